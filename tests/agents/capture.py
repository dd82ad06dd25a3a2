"""Writes what agents really ask into ``requests``, for tests of the dialects: ``python -m tests.agents.capture``.

Of each conversation that is the last call, which has all that came before.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import running_keeper
from tests.agents.cases import AGENTS, AgentCase, read_only_folders
from tests.agents.playing import conversations, play
from tests.agents.policies import POLICIES, SHARING
from tests.agents.recorder import Recorded, recorded_agents

FOLDER = Path(__file__).parent / "requests"
# Where agents write prose, and how much of it our own policies and tools write there at most.
_PROSE = {"description": 15, "text": 60, "content": 60, "instructions": 0}
_HEADER = "x-anthropic-billing-header"
_HEADERS = ("anthropic-beta", "anthropic-version", "user-agent", "x-stainless-retry-count")


def _shape(value: Any, field: str = "") -> Any:
    """The same without the agents' own prose, of which only the length is kept, and the tag that it begins with."""
    if isinstance(value, str):
        most = _PROSE.get(field)
        is_prose = most is not None and len(value) > most and not value.startswith(_HEADER)
        tag = re.match(r"<[\w ]+>", value)
        return f"{tag[0] if tag else ''}({len(value)} characters)" if is_prose else value
    if isinstance(value, list):
        return [_shape(part, field) for part in value]
    return {name: _shape(part, name) for name, part in value.items()} if isinstance(value, dict) else value


def _write(name: str, call: Recorded) -> None:
    headers = {header: call.headers[header] for header in _HEADERS if header in call.headers}
    request = {"path": call.path, "headers": headers, "size_bytes": call.size_bytes, "body": _shape(call.body)}
    (FOLDER / f"{name}.json").write_text(json.dumps(request, indent=1) + "\n")


async def _capture(case: AgentCase, folder: Path) -> None:
    files = [("one", "a.txt"), ("two", "b.txt")][: 1 if case.name == "mini-swe-agent" else 2]
    config = SandboxConfig(options={"read_only": [str(path) for path in read_only_folders()]})
    socket = folder / "socket"
    async with running_keeper(config, "capture") as host, recorded_agents(socket, POLICIES[case.name]) as recorder:
        await play(host, socket, case, files)
    for calls in conversations(recorder).values():
        is_part = len(files) > 1 and calls[0][1].content != SHARING
        _write(f"{case.name}{'-sub-agent' if is_part else ''}", calls[-1][0])


async def _main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in AGENTS:
        with tempfile.TemporaryDirectory(prefix="agents-", dir="/tmp") as folder:
            Path(folder).chmod(0o711)
            await _capture(case, Path(folder))


if __name__ == "__main__":
    asyncio.run(_main())
