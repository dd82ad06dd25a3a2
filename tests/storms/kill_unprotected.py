"""The command line with a protection taken away: ``python -m tests.storms.kill_unprotected NAME ...``.

``no_sync`` acknowledges entries a while before it writes them; ``retry`` repeats a call whose outcome is unknown;
``one_token`` gives all holders of an episode the same fencing token.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from agentrl.cli.main import app
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.rollouts import environment_recovery

VARIABLE = "AGENTRL_UNPROTECTED"
_WRITTEN_AFTER_S = 0.5


class _HastyWriter:
    """Acknowledges at once and writes later."""

    @staticmethod
    async def append(writer: JournalWriter, schema: int, kind: int, payload: bytes) -> None:
        asyncio.get_running_loop().call_later(_WRITTEN_AFTER_S, writer.note, schema, kind, payload)


def _same_token(journals: WorkerJournals) -> int:
    return 1


def _no_check(*arguments: Any) -> None:
    """Nothing is refused."""


def main() -> None:
    """Take the protection away and run the command."""
    if os.environ[VARIABLE] == "no_sync":
        JournalWriter.append = _HastyWriter.append  # type: ignore[method-assign,assignment]
    elif os.environ[VARIABLE] == "one_token":
        WorkerJournals.next_token = _same_token  # type: ignore[method-assign]
    else:
        environment_recovery._check_external = _no_check  # type: ignore[assignment]
    app()


if __name__ == "__main__":
    main()
