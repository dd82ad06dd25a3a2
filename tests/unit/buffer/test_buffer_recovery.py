from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from recovery_machine import RecoveryMachine

from agentrl.buffer.frontier import Frontier
from agentrl.buffer.recovery import Recovered, recover

TestRecovery = RecoveryMachine.TestCase
TestRecovery.settings = settings(max_examples=150, stateful_step_count=30)

UNTIL_FOUND = settings(
    max_examples=1000,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def without_retries(recovered: Recovered) -> Recovered:
    for group in recovered.groups:
        group.redispatch.clear()
    return recovered


def without_running(recovered: Recovered) -> Recovered:
    return replace(recovered, running=())


def without_failed(recovered: Recovered) -> Recovered:
    return replace(recovered, failed=())


def without_dropped(recovered: Recovered) -> Recovered:
    return replace(recovered, dropped=())


def with_youngest_first(recovered: Recovered) -> Recovered:
    steps = recovered.redo.get("main", ())
    return replace(recovered, redo={"main": tuple(replace(step, groups=step.groups[::-1]) for step in steps)})


@pytest.mark.parametrize(
    "fault", [without_retries, without_running, without_failed, without_dropped, with_youngest_first]
)
def test_the_machine_finds_a_recovery_that_forgets(fault: Callable[[Recovered], Recovered]) -> None:
    class Forgetful(RecoveryMachine):
        recover = staticmethod(lambda *state, **ledger: fault(recover(*state, **ledger)))

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Forgetful, settings=UNTIL_FOUND)


def test_the_machine_finds_a_ledger_that_is_not_looked_at() -> None:
    class Blind(RecoveryMachine):
        recover = staticmethod(lambda *state, in_ledger: recover(*state))

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Blind, settings=UNTIL_FOUND)


def test_the_machine_finds_tasks_that_are_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frontier, "hold", lambda frontier, ordinals: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(RecoveryMachine, settings=UNTIL_FOUND)
