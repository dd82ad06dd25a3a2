"""The proposals environment: has a problem written, lets the solver try it, and judges both by how that went."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.proposals.problems import FEWEST_TERMS, Problem, parse_problem
from agentrl_environments.proposals.tasks import ProposalsOptions

PROPOSER = "proposer"
SOLVERS = tuple(f"solver_{number}" for number in range(1, 5))
BAND = (0.2, 0.8)
"""Shares of right attempts, both included, between which a problem is worth proposing."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A problem before a solver."""

    solver: str
    problem: Problem
    is_proposed: bool


class ProposalsEnvironment:
    """One proposal, and the attempts of four solvers who know nothing of each other.

    A proposal is valid if it is a sum of 2 to `max_terms` digits from 1 to 4 that begins with the task's digit, and no
    held-out problem. The proposer has 1.0 if some solvers are right and some are not (`BAND`), else 0.0; each solver
    has 1.0 if it is right. Instead of a proposal that is not valid solvers get the problem that the task brings along.
    Those of a held-out task get that problem in any case, before the proposal, and are judged by it alone: so the
    solver's success on held-out tasks is one on fixed problems, whatever the proposer has learned. The proposer reads
    one of four digits, the same ones in training and on held-out tasks.

    Example: the proposer reads ``3`` and writes ``3+4+4``; each solver reads ``a3b4c4``; one says ``a3=3b4=7c4=1``, and
    three say ``a3=3b4=8c4=2``: the share is 0.25, so the proposer has 1.0, one solver 1.0, the others 0.0.
    """

    def __init__(self, options: ProposalsOptions, task: Task) -> None:
        self._options = options
        self._first: int = task.payload["first"]
        self._given = _known(task.payload["given"])
        self._is_heldout = task.split is Split.HELDOUT
        self._proposal: Problem | None = None
        self._waiting = deque[_Attempt]()
        self._has_proposed = False
        self._is_right: dict[_Attempt, bool] = {}

    async def start(self) -> Opening:
        """Tell the proposer what to begin with; on a held-out task, ask the first solver."""
        if self._is_heldout:
            self._waiting.extend(self._attempts_at(self._given))
        asked = self._asked()
        return Opening(asked.messages, agent=asked.agent)

    async def step(self, action: Message) -> StepResult:
        """Read an answer to the problem that was asked last, or the proposal; then ask the next agent."""
        if self._waiting:
            attempt = self._waiting.popleft()
            self._is_right[attempt] = attempt.problem.is_answered_by(action.content)
        else:
            self._has_proposed = True
            self._proposal = self._read(action.content)
            self._waiting.extend(self._attempts_behind_proposal())
        return self._asked()

    async def score(self) -> Score:
        """The share of solvers who are right, and the rewards of all; attempts that were not made count as wrong."""
        proposed = [right for attempt, right in self._is_right.items() if attempt.is_proposed]
        share = sum(proposed) / len(SOLVERS)
        in_band = float(len(proposed) == len(SOLVERS) and BAND[0] <= share <= BAND[1])
        judged = {a.solver: float(right) for a, right in self._is_right.items() if self._is_judged(a)}
        solved = {solver: judged.get(solver, 0.0) for solver in SOLVERS}
        metrics = {"valid": float(self._proposal is not None), "in_band": in_band}
        if self._proposal is not None:
            metrics |= {"terms": float(len(self._proposal.terms)), "share": share}
        return Score(sum(solved.values()) / len(SOLVERS), metrics, agent_rewards={PROPOSER: in_band, **solved})

    async def close(self) -> None:
        """Nothing is held."""

    def _read(self, text: str) -> Problem | None:
        """The proposal if it is valid."""
        found = parse_problem(text)
        if found is None or found.terms[0] != self._first or found.split is not Split.TRAIN:
            return None
        return found if FEWEST_TERMS <= len(found.terms) <= self._options.max_terms else None

    def _asked(self) -> StepResult:
        """What the agent reads whose turn it is."""
        if self._waiting:
            attempt = self._waiting[0]
            return StepResult((Message(Role.USER, attempt.problem.asked),), agent=attempt.solver)
        if self._has_proposed:
            return StepResult(is_done=True)
        return StepResult((Message(Role.USER, str(self._first)),), agent=PROPOSER)

    def _attempts_behind_proposal(self) -> list[_Attempt]:
        if self._proposal is not None:
            return self._attempts_at(self._proposal, is_proposed=True)
        return [] if self._is_heldout else self._attempts_at(self._given)

    def _attempts_at(self, problem: Problem, is_proposed: bool = False) -> list[_Attempt]:
        return [_Attempt(solver, problem, is_proposed) for solver in SOLVERS]

    def _is_judged(self, attempt: _Attempt) -> bool:
        """Whether a solver's reward goes by the attempt."""
        return not (self._is_heldout and attempt.is_proposed)


def _known(text: str) -> Problem:
    problem = parse_problem(text)
    assert problem is not None, text  # tasks are written by `sample_task`
    return problem
