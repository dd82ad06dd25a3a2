"""What `tests.adapters.trained` asserts of an adapter's run holds of one that is known to train."""

from __future__ import annotations

from tests.adapters.trained import train


def test_a_random_policy_trains_on_an_environment_that_gives_it_nothing(tiny_model, tmp_path):
    trained = train(tmp_path, tiny_model, '[environment]\nname = "facts"\nplacement = "inline"')
    assert {line["task"].split("/")[0] for line in trained.ledger} == {"facts"}
    assert {line["reward"] for line in trained.ledger} != {0.0}
