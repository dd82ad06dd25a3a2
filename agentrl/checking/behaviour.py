"""Checks of what an environment does: tasks, rewards, tools, speed, and whether instances disturb each other."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from agentrl.checking.drawing import draw_arguments
from agentrl.checking.players import RandomPlayer
from agentrl.checking.playing import PlayedEpisode, play, replay
from agentrl.checking.subject import Finding, Subject, Verdict
from agentrl.envs.inline import InlineHost
from agentrl.protocols import EnvironmentHost
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split, Task

_CEILING = 0.99
_SLOW_S = 1.0
_CLOSE_S = 30.0
_SEED = 0
_ODD_TEXTS = ("", "\x00", "é" * 2000, "<tool_call>{", '{"name": ')


async def check_tasks(subject: Subject) -> Finding:
    """The same arguments give the same task, tasks are plain JSON, and no held-out task is trained."""
    again: list[Task] = []
    for split in Split:
        ordinals = [place for place, _ in enumerate(t for t in subject.tasks if t.split is split)]
        again += await subject.host.sample(split, _SEED, ordinals)
    if again != list(subject.tasks):
        first = next(task for task, other in zip(subject.tasks, again, strict=True) if task != other)
        return _failed("tasks", f"{first.id} came out otherwise the second time", "draw it from the seed alone")
    for task in subject.tasks:
        if json.loads(json.dumps(task.payload)) != task.payload:
            return _failed("tasks", f"the payload of {task.id} is not plain JSON", "use dict, list, str, numbers only")
    trained = {json.dumps(task.payload, sort_keys=True) for task in subject.train_tasks}
    held = [t for t in subject.tasks if t.split is Split.HELDOUT]
    if shared := [t.id for t in held if json.dumps(t.payload, sort_keys=True) in trained]:
        return _failed("tasks", f"{shared[0]} is a training task, too", "keep held-out tasks apart")
    return _ok("tasks", f"{len(subject.tasks)} tasks, twice the same; none of {len(held)} held-out ones is trained")


async def check_rewards(subject: Subject) -> Finding:
    """Whatever is done ends with a finite reward or none, and never with an exception."""
    task = subject.tasks[0]
    players = subject.players.items()
    episodes = [
        await play(subject.host, task, make(task, seed), subject.max_turns) for _, make in players for seed in range(3)
    ]
    episodes += [await replay(subject.host, task, [Message(Role.ASSISTANT, text)]) for text in _ODD_TEXTS]
    # A policy that is cut off before its first word is judged, too.
    episodes.append(await replay(subject.host, task, []))
    if failed := next((episode for episode in episodes if episode.failure is not None), None):
        remedy = "return a finite number, or None where nothing can be said; what a policy does wrong is no exception"
        return _failed("rewards", f"after {_told(failed)}: {failed.failure}", remedy)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    if not rewards:
        return _failed("rewards", f"{len(episodes)} episodes, and none has a reward", "return a number from score()")
    return _ok("rewards", f"{len(episodes)} episodes, from {min(rewards):g} to {max(rewards):g}; odd texts are judged")


async def check_floor_and_ceiling(subject: Subject) -> Finding:
    """What chance reaches, and what the author's own player does: between them lies what can be learnt."""
    means: dict[str, float] = {}
    for name, make in subject.players.items():
        episodes = [
            await play(subject.host, task, make(task, n), subject.max_turns) for n, task in enumerate(subject.tasks)
        ]
        rewards = [episode.reward for episode in episodes]
        means[name] = math.fsum(reward or 0.0 for reward in rewards) / len(rewards)
    floor = means["random"]
    if "gold" not in means:
        remedy = "write an expert named 'gold', so that a task that nobody can do is found"
        return Finding("floor and ceiling", Verdict.NOTE, f"random {floor:.2f}; no gold player", remedy)
    said = f"random {floor:.2f}, {subject.gold} {means['gold']:.2f}"
    if means["gold"] <= floor:
        return _failed("floor and ceiling", f"{said}: there is nothing to learn", "look at the reward")
    if means["gold"] < _CEILING:
        remedy = f"play one with `agentrl env run {subject.name} --policy {subject.gold}`; some tasks may be wrong"
        return Finding("floor and ceiling", Verdict.NOTE, f"{said}: not every task is solved", remedy)
    return _ok("floor and ceiling", said)


async def check_tools(subject: Subject) -> Finding:
    """Every tool takes what its schema allows, and answers what it does not allow instead of failing."""
    task = subject.tasks[0]
    async with subject.host.open(task) as environment:
        specs = (await environment.start()).tools
    if not specs:
        return Finding("tools", Verdict.SKIPPED, "it has none")
    if unsaid := [spec.name for spec in specs if not spec.description.strip()]:
        return _failed("tools", f"'{unsaid[0]}' has no description", "say in a line what it does")
    if twice := [spec.name for spec in specs if [other.name for other in specs].count(spec.name) > 1]:
        return _failed("tools", f"'{twice[0]}' is there twice", "give every tool a name of its own")
    chance = random.Random(_SEED)
    calls = [ToolCall("c", spec.name, draw_arguments(spec.parameters, chance)) for spec in specs for _ in range(3)]
    calls += [ToolCall("c", spec.name, {"no such argument": [None]}) for spec in specs]
    calls += [ToolCall("c", spec.name, error="invalid_json", raw='{"') for spec in specs]
    calls.append(ToolCall("c", "no such tool"))
    for call in calls:
        episode = await replay(subject.host, task, [Message(Role.ASSISTANT, tool_calls=(call,))])
        if episode.failure is not None:
            remedy = "answer a wrong call with a message that says what is wrong"
            return _failed("tools", f"after {_told(episode)}: {episode.failure}", remedy)
        step = episode.steps[0].result
        if not step.is_done and [message.tool_call_id for message in step.messages] != ["c"]:
            return _failed(
                "tools", f"{_told(episode)} had {len(step.messages)} answers", "give one answer to each call"
            )
    return _ok("tools", f"{len(specs)} tools, {len(calls)} right and wrong calls, each answered")


async def check_isolation(subject: Subject) -> Finding:
    """Instances that are played at the same time, step by step in turn, see what they see alone.

    They share a process where the environment may be placed inline.
    """
    host = subject.host
    if subject.definition.placement == "inline":
        host = InlineHost(subject.definition, subject.options, _CLOSE_S)
    make = subject.players.get("gold", subject.players["random"])
    tasks = subject.train_tasks[:2]
    alone = [await play(host, task, make(task, _SEED), subject.max_turns) for task in tasks]
    again = [await replay(host, episode.task, episode.actions) for episode in alone]
    if any(episode.failure for episode in alone) or [e.seen for e in alone] != [e.seen for e in again]:
        said = "an episode alone fails, or is not twice the same: nothing can be compared"
        return Finding("isolation", Verdict.SKIPPED, said)
    for episode, seen in zip((*alone, *alone), await _play_in_turn(host, (*alone, *alone)), strict=True):
        if seen != episode.seen[:-1]:
            where = difference(episode.seen, seen)
            remedy = "share nothing that changes between instances: no globals, files or ports of one name"
            return _failed("isolation", f"{episode.task.id} went otherwise beside others: {where}", remedy)
    return _ok("isolation", f"{2 * len(alone)} instances of {len(alone)} tasks in turn, as alone")


async def _play_in_turn(host: EnvironmentHost, episodes: Sequence[PlayedEpisode]) -> list[list[object]]:
    """What instances say that all begin before the first one acts, and then act in turn. Raises EpisodeError."""
    async with AsyncExitStack() as stack:
        instances = [await stack.enter_async_context(host.open(episode.task)) for episode in episodes]
        seen: list[list[object]] = [[await instance.start()] for instance in instances]
        turns = [(place, number) for number, e in enumerate(episodes) for place in range(len(e.actions))]
        for place, number in sorted(turns):
            seen[number].append(await instances[number].step(episodes[number].actions[place]))
        for instance, heard in zip(instances, seen, strict=True):
            heard.append(await instance.score())
        return seen


async def check_latency(subject: Subject) -> Finding:
    """How long a step takes."""
    steps: list[float] = []
    for seed, task in enumerate(subject.tasks):
        episode = await play(subject.host, task, RandomPlayer(seed), subject.max_turns)
        steps += [step.step_s for step in episode.steps]
    if not steps:
        return _failed("latency", "no step was played", "see the other checks")
    steps.sort()
    median, worst = steps[len(steps) // 2], steps[-1]
    said = f"a step takes {1000 * median:.2f} ms, at most {1000 * worst:.1f} ms of {len(steps)}"
    if worst > _SLOW_S:
        return Finding(
            "latency", Verdict.NOTE, said, "others' episodes go on meanwhile; give rollout.limits.tool_s room"
        )
    return _ok("latency", said)


def _told(episode: PlayedEpisode) -> str:
    """What was done last, on a line."""
    if not episode.actions:
        return "nothing was done"
    action = episode.actions[-1]
    if not action.tool_calls:
        return f"the text {action.content[:40]!r}"
    call = action.tool_calls[0]
    return f"{call.name}({call.raw or json.dumps(call.arguments)[:80]})"


def difference(expected: Sequence[object], found: Sequence[object]) -> str:
    """Where what was seen in two episodes of the same actions parts."""
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"at step {place} {str(other)[:120]} instead of {str(one)[:120]}"
    return f"{len(found)} observations instead of {len(expected)}"


def _ok(check: str, message: str) -> Finding:
    return Finding(check, Verdict.OK, message)


def _failed(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAILED, message, remedy)
