"""A server like an engine, but for what it does: one of its routes reads a file into memory, in a thread.

``python -m tests.benchmarks.copying_server FILE PORT``; ends with the process that started it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import torch
import uvicorn

from agentrl.process.parent import die_with_parent
from agentrl.process.threads import run_in_thread


class CopyingApp:
    """An ASGI application: ``/load`` reads the file; ``/unload`` does nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._memory = memoryview(torch.ones(file.stat().st_size, dtype=torch.uint8).numpy())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One call."""
        orjson.loads((await receive())["body"])
        if scope["path"] == "/load":
            await run_in_thread("load", self._read)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps({"success": True})})

    def _read(self) -> None:
        with self._file.open("rb", buffering=0) as source:
            source.readinto(self._memory)


def main() -> None:
    file, port = sys.argv[1:]
    die_with_parent()
    uvicorn.run(CopyingApp(Path(file)), lifespan="off", host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
