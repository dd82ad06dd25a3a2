from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from agentrl.checking.checks import CHECKS, check, opened
from agentrl.checking.subject import Finding, Verdict

BROKEN = "agentrl.testing.broken_environments:"


async def find(name: str, *names: str) -> list[Finding]:
    async with opened(BROKEN + name, {}, num_tasks=6, max_turns=4) as subject:
        return [await check(subject, each) for each in names]


@pytest.fixture(autouse=True)
def step_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Each step of a played episode seems to take a millisecond, or as long as this is told."""

    def take(seconds: float) -> None:
        clock = SimpleNamespace(perf_counter=itertools.count(0.0, seconds).__next__)
        monkeypatch.setattr("agentrl.checking.playing.time", clock)

    take(0.001)
    return take


async def test_a_sound_environment_passes_every_check_whose_promise_it_makes():
    findings = await find("sound", *CHECKS)
    assert [finding.check for finding in findings] == list(CHECKS)
    verdicts = {finding.check: finding.verdict for finding in findings if finding.verdict is not Verdict.OK}
    assert verdicts == {"sessions": Verdict.SKIPPED}, findings


@pytest.mark.parametrize(("seconds", "verdict"), [(0.9, Verdict.OK), (1.1, Verdict.NOTE)])
async def test_steps_that_take_longer_than_a_second_are_noted(step_s, seconds: float, verdict: Verdict):
    step_s(seconds)
    [finding] = await find("sound", "latency")
    assert finding.verdict is verdict, finding


@pytest.mark.parametrize(
    ("name", "failing", "said", "remedy"),
    [
        ("restless", "tasks", "sound/train/0 came out otherwise|restless/train/0 came out otherwise", "from the seed"),
        ("leaking_tasks", "tasks", "leaking_tasks/heldout/0 is a training task, too", "keep held-out tasks apart"),
        ("strict", "rewards", "environment(score): ValueError: invalid literal", "is no exception"),
        ("infinite", "rewards", "reward is inf, not a finite number", "return a finite number"),
        ("unreachable", "floor and ceiling", "random 0.00, gold 0.00: there is nothing to learn", "look at the reward"),
        ("fragile", "tools", "KeyError", "answer a wrong call with a message"),
        ("fickle", "determinism", "played again: at step 1", "take is_deterministic out"),
        ("forgetful", "snapshots", "left before step 1 of", "keep all that a step or the reward reads"),
        ("leaky", "leaks", "8 files more after 8 episodes", "end in close()"),
        ("threaded", "leaks", "8 threads more after 8 episodes", "end in close()"),
        ("shared", "isolation", "went otherwise beside others: at step 1", "share nothing that changes"),
        ("orphaning", "death", "lived on after its worker was killed", "process group"),
    ],
)
async def test_a_broken_promise_is_found_by_its_check_and_told_with_the_remedy(
    name: str, failing: str, said: str, remedy: str
):
    [finding] = await find(name, failing)
    assert finding.verdict is Verdict.FAILED, finding
    assert any(part in finding.message for part in said.split("|")), finding
    assert remedy in finding.remedy


async def test_an_environment_that_hangs_fails_its_checks_and_holds_up_none():
    async with opened(BROKEN + "hanging", {}, num_tasks=6, max_turns=4) as subject:
        subject.host._call_s = 0.5
        rewards, latency = [await check(subject, name) for name in ("rewards", "latency")]
    assert rewards.verdict is Verdict.FAILED
    assert "not done within 0.5 s" in rewards.message
    assert latency.verdict is Verdict.OK
