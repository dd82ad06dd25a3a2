from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.types.errors import ConfigError
from agentrl.types.task import Split
from agentrl_environments.mcp import definition

URL = "http://127.0.0.1:9/mcp"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(20)))
    return file


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "give command, which starts a server, or url"),
        ({"url": URL, "command": ["x"]}, "one of them"),
        ({"command": ["sh"], "token_variable": "TOKEN"}, "token_variable is for a server at a url"),
        ({"url": URL, "variables": ["KEY"]}, "variables are for a server that a command starts"),
    ],
)
def test_options_of_no_server_and_of_two_are_refused(tasks, options, named):
    with pytest.raises(ConfigError, match=named):
        definition.parse_options({"tasks": str(tasks), **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"url": URL, "token_variable": "NO_SUCH_TOKEN"}, f"NO_SUCH_TOKEN is not set; {URL} needs it"),
        ({"command": ["sh"], "variables": ["NO_SUCH_KEY"]}, "NO_SUCH_KEY is not set; sh needs it"),
        ({"url": URL, "judge": "json"}, "judge 'json' names no function"),
        ({"url": URL, "judge": "json:no_such"}, "judge 'json:no_such' cannot be loaded"),
        ({"url": URL, "judge": "sys:path"}, "judge 'sys:path' is a list and no function"),
        ({"url": URL, "tasks": "no-such-file.jsonl"}, "tasks cannot be read from no-such-file"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_played(tasks, options, named):
    with pytest.raises(ConfigError, match=named):
        definition.describe(definition.parse_options({"tasks": str(tasks), **options}))


def test_a_row_without_an_answer_needs_a_judge(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    options: dict[str, Any] = {"tasks": str(file), "url": URL}
    with pytest.raises(ConfigError, match="line 1: the row lacks 'answer'"):
        definition.sample(definition.parse_options(options), Split.HELDOUT, 0, [0])
    judged = definition.parse_options({**options, "judge": "json:dumps"})
    (task,) = definition.sample(judged, Split.HELDOUT, 0, [0])
    assert task.payload["prompt"] in {"a", "b"}
