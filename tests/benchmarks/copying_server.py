"""A server like an engine, but for what it does: one of its routes reads a file into memory, in a thread.

``python -m tests.benchmarks.copying_server FILE PORT``; ends with the process that started it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request, Response

from agentrl.process.parent import die_with_parent
from agentrl.process.threads import run_in_thread


def build_app(file: Path) -> FastAPI:
    """``/load`` reads the file; ``/models`` and ``/unload`` do nothing."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    memory = memoryview(torch.ones(file.stat().st_size, dtype=torch.uint8).numpy())

    def read() -> None:
        with file.open("rb", buffering=0) as source:
            source.readinto(memory)

    async def answer(http: Request) -> Response:
        orjson.loads(await http.body())
        return Response(orjson.dumps({"success": True}), media_type="application/json")

    async def load(http: Request) -> Response:
        await run_in_thread("load", read)
        return await answer(http)

    app.add_api_route("/load", load, methods=["POST"])
    app.add_api_route("/models", answer, methods=["POST"])
    app.add_api_route("/unload", answer, methods=["POST"])
    return app


def main() -> None:
    file, port = sys.argv[1:]
    die_with_parent()
    uvicorn.run(build_app(Path(file)), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
