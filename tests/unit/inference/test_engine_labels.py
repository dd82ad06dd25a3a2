from __future__ import annotations

import pytest

from agentrl.inference.labels import Labels, mark_of
from agentrl.inference.ownership import inexact_in_place
from agentrl.types.errors import EngineRestartedError, EngineTakenError
from agentrl.types.version import PolicyVersion

LABELS = Labels("main-0", "http://there:30000", "coin-seed0-77ab01")
V3 = PolicyVersion(0, 3)


def test_a_version_goes_out_with_the_mark_and_comes_back_without() -> None:
    assert LABELS.write(V3) == "0.3@coin-seed0-77ab01"
    assert LABELS.read("0.3@coin-seed0-77ab01") == V3
    assert mark_of("0.3@coin-seed0-77ab01") == "coin-seed0-77ab01"


def test_without_a_mark_labels_are_bare_versions() -> None:
    bare = Labels("main-0", "http://there:30000")
    assert (bare.write(V3), bare.read("0.3"), mark_of("0.3")) == ("0.3", V3, None)


@pytest.mark.parametrize("label", ["0.3@sql-seed0-123456", "0.3@", "0.3@coin-seed0-77ab01@x", "x@y"])
def test_another_runs_mark_is_an_error_that_names_engine_and_run(label: str) -> None:
    named = f"engine main-0 at http://there:30000 belongs to the run '{label.partition('@')[2]}'"
    with pytest.raises(EngineTakenError, match=named):
        LABELS.read(label)


@pytest.mark.parametrize("label", ["0.3", "default", ""])
def test_a_label_without_any_mark_is_of_a_process_that_started_again(label: str) -> None:
    with pytest.raises(EngineRestartedError, match="without this run's mark"):
        LABELS.read(label)


@pytest.mark.parametrize("label", ["default", "", None, 7])
def test_a_label_that_is_no_version_is_a_value_error(label: str | None) -> None:
    with pytest.raises(ValueError, match="is not a policy version"):
        Labels("main-0", "http://there:30000").read(label)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"disable_overlap_schedule": True, "pp_size": 1, "disaggregation_mode": "null"}, None),
        ({"disable_overlap_schedule": False, "pp_size": 1}, "disable_overlap_schedule = False"),
        ({"disable_overlap_schedule": True, "pp_size": 2}, "pp_size = 2"),
        (
            {"pp_size": 1, "disaggregation_mode": "decode"},
            "disable_overlap_schedule = None, disaggregation_mode = decode",
        ),
    ],
)
def test_options_with_which_a_pause_leaves_tokens_on_their_way_are_named(options: dict, wrong: str | None) -> None:
    assert inexact_in_place(options) == wrong
