"""A problem of two states that can be written out whole: every episode, its probability, its scores of turns.

In state A the agent may go on to B, end at once, or stay; in B it may win, go back to A, or end with little. After
three turns the episode is cut off with nothing. Staying in A, and going back to it, has a reward of its own that is
part of what is optimised. The process scorer is wrong on purpose: it likes A better than B, an ending that loses
better than the one that wins, and what is cut off best of all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.credit_config import credit_columns
from agentrl.buffer.config import BufferConfig
from agentrl.buffer.group import Group
from agentrl.buffer.staleness import build_batch
from agentrl.testing.builders import build_ticket
from agentrl.trainer.advantages import token_advantages
from agentrl.types.batch import TrainBatch, TrainEpisode
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Agent, Episode, Node, SampledColumns, StopReason, Turn
from agentrl.types.score import scored_turns, with_scores
from agentrl.types.turn_score import TurnScore
from agentrl.types.version import PolicyVersion, VersionSpan

A, B = 0, 1
NUM_ACTIONS, MAX_TURNS = 3, 3
STEPS = {(A, 0): B, (A, 1): "lost", (A, 2): A, (B, 0): "won", (B, 1): A, (B, 2): "little"}
OUTCOMES = {"won": 1.0, "lost": 0.0, "little": 0.2, A: 0.0, B: 0.0}
WORTH = {A: 0.7, B: 0.3, "won": 0.1, "lost": 1.4, "little": 0.9}
CUT_OFF_WORTH = 1.6
TURN_REWARDS = {(A, 2): 0.1, (B, 1): 0.05}
VERSION = PolicyVersion(0, 0)


@dataclass(frozen=True)
class Play:
    """One way that an episode can go: states and actions, and how it ended."""

    moves: tuple[tuple[int, int], ...]
    end: str | int

    @property
    def is_cut_off(self) -> bool:
        return self.end in (A, B)

    @property
    def rewards(self) -> list[float]:
        return [TURN_REWARDS.get(move, 0.0) for move in self.moves]

    @property
    def outcome(self) -> float:
        return OUTCOMES[self.end]

    @property
    def priors(self) -> list[float]:
        """What the scorer says of the state of each turn."""
        return [WORTH[state] for state, _ in self.moves]

    @property
    def values(self) -> list[float]:
        """What it says of the state that each turn led to."""
        return [*self.priors[1:], CUT_OFF_WORTH if self.is_cut_off else WORTH[self.end]]

    def discounted(self, gamma: float) -> float:
        rewards = [*self.rewards[:-1], self.rewards[-1] + self.outcome]
        return sum(gamma**turn * reward for turn, reward in enumerate(rewards))


def plays(state: int = A, moves: tuple[tuple[int, int], ...] = ()) -> Iterator[Play]:
    """All of them that go on from a state."""
    for action in range(NUM_ACTIONS):
        after, behind = STEPS[state, action], (*moves, (state, action))
        if after in (A, B) and len(behind) < MAX_TURNS:
            yield from plays(after, behind)
        else:
            yield Play(behind, after)


PLAYS = list(plays())
_NOTHING = 2 * NUM_ACTIONS
_MOVES = torch.tensor(
    [[*(s * NUM_ACTIONS + a for s, a in p.moves), *[_NOTHING] * (MAX_TURNS - len(p.moves))] for p in PLAYS]
)


def episode_of(play: Play, gives: str = "prior and value") -> Episode:
    """The record of a play: a token for each state and action; scores by "process" and "teacher"."""
    nodes: list[Node] = []
    turns: list[Turn] = []
    for turn, (state, action) in enumerate(play.moves):
        nodes.append(
            Node(len(nodes), len(nodes) - 1 if nodes else None, "agent", turn, np.array([10 + state], np.int32))
        )
        spans = (VersionSpan(VERSION, 0, 1),)
        sample = SampledColumns(np.array([-1.0], np.float32), spans, spans)
        nodes.append(Node(len(nodes), len(nodes) - 1, "agent", turn, np.array([20 + action], np.int32), sample))
        turns.append(Turn(turn, "agent", len(nodes) - 1))
    ticket = build_ticket("-".join(f"{state}{action}" for state, action in play.moves))
    stop = StopReason.MAX_TURNS if play.is_cut_off else StopReason.ANSWERED
    played = Episode(ticket, (Agent("agent", "main"),), tuple(nodes), tuple(turns), stop)
    verdict = Score(play.outcome, turn_rewards=dict(enumerate(play.rewards)))
    scores = tuple(
        TurnScore(
            turn.key,
            "prm:0",
            value=play.values[n] if "value" in gives else None,
            prior=play.priors[n] if "prior" in gives else None,
        )
        for n, turn in enumerate(scored_turns(played))
    )
    scored = with_scores(played, [ScoreRecord("verifier", verdict)])
    return dataclasses.replace(scored, turn_scores={"process": scores} if gives else {})


def train_episodes(algorithm: AlgorithmConfig, gives: str = "prior and value") -> list[TrainEpisode]:
    """Every play as the buffer gives it to a trainer."""
    episodes = [episode_of(play, gives) for play in PLAYS]
    groups = [Group(n, e.ticket.task, 1, {"main": 0}, episodes=[e]) for n, e in enumerate(episodes)]
    columns = credit_columns(algorithm.credit)
    return list(build_batch(groups, "main", VERSION, BufferConfig(group_size=1), columns).episodes)


def group_table(algorithm: AlgorithmConfig, members: Sequence[Sequence[TrainEpisode]]) -> torch.Tensor:
    """[N, ..., N, K] advantages of the first member's turns in every group that can be drawn, 0 behind its end."""
    drawn = list(itertools.product(*(range(len(of_place)) for of_place in members)))
    episodes = tuple(
        dataclasses.replace(members[place][play], group=number)
        for number, group in enumerate(drawn)
        for place, play in enumerate(group)
    )
    batch = TrainBatch("main", VERSION, episodes)
    found = token_advantages(batch, algorithm)[:: len(members)]
    table = torch.zeros(len(drawn), MAX_TURNS, dtype=torch.float64)
    for row, ((column,), episode) in enumerate(zip(found, batch.episodes[:: len(members)], strict=True)):
        (trained,) = episode.trajectories
        own = torch.from_numpy(column[trained.loss_mask].astype(np.float64))
        turns = torch.from_numpy(trained.trajectory.turns[trained.loss_mask].astype(np.int64))
        table[row, turns] = own
    return table.reshape(*map(len, members), MAX_TURNS)


def logprobs(theta: torch.Tensor) -> torch.Tensor:
    """[N, K]: log-probability of each turn of every play, 0 behind its end."""
    table = torch.cat([theta.log_softmax(1).flatten(), torch.zeros(1, dtype=theta.dtype)])
    return table[_MOVES]


def gradient_of_return(theta: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Of the expected discounted return, by differentiating the sum over all plays."""
    leaf = theta.clone().requires_grad_()
    probabilities = logprobs(leaf).sum(1).exp()
    returns = torch.tensor([play.discounted(gamma) for play in PLAYS], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((probabilities * returns).sum(), leaf)
    return gradient


def expected_gradient(theta: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What a rule gives on average over all groups: of grad log pi times the advantages of the first member."""
    leaf = theta.clone().requires_grad_()
    logprobs_NK = logprobs(leaf)
    probabilities = logprobs_NK.detach().sum(1).exp()
    means = table
    while means.dim() > 2:
        means = torch.einsum("i...jk,j->i...k", means, probabilities)
    loss = (probabilities[:, None] * means * logprobs_NK).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def success_after_ascent(table: torch.Tensor, steps: int = 600, rate: float = 8.0) -> float:
    """Probability of winning, once plain gradient ascent by a rule has gone on from the uniform policy."""
    theta = torch.zeros(2, NUM_ACTIONS, dtype=torch.float64)
    for _ in range(steps):
        theta = theta + rate * expected_gradient(theta, table)
    won = torch.tensor([play.end == "won" for play in PLAYS])
    return float(logprobs(theta).sum(1).exp()[won].sum())
