"""One end of a channel in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import sys

from agentrl.process.channel import Channel
from agentrl.process.parent import die_with_parent


class Peer:
    def add(self, left: int, right: int) -> int:
        return left + right

    async def never(self) -> int:
        await asyncio.Event().wait()
        return 0


async def main() -> None:
    channel = await Channel.open("parent", socket.socket(fileno=int(sys.argv[-1])), Peer())
    await channel.ended()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main())
