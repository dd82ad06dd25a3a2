"""Whose an engine is: two runs at one server, with clients of ours and with whole runs."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from engine_server import EngineCalls
from running_request import ENDLESS_TOKENS

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.ownership import release, take, wake
from agentrl.orchestration.engines import let_go
from agentrl.types.errors import EngineRestartedError, EngineTakenError, EpisodeError
from agentrl.types.generation import GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import FolderWeights, PauseMode
from tests.integration import runs

FIRST = PolicyVersion(0, 0)
PLAIN = Sampling(temperature=0.01)  # at which the model draws no end of text, where SGLang stops


def _client(engine: EngineCalls, mark: str) -> EngineClient:
    return EngineClient(mark, engine.server.url, ClientConfig(), token=engine.server.token, mark=mark)


def _request(rid: str, num_tokens: int = 4, sampling: Sampling = PLAIN) -> GenerationRequest:
    prompt = np.asarray([20, 31, 42, 53], np.int32)
    return GenerationRequest(rid, rid, prompt, num_tokens, (), sampling, 7, expects=FIRST)


async def test_a_run_has_its_versions_back_without_its_mark(engine: EngineCalls) -> None:
    client = _client(engine, "mine")
    await take(client, FIRST)
    assert (await engine.info())["weight_version"] == "0.0@mine"
    assert await client.probe() == FIRST
    assert (await client.generate(_request("marked-0001"))).versions == (VersionSpan(FIRST, 0, 4),)
    await client.pause()
    await client.swap(FolderWeights(str(engine.server.other_model)), FIRST.next())
    await client.resume()
    assert (await client.receipt()).version == FIRST.next()
    assert (await client.generate(_request("marked-0002"))).versions == (VersionSpan(FIRST.next(), 0, 4),)
    await release(client)
    assert (await engine.info())["weight_version"] == "0.1"
    await client.close()


async def test_an_engine_with_another_runs_mark_is_refused_by_name_and_taken_over_by_name_only(
    engine: EngineCalls,
) -> None:
    first, second = _client(engine, "first-run"), _client(engine, "second-run")
    await take(first, FIRST)
    await take(first, FIRST)  # a run that is resumed knows its own
    with pytest.raises(EngineTakenError, match=r"belongs to the run 'first-run'.*take_over = \"first-run\""):
        await take(second, FIRST)
    with pytest.raises(EngineTakenError, match="belongs to the run 'first-run'"):
        await take(second, FIRST, take_over="third-run")
    await release(second)  # leaves alone what is not its own
    assert (await engine.info())["weight_version"] == "0.0@first-run"
    await take(second, FIRST, take_over="first-run")
    assert (await engine.info())["weight_version"] == "0.0@second-run"
    await asyncio.gather(first.close(), second.close())


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE])
async def test_an_engine_that_a_run_leaves_in_mid_pause_answers_the_next_one(
    engine: EngineCalls, mode: PauseMode
) -> None:
    first = EngineClient("first", engine.server.url, ClientConfig(), mode, engine.server.token, "first")
    await take(first, FIRST)
    await first.pause()
    await let_go(first)
    second = _client(engine, "second")
    await take(second, FIRST)
    assert not await wake(second)
    assert len((await second.generate(_request(f"left-{mode}"))).token_ids) == 4
    await second.close()


async def test_an_engine_that_was_left_paused_is_woken_and_has_no_kv_of_others(engine: EngineCalls) -> None:
    gone, next_one = _client(engine, "gone"), _client(engine, "next")
    await take(gone, FIRST)
    await gone.generate(_request("left-kv-0001"))
    await gone.pause()
    await take(next_one, FIRST, take_over="gone")
    assert await wake(next_one)
    generation = await next_one.generate(_request("left-kv-0002"))
    assert (len(generation.token_ids), generation.cached_tokens) == (4, 0)
    await asyncio.gather(gone.close(), next_one.close())


@pytest.mark.parametrize("attempt", range(3))
async def test_of_runs_that_take_an_engine_at_the_same_time_exactly_one_has_it(
    engine: EngineCalls, attempt: int
) -> None:
    clients = [_client(engine, f"racer-{attempt}-{number}") for number in range(4)]
    results = await asyncio.gather(*(take(client, FIRST) for client in clients), return_exceptions=True)
    winners = [client for client, result in zip(clients, results, strict=True) if result is None]
    assert [type(result) for result in results].count(EngineTakenError) == len(clients) - 1
    assert (await engine.info())["weight_version"] == f"0.0@{winners[0].name}"
    await asyncio.gather(*(client.close() for client in clients))


async def test_a_foreign_mark_is_noticed_by_every_look_and_every_answer(engine: EngineCalls) -> None:
    client = _client(engine, "mine")
    await take(client, FIRST)
    # Draws so cold go round in circles: no end token comes before the request is aborted.
    long = _request("taken-away-0001", ENDLESS_TOKENS, Sampling(temperature=0.01))
    playing = asyncio.create_task(client.generate(long))
    await engine.wait_for(running=1)
    await engine.ok("/update_weight_version", new_version="0.0@theirs", abort_all_requests=False)
    await engine.generate([20, 31], max_new_tokens=2)  # drawn beside it, so it has tokens of the new label too
    await engine.post("/abort_request", abort_all=True)
    for look in (client.ping, client.probe, client.receipt):
        with pytest.raises(EngineTakenError, match="belongs to the run 'theirs' by now"):
            await look()
    for answer in (playing, client.generate(_request("taken-away-0002"))):
        with pytest.raises(EngineTakenError, match="belongs to the run 'theirs' by now"):
            await answer
    await client.close()


async def test_an_engine_without_the_mark_that_it_was_given_has_started_again(engine: EngineCalls) -> None:
    client = _client(engine, "mine")
    await take(client, FIRST)
    await engine.ok("/update_weight_version", new_version="0.0", abort_all_requests=False)
    with pytest.raises(EngineRestartedError, match=r"'0\.0', without this run's mark"):
        await client.probe()
    with pytest.raises(EpisodeError) as caught:
        await client.generate(_request("restarted-0001"))
    assert caught.value.failure.kind == "unreachable", "such an answer is lost, and asked for again elsewhere"
    await client.close()


async def test_a_client_without_a_mark_does_not_use_an_engine_of_a_run(engine: EngineCalls) -> None:
    run, stranger = _client(engine, "mine"), engine.server.client()
    await take(run, FIRST)
    with pytest.raises(EngineTakenError, match="belongs to the run 'mine'"):
        await stranger.probe()
    await asyncio.gather(run.close(), stranger.close())


def _start(folder: Path, name: str, engine: EngineCalls, *overrides: str) -> tuple:
    """A run that goes on until it is ended, and its folder."""
    (folder / name).mkdir(exist_ok=True)
    attached = f'policies.main.engine={{kind = "attached", urls = ["{engine.server.url}"]}}'
    options = (attached, f"name={name}", "policies.main.fleet.probe_s=0.2", "buffer.max_staleness=2", *overrides)
    process = runs.start(folder / name, engine.server.model, *options)
    return process, folder / name / "runs" / f"{name}-seed0"


def _end(process) -> None:
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == runs.STOPPED, output


@pytest.mark.long
async def test_of_two_runs_at_one_engine_the_second_is_refused_and_the_first_goes_on(
    embedded: EngineCalls, tmp_path: Path
) -> None:
    first, folder = _start(tmp_path, "alpha", embedded, runs.ENDLESS)
    await asyncio.to_thread(runs.wait_for_step, folder, 1, first)
    mark = (folder / "mark").read_text().strip()
    second, _ = _start(tmp_path, "beta", embedded, runs.ENDLESS)
    output = (await asyncio.to_thread(second.communicate, timeout=300))[0]
    assert second.returncode != 0
    assert re.search(rf"belongs to the run\s+'{mark}'", output), output
    step = runs.metrics(folder)[-1]["step"]
    await asyncio.to_thread(runs.wait_for_step, folder, step + 2, first)
    await asyncio.to_thread(_end, first)
    left = (await embedded.info())["weight_version"]
    assert mark_left({"weight_version": left}) is None
    # A publication that is under way when a run is told to stop is given up.
    assert 0 < PolicyVersion.parse(left).step <= runs.version(folder)["step"]


@pytest.mark.long
async def test_of_two_runs_that_start_together_exactly_one_has_the_engine(
    embedded: EngineCalls, tmp_path: Path
) -> None:
    both = dict(_start(tmp_path, name, embedded, runs.ENDLESS) for name in ("alpha", "beta"))
    until = time.monotonic() + 300
    while all(process.poll() is None for process in both):
        assert time.monotonic() < until, "neither was refused"
        await asyncio.sleep(0.1)
    (loser,) = [process for process in both if process.poll() is not None]
    (winner,) = [process for process in both if process is not loser]
    assert loser.returncode != 0
    assert "belongs to the run" in loser.communicate()[0]
    await asyncio.to_thread(runs.wait_for_step, both[winner], 2, winner)
    await asyncio.to_thread(_end, winner)


@pytest.mark.long
async def test_a_run_whose_engine_is_taken_from_it_ends_with_the_other_ones_name(
    embedded: EngineCalls, tmp_path: Path
) -> None:
    process, folder = _start(tmp_path, "alpha", embedded, runs.ENDLESS)
    await asyncio.to_thread(runs.wait_for_step, folder, 1, process)
    label = "0.0@robber-seed0-123abc"
    try:
        async with asyncio.timeout(200):
            while process.poll() is None:
                # A publication that had looked before writes its own label once more.
                if mark_left(await embedded.info()) != "robber-seed0-123abc":
                    await embedded.ok("/update_weight_version", new_version=label, abort_all_requests=False)
                await asyncio.sleep(0.5)
    finally:
        process.kill()
    output = process.communicate()[0]
    assert process.returncode != 0, output
    assert "'robber-seed0-123abc'" in runs.state(folder)["message"]
    assert mark_left(await embedded.info()) == "robber-seed0-123abc"


@pytest.mark.long
async def test_an_engine_of_a_killed_run_is_had_by_its_resumption_or_by_who_names_it(
    embedded: EngineCalls, tmp_path: Path
) -> None:
    killed, folder = _start(tmp_path, "alpha", embedded, runs.ENDLESS)
    await asyncio.to_thread(runs.wait_for_step, folder, 1, killed)
    killed.kill()
    killed.communicate()
    mark = (folder / "mark").read_text().strip()
    assert mark_left(await embedded.info()) == mark
    heir, heirs = _start(tmp_path, "beta", embedded, "steps=1", f'policies.main.engine.take_over="{mark}"')
    output = (await asyncio.to_thread(heir.communicate, timeout=300))[0]
    assert heir.returncode == 0, output
    assert runs.version(heirs)["step"] == 1
    await embedded.ok("/update_weight_version", new_version=f"0.9@{mark}", abort_all_requests=False)
    runs.end_at(folder, runs.last_step(folder) + 3)
    resumed = await asyncio.to_thread(runs.agentrl, "resume", folder)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert mark_left(await embedded.info()) is None


def mark_left(info: dict) -> str | None:
    return info["weight_version"].partition("@")[2] or None
