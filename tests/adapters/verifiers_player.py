"""Episodes that verifiers plays: its own TrainClient in a process of its own, against the gateway of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.gateway.starting import LazyGateway
from agentrl.testing.builders import build_ticket
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.program import GatewayAccess
from agentrl.types.trajectory import build_trajectories
from tests.storms.deliveries import Delivery, Faults, check_episode
from tests.unit.gateway.gateway_parts import play

ROOT = Path(__file__).parents[2]
SIDE = ROOT / "tests/adapters/verifiers_side"
TURNS = 4
_PYTHON = ROOT / ".venv-verifiers/bin/python"
_END_S = 60.0
_LINE_BYTES = 1 << 26


class Recorded:
    """An engine that remembers what it gave."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.deliveries: list[Delivery] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        """What the engine gives."""
        generation = await self._engine.generate(request)
        self.deliveries.append(Delivery.of(request, generation))
        return generation

    @property
    def num_tokens(self) -> int:
        """Of all that it gave."""
        return sum(len(delivery.token_ids) for delivery in self.deliveries)


@dataclass(frozen=True)
class Rollout:
    """What both sides hold of one episode: `said` is verifiers' own account of it."""

    episode: Episode
    said: dict[str, Any]
    deliveries: Sequence[Delivery]

    def check(self) -> None:
        """verifiers saw no error, and its one branch has our one branch's tokens, mask and log-probabilities."""
        assert (self.said["ok"], self.said["errors"]) == (True, [])
        assert self.episode.failure is None, self.episode.failure
        assert check_episode(self.episode, self.deliveries) == Faults()
        assert len(self.episode.turns) == TURNS
        (ours,) = build_trajectories(self.episode)
        (theirs,) = self.said["branches"]
        assert theirs["token_ids"] == ours.token_ids.tolist()
        assert theirs["mask"] == ours.sampled.tolist()
        assert theirs["logprobs"] == ours.logprobs.tolist()


class VerifiersPlayer:
    """A process of verifiers: rollouts go in, and what their traces have comes out."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def rollout(self, number: int, access: GatewayAccess) -> dict[str, Any]:
        """Let verifiers play its task of this number; an even one by its path, an odd one by its key."""
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        by_path = number % 2 == 0
        url = f"{access.url}/sessions/{access.key}/v1" if by_path else f"{access.url}/v1"
        rollout = {"number": number, "url": url, "key": "none" if by_path else access.key}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(rollout).encode() + b"\n")
        await self._process.stdin.drain()
        return await answer

    async def listen(self) -> None:
        """Take answers until the process ends; then those that are due fail."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            self._answers.pop(answer["number"]).set_result(answer)
        for left in self._answers.values():
            left.set_exception(AssertionError("verifiers' process has ended"))


@asynccontextmanager
async def verifiers_player(model: Path, log: Path) -> AsyncIterator[VerifiersPlayer]:
    """A process of verifiers that renders for the model in a folder; it ends with the block."""
    assert _PYTHON.exists(), f"{_PYTHON} is not there; run `make .venv-verifiers/.installed`"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(str(_PYTHON), str(SIDE / "play.py"), str(model)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=log.parent,
            limit=_LINE_BYTES,
        )
    player = VerifiersPlayer(process)
    listening = asyncio.create_task(player.listen())
    try:
        yield player
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(_END_S):
            await listening
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        listening.cancel()


async def play_rollouts(
    player: VerifiersPlayer, chat: ChatFormat, engines: Sequence[Recorded], **limits: Any
) -> list[Rollout]:
    """Episodes that verifiers plays at the same time, one for each engine."""
    gateway = LazyGateway()
    said: dict[int, dict[str, Any]] = {}

    async def one(number: int, engine: Recorded) -> Rollout:
        async def agent(access: GatewayAccess) -> None:
            said[number] = await player.rollout(number, access)

        ticket = build_ticket(f"train-{number:06d}-0", number)
        episode = await play(chat, engine, agent, gateway, ticket=ticket, total_s=600.0, **limits)
        return Rollout(episode, said.get(number, {"ok": False, "errors": ["it said nothing"]}), engine.deliveries)

    try:
        return await asyncio.gather(*(one(n, engine) for n, engine in enumerate(engines)))
    finally:
        await gateway.close()
