"""Sessions over real engines behind proxies of faults, with publications going on, and what became of their tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import EngineCalls, Reference

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, FleetConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.inference.supervision import FleetSupervisor
from agentrl.orchestration.engines import wait_for_answer
from agentrl.testing.fault_proxy import Exchange, FaultProxy, Rule
from agentrl.types.errors import EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan, append_spans
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.resync import Resynchronizer
from tests.storms.fault_stage import make_manifest

FIRST = PolicyVersion(0, 0)
NUM_SESSIONS = 6
NUM_TOKENS = 48
RECOVERY_S = 120.0
EMBEDDED_LIMITS = ClientConfig(generate_s=20.0, control_s=6.0, load_s=10.0, connect_s=1.0)
# A pause takes SGLang a second.
SGLANG_LIMITS = ClientConfig(generate_s=40.0, control_s=8.0, load_s=20.0, connect_s=2.0)
WATCH = FleetConfig(probe_s=0.5, suspect_s=2.5, dead_s=4.0, wait_s=60.0)


@dataclass(frozen=True)
class Reply:
    """What one session has of one prompt: the parts between aborts."""

    prompt: tuple[int, ...]
    parts: list[Generation]

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids.tolist()]


@dataclass
class ProxiedFleet:
    """A fleet whose engines are reached through proxies; `replies` is what sessions have committed."""

    engines: dict[str, EngineCalls]
    replies: list[Reply] = field(default_factory=list)
    failures: list[EpisodeError] = field(default_factory=list)
    heard_at: dict[int, float] = field(default_factory=dict)
    is_over: bool = False

    @classmethod
    @asynccontextmanager
    async def playing(cls, **engines: EngineCalls) -> AsyncIterator[ProxiedFleet]:
        """Sessions, publications and those that look after engines, until the block ends."""
        fleet = cls(engines)
        async with AsyncExitStack() as stack:
            await fleet._start(stack)
            running = [asyncio.create_task(work()) for work in fleet._services()]
            talking = [asyncio.create_task(fleet._talk(number)) for number in range(NUM_SESSIONS)]
            try:
                yield fleet
                fleet.is_over = True
                await asyncio.wait_for(asyncio.gather(*talking), RECOVERY_S)
                assert not any(task.done() for task in running)
            finally:
                for task in (*running, *talking):
                    task.cancel()
                await asyncio.gather(*running, *talking, return_exceptions=True)

    async def _start(self, stack: AsyncExitStack) -> None:
        self.proxies = {name: FaultProxy(calls.server.url) for name, calls in self.engines.items()}
        is_embedded = next(iter(self.engines.values())).server.is_embedded
        self.limits = EMBEDDED_LIMITS if is_embedded else SGLANG_LIMITS
        self.clients: dict[str, EngineClient] = {}
        for name, proxy in self.proxies.items():
            await proxy.start()
            self.clients[name] = EngineClient(name, proxy.url, self.limits)
            stack.push_async_callback(proxy.stop)
            stack.push_async_callback(self.clients[name].close)
        self.fleet = Fleet(self.clients.values(), FIRST)
        self.router = EngineRouter(self.fleet, WATCH.wait_s)
        first = make_manifest(self.model_of(FIRST), FIRST)
        self.publisher = StagedPublisher(self.fleet, DiskTransport(), PublishConfig(), first, WATCH.wait_s)
        stack.push_async_callback(self.publisher.close)

    def _services(self) -> list[Callable[[], Any]]:
        supervisor = FleetSupervisor(self.fleet, self, WATCH)
        return [self._publish, supervisor.run, Resynchronizer(self.fleet, self.publisher).run]

    def model_of(self, version: PolicyVersion) -> Path:
        """Weights of even and odd steps."""
        server = next(iter(self.engines.values())).server
        return (server.model, server.other_model)[version.step % 2]

    async def engine_ended(self, name: str) -> str:
        """Nobody here sees the engines' processes."""
        return await asyncio.get_running_loop().create_future()

    async def revive_engine(self, name: str) -> EngineClient:
        """The same engine, once it answers again."""
        await wait_for_answer(self.clients[name], 60.0)
        return self.clients[name]

    async def suffer(self, name: str, *rules: Rule) -> None:
        """Let faults befall an engine until it serves a newer version and every session has new tokens."""
        struck = [self.proxies[name].arm(rule) for rule in rules]
        try:
            async with asyncio.timeout(RECOVERY_S):
                await asyncio.gather(*(event.wait() for event in struck))
                await self.recover(name)
        except TimeoutError:
            raise AssertionError(f"{rules} on {name}: not over in {RECOVERY_S} s ({self.fleet.aside})") from None

    async def recover(self, name: str) -> None:
        """Until an engine serves a newer version than any did, and every session has had new tokens."""
        since, member = time.monotonic(), self.fleet.members[name]
        newest = max(other.version for other in self.fleet.members.values())
        while not (
            name in self.fleet.healthy
            and member.version > newest
            and all(self.heard_at.get(number, 0.0) > since for number in range(NUM_SESSIONS))
        ):
            await asyncio.sleep(0.02)

    async def _publish(self) -> None:
        for step in itertools.count(1):
            version = PolicyVersion(0, step)
            await self.publisher.publish(make_manifest(self.model_of(version), version))
            await asyncio.sleep(0.3)

    async def _talk(self, number: int) -> None:
        """One prompt after the other, each of its own length; whatever is aborted goes on from its tokens."""
        for turn in itertools.count():
            if self.is_over:
                return
            prompt = tuple(20 + (13 * number + 7 * turn + 3 * place) % 200 for place in range(5 + (number + turn) % 7))
            with suppress(EpisodeError):
                await self._reply(f"session-{number:04d}-{turn:06d}", number, prompt)

    async def _reply(self, session: str, number: int, prompt: tuple[int, ...]) -> None:
        reply = Reply(prompt, [])
        while len(reply.tokens) < NUM_TOKENS:
            ids = np.asarray([*prompt, *reply.tokens], np.int32)
            rid, left = f"{session}-{len(reply.parts):04d}", NUM_TOKENS - len(reply.tokens)
            try:
                part = await self.router.generate(GenerationRequest(rid, session, ids, left, (), Sampling(), number))
            except EpisodeError as error:
                self.failures.append(error)
                raise
            if len(part.token_ids):
                self.heard_at[number] = time.monotonic()
            reply.parts.append(part)
            if part.finish is FinishReason.STOP:
                break
        self.router.end_session(session)
        self.replies.append(reply)

    def verdict(self) -> Verdict:
        """Compare what sessions have committed with what engines had answered to them; each answer counts once."""
        unclaimed: dict[tuple[int, ...], list[Exchange]] = {}
        for exchange in (e for proxy in self.proxies.values() for e in proxy.exchanges if _is_rollout(e)):
            unclaimed.setdefault(tuple(exchange.body["input_ids"]), []).append(exchange)
        foreign = misversioned = committed = 0
        for reply in self.replies:
            context = list(reply.prompt)
            for part in (part for part in reply.parts if len(part.token_ids)):
                answers = unclaimed.get(tuple(context), [])
                # Versions of one parity have the same weights: an answer that was lost and the one in its place may
                # differ in nothing but their labels.
                alike = [e for e in answers if _is_of(part, e)]
                own = next((e for e in alike if _has_spans(part, e)), alike[0] if alike else None)
                foreign += len(part.token_ids) if own is None else 0
                if own is not None:
                    answers.remove(own)
                    misversioned += 0 if _has_spans(part, own) else len(part.token_ids)
                committed += len(part.token_ids)
                context += part.token_ids.tolist()
        left = [e for answers in unclaimed.values() for e in answers if e.is_passed_on]
        return Verdict(committed, foreign, misversioned, len(left))


@dataclass(frozen=True)
class Verdict:
    """Tokens that sessions have committed; of these, what no engine had given for that context, and what is labelled
    otherwise than the engine had said. `unclaimed` are answers that came whole and were not committed.
    """

    committed: int
    foreign: int
    misversioned: int
    unclaimed: int


def check_logprobs(fleet: ProxiedFleet, reference: Reference, num_replies: int) -> None:
    """Tokens of the newest replies have the log-probabilities of the weights that their spans name."""
    for reply in fleet.replies[-num_replies:]:
        spans: tuple[VersionSpan, ...] = ()
        for part in reply.parts:
            spans = append_spans(spans, part.versions)
        logprobs = [logprob for part in reply.parts for logprob in part.logprobs.tolist()]
        for span in spans:
            expected = reference.sampled(fleet.model_of(span.version), list(reply.prompt), reply.tokens)
            assert logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=1e-3)


def _is_rollout(exchange: Exchange) -> bool:
    """Neither a score nor a sentinel, and with tokens."""
    return exchange.body["sampling_params"]["temperature"] > 0 and bool(exchange.answer.get("output_ids"))


def _is_of(part: Generation, exchange: Exchange) -> bool:
    meta = exchange.answer["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return exchange.answer["output_ids"] == part.token_ids.tolist() and np.allclose(logprobs, part.logprobs, atol=1e-6)


def _has_spans(part: Generation, exchange: Exchange) -> bool:
    spans = exchange.answer["meta_info"]["weight_versions"]
    own = [(str(span.version), span.start, span.end) for span in part.versions]
    return [(span["version"], span["start"], span["end"]) for span in spans] == own
