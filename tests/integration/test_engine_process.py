from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest
from engine_server import EngineCalls

from agentrl.config.base import parse_config
from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig, ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.engines import EngineProcess, attachments
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.process.local_place import LocalPlace, LocalPlaces
from agentrl.process.place import Role
from agentrl.testing.pumped_place import PumpedPlace, PumpedPlaces
from agentrl.types.errors import ConfigError, EngineError, EnginesLostError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode
from tests.integration import runs

FIRST = PolicyVersion(0, 0)
NOBODY_LISTENS = "http://127.0.0.1:9"


def _launch(model: Path, logs: Path, **config: object) -> EngineLaunch:
    return EngineLaunch("main", "main-0", model, FIRST, EmbeddedEngineConfig(**config), False, logs)


async def test_a_missing_model_folder_is_a_configuration_error_with_the_log(tmp_path: Path) -> None:
    launch = _launch(tmp_path / "nothing", tmp_path)
    with pytest.raises(ConfigError, match=r"main-0 did not start \(exit code \d\)") as caught:
        await EngineProcess.start(launch, ClientConfig(), LocalPlace())
    assert f"no model at {tmp_path / 'nothing'}: config.json is missing" in str(caught.value)


async def test_an_engine_that_does_not_answer_in_time_is_ended_and_named(tiny_model: Path, tmp_path: Path) -> None:
    launch = _launch(tiny_model, tmp_path, start_s=0.2)
    with pytest.raises(EngineError, match=r"main-0 did not answer within 0.2 s; see .*main-0.log"):
        await EngineProcess.start(launch, ClientConfig(), LocalPlace())


async def _attach(config: AttachedEngineConfig, mode: PauseMode = PauseMode.ABORT) -> EngineClient:
    (attachment,) = attachments("main", config, ClientConfig(), mode, PolicyVersion(0, 4))
    return await attachment.attach()


async def test_an_attached_engine_is_relabelled_to_the_runs_first_version(engine: EngineCalls) -> None:
    config = AttachedEngineConfig(urls=[engine.server.url])
    client = await _attach(config)
    assert client.name == "main-0"
    assert (await engine.info())["weight_version"] == "0.4"
    await client.close()


async def test_an_attached_engine_gets_the_token_of_its_variable(
    exact_engine: EngineCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AttachedEngineConfig(urls=[exact_engine.server.url], token_variable="ENGINE_SECRET")
    monkeypatch.setenv("ENGINE_SECRET", exact_engine.server.token or "")
    client = await _attach(config)
    await client.pause()
    await client.close()


async def test_an_attached_engine_that_does_not_answer_is_named_by_its_url() -> None:
    config = AttachedEngineConfig(urls=[NOBODY_LISTENS], start_s=0.3)
    with pytest.raises(EngineError, match=f"engine main-0 at {NOBODY_LISTENS} has not answered for 0.3 s"):
        await _attach(config)


async def test_swaps_in_place_are_refused_where_the_server_cannot_tell_which_weights_drew_a_token(
    engine: EngineCalls,
) -> None:
    config = AttachedEngineConfig(urls=[engine.server.url])
    if not engine.server.traits.labels_tokens_in_its_queue_late:
        await (await _attach(config, PauseMode.IN_PLACE)).close()
        return
    with pytest.raises(ConfigError, match=r"disable_overlap_schedule = False.*Start it with --disable-overlap"):
        await _attach(config, PauseMode.IN_PLACE)


async def test_swaps_in_place_are_allowed_where_the_server_names_the_weights_of_every_token(
    in_place_engine: EngineCalls,
) -> None:
    config = AttachedEngineConfig(urls=[in_place_engine.server.url])
    await (await _attach(config, PauseMode.IN_PLACE)).close()


async def test_the_evaluations_engine_keeps_no_cache_of_older_weights_where_rollouts_swap_in_place(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = tomllib.loads(runs.RECIPE)
    settings["policies"]["main"] |= {"model": str(tiny_model), "publish": {"pause_mode": "in_place"}}
    runtime = ProcessRuntime(parse_config(RunConfig, settings, "test"), tmp_path, LocalPlaces())
    try:
        engine = await runtime.start_side_engine("evaluation", "main", tiny_model, FIRST)
        await engine.pause()
        assert (await engine.model_info())["paused"] == "abort"
    finally:
        await runtime.close()


async def test_the_loss_of_an_engines_place_is_its_end_and_places_are_given_back(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = tomllib.loads(runs.RECIPE)
    settings["policies"]["main"] |= {"model": str(tiny_model)}
    places = PumpedPlaces()
    runtime = ProcessRuntime(parse_config(RunConfig, settings, "test"), tmp_path, places)
    try:
        engine = await runtime.start_side_engine("evaluation", "main", tiny_model, FIRST)
        assert (await engine.model_info())["weight_version"]
        places.taken["engine-main-evaluation"].lose()
        async with asyncio.timeout(120):
            with pytest.raises(
                EngineError, match=r"engine-main-evaluation ended \(its place is gone\)\. End of .*log:"
            ):
                await runtime.watch()
    finally:
        await runtime.close()
    assert places.taken["engine-main-evaluation"].is_closed


class PlacesThatFail(PumpedPlaces):
    """The first places that are taken after `num_lost` was set are lost before anything starts there."""

    num_lost = 0

    async def take(self, role: Role, name: str, team: str = "") -> PumpedPlace:
        place = await super().take(role, name, team)
        if self.num_lost:
            self.num_lost -= 1
            place.lose()
        return place


class ElasticPlacesThatFail(PlacesThatFail):
    """A run begins with one engine of a policy."""

    is_elastic = True


async def test_an_engine_whose_next_place_is_lost_too_is_started_at_the_one_behind_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = tomllib.loads(runs.RECIPE)
    settings["policies"]["main"] |= {"model": str(tiny_model), "engine": {"kind": "embedded", "max_restarts": 2}}
    places = PlacesThatFail()
    runtime = ProcessRuntime(parse_config(RunConfig, settings, "test"), tmp_path, places)
    try:
        await runtime.start_engines("main", tiny_model, FIRST)
        places.num_lost = 1
        places.taken["engine-main-0"].lose()
        engine = await runtime.revive_engine("engine-main-0")
        assert await engine.probe() == FIRST
        with pytest.raises(EngineError, match=r"engine.max_restarts = 2 allows no further start"):
            await runtime.revive_engine("engine-main-0")
    finally:
        await runtime.close()


async def test_an_engine_that_an_elastic_run_does_not_wait_for_is_started_again_if_it_is_lost_meanwhile(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = tomllib.loads(runs.RECIPE)
    settings["policies"]["main"] |= {"model": str(tiny_model), "engine": {"kind": "embedded", "count": 2}}
    places = ElasticPlacesThatFail()
    runtime = ProcessRuntime(parse_config(RunConfig, settings, "test"), tmp_path, places)
    try:
        [first] = await runtime.start_engines("main", tiny_model, FIRST)
        places.num_lost = 1
        late = await runtime.late_engine("main")
        assert (first.name, late.name) == ("engine-main-0", "engine-main-1")
        assert await late.probe() == FIRST
    finally:
        await runtime.close()


async def test_a_run_that_loses_an_engine_as_it_starts_may_be_started_again(tiny_model: Path, tmp_path: Path) -> None:
    settings = tomllib.loads(runs.RECIPE)
    settings["policies"]["main"] |= {"model": str(tiny_model)}
    places = PlacesThatFail()
    places.num_lost = 1
    runtime = ProcessRuntime(parse_config(RunConfig, settings, "test"), tmp_path, places)
    with pytest.raises(EnginesLostError, match=r"engine-main-0 could not be started: .* its place is gone"):
        await runtime.start_engines("main", tiny_model, FIRST)
    await runtime.close()
