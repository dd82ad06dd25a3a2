"""BFCL's own data and checker, without agentrl: python bfcl_checker.py gold|judge|functions < lines > lines

`gold` prints a task a line: its id, and of each turn the reference calls as name and arguments, all by name. `judge`
takes an episode a line, ``{"id": ..., "turns": [[["cd(folder='a')", ...], ...], ...]}``: of each turn the replies that
called something. It prints of each whether the episode is valid, and the type of error if it is not. `functions` prints
a description of each function as text.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from importlib import resources

from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
DATA = resources.files("bfcl_eval") / "data"


def rows(file: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def tasks() -> dict[str, dict]:
    found = {}
    for category in CATEGORIES:
        file = f"BFCL_v4_multi_turn_{category}.json"
        gold = {row["id"]: row["ground_truth"] for row in rows(f"possible_answer/{file}")}
        found |= {row["id"]: {**row, "gold": gold[row["id"]]} for row in rows(file)}
    return found


def by_name(task: dict, text: str) -> list:
    call = ast.parse(text, mode="eval").body
    classes = [
        getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name) for name in task["involved_classes"]
    ]
    function = next(getattr(each, call.func.id) for each in classes if hasattr(each, call.func.id))
    names = list(inspect.signature(function).parameters)[1:]
    arguments = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
    return [call.func.id, arguments | {each.arg: ast.literal_eval(each.value) for each in call.keywords}]


def verdict(task: dict, turns: list, place: int) -> dict:
    if len(turns) != len(task["gold"]):  # as its runner says of an episode that was cut short
        return {"valid": False, "error_type": "multi_turn:force_terminated"}
    found = multi_turn_checker(turns, task["gold"], task, "", f"episode_{place}")
    return {"valid": found["valid"], "error_type": found.get("error_type")}


def main() -> None:
    known = tasks()
    if sys.argv[1] == "gold":
        for name, task in known.items():
            print(json.dumps({"id": name, "turns": [[by_name(task, call) for call in turn] for turn in task["gold"]]}))
        return
    if sys.argv[1] == "functions":
        for name in sorted({name for task in known.values() for name in task["involved_classes"]}):
            for function in rows(f"multi_turn_func_doc/{MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]}"):
                print(json.dumps(json.dumps(function)))
        return
    for place, line in enumerate(sys.stdin):
        episode = json.loads(line)
        print(json.dumps(verdict(known[episode["id"]], episode["turns"], place)), flush=True)


if __name__ == "__main__":
    main()
