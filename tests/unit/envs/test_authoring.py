from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.base import ConfigModel
from agentrl.envs.authoring import Generated, Rows, ToolEnvironment, call, define, say, tool
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.envs.inline import InlineHost
from agentrl.types.environment import Origin, Score
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split


class Sums(ToolEnvironment):
    """Additions with a calculator.

    More than a line.
    """

    def prompt(self) -> str:
        return f"What is {self.row['a']} + {self.row['b']}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self) -> float:
        return float(self.answer == str(self.row["a"] + self.row["b"]))


def gold(row: Mapping[str, Any], messages: Sequence[Message]) -> Message:
    return call("add", **row) if len(messages) == 1 else say(messages[-1].content)


ROWS = [{"a": a, "b": b} for a in range(5) for b in range(4)]
SUMS = define("sums", Sums, Rows(ROWS), gold=gold, is_quick=True)


class PlusOptions(ConfigModel):
    by: int = 1


class Counter(ToolEnvironment[PlusOptions]):
    """Counts up to ten, and talks."""

    def prepare(self) -> None:
        self.count, self.is_free = 0, False

    def prompt(self) -> list[Message]:
        return [Message(Role.SYSTEM, "count"), Message(Role.USER, "go")]

    @tool
    def up(self) -> int:
        self.count += self.options.by
        if self.count >= 10:
            self.finish()
        return self.count

    def reply(self, text: str) -> str | None:
        return None if text == "enough" else f"you said {text}"

    async def reward(self) -> Score:
        return Score(self.count / 10, {"count": float(self.count)})

    def free(self) -> None:
        self.is_free = True

    def save(self) -> int:
        return self.count

    def load(self, state: int) -> None:
        self.count = state


COUNTER = define("counter", Counter, Generated(lambda chance: {"n": chance.randrange(1000)}), options=PlusOptions)


async def play(definition: EnvironmentDefinition, ordinal: int) -> tuple[list[Message], float | None]:
    options = definition.parse_options({})
    task = definition.sample_task(options, Split.TRAIN, ordinal, 0)
    environment, expert = definition.create(options, task), definition.experts["gold"]
    messages = [*(await environment.start()).messages]
    while True:
        messages.append(expert.act(options, task, messages, random.Random(0)))
        result = await environment.step(messages[-1])
        messages.extend(result.messages)
        if result.is_done:
            break
    score = await environment.score()
    await environment.close()
    return messages, score.reward


async def test_an_environment_of_thirty_lines_is_played_and_judged():
    messages, reward = await play(SUMS, 0)
    row = SUMS.sample_task(SUMS.parse_options({}), Split.TRAIN, 0, 0).payload
    assert [m.content for m in messages[::3]] == [f"What is {row['a']} + {row['b']}?", str(row["a"] + row["b"])]
    assert reward == 1.0
    assert (SUMS.description, SUMS.placement, SUMS.external_tools) == (
        "Additions with a calculator.", "inline", frozenset()
    )  # fmt: skip
    wrong = Sums(SUMS.parse_options({}), SUMS.sample_task(SUMS.parse_options({}), Split.TRAIN, 0, 0))
    assert (await wrong.step(say("no idea"))).is_done
    assert (await wrong.score()).reward == 0.0


async def test_a_conversation_goes_on_while_it_is_answered_and_ends_when_a_tool_says_so():
    options = COUNTER.parse_options({"by": 4})
    task = COUNTER.sample_task(options, Split.TRAIN, 0, 0)
    environment = Counter(options, task)
    opening = await environment.start()
    assert [(m.role, m.content) for m in opening.messages] == [(Role.SYSTEM, "count"), (Role.USER, "go")]
    said = await environment.step(say("hello"))
    assert ([m.content for m in said.messages], said.is_done) == (["you said hello"], False)
    both = Message(Role.ASSISTANT, tool_calls=(ToolCall("x", "up"), ToolCall("y", "up")))
    result = await environment.step(both)
    assert [(m.tool_call_id, m.content) for m in result.messages] == [("x", "4"), ("y", "8")]
    assert not result.is_done
    last = await environment.step(call("up"))
    assert ([m.content for m in last.messages], last.is_done) == (["12"], True)
    assert await environment.score() == Score(1.2, {"count": 12.0})
    await environment.close()
    assert environment.is_free


async def test_an_environment_that_saves_and_loads_goes_on_where_another_instance_was():
    assert COUNTER.recovery.has_snapshots
    assert not SUMS.recovery.has_snapshots
    options = COUNTER.parse_options({})
    task = COUNTER.sample_task(options, Split.TRAIN, 3, 0)
    first = Counter(options, task)
    for _ in range(3):
        await first.step(call("up"))
    await first.step(say("three"))
    host = InlineHost(COUNTER, options, close_s=60.0)
    async with host.open(task, Origin(snapshot=await first.snapshot())) as second:
        assert [m.content for m in (await second.step(call("up"))).messages] == ["4"]
        assert (await second.score()).reward == 0.4


def rows_of(source: Rows, split: Split, count: int) -> list[dict[str, Any]]:
    return [source.row(split, ordinal, 0) for ordinal in range(count)]


def test_rows_are_split_by_their_content_and_a_new_row_moves_none_of_many():
    source = Rows(ROWS, heldout=0.25)
    train, held = rows_of(source, Split.TRAIN, source.num_tasks), rows_of(source, Split.HELDOUT, 5)
    assert (len(train), len({json.dumps(row) for row in held})) == (15, 5)
    assert [row for row in ROWS if row not in held] == train, "in their order"
    assert rows_of(source, Split.HELDOUT, 6)[5] == held[0]
    turned = Rows(ROWS[::-1], heldout=0.25)
    assert sorted(map(str, rows_of(turned, Split.HELDOUT, 5))) == sorted(map(str, held))
    twice = Rows(ROWS + ROWS, heldout=0.25)
    again = rows_of(twice, Split.TRAIN, twice.num_tasks)
    assert not [row for row in again if row in rows_of(twice, Split.HELDOUT, 10)], "equal rows are on one side"


def test_rows_of_files_and_held_out_ones_of_their_own(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    source = Rows(file, heldout=[{"a": 9}], fields=("a",))
    assert source.num_tasks == 2
    assert rows_of(source, Split.TRAIN, 3) == [{"a": 1}, {"a": 2}, {"a": 1}]
    assert rows_of(source, Split.HELDOUT, 1) == [{"a": 9}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"tasks cannot be read from .*rows\.jsonl: .*No such file.*; give a file"),
        ('{"a": 1}\n{"b": 2}\n', r"rows\.jsonl, line 2: the row lacks 'a'; it has b"),
        ('{"a": 1}\n[1]\n', r"rows\.jsonl, line 2: a task is an object with fields, not list"),
        ('{"a": 1}\n{"a": \n', r"rows\.jsonl, line 2: not JSON \(.*\); give a JSON object a line"),
        ('{"a": 1}\n{"a": 1}\n', r"1 different rows cannot be split; give two or more, or heldout rows"),
        ("", r"0 different rows cannot be split"),
    ],
)
def test_bad_rows_are_named_with_the_remedy(tmp_path: Path, content: str | None, said: str):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        _ = Rows(file, fields=("a",)).num_tasks


def test_a_share_that_is_none_and_a_side_without_rows_are_refused():
    with pytest.raises(ConfigError, match=r"heldout is 1\.5; give a share between 0 and 1"):
        _ = Rows(ROWS, heldout=1.5).num_tasks
    with pytest.raises(ConfigError, match="there are no heldout tasks"):
        _ = Rows(ROWS, heldout=[]).num_tasks


def test_generated_tasks_are_of_split_seed_and_ordinal_and_held_out_ones_of_no_seed():
    source = Generated(lambda chance: {"n": chance.random()})
    keys = [(split, ordinal, seed) for split in Split for ordinal in range(3) for seed in range(3)]
    values = {key: source.row(*key)["n"] for key in keys}
    assert values == {key: source.row(*key)["n"] for key in keys}
    assert len({value for (split, *_), value in values.items() if split is Split.TRAIN}) == 9
    assert len({value for (split, *_), value in values.items() if split is Split.HELDOUT}) == 3


def test_a_class_without_a_docstring_is_refused():
    kind = type("Bare", (Sums,), {})
    with pytest.raises(ConfigError, match="environment 'bare': Bare has no docstring; say in a line what it is"):
        define("bare", kind, Rows(ROWS))
