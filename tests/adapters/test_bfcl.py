"""BFCL's multi-turn tasks, played by the run's own way and judged beside the package's own checker."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.protocols import EnvironmentHost
from agentrl.testing.tiny import TINY_SHAPE
from agentrl.tokens.train_tokenizer import make_tokenizer, save_tokenizer
from agentrl.trainer.init_model import make_model
from agentrl.types.environment import Score
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split, Task
from tests.adapters.conftest import ROOT, packages_python
from tests.adapters.trained import train

pytestmark = pytest.mark.usefixtures("beside_packages")
CHECKER = ROOT / "tests/adapters/packages_side/bfcl_checker.py"
CALL_S = 60.0
Call = tuple[str, dict[str, Any]]
Turns = list[list[Call]]


def asked(command: str, lines: Sequence[Any] = ()) -> list[Any]:
    """What the package's side answers, in a process that has no agentrl."""
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(
        [packages_python(), CHECKER, command], input=given, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def gold() -> dict[str, Turns]:
    return {row["id"]: [[(name, values) for name, values in turn] for turn in row["turns"]] for row in asked("gold")}


@asynccontextmanager
async def hosting(folder: Path, **options: Any) -> AsyncIterator[EnvironmentHost]:
    config = EnvironmentConfig(name="bfcl", options=options, interpreter=packages_python())
    host = await build_host(config, CALL_S, folder)
    try:
        yield host
    finally:
        await host.close()


def task_of(name: str) -> Task:
    return Task("bfcl", Split.TRAIN, 0, {"id": name})


def calling(*calls: Call) -> Message:
    return Message(Role.ASSISTANT, tool_calls=tuple(ToolCall(f"call-{n}", *call) for n, call in enumerate(calls)))


async def played(host: EnvironmentHost, name: str, turns: Turns, one_by_one: bool = False) -> Score:
    """The verdict on an episode that makes these calls in these turns, and then no further turn."""
    async with host.open(task_of(name)) as environment:
        await environment.start()
        for calls in turns:
            for batch in [[call] for call in calls] if one_by_one else [calls] * bool(calls):
                assert not (await environment.step(calling(*batch))).is_done
            await environment.step(Message(Role.ASSISTANT, "Done."))
        return await environment.score()


def broken(turns: Turns, chance: random.Random) -> tuple[str, Turns]:
    """The turns, changed in one way that chance decides, and which it was."""
    turns = [list(turn) for turn in turns]
    full = [place for place, turn in enumerate(turns) if turn]
    place = chance.choice(full)
    way = chance.choice(["lost", "twice", "turned", "late", "wrong", "more", "unknown", "spread", "silent", "cut"])
    name, values = turns[place][-1]
    if way == "lost":
        turns[place].pop(chance.randrange(len(turns[place])))
    elif way == "twice":
        turns[place].append((name, values))
    elif way == "turned":
        turns[place].reverse()
    elif way == "late":
        turns[-1] = [*turns[place], *turns[-1]] if place < len(turns) - 1 else turns[-1]
        turns[place] = [] if place < len(turns) - 1 else turns[place]
    elif way == "wrong":
        key = chance.choice([*values, "no_such_argument"])
        turns[place][-1] = (name, {**values, key: "no such thing"})
    elif way == "more":
        turns[place].insert(0, (name, values))
        turns[place].insert(0, (name, {}))
    elif way == "unknown":
        turns[place].append(("no_such_function", {}))
    elif way == "spread":
        turns[place] = [call for turn in turns[: place + 1] for call in turn]
    elif way == "silent":
        turns = [[] for _ in turns]
    else:
        turns = turns[:place]
    return way, turns


def as_python(turns: Turns, one_by_one: bool) -> list[list[list[str]]]:
    """The calls as the package wants them: texts, in lists of a reply each."""
    texts = [[f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})" for name, values in t] for t in turns]
    return [[[text] for text in turn] if one_by_one else [turn] * bool(turn) for turn in texts]


async def test_verdicts_on_gold_broken_and_partial_episodes_are_those_of_the_packages_own_checker(gold, tmp_path):
    chance = random.Random(11)
    episodes = [("gold", name, turns, False) for name, turns in gold.items() if int(name.rsplit("_", 1)[1]) % 10 == 3]
    for _ in range(240):
        name = chance.choice(list(gold))
        way, turns = broken(gold[name], chance)
        episodes.append((way, name, turns, chance.random() < 0.5))
    expected = asked("judge", [{"id": name, "turns": as_python(turns, each)} for _, name, turns, each in episodes])
    async with hosting(tmp_path) as host:
        found = [await played(host, name, turns, each) for _, name, turns, each in episodes]
    wrong = [
        (way, name, score.reward, verdict)
        for (way, name, _, _), score, verdict in zip(episodes, found, expected, strict=True)
        if score.reward != float(verdict["valid"])
    ]
    assert wrong == []
    rewards = Counter((way == "gold", score.reward) for (way, *_), score in zip(episodes, found, strict=True))
    assert rewards[True, 1.0] == 80
    assert rewards[False, 1.0] > 30, "some changes leave the verdict as it is, such as a call that only reads"
    kinds = Counter(verdict["error_type"] for verdict in expected)
    assert min(kinds[f"multi_turn:{kind}"] for kind in ("instance_state_mismatch", "execution_response_mismatch")) > 5
    assert min(kinds[f"multi_turn:{kind}"] for kind in ("empty_turn_model_response", "force_terminated")) > 5


async def test_a_world_is_the_episodes_own_though_long_contexts_share_the_packages_dictionaries(tmp_path):
    """The package has this credit card once for all, and what an episode books is taken from its balance."""
    card = {"access_token": "abc123token", "card_id": "1234567812345678"}
    flight = {"travel_date": "2024-11-15", "travel_from": "RMS", "travel_to": "JFK", "travel_class": "business"}
    balance, book = ("get_credit_card_balance", card), ("book_flight", card | flight)
    spend = ("set_budget_limit", {"access_token": "abc123token", "budget_limit": 1.0})
    async with hosting(tmp_path) as host:
        for _ in range(2):
            async with host.open(task_of("multi_turn_long_context_150")) as environment:
                await environment.start()
                said = await environment.step(calling(spend, balance, book, balance))
            _, before, booked, after = (json.loads(message.content) for message in said.messages)
            assert before == {"card_balance": 5000.0}
            assert booked["booking_status"] is True
            assert after["card_balance"] < 5000.0


async def test_a_missing_function_is_not_shown_before_the_turn_that_brings_it(tmp_path):
    async with hosting(tmp_path) as host, host.open(task_of("multi_turn_miss_func_0")) as environment:
        opening = await environment.start()
        names = {tool.name for tool in opening.tools}
        unknown = await environment.step(calling(("no_such_function", {})))
        assert set(unknown.messages[0].content.partition("there is ")[2].split(", ")) == names
        said = []
        while not (result := await environment.step(Message(Role.ASSISTANT, "I cannot."))).is_done:
            said += [message.content for message in result.messages]
        (brought,) = [text for text in said if "updated some more functions" in text]
        shown = {json.loads(line)["name"] for line in brought.splitlines()[:-1]}
        assert shown
        assert shown.isdisjoint(names)


async def test_what_cannot_be_called_is_an_observation_and_text_is_never_evaluated(tmp_path):
    async with hosting(tmp_path) as host, host.open(task_of("multi_turn_base_0")) as environment:
        await environment.start()
        marker = tmp_path / "evaluated"
        tried = calling(
            ("cd", {"folder": f"__import__('pathlib').Path({str(marker)!r}).touch()"}),
            (f"__import__('pathlib').Path({str(marker)!r}).touch", {}),
            ("_load_scenario", {"scenario": {}}),
            ("__init__", {}),
            ("cd", {"folder": "document", "more": 1}),
        )
        texts = [message.content for message in (await environment.step(tried)).messages]
        assert texts[0].startswith('{"error": "cd: ')
        assert [text.split(" '")[0] for text in texts[1:4]] == ["error: no tool"] * 3
        assert texts[4].startswith("Error during execution: ")
        malformed = Message(Role.ASSISTANT, tool_calls=(ToolCall("call-0", "", error="invalid_json"),))
        (said,) = (await environment.step(malformed)).messages
        assert said.content == "error: the tool call is malformed (invalid_json)"
        assert not marker.exists()


async def test_a_power_without_end_is_an_observation_and_holds_up_nobody(tmp_path):
    async with hosting(tmp_path) as host, host.open(task_of("multi_turn_base_15")) as environment:
        await environment.start()
        powers = calling(("power", {"base": 9, "exponent": 10**8}), ("power", {"base": 2, "exponent": 10}))
        endless, small = (await environment.step(powers)).messages
        assert endless.content == "Error during execution: the result has too many digits"
        assert small.content == '{"result": 1024}'


async def test_a_turn_of_more_than_twenty_replies_ends_the_episode(tmp_path):
    async with hosting(tmp_path) as host, host.open(task_of("multi_turn_base_0")) as environment:
        await environment.start()
        ends = [(await environment.step(calling(("pwd", {})))).is_done for _ in range(21)]
        assert ends == [False] * 20 + [True]
        assert (await environment.score()).reward == 0.0


async def test_held_out_tasks_are_other_stories_whatever_the_seed(tmp_path):
    async with hosting(tmp_path, categories=["base", "miss_param"]) as host:
        assert host.description.num_tasks == 320
        trained = [task.payload["id"] for task in await host.sample(Split.TRAIN, 7, range(320))]
        held = [task.payload["id"] for task in await host.sample(Split.HELDOUT, 7, range(80))]
        other = [task.payload["id"] for task in await host.sample(Split.HELDOUT, 8, range(80))]
    assert held == other
    assert len({*trained, *held}) == 400
    assert {name.rsplit("_", 1)[1] for name in held}.isdisjoint(name.rsplit("_", 1)[1] for name in trained)


async def test_a_task_that_is_not_there_is_named(tmp_path):
    async with hosting(tmp_path) as host:
        with pytest.raises(EpisodeError, match=r"bfcl has no task 'multi_turn_base_900'; its ids are like"):
            async with host.open(task_of("multi_turn_base_900")):
                pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has words of the functions' descriptions, which are long."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 8192, "vocabulary_tokens": 2000})
    save_tokenizer(make_tokenizer(asked("functions"), [], [], shape.vocabulary_tokens), folder)
    make_model(shape, folder, seed=0)
    return folder


def test_an_episode_of_a_real_task_is_trained(model, tmp_path):
    table = f'[environment]\nname = "bfcl"\ninterpreter = "{packages_python()}"\noptions.categories = ["base"]'
    limits = {"max_context_tokens": 8192, "max_reply_tokens": 16, "max_turns": 2, "tool_s": 60}
    buffer = {"group_size": 2, "groups_per_step": 1, "stall_s": 900}  # of a machine that is busy
    settings = [f"rollout.limits.{name}={value}" for name, value in limits.items()]
    settings += [
        "policies.main.engine.kind=embedded",
        "policies.main.engine.start_s=600",
        "policies.main.trainer.deadlines.start_s=600",
    ]
    trained = train(tmp_path, model, table, *settings, *(f"buffer.{name}={value}" for name, value in buffer.items()))
    assert {line["task"].split("/")[0] for line in trained.ledger} == {"bfcl"}
    assert min(line["turns"] for line in trained.ledger) > 0
    print(json.dumps(trained.ledger[0]))
