"""Episodes on a real server whose clients, processes and connections are ended at any moment.

Two rollout workers play an environment that counts what it does, on a server of two processes, behind a proxy. Clients
die while what they have sent is still on its way: it arrives when another goes on with their episodes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agentrl.journal.reading import read_journal
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split
from tests.servers.environments import COMMAND, TOKEN, RunningServer, environment_server
from tests.storms import server_unprotected
from tests.storms.connection_proxy import ConnectionProxy
from tests.storms.kill_verdict import KillVerdict
from tests.storms.worker_pools import PlayedPool, make_run, nothing, playing

NUM_WORKERS = 2
MOST_UNPROTECTED_KILLS = 100
_COUNTING = "tests.storms.kill_plugins:counting"
_TOKEN_VARIABLE = "AGENTRL_STORM_TOKEN"
_AT_ONCE = 16
_MEAN_DELAY_S = 0.3
_DELIVERED_AFTER_S = 1.0
_DEADLINE_S = 180.0
_QUERY = Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": "SELECT count(*) FROM sqlite_master"}),))
_DIALOGUE = (*(_QUERY,) * 7, Message(Role.ASSISTANT, "the answer is 93"))
_ALL_WAYS = ("client", "server", "connection", "connection")
# What a protection is against: without it nothing else is ended, or whether the fault is found would be left to chance.
_WAYS_WITHOUT = {"request_ids": ("connection",), "fencing": ("client",)}
# What an episode may fail of: what the platform counts as infrastructure, and dispatches anew.
_INFRASTRUCTURE = {(Boundary.ENVIRONMENT, "lost"), (Boundary.ENVIRONMENT, "busy"), (Boundary.ENVIRONMENT, "fenced")}


@dataclass(slots=True)
class ServerVerdict:
    """What a storm has done and found.

    `lost` counts episodes without a result, ended ones that were played again, and turns that are no more; `failed`
    episodes by what of the infrastructure they failed of, `other` those that failed of anything else.
    """

    kills: Counter[str] = field(default_factory=Counter)
    episodes: int = 0
    calls: int = 0
    effects_twice: int = 0
    lost: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    other: list[str] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    """What the server counted: ``repeated`` calls, ``fenced`` ones, ``restarts``."""


async def storm(folder: Path, model: Path, num_kills: int, seed: int, without: str = "") -> ServerVerdict:
    """Play until so many have been ended, then to the end; without a protection until a fault is found."""
    os.environ[_TOKEN_VARIABLE] = TOKEN
    os.environ[server_unprotected.VARIABLE] = without
    folder.mkdir(parents=True, exist_ok=True)
    options = f'{{"count_file": "{folder / "count.txt"}", "linger_s": 0.03}}'
    command = server_unprotected.COMMAND if without else COMMAND
    arguments = (_COUNTING, "--options", options, "--workers", "2", "--idle-s", "300", "--max-message-mb", "4")
    with environment_server(folder / "server", *arguments, command=command) as server:
        async with ConnectionProxy.standing(server.url) as proxy:
            run = make_run(
                model,
                folder / "run",
                environment={
                    "name": _COUNTING,
                    "placement": "remote",
                    "servers": [proxy.url],
                    "token_variable": _TOKEN_VARIABLE,
                    "options": {},
                },
                rollout={"workers": NUM_WORKERS, "max_attempts": 1000, "limits": {"tool_s": _DEADLINE_S}},
            )
            verdict = KillVerdict(run.path, folder / "count.txt")
            async with playing(run, _DIALOGUE, delay_s=0.05) as pool:
                one = _Storm(pool, server, proxy, verdict, random.Random(seed))
                await one.rage(num_kills, _WAYS_WITHOUT.get(without, _ALL_WAYS), until_fault=bool(without))
            return one.judge(run.journal)


class _Storm:
    """One storm: episodes in play, and who is ended next."""

    def __init__(
        self, pool: PlayedPool, server: RunningServer, proxy: ConnectionProxy, verdict: KillVerdict, rng: random.Random
    ) -> None:
        self._pool, self._server, self._proxy = pool, server, proxy
        self._verdict, self._rng = verdict, rng
        self._numbers, self._is_over = itertools.count(), False
        self._started: set[str] = set()
        self._episodes: dict[str, Episode] = {}
        self._found = ServerVerdict()

    async def rage(self, num_kills: int, ways: Sequence[str], until_fault: bool) -> None:
        """End one after the other, each in one of these ways, and let what is in play come to its end."""
        playing_all = [asyncio.create_task(self._play()) for _ in range(_AT_ONCE)]
        ends = {"client": self._kill_client, "server": self._kill_server, "connection": self._break_connection}
        for number in range(1, num_kills + 1):
            await asyncio.sleep(self._rng.expovariate(1 / _MEAN_DELAY_S))
            way = self._rng.choice(ways)
            await ends[way]()
            self._found.kills[way] += 1
            self._verdict.look()
            _say(f"{number} of {num_kills}, {way}: {len(self._episodes)} episodes, {self._faults()} faults")
            ended_early = [task for task in playing_all if task.done()]
            if ended_early or (until_fault and self._faults()):
                break
        self._is_over = True
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.gather(*playing_all)
        self._found.served = await asyncio.to_thread(self._counted)

    def judge(self, journal: Path) -> ServerVerdict:
        """What is left of it, once all have ended."""
        self._verdict.look()
        found = self._found
        lives = read_journal(journal).lives
        unended = [name for name in self._started if name not in lives or lives[name].ended is None]
        found.lost = self._faults() - self._verdict.effects_twice
        found.lost += len(self._started - set(self._episodes)) + len(unended)
        found.effects_twice = self._verdict.effects_twice
        found.episodes, found.calls = len(self._episodes), self._verdict.num_turns
        for episode in self._episodes.values():
            failure = episode.failure
            if failure is None:
                continue
            if (failure.boundary, failure.kind) in _INFRASTRUCTURE or failure.boundary is Boundary.TIMEOUT:
                found.failed[failure.kind] += 1
            else:
                found.other.append(str(failure))
        return found

    async def _play(self) -> None:
        [host] = self._pool.hosts.values()
        while not self._is_over:
            number = next(self._numbers)
            [task] = await host.sample(Split.TRAIN, 0, [number])
            ticket = self._pool.ticket(number, task=task)
            self._started.add(ticket.episode_id)
            self._episodes[ticket.episode_id] = await self._pool.pool.play(ticket, (), nothing)

    async def _kill_client(self) -> None:
        """End a rollout worker that has episodes, mostly while what it has sent is on its way."""
        held = self._proxy.hold() if self._rng.random() < 0.8 else []
        await asyncio.sleep(self._rng.uniform(0.0, 0.2))
        _kill(self._rng.choice(await _some(self._clients)))
        # Behind its first calls to the sessions that it takes over, or beside them.
        await asyncio.sleep(self._rng.uniform(0.0, _DELIVERED_AFTER_S))
        for flows in held:
            flows.set()

    async def _kill_server(self) -> None:
        """End a process of the server while the other one serves."""
        until = time.monotonic() + _DEADLINE_S
        while (await asyncio.to_thread(self._get, "/health")).json()["problems"]:
            assert time.monotonic() < until, "the server's processes are not replaced"
            await asyncio.sleep(0.02)
        _kill(self._rng.choice(await _some(self._server.workers)))

    async def _break_connection(self) -> None:
        self._proxy.break_one(self._rng)

    def _clients(self) -> list[int]:
        """Rollout workers that have had episodes; a place in which no worker comes up ends a run, as it should."""
        return [pid for pid in self._pool.processes() if _writes(pid)]

    def _faults(self) -> int:
        return self._verdict.turns_lost + self._verdict.effects_twice + self._verdict.regenerated

    def _get(self, path: str) -> httpx.Response:
        headers, deadline_s = {"authorization": f"Bearer {TOKEN}"}, _DEADLINE_S
        return httpx.get(f"{self._server.url}{path}", headers=headers, trust_env=False, timeout=deadline_s)

    def _counted(self) -> dict[str, float]:
        page = self._get("/metrics")
        rows = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
        names = ("repeated", "fenced", "lost", "restarts", "relayed")
        return {name: float(rows[f"agentrl_env_{name}_total"]) for name in names}


async def _some(find: Callable[[], list[int]]) -> list[int]:
    """What is found, once there is any."""
    until = time.monotonic() + _DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < until, "no process came up"
        await asyncio.sleep(0.02)
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _writes(pid: int) -> bool:
    with suppress(OSError):
        return any(os.readlink(link).endswith(".journal") for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
