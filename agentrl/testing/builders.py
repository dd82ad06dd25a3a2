"""Builders of records and tasks, for tests that need an episode but not a rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from agentrl.buffer.tasks import TaskSource
from agentrl.types.episode import Agent, Episode, Node, SampledColumns, StopReason, Ticket, Turn
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion, VersionSpan


def build_ticket(name: str = "train-000000-0", group: int = 0, member: int = 0, step: int = 0) -> Ticket:
    """A ticket of policy ``main`` and environment ``fake`` that was admitted at a step."""
    task = Task("fake", Split.TRAIN, group)
    return Ticket(name, task, group, member, 0, member, {"main": PolicyVersion(0, step)}, "fake")


def build_episode(
    ticket: Ticket, replies: Sequence[tuple[int, int]], reward: float | None = 1.0, prompt_tokens: int = 3
) -> Episode:
    """A linear episode: a prompt, then for each ``(sampled tokens, step of their version)`` a reply.

    Two tokens of context lie between replies. Token ids count from 10; log-probabilities are -0.5.

    Example: ``build_episode(ticket, [(4, 0), (2, 1)])`` has 3 + 4 + 2 + 2 tokens, 6 of them sampled.
    """
    nodes: list[Node] = []
    turns: list[Turn] = []
    for turn, (count, step) in enumerate(replies):
        context = np.arange(10, 10 + (prompt_tokens if turn == 0 else 2), dtype=np.int32)
        nodes.append(Node(len(nodes), len(nodes) - 1 if nodes else None, "agent", turn, context))
        spans = (VersionSpan(PolicyVersion(0, step), 0, count),)
        sample = SampledColumns(np.full(count, -0.5, np.float32), spans, spans)
        ids = np.arange(20, 20 + count, dtype=np.int32)
        nodes.append(Node(len(nodes), len(nodes) - 1, "agent", turn, ids, sample))
        turns.append(Turn(turn, "agent", len(nodes) - 1))
    return Episode(
        ticket=ticket,
        agents=(Agent("agent", "main"),),
        nodes=tuple(nodes),
        turns=tuple(turns),
        stop_reason=StopReason.ANSWERED,
        reward=reward,
    )


class InstantTasks(TaskSource):
    """Tasks that are made in no time, in this process."""

    def __init__(self, sample_task: Callable[[int], Task]) -> None:
        self._sample_task = sample_task

    def get(self, environment: str, ordinal: int) -> Task | None:
        """The task itself."""
        return self._sample_task(ordinal)

    def listen(self, on_arrival: Callable[[], Awaitable[None]]) -> None:
        """Nothing arrives later."""
