from __future__ import annotations

from pathlib import Path

import pytest
from engine_server import EngineCalls

from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig, ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess, attachments
from agentrl.types.errors import ConfigError, EngineError
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig

FIRST = PolicyVersion(0, 0)
NOBODY_LISTENS = "http://127.0.0.1:9"


def _launch(model: Path, logs: Path, **config: object) -> EngineLaunch:
    return EngineLaunch("main", "main-0", model, FIRST, EmbeddedEngineConfig(**config), False, logs)


async def test_a_missing_model_folder_is_a_configuration_error_with_the_log(tmp_path: Path) -> None:
    launch = _launch(tmp_path / "nothing", tmp_path)
    with pytest.raises(ConfigError, match=r"main-0 did not start \(exit code \d\)") as caught:
        await EngineProcess.start(launch, ClientConfig(), PublishConfig())
    assert f"no model at {tmp_path / 'nothing'}: config.json is missing" in str(caught.value)


async def test_an_engine_that_does_not_answer_in_time_is_ended_and_named(tiny_model: Path, tmp_path: Path) -> None:
    launch = _launch(tiny_model, tmp_path, start_s=0.2)
    with pytest.raises(EngineError, match=r"main-0 did not answer within 0.2 s; see .*main-0.log"):
        await EngineProcess.start(launch, ClientConfig(), PublishConfig())


async def _attach(config: AttachedEngineConfig, publish: PublishConfig | None = None) -> EngineClient:
    (attachment,) = attachments("main", config, ClientConfig(), publish or PublishConfig(), PolicyVersion(0, 4))
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
    with pytest.raises(EngineError, match=f"engine main-0 at {NOBODY_LISTENS} has not answered for 0 s"):
        await _attach(config)


async def test_swaps_in_place_are_refused_where_the_server_cannot_tell_which_weights_drew_a_token(
    engine: EngineCalls,
) -> None:
    config, publish = AttachedEngineConfig(urls=[engine.server.url]), PublishConfig(pause_mode="in_place")
    if not engine.server.traits.labels_tokens_in_its_queue_late:
        await (await _attach(config, publish)).close()
        return
    with pytest.raises(ConfigError, match=r"disable_overlap_schedule = False.*Start it with --disable-overlap"):
        await _attach(config, publish)


async def test_swaps_in_place_are_allowed_where_the_server_names_the_weights_of_every_token(
    in_place_engine: EngineCalls,
) -> None:
    config = AttachedEngineConfig(urls=[in_place_engine.server.url])
    await (await _attach(config, PublishConfig(pause_mode="in_place"))).close()
