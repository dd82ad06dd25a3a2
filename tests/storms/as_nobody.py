"""The keeper of sandboxes under a user without rights: ``python -m tests.storms.as_nobody FD``, started by root.

Everything is imported before, since that user may not see where Python is installed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

from agentrl import registry
from agentrl.sandbox import keeper
from agentrl.sandbox.wire import SOCKET_VARIABLE

_NOBODY = 65534
_PR_SET_DUMPABLE = 4


def main() -> None:
    """Make the socket's folder and give it away, become nobody, and keep sandboxes."""
    asyncio.run(asyncio.to_thread(int))
    for name in ("bwrap", "local"):
        registry.load_plugin(registry.SANDBOXES, name)
    folder = Path(os.environ[SOCKET_VARIABLE]).parent
    folder.mkdir(mode=0o700)
    os.chown(folder, _NOBODY, _NOBODY)
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    # The kernel gives root what /proc shows of a process that has changed its user, the map of user ids among it.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
    keeper.main()


if __name__ == "__main__":
    main()
