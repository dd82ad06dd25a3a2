"""A step is trained on the environments of several turns that ship with agentrl, by a policy that knows nothing."""

from __future__ import annotations

import pytest

from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from tests.adapters.trained import train

OPTIONS = {"search": "hops = [2]", "workflow": "turn_rewards = true"}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_random_policy_trains_a_step(name, tmp_path):
    model = make_tiny_model(tmp_path / "model", shape=TINY_SHAPE.model_copy(update={"context_tokens": 8192}))
    environment = f'[environment]\nname = "{name}"\nplacement = "inline"\n[environment.options]\n{OPTIONS[name]}\n'
    limits = ("rollout.limits.max_context_tokens=8192", "rollout.limits.max_turns=3")
    trained = train(tmp_path, model, environment, *limits)
    assert {line["task"].split("/")[0] for line in trained.ledger} == {name}
