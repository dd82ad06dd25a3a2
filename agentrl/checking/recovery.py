"""Checks of what an environment declares about its state: that it can be had again after its worker is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agentrl.checking.behaviour import difference
from agentrl.checking.playing import PlayedEpisode, play, replay
from agentrl.checking.subject import Finding, Subject, Verdict
from agentrl.protocols import DurableEnvironment
from agentrl.types.environment import Origin, Score, StepResult
from agentrl.types.errors import EpisodeError

_Leave = Callable[[DurableEnvironment], Awaitable[Origin]]
_TASKS = 4
_SEED = 1


async def check_determinism(subject: Subject) -> Finding:
    """The same actions in a fresh instance give the same results, if that is declared."""
    is_declared = subject.host.description.recovery.is_deterministic
    for task in subject.tasks[:_TASKS]:
        for make in subject.players.values():
            played = await play(subject.host, task, make(task, _SEED), subject.max_turns)
            again = await replay(subject.host, task, played.actions)
            if played.seen == again.seen:
                continue
            said = f"{task.id} played again: {difference(played.seen, again.seen)}"
            if is_declared:
                remedy = "take is_deterministic out of the definition, or draw everything from the task"
                return Finding("determinism", Verdict.FAILED, said, remedy)
            return Finding("determinism", Verdict.SKIPPED, f"not declared, and {said}")
    if not is_declared:
        remedy = "declare is_deterministic, so that episodes survive their worker's end"
        return Finding("determinism", Verdict.NOTE, "played again, all is the same, which is not declared", remedy)
    return Finding("determinism", Verdict.OK, f"{_TASKS} tasks played twice, all the same")


async def check_snapshots(subject: Subject) -> Finding:
    """An instance that is restored from a snapshot goes on as the one that gave it."""
    if not subject.host.description.recovery.has_snapshots:
        return Finding("snapshots", Verdict.SKIPPED, "not declared")

    async def origin(environment: DurableEnvironment) -> Origin:
        return Origin(snapshot=await environment.snapshot())

    return await _check_resumption(subject, "snapshots", origin)


async def check_sessions(subject: Subject) -> Finding:
    """A session that is left and reattached goes on where it was."""
    if not subject.host.description.recovery.has_handles:
        return Finding("sessions", Verdict.SKIPPED, "not declared")

    async def origin(environment: DurableEnvironment) -> Origin:
        handle = await environment.handle()
        await environment.detach()
        return Origin(handle=handle, token=1)

    return await _check_resumption(subject, "sessions", origin)


async def _check_resumption(subject: Subject, check: str, leave: _Leave) -> Finding:
    """Leave an episode after each of its steps and go on in another instance."""
    make = subject.players.get("gold", subject.players["random"])
    task = subject.tasks[0]
    played = await play(subject.host, task, make(task, _SEED), subject.max_turns)
    if played.failure is not None:
        return Finding(check, Verdict.SKIPPED, f"no episode to try it on: {played.failure}")
    for place in range(len(played.steps)):
        try:
            results, score = await _go_on_elsewhere(subject, played, place, leave)
        except EpisodeError as error:
            return Finding(check, Verdict.FAILED, f"after step {place}: {error}", f"mend it, or do not declare {check}")
        expected = [step.result for step in played.steps[place:]]
        if (results, score) != (expected, played.score):
            wrong = next((r for r, e in zip(results, expected, strict=True) if r != e), score)
            said = f"left before step {place} of {task.id}, it goes on otherwise: {str(wrong)[:160]}"
            return Finding(check, Verdict.FAILED, said, "keep all that a step or the reward reads")
    return Finding(
        check, Verdict.OK, f"left and taken up before each of {len(played.steps)} steps, it goes on as it was"
    )


async def _go_on_elsewhere(
    subject: Subject, played: PlayedEpisode, place: int, leave: _Leave
) -> tuple[Sequence[StepResult], Score]:
    async with subject.host.open(played.task) as environment:
        await environment.start()
        for action in played.actions[:place]:
            await environment.step(action)
        origin = await leave(environment)
    async with subject.host.open(played.task, origin) as environment:
        results = [await environment.step(action) for action in played.actions[place:]]
        return results, await environment.score()
