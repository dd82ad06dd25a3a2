from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from agentrl.cli.show import _print_episode
from agentrl.testing.builders import build_ticket
from agentrl.testing.tiny import tiny_chat
from agentrl.types.episode import Agent, Episode, Node, SampledColumns
from agentrl.types.turn_score import TurnKey, TurnScore
from agentrl.types.version import PolicyVersion, VersionSpan


def node(index: int, parent: int | None, agent: str, is_sampled: bool) -> Node:
    spans = (VersionSpan(PolicyVersion(0, 0), 0, 2),)
    sample = SampledColumns(np.zeros(2, np.float32), spans, spans) if is_sampled else None
    return Node(index, parent, agent, 0, np.asarray([300 + index, 301], np.int32), sample)


@pytest.fixture
def shown(tiny_model):
    tokenizer = tiny_chat(tiny_model).tokenizer

    def show(*nodes: Node, **said: tuple[TurnScore, ...]) -> str:
        agents = tuple(Agent(name, "main") for name in dict.fromkeys(node.agent for node in nodes))
        output = io.StringIO()
        episode = Episode(build_ticket(), agents, nodes, (), turn_scores=said)
        _print_episode(episode, {"main": tokenizer}, Console(file=output, width=200))
        return output.getvalue()

    return show


def test_agents_who_speak_in_turn_have_no_branches(shown):
    said = shown(
        node(0, None, "a", False), node(1, 0, "a", True), node(2, None, "b", False), node(3, 2, "b", True),
        node(4, 1, "a", False), node(5, 4, "a", True), node(6, 3, "b", False), node(7, 6, "b", True),
    )  # fmt: skip
    assert "branch" not in said
    assert "of its own" not in said


def test_a_branch_and_another_conversation_are_said_where_they_begin(shown):
    said = shown(
        node(0, None, "a", False), node(1, 0, "a", True), node(2, 0, "a", True), node(3, None, "a", False),
        node(4, 3, "a", True), node(5, 1, "a", False), node(6, 5, "a", True),
    )  # fmt: skip
    assert [line for line in said.splitlines() if "(node" in line] == [
        "a branch behind node 0 (node 2):",
        "a conversation of its own (node 3):",
        "a branch behind node 1 (node 5):",
    ]


def test_scores_are_said_behind_the_turn_that_they_are_of(shown):
    nodes = [node(0, None, "a", False), node(1, 0, "a", True), node(2, 1, "a", False), node(3, 2, "a", True)]
    nodes[2:] = [replace(one, turn=1) for one in nodes[2:]]
    first, second = (TurnKey(build_ticket().episode_id, "a", turn, "") for turn in (0, 1))
    said = shown(
        *nodes,
        prm=(TurnScore(first, "1", value=0.625, prior=0.25), TurnScore(second, "1", value=-1.5, note="too long")),
        teacher=(TurnScore(second, "1", logprobs=np.array([-0.5, -1.0], np.float32)),),
    )
    assert "[prm 0.25 -> 0.62]" in said
    assert "[prm -1.50 (too long), teacher -0.75 nats a token]" in said
    assert said.index("[prm 0.25") < said.index("[prm -1.50")
    assert said.count("[prm") == 2, "a reply has its own scores alone"
