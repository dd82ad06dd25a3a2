from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_parts import ANSWER, CALL, LIMITS, in_turn, nothing

from agentrl.envs.inline import InlineHost
from agentrl.journal.entries import PartialReply, StepResultRecorded, TurnCommitted, unpack
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import all_segments, read_journal
from agentrl.journal.segments import read_segment
from agentrl.journal.writer import JournalWriter
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.environments import FaultyEnvironment, FaultyOptions, faulty
from agentrl.testing.scripted import AbortingEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.types.environment import StepResult
from agentrl.types.episode import Episode
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role
from agentrl_scaffolds.tool_calling import ToolCalling

NAME = build_ticket().episode_id
CUTS = (2, 0, 3)


class Counting(FaultyEnvironment):
    """Writes down every call that it carries out, and in which instance."""

    calls: list[tuple[int, str]] = []
    instances = 0

    def __init__(self, options: FaultyOptions, task: Any) -> None:
        super().__init__(options, task)
        Counting.instances += 1
        self._number = Counting.instances

    async def step(self, action: Message) -> StepResult:
        self.calls += [(self._number, call.id) for call in action.tool_calls]
        return await super().step(action)


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    Counting.calls = []
    Counting.instances = 0


def host(**declared: Any) -> InlineHost:
    return InlineHost(replace(faulty, create=Counting, **declared), FaultyOptions(), 5.0)


async def play(
    folder: Path, chat: Any, token: int, engine: Any, environments: InlineHost, scaffold: Any = None, **histories: Any
) -> Episode:
    writer = JournalWriter(folder, "worker")
    runner = EpisodeRunner(
        {"agent": Player("main", engine, chat, Sampling())},
        scaffold or ToolCalling(),
        environments,
        Verifier(5.0),
        SoleHolder(writer, token, histories.get("histories")),
        LIMITS,
    )
    try:
        return await runner.run(runner.open(build_ticket()), nothing)
    finally:
        await writer.close()


def columns(episode: Episode) -> list[Any]:
    found = []
    for node in episode.nodes:
        sample = node.sample
        found.append((node.index, node.parent, node.turn, node.token_ids.tolist()))
        if sample is not None:
            found.append((np.asarray(sample.logprobs).tolist(), sample.versions))
    return found


def cut_histories(history: EpisodeHistory) -> list[EpisodeHistory]:
    """The history as it would be read had the worker died behind each of its entries."""
    cut = [build_history(history.entries[:n]) for n in range(1, len(history.entries))]
    return [one for one in cut if one is not None]


def script_engine(chat: Any, cuts: tuple[int, ...] = CUTS) -> AbortingEngine:
    return AbortingEngine(chat, in_turn(CALL, CALL, ANSWER), list(cuts), moves=False)


async def test_an_episode_cut_off_behind_any_entry_ends_as_if_it_never_had_been(chat: Any, tmp_path: Path) -> None:
    whole = await play(tmp_path / "whole", chat, 1, script_engine(chat), host(is_deterministic=True))
    recorded = read_journal(tmp_path / "whole").lives[NAME]
    assert columns(recorded.episode()) == columns(whole)
    assert len(cut_histories(recorded)) == 14, "lease, opening, two parts, three times reply, intent, result; score"
    for number, history in enumerate(cut_histories(recorded)):
        engine = script_engine(chat, ())
        resumed = await play(
            tmp_path / f"cut{number}",
            chat,
            2,
            _Continuing(engine),
            host(is_deterministic=True),
            histories={NAME: history},
        )
        assert columns(resumed) == columns(whole), f"cut behind entry {number}"
        assert (resumed.reward, resumed.failure) == (1.0, None)
        assert resumed.turns[0].effects[0].result == whole.turns[0].effects[0].result
        assert len(engine.delivered) == whole.num_sampled_tokens - history.num_sampled_tokens, (
            "nothing that was on record again"
        )


class _Continuing:
    """The scripted engine for a worker that did not see the beginning: where a reply began is in the request."""

    def __init__(self, engine: AbortingEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> Generation:
        whole = self._engine._chat.complete(self._engine._script(request.session, request.conversation))
        ids = request.prompt_ids
        known = next(n for n in range(len(whole), -1, -1) if n == 0 or np.array_equal(ids[-n:], whole[:n]))
        self._engine._prompts[(request.session, len(request.conversation))] = len(ids) - known
        return await self._engine.generate(request)


async def test_no_call_runs_twice_in_one_instance_whatever_is_cut(chat: Any, tmp_path: Path) -> None:
    await play(tmp_path / "whole", chat, 1, script_engine(chat, ()), host(is_deterministic=True))
    history = read_journal(tmp_path / "whole").lives[NAME]
    for number, cut in enumerate(cut_histories(history)):
        await play(
            tmp_path / f"{number}",
            chat,
            2,
            _Continuing(script_engine(chat, ())),
            host(is_deterministic=True),
            histories={NAME: cut},
        )
    assert len(set(Counting.calls)) == len(Counting.calls)


async def cut_before(chat: Any, folder: Path, kind: type, nth: int = 1, **declared: Any) -> EpisodeHistory:
    """The history of an episode whose worker died before the nth entry of a kind."""
    await play(folder, chat, 1, script_engine(chat, ()), host(**declared))
    entries = read_journal(folder).lives[NAME].entries
    at = [n for n, entry in enumerate(entries) if isinstance(entry, kind)][nth - 1]
    history = build_history(entries[:at])
    assert history is not None
    return history


async def test_an_environment_that_declares_nothing_is_lost_with_its_worker(chat: Any, tmp_path: Path) -> None:
    history = await cut_before(chat, tmp_path / "a", StepResultRecorded, 2)
    episode = await play(tmp_path / "b", chat, 2, script_engine(chat, ()), host(), histories={NAME: history})
    assert str(episode.failure).startswith("environment(lost)")
    assert (episode.reward, Counting.instances) == (None, 1)


class _CutsTheSecondReply(AbortingEngine):
    """Cuts the second reply behind four tokens."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if len(request.conversation) == 3 and len(self.requests) == 1:
            self._cuts = [4]
        return await super().generate(request)


async def test_an_episode_that_fails_when_it_is_resumed_has_all_tokens_that_are_on_record(
    chat: Any, tmp_path: Path
) -> None:
    engine = _CutsTheSecondReply(chat, in_turn(CALL, CALL, ANSWER), [], moves=False)
    await play(tmp_path / "a", chat, 1, engine, host())
    entries = read_journal(tmp_path / "a").lives[NAME].entries
    first = next(n for n, entry in enumerate(entries) if isinstance(entry, StepResultRecorded))
    failed: list[int] = []
    for end in range(first + 1, len(entries)):
        on_record = [entry for entry in entries[:end] if isinstance(entry, TurnCommitted)]
        tokens = sum(len(entry.nodes[-1].token_ids) for entry in on_record)
        if isinstance(entries[end - 1], PartialReply):
            tokens += len(entries[end - 1].generation.token_ids)
        folder, history = tmp_path / f"{end}", build_history(entries[:end])
        episode = await play(folder, chat, 2, script_engine(chat, ()), host(), histories={NAME: history})
        assert str(episode.failure).startswith("environment(lost)")
        assert (episode.num_sampled_tokens, len(episode.turns)) == (tokens, len(on_record)), f"cut at {end}"
        both = build_history([*entries[:end], *entries_of(folder)]).episode()
        assert (columns(both), both.failure) == (columns(episode), episode.failure), f"read again, cut at {end}"
        failed.append(tokens)
    assert failed == sorted(failed)
    assert failed[1] == failed[0] + 4, "the part of the second reply counts before its turn is complete"


def entries_of(folder: Path) -> list[Any]:
    """Entries of a journal of one episode, as they were written."""
    frames = [frame for path in all_segments(folder) for frame in read_segment(path)]
    return [unpack(frame.schema, frame.kind, frame.payload) for frame in frames]


async def test_an_external_call_of_unknown_outcome_is_never_repeated(chat: Any, tmp_path: Path) -> None:
    declared = {"is_deterministic": True, "external_tools": frozenset({"query"})}
    history = await cut_before(chat, tmp_path / "a", StepResultRecorded, 2, **declared)
    Counting.calls.clear()
    episode = await play(tmp_path / "b", chat, 2, script_engine(chat, ()), host(**declared), histories={NAME: history})
    assert str(episode.failure).startswith("environment(outcome_unknown)")
    assert Counting.calls == []


async def test_an_external_call_on_record_is_not_replayed_but_remembered(chat: Any, tmp_path: Path) -> None:
    declared = {"is_deterministic": True, "external_tools": frozenset({"query"})}
    await play(tmp_path / "a", chat, 1, script_engine(chat, ()), host(**declared))
    entries = read_journal(tmp_path / "a").lives[NAME].entries
    at = next(n for n, entry in enumerate(entries) if isinstance(entry, StepResultRecorded))
    history = build_history(entries[: at + 1])
    Counting.calls.clear()
    engine = _Continuing(script_engine(chat, ()))
    episode = await play(tmp_path / "b", chat, 2, engine, host(**declared), histories={NAME: history})
    assert (episode.failure, episode.reward) == (None, 1.0)
    assert [name for _, name in Counting.calls] == [f"{NAME}/1.0"], "only the second call ran"


async def test_a_deterministic_environment_that_answers_otherwise_is_found_out(chat: Any, tmp_path: Path) -> None:
    class Moody(Counting):
        async def step(self, action: Message) -> StepResult:
            result = await super().step(action)
            moods = tuple(replace(m, content=f"{m.content} in {self._number}") for m in result.messages)
            return replace(result, messages=moods)

    moody = InlineHost(replace(faulty, create=Moody, is_deterministic=True), FaultyOptions(), 5.0)
    await play(tmp_path / "a", chat, 1, script_engine(chat, ()), moody)
    entries = read_journal(tmp_path / "a").lives[NAME].entries
    history = build_history(entries[:-2])
    episode = await play(tmp_path / "b", chat, 2, script_engine(chat, ()), moody, histories={NAME: history})
    assert str(episode.failure).startswith("environment(nondeterministic)")


async def test_a_scaffold_that_asks_otherwise_when_run_again_is_named(chat: Any, tmp_path: Path) -> None:
    class Fickle:
        async def run(self, context: Any) -> None:
            opening = await context.start()
            mood = Message(Role.SYSTEM, f"mood {random.SystemRandom().random()}")
            reply = await context.generate((mood, *opening.messages), opening.tools)
            while not (result := await context.step(reply)).is_done:
                reply = await context.generate(result.messages, opening.tools)

    environments = host(is_deterministic=True)
    await play(tmp_path / "a", chat, 1, script_engine(chat, ()), environments, Fickle())
    history = build_history(read_journal(tmp_path / "a").lives[NAME].entries[:-3])
    episode = await play(
        tmp_path / "b", chat, 2, script_engine(chat, ()), environments, Fickle(), histories={NAME: history}
    )
    assert str(episode.failure).startswith("scaffold(nondeterministic): run again, the scaffold differs")
    assert "the prompt of turn 0" in str(episode.failure)


async def test_a_parked_episode_keeps_the_part_of_its_reply(chat: Any, tmp_path: Path) -> None:
    class Parks(AbortingEngine):
        """Cuts the second reply behind four tokens, as the worker is told to stop."""

        async def generate(self, request: GenerationRequest) -> Generation:
            if len(request.conversation) > 1:
                self._cuts = [4]
                journal.park()
            return await super().generate(request)

    writer = JournalWriter(tmp_path / "a", "worker")
    journal = SoleHolder(writer, 1)
    player = Player("main", Parks(chat, in_turn(CALL, CALL, ANSWER), [], moves=False), chat, Sampling())
    environments = host(is_deterministic=True)
    runner = EpisodeRunner({"agent": player}, ToolCalling(), environments, Verifier(5.0), journal, LIMITS)
    with pytest.raises(EpisodeParked):
        await runner.run(runner.open(build_ticket()), nothing)
    await writer.close()
    history = read_journal(tmp_path / "a").lives[NAME]
    assert (len(history.turns), [len(p.generation.token_ids) for p in history.parts], history.ended) == (1, [4], None)
    resumed = await play(
        tmp_path / "b", chat, 2, _Continuing(script_engine(chat, ())), environments, histories={NAME: history}
    )
    assert (resumed.reward, len(resumed.turns)) == (1.0, 3)
    assert resumed.turns[1].aborts == 1
