"""What the package has of the multi-turn tasks: turns, first states, reference calls, and what functions do."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from agentrl.types.errors import ConfigError
from agentrl.types.message import ToolSpec
from agentrl.types.task import Split, Task
from agentrl_environments.packages import Package, PackagedOptions

Category = Literal["base", "miss_func", "miss_param", "long_context"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
BFCL = Package("bfcl-eval", "==2026.3.23", more="--no-deps 'mpmath>=1.3,<2'")
MATHS = Package("mpmath", ">=1.3,<2")
HELD_OUT_EVERY = 5
_PREFIX = "multi_turn"
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


class BfclOptions(PackagedOptions):
    """Which of the tasks are played."""

    categories: Annotated[tuple[Category, ...], Field(min_length=1)] = CATEGORIES
    """Of these four: ``base``; ``miss_func``, where a function is shown only once the user has asked in vain;
    ``miss_param``, where the user leaves something out at first; ``long_context``, whose results are long."""


@dataclass(frozen=True, slots=True)
class GoldCall:
    """One reference call.

    Example: ``mkdir('temp', parents=True)`` is ``GoldCall("mkdir", ("temp",), {"parents": True})``.
    """

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One task, whole.

    `turns` has what the user says, None where he says that there are more functions now; `gold` the reference calls of
    each turn, none where nothing can be done yet. `classes` are the APIs in play and `first_states` what they begin
    with; `missing` has the functions that a turn brings.
    """

    id: str
    turns: tuple[str | None, ...]
    gold: tuple[tuple[GoldCall, ...], ...]
    classes: tuple[str, ...]
    first_states: Mapping[str, Any]
    missing: Mapping[int, tuple[str, ...]]

    @property
    def has_long_results(self) -> bool:
        """Whether the APIs pad what they return."""
        return self.id.startswith(f"{_PREFIX}_long_context")


def num_tasks(options: BfclOptions) -> int:
    """Number of training tasks."""
    return len(_numbered(options)[Split.TRAIN])


def sample_task(options: BfclOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal, in the package's order.

    Tasks of one number tell one story in four ways, so a number is on one side as a whole: each fifth is held out.
    """
    ids = _numbered(options)[split]
    return Task("bfcl", split, ordinal, {"id": ids[ordinal % len(ids)]})


def scenario_of(options: BfclOptions, task: Task) -> Scenario:
    """What a task stands for. Raises ConfigError if the package has no task of that id."""
    name = str(task.payload.get("id"))
    category = next((each for each in CATEGORIES if name.startswith(f"{_PREFIX}_{each}_")), None)
    found = None if category is None else _scenarios(category, options.any_version).get(name)
    if found is None:
        raise ConfigError(f"bfcl has no task '{name}'; its ids are like {_PREFIX}_base_0, of {', '.join(CATEGORIES)}")
    return found


@cache
def module_of_bfcl(name: str, any_version: bool) -> Any:
    """A module of the package. Raises ConfigError if it is missing, or of a version that was not tried."""
    return BFCL.load(name, PackagedOptions(any_version=any_version))


@cache
def functions_of(class_name: str, any_version: bool) -> Mapping[str, ToolSpec]:
    """The functions of an API, in the package's order."""
    file = _constant("executable_backend_config", any_version).MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    specs = (
        ToolSpec(row["name"], row["description"], _json_schema(row["parameters"]))
        for row in _rows(f"multi_turn_func_doc/{file}", any_version)
    )
    return {spec.name: spec for spec in specs}


@cache
def api_class(class_name: str, any_version: bool) -> type[Any]:
    """The class of an API. Raises ConfigError if a package is missing."""
    if class_name == "MathAPI":
        MATHS.load("mpmath", PackagedOptions(any_version=any_version))
    path = _constant("executable_backend_config", any_version).CLASS_FILE_PATH_MAPPING[class_name]
    found: type[Any] = getattr(module_of_bfcl(path, any_version), class_name)
    return found


def has_state(class_name: str, any_version: bool) -> bool:
    """Whether an API is given a first state."""
    return class_name not in _constant("executable_backend_config", any_version).STATELESS_CLASSES


def most_steps(any_version: bool) -> int:
    """Replies with calls that a turn of the user may take; one more ends the episode."""
    return int(_constant("default_prompts", any_version).MAXIMUM_STEP_LIMIT)


def words_of_more_functions(any_version: bool) -> str:
    """What the user says when there are more functions."""
    return str(_constant("default_prompts", any_version).DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)


@cache
def _numbered(options: BfclOptions) -> Mapping[Split, tuple[str, ...]]:
    """Ids of both splits, sorted by number."""
    every = [
        name for category in dict.fromkeys(options.categories) for name in _scenarios(category, options.any_version)
    ]
    every.sort(key=_number)
    held = tuple(name for name in every if _number(name) % HELD_OUT_EVERY == 0)
    return {Split.TRAIN: tuple(name for name in every if _number(name) % HELD_OUT_EVERY), Split.HELDOUT: held}


def _number(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


@cache
def _scenarios(category: Category, any_version: bool) -> Mapping[str, Scenario]:
    file = f"BFCL_v4_{_PREFIX}_{category}.json"
    gold = {row["id"]: row["ground_truth"] for row in _rows(f"possible_answer/{file}", any_version)}
    return {row["id"]: _scenario(row, gold[row["id"]]) for row in _rows(file, any_version)}


def _scenario(row: Mapping[str, Any], gold: list[list[str]]) -> Scenario:
    return Scenario(
        row["id"],
        tuple(messages[0]["content"] if messages else None for messages in row["question"]),
        tuple(tuple(map(parse_call, calls)) for calls in gold),
        tuple(row["involved_classes"]),
        row["initial_config"],
        {int(turn): tuple(names) for turn, names in row.get("missed_function", {}).items()},
    )


def parse_call(text: str) -> GoldCall:
    """A reference call of its text, a name and literals. Raises ValueError for anything else."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text!r} is not the call of a function by its name")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(named) < len(node.keywords):
        raise ValueError(f"{text!r} spreads a mapping; give the arguments one by one")
    return GoldCall(node.func.id, tuple(map(ast.literal_eval, node.args)), named)


def _json_schema(described: Any) -> Any:
    """A schema of types as Python calls them, as JSON Schema calls them."""
    if isinstance(described, list):
        return [_json_schema(each) for each in described]
    if not isinstance(described, dict):
        return described
    schema = {key: _json_schema(value) for key, value in described.items()}
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


def _constant(module: str, any_version: bool) -> Any:
    return module_of_bfcl(f"bfcl_eval.constants.{module}", any_version)


def _rows(file: str, any_version: bool) -> list[dict[str, Any]]:
    text = (
        resources.files(module_of_bfcl("bfcl_eval", any_version))
        .joinpath("data", *file.split("/"))
        .read_text(encoding="utf-8")
    )
    return [json.loads(line) for line in text.splitlines() if line.strip()]
