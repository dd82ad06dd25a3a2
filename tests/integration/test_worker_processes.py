"""Rollout workers in processes: they play as one in process does, and their ends cost no episode but the guilty."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentrl.journal.entries import Leased
from agentrl.journal.reading import read_journal
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.worker_assembly import num_processes
from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Places
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.testing.pumped_place import PumpedPlaces
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import ConfigError
from agentrl.types.rollout import PackedEntry
from tests.storms.scripted_worker import ScriptedPlaces
from tests.storms.worker_pools import DIALOGUE, PlayedPool, make_run, nothing, playing

PLACES = [LocalPlaces, PumpedPlaces]
pytestmark = pytest.mark.timeout(120)


def contents(episodes) -> list[object]:
    """What of episodes does not depend on time."""
    return [
        (
            episode.episode_id,
            [(node.parent, node.token_ids.tolist()) for node in episode.nodes],
            [[(effect.effect_id, effect.result) for effect in turn.effects] for turn in episode.turns],
            (episode.stop_reason, episode.failure, episode.reward, episode.metrics),
        )
        for episode in episodes
    ]


async def wait_until(condition) -> None:
    """Until something holds that only processes bring about."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def pids(played: PlayedPool) -> dict[str, int]:
    return {worker.name: worker.pid for worker in played.pool._workers.values()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", PLACES)
async def test_two_processes_play_the_same_episodes_as_the_run_itself(
    kind: type[Places], tiny_model: Path, tmp_path: Path
) -> None:
    played = {}
    for workers in (0, 2):
        run = make_run(tiny_model, tmp_path / str(workers), rollout={"workers": workers})
        async with playing(run, places=kind()) as pool:
            played[workers] = contents(await pool.play(range(8)))
            turns = pool.pool.metrics()["workers/turns_total"]
        histories = read_journal(run.journal).lives
        assert contents(histories[f"train-{number:06d}-0"].episode() for number in range(8)) == played[workers]
        assert turns == 8 * len(DIALOGUE)
    assert played[2] == played[0]
    writers = {path.name.rpartition("-")[0] for path in run.journal.glob("*.journal")}
    assert writers == {"worker-1", "worker-2"}, "each has had episodes"


async def test_workers_with_a_scripted_engine_inside_play_the_same_and_ask_nobody(tiny_model: Path, tmp_path: Path):
    """The workers by which benchmarks measure what a turn costs."""
    inside = ScriptedPlaces(LocalPlaces())
    played, asked = {}, {}
    for name, places in (("outside", LocalPlaces()), ("inside", inside)):
        run = make_run(tiny_model, tmp_path / name, rollout={"workers": 2})
        async with playing(run, places=places) as pool:
            played[name] = contents(await pool.play(range(4)))
            asked[name] = sum(pool.engine.requests.values())
    assert played["inside"] == played["outside"]
    assert asked == {"outside": 4 * len(DIALOGUE), "inside": 0}


async def play_to_turn(pool: PlayedPool, turn: int) -> list[Episode]:
    """Eight episodes, which go on to a turn, and from there once the engine is told to."""
    pool.engine.held_turn = turn
    return await pool.play(range(8))


def are_at_turn(pool: PlayedPool, turn: int) -> bool:
    """Whether all eight have asked for it."""
    return sum(asked == turn for _, asked in pool.engine.requests) == 8


@pytest.mark.parametrize("kind", PLACES)
async def test_a_worker_that_is_killed_costs_its_episodes_nothing_and_others_never_stop(
    kind: type[Places], tiny_model: Path, tmp_path: Path
) -> None:
    run = make_run(tiny_model, tmp_path, rollout={"workers": 2})
    async with playing(run, places=kind()) as pool:
        playing_all = asyncio.create_task(play_to_turn(pool, 2))
        await wait_until(lambda: are_at_turn(pool, 2))
        before = pids(pool)
        os.kill(before["worker-1"], signal.SIGKILL)
        pool.engine.released.set()
        episodes = await playing_all
        metrics = pool.pool.metrics()
        await wait_until(lambda: len(pids(pool)) == 2)
        after = pids(pool)
        requests = pool.engine.requests
    assert [episode.failure for episode in episodes] == [None] * 8
    assert (metrics["workers/restarts_total"], metrics["workers/handed_over_total"]) == (1, 4)
    assert after["worker-1"] != before["worker-1"]
    assert after["worker-2"] == before["worker-2"]
    histories = read_journal(run.journal).lives
    assert contents(histories[name].episode() for name in sorted(histories)) == contents(episodes)
    leases = [[e.token for e in history.entries if isinstance(e, Leased)] for history in histories.values()]
    assert sorted(map(len, leases)) == [1] * 4 + [2] * 4
    assert all(tokens == sorted(set(tokens)) for tokens in leases), "tokens rise with each hand-over"
    assert sum(requests.values()) <= 8 * len(DIALOGUE) + 4, "what was on record was not generated again"


async def test_the_loss_of_a_place_is_the_loss_of_its_worker(tiny_model: Path, tmp_path: Path, caplog) -> None:
    run, places = make_run(tiny_model, tmp_path, rollout={"workers": 2}), PumpedPlaces()
    async with playing(run, places=places) as pool:
        playing_all = asyncio.create_task(play_to_turn(pool, 2))
        await wait_until(lambda: are_at_turn(pool, 2))
        lost = places.taken["worker-1"]
        lost.lose()
        pool.engine.released.set()
        episodes = await playing_all
        await wait_until(lambda: len(pids(pool)) == 2)
        metrics = pool.pool.metrics()
    assert [(episode.failure, len(episode.turns)) for episode in episodes] == [(None, len(DIALOGUE))] * 8
    assert (metrics["workers/restarts_total"], metrics["workers/handed_over_total"]) == (1, 4)
    assert "process worker-1: its place is gone; end of" in caplog.text
    assert places.taken["worker-1"] is not lost, "another takes its place"
    assert lost.is_closed
    await places.close()
    assert all(place.is_closed for place in places.taken.values())


async def test_episodes_go_on_in_whatever_number_of_workers_a_later_start_has(tiny_model: Path, tmp_path: Path) -> None:
    run = make_run(tiny_model, tmp_path, rollout={"workers": 2})
    long = (*DIALOGUE[:1], *DIALOGUE[1:2] * 6, *DIALOGUE[-1:])
    async with playing(run, long, delay_s=0.1) as pool:
        playing_all = asyncio.gather(*(parked(pool, pool.ticket(n), ()) for n in range(6)))
        await wait_until(lambda: pool.pool.metrics()["workers/turns_total"] >= 8)
        pool.pool.park()
        assert await playing_all == [None] * 6
    turns = sum(len(history.turns) for history in read_journal(run.journal).lives.values())
    assert turns >= 8
    for workers in (3, 0):
        with_workers(run, workers)
        async with playing(run, long, delay_s=0.1) as pool:
            running, unscored = pool.journal.hand_over()
            assert (len(running), unscored) == (6, ())
            playing_all = asyncio.gather(*(parked(pool, *episode) for episode in running))
            if workers:
                await wait_until(lambda: pool.pool.metrics()["workers/turns_total"] >= 3)
                pool.pool.park()
            episodes = await playing_all
    assert [(episode.failure, len(episode.turns)) for episode in episodes] == [(None, len(long))] * 6


async def parked(pool: PlayedPool, ticket: Ticket, entries: tuple[PackedEntry, ...]) -> Episode | None:
    """The episode, or None if it was parked."""
    try:
        return await pool.pool.play(ticket, entries, nothing)
    except EpisodeParked:
        return None


def with_workers(run: RunDirectory, workers: int) -> None:
    config = run.config()
    rollout = config.rollout.model_copy(update={"workers": workers})
    (run.path / "config.json").write_text(config.model_copy(update={"rollout": rollout}).model_dump_json())


@pytest.mark.parametrize(
    ("fault", "kind", "says", "places"),
    [
        ("hang", "hung", "was silent for 5 s and was killed", LocalPlaces),
        ("exit", "crashed", "exit code 3", LocalPlaces),
        ("exit", "crashed", "exit code 3", PumpedPlaces),
        ("crash", "crashed", "signal 11", LocalPlaces),
    ],
)
async def test_a_scaffold_that_ends_or_holds_its_process_costs_its_episodes_and_no_other(
    fault: str, kind: str, says: str, places: type[Places], tiny_model: Path, tmp_path: Path
) -> None:
    plain = {"name": "sql", "options": {}}  # whose every call may be made again in another instance
    options = {"fault": fault, "words": [await question(make_run(tiny_model, tmp_path, environment=plain))]}
    bad = make_run(
        tiny_model,
        tmp_path / "bad",
        environment=plain,
        scaffold={"name": "tests.storms.bad_scaffolds:Bad", "options": options},
        # Longer than a busy machine may let a worker wait.
        rollout={"max_attempts": 1, **({"worker_silence_s": 5.0} if fault == "hang" else {})},
    )
    assert num_processes(bad.config()) == 1, "a scaffold that others wrote has a process of its own"
    async with playing(bad, places=places()) as pool:
        episodes = await pool.play(range(4))
        metrics = pool.pool.metrics()
    guilty, *others = episodes
    assert [(episode.failure, len(episode.turns)) for episode in others] == [(None, len(DIALOGUE))] * 3
    assert guilty.failure is not None
    assert (guilty.failure.boundary, guilty.failure.kind) == ("scaffold", kind)
    for words in (says, "worker-1", str(bad.logs / "worker-1.log"), "rollout.max_attempts = 1"):
        assert words in guilty.failure.message
    assert (metrics["workers/restarts_total"], metrics["workers/given_up_total"]) == (2, 1)
    log = (bad.logs / "worker-1.log").read_text()
    assert "bad_scaffolds.py" in log or fault == "exit", "where it was is in the log"
    history = read_journal(bad.journal).lives[guilty.episode_id]
    assert history.ended is not None
    assert history.ended.failure == guilty.failure, "it will not be played again"


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_scaffold_that_calls_exit_fails_its_episode_and_ends_no_process(
    workers: int, tiny_model: Path, tmp_path: Path
) -> None:
    plain = {"name": "sql", "options": {}}
    words = [await question(make_run(tiny_model, tmp_path, environment=plain))]
    scaffold = {"name": "tests.storms.bad_scaffolds:Bad", "options": {"fault": "sys_exit", "words": words}}
    bad = make_run(tiny_model, tmp_path / "bad", environment=plain, scaffold=scaffold, rollout={"workers": workers})
    async with playing(bad) as pool:
        guilty, *others = await pool.play(range(4))
        metrics = pool.pool.metrics()
    assert [(episode.failure, len(episode.turns)) for episode in others] == [(None, len(DIALOGUE))] * 3
    assert guilty.failure is not None
    assert (guilty.failure.boundary, guilty.failure.kind) == ("scaffold", "run")
    assert guilty.failure.message.startswith("SystemExit: 4 (line ")
    assert "bad_scaffolds.py, in misbehave)" in guilty.failure.message
    assert (metrics["workers/restarts_total"], metrics["workers/given_up_total"]) == (0, 0)


async def question(run: RunDirectory) -> str:
    """What the first task asks."""
    with_workers(run, 0)
    async with playing(run) as pool:
        [host] = pool.hosts.values()
        async with host.open(pool.ticket(0).task) as environment:
            return (await environment.start()).messages[-1].content


async def test_a_worker_that_cannot_be_built_ends_the_run_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    run = make_run(tiny_model, tmp_path, scaffold={"name": "tests.storms.bad_scaffolds:Missing"})
    with pytest.raises(ConfigError, match=r"worker-1: plugin tests.storms.bad_scaffolds:Missing cannot be loaded"):
        async with playing(run) as pool:
            await pool.play(range(1))
