"""Worker processes with a scripted engine inside: what a turn costs without any token that crosses a border.

``python -m agentrl.process.child tests.storms.scripted_worker MARK_FD FD``
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.worker_process import WorkerServer
from agentrl.process.loop import run_async
from agentrl.process.parent import CHILD
from agentrl.process.place import Place, PlacedProcess, Places, ProcessLaunch, Role
from agentrl.process.running_mark import RunningMark
from agentrl.rollouts.recorded_replies import Generating
from agentrl.tokens.chat import ChatFormat
from tests.storms.worker_pools import DIALOGUE, DialogueEngine


class ScriptedWorker(WorkerServer):
    """A worker that asks nobody for tokens."""

    def _engines(self, config: RunConfig, chats: Mapping[str, ChatFormat]) -> Mapping[str, Generating]:
        return {name: DialogueEngine(chat, DIALOGUE) for name, chat in chats.items()}


@dataclass(frozen=True, slots=True)
class ScriptedPlaces:
    """Places on which workers are started that have their engine inside."""

    places: Places

    @property
    def host(self) -> str:
        return self.places.host

    @property
    def is_elastic(self) -> bool:
        return self.places.is_elastic

    async def take(self, role: Role, name: str, team: str = "") -> Place:
        return _ScriptedPlace(await self.places.take(role, name, team))

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        return await self.places.gang(role, names)

    async def beside(self, place: Place, name: str) -> Place:
        return await self.places.beside(place, name)

    async def watch(self) -> None:
        await self.places.watch()

    async def close(self) -> None:
        await self.places.close()


@dataclass(frozen=True, slots=True)
class _ScriptedPlace:
    place: Place

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def node(self) -> str:
        return self.place.node

    async def start(self, launch: ProcessLaunch) -> PlacedProcess:
        return await self.place.start(replace(launch, argv=(*CHILD, "tests.storms.scripted_worker")))

    async def free_port(self) -> int:
        return await self.place.free_port()

    async def close(self) -> None:
        await self.place.close()


def main() -> None:
    mark, connection = map(int, sys.argv[1:])
    run_async(ScriptedWorker(RunningMark(mark)).serve(socket.socket(fileno=connection)))


if __name__ == "__main__":
    main()
