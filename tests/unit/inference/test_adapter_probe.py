from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from canned_server import CannedServer, canned_server, json_answer

from agentrl.inference.adapters import Adapter, adapter_name
from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.types.errors import EngineError
from agentrl.types.version import PolicyVersion

BASE, V1, V2 = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)


class Overtaken(dict[str, bytes]):
    """Answers of a server that a newer adapter reaches, in place of the old one, while it is asked what it holds."""

    client: EngineClient | None = None

    def get(self, path: str, default: bytes) -> bytes:  # type: ignore[override]
        if path == "/v1/models" and self.client is not None:
            self[path] = _holds(V2)
            self.client._shelf.put(Adapter(adapter_name(V2), V2))
        return super().get(path, default)


def _holds(*versions: PolicyVersion) -> bytes:
    return json_answer({"data": [{"id": "base"}, *({"id": f"adapter-{version}"} for version in versions)]})


def _says(label: object) -> bytes:
    return json_answer({"weight_version": str(label)})


@asynccontextmanager
async def _loaded(answers: dict[str, bytes]) -> AsyncIterator[tuple[EngineClient, CannedServer]]:
    """A client that has loaded version 0.1's adapter on a server that holds it then, and calls its base 0.0."""
    answers |= {"/v1/models": _holds(), "/model_info": _says(BASE)}
    async with canned_server(answers) as server:
        client = EngineClient("main-0", server.url, ClientConfig())
        await client.load_adapter("/staged/0.1", V1)
        server.answers["/v1/models"] = _holds(V1)
        yield client, server
        await client.close()


async def test_a_probe_names_the_newest_adapter_that_the_engine_lists() -> None:
    async with _loaded({}) as (client, _):
        assert await client.probe() == V1


async def test_an_engine_that_has_lost_its_adapter_serves_its_base_weights() -> None:
    async with _loaded({}) as (client, server):
        server.answers["/v1/models"] = _holds()
        assert await client.probe() == BASE


@pytest.mark.parametrize(
    ("label", "message"), [(V1, "does not list adapter-0.1"), ("default", "'default' is not a policy version")]
)
async def test_base_weights_never_pass_for_an_adapter_that_was_lost(label: object, message: str) -> None:
    async with _loaded({}) as (client, server):
        server.answers |= {"/v1/models": _holds(), "/model_info": _says(label)}
        with pytest.raises(EngineError, match=message):
            await client.probe()


async def test_an_adapter_that_was_replaced_while_the_engine_was_asked_is_not_lost() -> None:
    answers = Overtaken()
    async with _loaded(answers) as (client, _):
        answers.client = client
        assert await client.probe() == V2


def _lists(*versions: PolicyVersion) -> bytes:
    return json_answer({"loaded_adapters": {f"adapter-{version}": "/staged" for version in versions}})


async def test_a_receipt_is_what_the_engine_listed_as_it_had_loaded_and_the_next_one_asks_again() -> None:
    async with _loaded({"/load_lora_adapter": _lists(V1)}) as (client, server):
        assert (await client.receipt()).version == V1
        assert "/v1/models" not in server.paths()[1:]
        server.answers["/v1/models"] = _holds()
        with pytest.raises(EngineError, match=r"does not list adapter-0\.1"):
            await client.receipt()


async def test_a_load_that_lists_other_adapters_gives_no_receipt() -> None:
    async with _loaded({"/load_lora_adapter": _lists(V2)}) as (client, _):
        with pytest.raises(EngineError, match=r"does not list adapter-0\.1"):
            await client.receipt()


async def test_an_engine_that_lists_nothing_as_it_loads_is_asked_for_the_receipt() -> None:
    async with _loaded({"/load_lora_adapter": json_answer({"success": True})}) as (client, server):
        assert (await client.receipt()).version == V1
        assert server.paths()[-1] == "/v1/models"
