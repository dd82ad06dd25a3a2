from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rollout_parts import ANSWER, CALL, LIMITS, in_turn, nothing, play

from agentrl.envs.inline import InlineHost
from agentrl.rollouts.episode_log import NoJournal, NoLog
from agentrl.rollouts.replies import session_key
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.clock import run_virtual
from agentrl.testing.environments import FaultyEnvironment, FaultyOptions, faulty
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.scripted import AbortingEngine, ScriptedEngine
from agentrl.types.environment import Score
from agentrl.types.episode import StopReason
from agentrl.types.errors import Boundary, StorageError
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role, ToolCall
from agentrl_scaffolds.tool_calling import ToolCalling


def host_of(kind: type[FaultyEnvironment]) -> InlineHost:
    return InlineHost(replace(faulty, create=kind), FaultyOptions(), 5.0)


async def test_an_episode_is_played_and_judged(chat):
    episode = await play(chat, AbortingEngine(chat, in_turn(CALL, ANSWER), cuts=[2]))
    assert (episode.stop_reason, episode.failure, episode.reward) == (StopReason.ANSWERED, None, 1.0)
    assert [turn.aborts for turn in episode.turns] == [1, 0]
    [effect] = episode.turns[0].effects
    assert (effect.effect_id, effect.call.arguments) == ("train-000000-0/0.0", {"sql": "select count from name"})
    assert effect.result == "{'sql': 'select count from name'}"
    assert episode.turns[1].effects == ()


async def test_a_reply_is_on_record_before_its_intents_and_these_before_the_environment_acts(chat):
    journal = RecordingJournal()

    class Watched(FaultyEnvironment):
        async def step(self, action: Message):
            journal.events.append(f"act {len(action.tool_calls)}")
            return await super().step(action)

        async def score(self) -> Score:
            journal.events.append("score")
            return await super().score()

    async def released() -> None:
        journal.events.append("place given back")

    two_calls = Message(Role.ASSISTANT, "", (ToolCall("", "query", {}), ToolCall("", "query", {"n": 1})))
    engine = ScriptedEngine(chat, in_turn(two_calls, ANSWER))
    await play(chat, engine, journal=journal, on_generated=released, host=host_of(Watched))
    name = "train-000000-0"
    assert journal.events == [
        "reply 0",
        f"intent {name}/0.0",
        f"intent {name}/0.1",
        "act 2",
        f"result {name}/0.0",
        f"result {name}/0.1",
        "reply 1",
        "act 0",
        "place given back",
        "score",
    ]


async def test_an_effect_whose_result_never_came_stays_open_on_record(chat):
    journal = RecordingJournal()
    episode = await play(chat, ScriptedEngine(chat, in_turn(CALL)), journal=journal, fault="raise", at="step")
    assert journal.events == ["reply 0", "intent train-000000-0/0.0"]
    assert len(episode.turns) == 1


async def test_out_of_turns_is_an_outcome_that_is_judged(chat):
    episode = await play(chat, ScriptedEngine(chat, in_turn(CALL)), limits=replace(LIMITS, max_turns=3))
    assert (episode.stop_reason, episode.failure, episode.reward) == (StopReason.MAX_TURNS, None, 1.0)
    assert len(episode.turns) == 3


async def test_out_of_context_is_an_outcome_that_is_judged(chat):
    engine = AbortingEngine(chat, in_turn(CALL), cuts=[])
    episode = await play(chat, engine, limits=replace(LIMITS, max_context_tokens=400, max_turns=100))
    assert (episode.failure, episode.reward) == (None, 1.0)
    assert episode.stop_reason in (StopReason.MAX_TOKENS, StopReason.LENGTH)
    assert all(len(r.prompt_ids) + r.max_new_tokens <= 400 for r in engine.requests)


async def test_a_reply_that_is_too_long_is_an_outcome_that_is_judged(chat):
    episode = await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), limits=replace(LIMITS, max_reply_tokens=4))
    assert (episode.stop_reason, episode.failure, episode.reward) == (StopReason.LENGTH, None, 1.0)
    assert episode.num_sampled_tokens == 4


@pytest.mark.parametrize(
    ("fault", "at", "failure"),
    [
        ("raise", "create", "environment(create)"),
        ("raise", "start", "environment(start)"),
        ("raise", "step", "environment(step)"),
        ("raise", "score", "environment(score)"),
        ("answer", "start", "environment(answer)"),
        ("answer", "step", "environment(answer)"),
        ("answer", "score", "environment(reward)"),
        ("nan", "close", "environment(reward)"),
        ("infinite", "close", "environment(reward)"),
        ("text", "close", "environment(reward)"),
        ("bool", "close", "environment(reward)"),
    ],
)
async def test_whatever_an_environment_does_is_a_failure_of_its_kind_without_a_reward(chat, fault, at, failure):
    episode = await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), fault=fault, at=at)
    assert str(episode.failure).startswith(failure)
    assert (episode.reward, episode.stop_reason) == (None, None)


@pytest.mark.parametrize("at", ["start", "step", "score"])
def test_an_environment_that_hangs_is_a_timeout_of_its_stage(chat, at):
    episode = run_virtual(play(chat, ScriptedEngine(chat, in_turn(ANSWER)), fault="hang", at=at))
    assert (episode.failure.boundary, episode.failure.kind) == ("timeout", f"environment.{at}")
    assert episode.failure.message == "not done within 5 s"
    assert episode.reward is None


def test_the_whole_episode_has_a_deadline_however_quick_each_call_is(chat):
    class Slow(FaultyEnvironment):
        async def step(self, action: Message):
            await asyncio.sleep(4)
            return await super().step(action)

    limits = replace(LIMITS, max_turns=1000, total_s=30.0)
    engine = ScriptedEngine(chat, in_turn(CALL))
    episode = run_virtual(play(chat, engine, limits=limits, host=host_of(Slow)))
    assert (episode.failure.boundary, episode.failure.kind) == ("timeout", "episode")
    assert (len(episode.turns), episode.stop_reason, episode.reward) == (8, None, None)


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_an_environment_that_cannot_be_freed_takes_nothing_from_the_verdict(chat, fault):
    limits = replace(LIMITS, tool_s=30.0, total_s=10.0)
    episode = run_virtual(play(chat, ScriptedEngine(chat, in_turn(ANSWER)), limits=limits, fault=fault, at="close"))
    assert (episode.failure, episode.reward, episode.stop_reason) == (None, 1.0, StopReason.ANSWERED)


async def test_a_scaffold_that_raises_is_a_failure_of_the_scaffold(chat):
    class Broken:
        async def run(self, context) -> None:
            await context.start()
            raise KeyError("memory")

    episode = await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), scaffold=Broken())
    assert str(episode.failure).startswith("scaffold(run): KeyError: 'memory' (line ")


async def test_an_agent_that_the_recipe_does_not_name_is_a_failure_that_names_it(chat):
    class Misnaming:
        async def run(self, context) -> None:
            opening = await context.start()
            await context.agent("balck").generate(opening.messages)

    episode = await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), Misnaming())
    assert (episode.failure.boundary, episode.failure.kind) == (Boundary.SCAFFOLD, "unknown_agent")
    assert episode.failure.message == "no agent 'balck' acts here; the recipe names agent"
    assert (episode.turns, episode.reward) == ((), None)


class Stubborn:
    """Catches whatever a call raises and goes on."""

    def __init__(self, times: int) -> None:
        self._times = times

    async def run(self, context) -> None:
        opening = await context.start()
        for _ in range(self._times):
            try:
                await context.step(await context.generate(opening.messages, opening.tools))
            except Exception:  # noqa: BLE001 - what a careless scaffold does
                continue


async def test_a_scaffold_cannot_go_on_after_its_environment_failed(chat):
    engine = AbortingEngine(chat, in_turn(CALL), cuts=[])
    episode = await play(chat, engine, scaffold=Stubborn(5), fault="raise", at="step")
    assert str(episode.failure) == "environment(step): RuntimeError: the database is gone"
    assert (len(engine.requests), episode.reward, episode.stop_reason) == (1, None, None)


async def test_a_scaffold_cannot_go_on_after_its_limits(chat):
    engine = AbortingEngine(chat, in_turn(CALL), cuts=[])
    episode = await play(chat, engine, scaffold=Stubborn(5), limits=replace(LIMITS, max_turns=2))
    assert (episode.stop_reason, len(engine.requests)) == (StopReason.MAX_TURNS, 2)


async def test_chance_in_a_scaffold_comes_from_the_episodes_seed(chat):
    draws = []

    class Gambler:
        async def run(self, context) -> None:
            await context.start()
            assert context.time() >= 0
            draws.append(context.random.random())

    for _ in range(2):
        await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), scaffold=Gambler())
    assert draws[0] == draws[1]


async def test_an_error_of_the_platform_passes_and_is_no_failure_of_the_episode(chat):
    class FullLog(NoLog):
        async def intended(self, effects) -> None:
            raise StorageError("disk full; free space, then resume the run")

    class FullDisk(NoJournal):
        async def open(self, ticket, agents) -> NoLog:
            return FullLog()

    with pytest.raises(StorageError, match="disk full"):
        await play(chat, ScriptedEngine(chat, in_turn(CALL)), journal=FullDisk())


async def test_cancellation_passes_and_leaves_a_record_of_what_was_played(chat):
    acting = asyncio.Event()

    class Waiting(FaultyEnvironment):
        closed = asyncio.Event()

        async def step(self, action: Message):
            acting.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            self.closed.set()

    player = Player("main", ScriptedEngine(chat, in_turn(CALL)), chat, Sampling())
    runner = EpisodeRunner({"agent": player}, Stubborn(3), host_of(Waiting), None, RecordingJournal(), LIMITS)
    record = runner.open(build_ticket())
    task = asyncio.create_task(runner.run(record, acting.wait))
    await acting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Waiting.closed.is_set()
    episode = record.close(1.0)
    assert (len(episode.turns), episode.failure, episode.reward) == (1, None, None)


async def test_episodes_of_one_runner_do_not_mix(chat):
    def script(session, messages):
        return Message(Role.ASSISTANT, f"answer of {session.split('/')[1]}")

    player = Player("main", ScriptedEngine(chat, script), chat, Sampling())
    runner = EpisodeRunner(
        {"agent": player}, ToolCalling(), host_of(FaultyEnvironment), Verifier(1.0), RecordingJournal(), LIMITS
    )

    names = [f"episode-{n}" for n in range(20)]
    episodes = await asyncio.gather(*(runner.run(runner.open(build_ticket(name)), nothing) for name in names))
    texts = [chat.parse(e.nodes[-1].token_ids, (), "").content for e in episodes]
    assert texts == [f"answer of {name}" for name in names]
    assert session_key(build_ticket("a"), "agent") == "0/a/agent"


async def test_a_cancellation_that_an_environment_makes_up_is_a_failed_episode(chat):
    class Confused(FaultyEnvironment):
        async def step(self, action: Message):
            raise asyncio.CancelledError

    episode = await play(chat, ScriptedEngine(chat, in_turn(CALL, ANSWER)), host=host_of(Confused))
    assert str(episode.failure).startswith("cancelled(foreign): environment or scaffold raised CancelledError")
    assert episode.reward is None
