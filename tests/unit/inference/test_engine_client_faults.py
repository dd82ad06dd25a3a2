from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from canned_server import HANGS, HANGS_UP, canned_server, json_answer, plain_answer

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.transport import Answer, HttpConnections, NoAnswerError
from agentrl.testing.clock import run_virtual
from agentrl.types.errors import Boundary, EngineBusyError, EngineError, EpisodeError
from agentrl.types.generation import GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import FolderWeights, PauseMode

REQUEST = GenerationRequest("rid-1", "session", np.asarray([5, 6], np.int32), 3, (1,), Sampling(), 7)
QUICK = ClientConfig(generate_s=0.2, control_s=0.2, load_s=0.2, connect_s=0.2)
"""For servers that never answer; one that does may be slow on a busy machine, so it gets `PATIENT`."""
PATIENT = ClientConfig()
GOOD = {
    "output_ids": [8, 9],
    "meta_info": {
        "id": "rid-1",
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
        "weight_versions": [{"version": "0.3", "start": 0, "end": 2}],
    },
}


async def _failure(answer: bytes) -> EpisodeError:
    async with canned_server({"/generate": answer}) as server:
        client = EngineClient("main-0", server.url, PATIENT)
        with pytest.raises(EpisodeError) as caught:
            await client.generate(REQUEST)
        await client.close()
    return caught.value


async def _control_error(path: str, answer: bytes, call: str, *arguments: Any) -> str:
    async with canned_server({path: answer}) as server:
        client = EngineClient("main-0", server.url, QUICK if answer == HANGS else PATIENT)
        with pytest.raises(EngineError) as caught:
            await getattr(client, call)(*arguments)
        await client.close()
    return str(caught.value)


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    client = EngineClient("main-0", "http://127.0.0.1:9", PATIENT)
    with pytest.raises(EpisodeError, match=r"main-0 at http://127\.0\.0\.1:9: ClientConnectorError") as caught:
        await client.generate(REQUEST)
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENGINE, "unreachable")
    with pytest.raises(EngineError, match="does not answer: ClientConnectorError"):
        await client.model_info()
    with pytest.raises(EngineError, match="/pause_generation: ClientConnectorError"):
        await client.pause()
    await client.close()


async def test_an_engine_that_drops_the_call_is_unreachable() -> None:
    error = await _failure(HANGS_UP)
    assert (error.failure.boundary, error.failure.kind) == (Boundary.ENGINE, "unreachable")
    assert "ServerDisconnectedError" in error.failure.message


async def test_half_an_answer_is_waited_for_until_the_deadline() -> None:
    cut = b"HTTP/1.1 200 X\r\ncontent-length: 50\r\n\r\n{"
    async with canned_server({"/generate": cut}) as server:
        client = EngineClient("main-0", server.url, QUICK)
        with pytest.raises(EpisodeError) as caught:
            await client.generate(REQUEST)
        await client.close()
    assert caught.value.failure.kind == "engine.generate"


async def test_a_silent_engine_is_a_timeout_and_hears_an_abort() -> None:
    async with canned_server({"/generate": HANGS}) as server:
        client = EngineClient("main-0", server.url, ClientConfig(generate_s=0.2))
        with pytest.raises(EpisodeError, match=r"main-0 gave no reply within 0.2 s") as caught:
            await client.generate(REQUEST)
        await client.close()
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.TIMEOUT, "engine.generate")
    assert server.seen[-1] == ("/abort_request", {"rid": "rid-1"})


@dataclass
class Unanswered:
    """Takes the place of connections: when which path was asked for, on a virtual clock, and how a call fails."""

    fails: Callable[[], Answer] | None = None
    seen: list[tuple[float, str]] = field(default_factory=list)

    async def request(self, path: str) -> Answer:
        self.seen.append((asyncio.get_running_loop().time(), path))
        if self.fails is None:
            await asyncio.Event().wait()
        return self.fails()

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HttpConnections, "request", lambda _, method, path, body=None: self.request(path))


def _hang_up() -> Answer:
    raise NoAnswerError("ServerDisconnectedError", is_delivered=True)


def test_a_cancelled_call_sends_an_abort_even_if_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Unanswered()
    engine.put(monkeypatch)

    async def cancel() -> float:
        client = EngineClient("main-0", "http://engine", ClientConfig(control_s=3000.0))
        task = asyncio.create_task(client.generate(REQUEST))
        while not engine.seen:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()
        return asyncio.get_running_loop().time()

    assert run_virtual(cancel()) == pytest.approx(1.0)
    assert engine.seen == [(0.0, "/generate"), (0.0, "/abort_request")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (json_answer({"error": {"message": "too hot"}}, 400), "HTTP 400: too hot"),
        (json_answer({"error": "unknown field"}, 400), "HTTP 400: unknown field"),
        (json_answer({"object": "error", "message": "schema"}, 400), "HTTP 400: schema"),
        (plain_answer(b"Internal Server Error", 500), "HTTP 500: Internal Server Error"),
    ],
)
async def test_a_refusal_carries_the_servers_words(answer: bytes, message: str) -> None:
    error = await _failure(answer)
    assert (error.failure.boundary, error.failure.kind) == (Boundary.ENGINE, "refused")
    assert error.failure.message == f"main-0: {message}"


@pytest.mark.parametrize("content", [b"", b"<html>", b"null", b"[]", b"7", b'{"meta_info": null}'])
async def test_an_answer_that_is_no_generation_is_not_for_its_request(content: bytes) -> None:
    error = await _failure(plain_answer(content))
    assert (error.failure.boundary, error.failure.kind) == (Boundary.CONTRACT, "engine.identity")


async def test_an_answer_for_its_request_that_is_no_generation_breaks_the_contract() -> None:
    error = await _failure(json_answer({"meta_info": {"id": "rid-1"}}))
    assert (error.failure.boundary, error.failure.kind) == (Boundary.CONTRACT, "engine.answer")


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"id": "rid-2"}, "its id is 'rid-2'"),
        ({"id": None}, "its id is None"),
        ({"prompt_tokens": 3}, "its prompt has 3 tokens, not 2"),
        ({"request_hash": "0"}, "its request_hash is that of another prompt, sampling or adapter"),
    ],
)
async def test_an_answer_for_another_request_is_a_contract_failure_that_says_why(meta: Any, reason: str) -> None:
    error = await _failure(json_answer(GOOD | {"meta_info": GOOD["meta_info"] | meta}))
    assert (error.failure.boundary, error.failure.kind) == (Boundary.CONTRACT, "engine.identity")
    assert error.failure.message == f"main-0 answered something else than request rid-1: {reason}"


async def test_an_answer_whose_tokens_were_cut_off_breaks_the_contract() -> None:
    emptied = {"output_ids": [], "meta_info": GOOD["meta_info"] | {"completion_tokens": 2}}
    error = await _failure(json_answer(emptied))
    assert (error.failure.kind, "0 output_ids of 2 tokens" in str(error)) == ("engine.answer", True)


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_gateway_that_got_no_answer_is_an_engine_that_cannot_be_reached(status: int) -> None:
    error = await _failure(plain_answer(b"", status))
    assert (error.failure.boundary, error.failure.kind) == (Boundary.ENGINE, "unreachable")


@pytest.mark.parametrize("words", ["Duplicate request ID detected: rid-1", "duplicate request id in flight: rid-1"])
async def test_the_copy_of_a_request_is_no_refusal_of_it(words: str) -> None:
    error = await _failure(json_answer({"error": {"message": words}}, 400))
    assert error.failure.kind == "unreachable"


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [
        (503, "2", 2.0),
        (429, "0", 0.0),
        (429, None, 1.0),
        (503, "86400", 30.0),
        (503, "soon", 1.0),
        (503, "-1", 1.0),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (503, "Wed, 21 Oct 2115 07:28:00 GMT", 30.0),
    ],
)
async def test_an_engine_under_load_says_when_to_ask_again(status: int, header: str | None, seconds: float) -> None:
    line = f"retry-after: {header}\r\n" if header else ""
    error = await _failure(f"HTTP/1.1 {status} X\r\n{line}content-length: 0\r\n\r\n".encode())
    assert isinstance(error, EngineBusyError)
    assert (error.failure.kind, error.retry_after_s) == ("busy", seconds)


async def test_a_pause_whose_answer_is_lost_is_sent_again() -> None:
    async with canned_server({"/pause_generation": HANGS_UP}) as server:
        client = EngineClient("main-0", server.url, PATIENT)
        pausing = asyncio.create_task(client.pause())
        while not client.repeated_calls:
            await asyncio.sleep(0.001)
        server.answers["/pause_generation"] = json_answer({"num_paused_requests": 3})
        assert await pausing == 3
        await client.close()
    assert client.repeated_calls["/pause_generation"] >= 1


@pytest.mark.parametrize(
    ("fails", "asked_s", "ended_s"),
    [
        (None, [0, 2.05, 4.15], 6.0),
        (_hang_up, [0, 0.05, 0.15, 0.35, 0.75, 1.55, 3.15], 3.15),
        (lambda: Answer(502, {}, b""), [0, 0.05, 0.15, 0.35, 0.75, 1.55, 3.15], 3.15),
    ],
)
def test_a_resume_that_is_never_answered_is_sent_again_and_ends_by_its_deadline(
    fails: Callable[[], Answer] | None, asked_s: list[float], ended_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Unanswered(fails)
    engine.put(monkeypatch)

    async def resume() -> tuple[float, int]:
        client = EngineClient("main-0", "http://engine", ClientConfig(control_s=6.0))
        with pytest.raises(EngineError, match="/continue_generation"):
            await client.resume()
        await client.close()
        return asyncio.get_running_loop().time(), client.repeated_calls["/continue_generation"]

    ended, num_repeated = run_virtual(resume())
    assert ended == pytest.approx(ended_s)
    assert [at for at, _ in engine.seen] == pytest.approx(asked_s)
    assert num_repeated == len(asked_s) - 1


async def test_a_resume_that_the_engine_refuses_is_not_sent_again() -> None:
    async with canned_server({"/continue_generation": json_answer({"error": "no"}, 400)}) as server:
        client = EngineClient("main-0", server.url, PATIENT)
        with pytest.raises(EngineError, match="HTTP 400: no"):
            await client.resume()
        await client.close()
    assert len(server.seen) == 1


async def test_a_good_answer_is_read_and_its_connection_used_again() -> None:
    async with canned_server({"/generate": json_answer(GOOD)}) as server:
        client = EngineClient("main-0", server.url, PATIENT)
        for _ in range(3):
            generation = await client.generate(REQUEST)
        await client.close()
    assert generation.token_ids.tolist() == [8, 9]
    assert server.connections == 1


async def test_control_calls_past_their_deadline_are_named() -> None:
    version = PolicyVersion(0, 1)
    assert "/pause_generation took longer than 0.2 s" in await _control_error("/pause_generation", HANGS, "pause")
    message = await _control_error("/update_weights_from_disk", HANGS, "swap", FolderWeights("/w"), version)
    assert message == "engine main-0: /update_weights_from_disk took longer than 0.2 s"
    assert "does not answer within 0.2 s" in await _control_error("/model_info", HANGS, "model_info")


@pytest.mark.parametrize("info", [{}, {"weight_version": "default"}, {"weight_version": None}, [], "text"])
async def test_a_receipt_without_a_version_is_an_engine_error(info: Any) -> None:
    assert "main-0: /model_info" in await _control_error("/model_info", json_answer(info), "receipt")


@pytest.mark.parametrize("meta", [{}, {"input_token_logprobs": [[None, 5], [None, 6]]}, {"input_token_logprobs": 7}])
async def test_scores_that_are_no_numbers_are_an_engine_error(meta: Any) -> None:
    assert "/generate" in await _control_error("/generate", json_answer({"meta_info": meta}), "score", [5, 6])


@pytest.mark.parametrize(
    ("mode", "flushes"), [(PauseMode.ABORT, True), (PauseMode.RETRACT, True), (PauseMode.IN_PLACE, False)]
)
async def test_a_load_keeps_the_cache_of_requests_frozen_in_place(mode: PauseMode, flushes: bool) -> None:
    async with canned_server({"/abort_request": plain_answer(b"")}) as server:
        client = EngineClient("main-0", server.url, PATIENT, mode)
        assert await client.pause() == 0
        await client.swap(FolderWeights("/w"), PolicyVersion(0, 4))
        await client.abort_all()
        await client.close()
    assert server.seen[0] == ("/pause_generation", {"mode": mode})
    assert server.seen[1][1]["flush_cache"] is flushes
    assert server.seen[1][1]["weight_version"] == "0.4"
    assert server.seen[2] == ("/abort_request", {"abort_all": True})


@pytest.mark.parametrize(("mode", "step"), [(PauseMode.ABORT, 3), (PauseMode.RETRACT, 3), (PauseMode.IN_PLACE, 2)])
async def test_only_a_pause_in_place_leaves_kv_of_old_weights_to_new_requests(mode: PauseMode, step: int) -> None:
    answer = {**GOOD, "meta_info": {**GOOD["meta_info"], "cached_tokens": 12}}
    async with canned_server({"/generate": json_answer(answer)}) as server:
        client = EngineClient("main-0", server.url, PATIENT, mode)
        generation = await client.generate(replace(REQUEST, expects=PolicyVersion(0, 2)))
        await client.close()
    assert {span.version for span in generation.versions} == {PolicyVersion(0, 3)}
    assert {span.version for span in generation.kv_versions} == {PolicyVersion(0, step)}


@pytest.mark.parametrize("mode", PauseMode)
async def test_requests_find_no_kv_of_another_run_policy_epoch_or_version(mode: PauseMode) -> None:
    users = [
        ("main-0", "ours", PolicyVersion(0, 2)),
        ("main-0", "theirs", PolicyVersion(0, 2)),
        ("main-0", "ours", PolicyVersion(1, 2)),
        ("main-0", "ours", PolicyVersion(0, 3)),
        ("critic-0", "ours", PolicyVersion(0, 2)),
    ]
    async with canned_server({"/generate": json_answer(GOOD)}) as server:
        for name, mark, version in [*users, users[0]]:
            client = EngineClient(name, server.url, PATIENT, mode, mark=mark)
            with contextlib.suppress(EpisodeError):
                await client.generate(replace(REQUEST, expects=version))
            await client.close()
    keys = [body["extra_key"] for path, body in server.seen if path == "/generate"]
    assert len({*keys[:-1]}) == len(users)
    assert keys[-1] == keys[0]
