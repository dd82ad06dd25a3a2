"""Poses a user's turns one after another, carries out calls by name, and judges each turn when it ends."""

from __future__ import annotations

import json
from typing import Any

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Task
from agentrl_environments.bfcl.apis import Apis
from agentrl_environments.bfcl.tasks import (
    BfclOptions,
    Scenario,
    module_of_bfcl,
    most_steps,
    scenario_of,
    words_of_more_functions,
)

_CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"


class Judge:
    """Judges turns as BFCL does: the reference calls are carried out beside the policy's, in a world of their own.

    A turn with reference calls is right if the policy has called something in it, all APIs have the state that the
    reference leaves (attributes that begin with ``_`` aside), and what each reference call of the turn returned is
    among all that the policy's calls have returned so far, as often and in any order. A turn without is not judged.
    Both comparisons are the package's own functions, which take instances and texts.
    """

    def __init__(self, options: BfclOptions, scenario: Scenario) -> None:
        self._scenario = scenario
        self._checker = module_of_bfcl(_CHECKER, options.any_version)
        self._reference = Apis(scenario, any_version=options.any_version)
        self.failed_turn: int | None = None
        """The first turn that was not right."""

    def judge(self, turn: int, instances: dict[str, Any], num_calls: int, results: list[str]) -> None:
        """Judge the turn that has ended: calls in it, and results of all turns so far."""
        gold = self._scenario.gold[turn]
        expected = [self._reference.call(call.name, call.positional, call.named) for call in gold]
        is_right = not gold or (num_calls > 0 and self._is_same(instances) and self._has_all(results, expected, turn))
        if not is_right and self.failed_turn is None:
            self.failed_turn = turn

    def _is_same(self, instances: dict[str, Any]) -> bool:
        try:
            return bool(self._checker.state_checker(instances, self._reference.instances)["valid"])
        except RecursionError:  # the policy has put a folder into itself
            return False

    def _has_all(self, results: list[str], expected: list[str], turn: int) -> bool:
        return bool(self._checker.response_checker(results, expected, turn)["valid"])


class BfclEnvironment:
    """One task: a reply without calls ends the user's turn, and the episode behind the last one.

    An unknown function and a call that is no JSON are observations. A function that the policy has not been shown yet
    is carried out all the same, as BFCL does; one of its own references needs that. The reward is 1.0 if every turn was
    right, else 0.0.

    Example: of ``multi_turn_base_0`` the first turn is ended by ``Done.`` behind calls of cd, mkdir and mv.
    """

    def __init__(self, options: BfclOptions, task: Task) -> None:
        self._scenario = scenario_of(options, task)
        self._most_steps = most_steps(options.any_version)
        self._more_functions = words_of_more_functions(options.any_version)
        self._apis = Apis(self._scenario, any_version=options.any_version)
        self._judge = Judge(options, self._scenario)
        self._turn = 0
        self._num_judged = 0
        self._num_steps = 0  # of the turn: replies with calls
        self._num_calls = 0  # of the turn
        self._results: list[str] = []  # of all turns

    async def start(self) -> Opening:
        """The user's first turn, and the functions that there are from the beginning."""
        return Opening((self._said(),), tuple(self._shown()))

    async def step(self, action: Message) -> StepResult:
        """Carry out the calls one after the other, or end the turn of the user."""
        if not action.tool_calls:
            return self._end_turn()
        replies = tuple(Message(Role.TOOL, self._act(call), tool_call_id=call.id) for call in action.tool_calls)
        self._num_steps += 1
        return StepResult(replies, is_done=self._num_steps > self._most_steps)

    async def score(self) -> Score:
        """1.0 if all turns were right; the last one may have been cut short, as BFCL has it."""
        turns = len(self._scenario.turns)
        if self._num_judged == turns - 1:
            self._judge_turn()
        is_right = self._num_judged == turns and self._judge.failed_turn is None
        failed = turns if self._judge.failed_turn is None else self._judge.failed_turn
        first_right = min(failed, self._num_judged)
        return Score(float(is_right), {"turns_right_share": first_right / turns, "calls": float(len(self._results))})

    async def close(self) -> None:
        """Nothing is held."""

    def _end_turn(self) -> StepResult:
        self._judge_turn()
        self._turn += 1
        self._num_steps = self._num_calls = 0
        if self._turn == len(self._scenario.turns):
            return StepResult(is_done=True)
        return StepResult((self._said(),))

    def _judge_turn(self) -> None:
        self._judge.judge(self._turn, self._apis.instances, self._num_calls, self._results)
        self._num_judged += 1

    def _said(self) -> Message:
        """What the user says in this turn; functions that it brings are described there."""
        added = [self._apis.functions[name] for name in self._scenario.missing.get(self._turn, ())]
        text = self._scenario.turns[self._turn]
        said = self._more_functions if text is None else text
        return Message(Role.USER, "\n".join([*map(_described, added), said]))

    def _shown(self) -> list[ToolSpec]:
        """The functions that the policy has been told of: all but those that a later turn brings."""
        hidden = {name for turn, names in self._scenario.missing.items() if turn > self._turn for name in names}
        return [spec for name, spec in self._apis.functions.items() if name not in hidden]

    def _act(self, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: the tool call is malformed ({call.error})"
        self._num_calls += 1
        if call.name not in self._apis.functions:
            result = f"error: no tool '{call.name}'; there is {', '.join(spec.name for spec in self._shown())}"
        else:
            result = self._apis.call(call.name, (), call.arguments)
        self._results.append(result)
        return result


def _described(spec: ToolSpec) -> str:
    return json.dumps({"name": spec.name, "description": spec.description, "parameters": spec.parameters})
