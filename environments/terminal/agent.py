"""An agent that knows nothing but OpenAI's Chat Completions: it runs the commands that the model asks for.

It needs Python's standard library alone, and these variables: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``MODEL``.

Example: ``python3 agent.py "count the files"``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

SYSTEM = "You work in a shell, in a folder with files. Look before you act, and say done when the task is done."
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"name": "shell", "description": "Run a shell command and return its output.", "parameters": COMMAND}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    asked = {"model": os.environ["MODEL"], "messages": messages, "tools": [{"type": "function", "function": SHELL}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def run(call: dict[str, Any]) -> str:
    """What a call of the tool gives."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=5, errors="replace")
    except (ValueError, TypeError, KeyError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()[:400] or "(no output)"


def main(task: str) -> None:
    """Ask and act, until the model has nothing more to run."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    while calls := (message := ask(messages)).get("tool_calls"):
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in calls]
    sys.stdout.write(message["content"] or "")


if __name__ == "__main__":
    main(sys.argv[1])
