"""Forks: which state they go on from, when they may start, and what of them is trained."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from buffer_states import at, attempt, make_buffer
from pydantic import ValidationError

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.forks import draw_fork, fork_turns
from agentrl.buffer.group import Group
from agentrl.buffer.ledger import LedgerLine
from agentrl.buffer.staleness import build_batch, train_view
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.episode import Episode, Fork, Ticket
from agentrl.types.errors import Boundary, Failure
from agentrl.types.version import PolicyVersion

CONFIG = BufferConfig(group_size=4, groups_per_step=1, max_staleness=0, forks=2)
CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "gone")


def answered(episode: Episode, *turns: int) -> Episode:
    """The episode, with an answer of the environment to these turns."""
    replies = tuple(replace(turn, environment_s=0.5 * (turn.index in turns)) for turn in episode.turns)
    return replace(episode, turns=replies)


def four_turns(ticket: Ticket, reward: float = 1.0) -> Episode:
    return answered(build_episode(ticket, [(2, 0), (3, 0), (4, 0), (5, 0)], reward), 0, 1, 2, 3)


def failed(ticket: Ticket) -> Episode:
    return replace(build_episode(ticket, [(2, 0)], reward=None), failure=CRASH, stop_reason=None)


def test_a_state_is_one_behind_which_the_policy_acted_again() -> None:
    four = build_episode(build_ticket(), [(2, 0)] * 4)
    assert fork_turns(answered(four, 0, 1, 2, 3)) == [0, 1, 2], "behind the last turn nobody acted"
    assert fork_turns(answered(four, 1, 3)) == [1], "others the scaffold answered itself"
    assert fork_turns(answered(build_episode(build_ticket(), [(2, 0)]), 0)) == []
    assert draw_fork(build_episode(build_ticket(), [])) is None


def test_states_are_drawn_uniformly_and_not_by_the_outcome() -> None:
    parents = [four_turns(replace(build_ticket(f"train-{n:06d}-0"), seed=n)) for n in range(3000)]
    drawn = [draw_fork(parent) for parent in parents]
    counts = Counter(fork.turn for fork in drawn if fork is not None)
    # Three standard deviations of a binomial with n = 3000 and p = 1/3 are 77.
    assert set(counts) == {0, 1, 2}
    assert all(abs(count - 1000) < 100 for count in counts.values()), counts
    assert drawn == [draw_fork(replace(parent, reward=0.0, scores=())) for parent in parents]


async def _admitted(buffer) -> list[Ticket]:
    tickets = []
    while (ticket := await attempt(buffer.admit())) is not None:
        tickets.append(ticket)
    return tickets


async def test_forks_wait_for_the_first_member_and_all_go_on_from_the_same_state() -> None:
    lines: list[LedgerLine] = []
    buffer = make_buffer(CONFIG, lines)
    first, second = await _admitted(buffer)
    assert (first.member, second.member, first.fork, second.fork) == (0, 1, None, None)
    await buffer.settle(four_turns(second))
    assert await _admitted(buffer) == [], "a short one that ends before the first is no parent"
    parent = four_turns(first, reward=0.0)
    await buffer.settle(parent)
    forks = await _admitted(buffer)
    assert [ticket.member for ticket in forks] == [2, 3]
    assert [ticket.fork for ticket in forks] == [draw_fork(parent)] * 2
    assert forks[0].fork is not None
    assert forks[0].fork.parent == first.episode_id
    assert len({ticket.seed for ticket in forks}) == 2
    for ticket in forks:
        await buffer.settle(four_turns(ticket))
    batch = await attempt(buffer.take(*at(0)))
    name = forks[0].fork.name
    assert [episode.fork for episode in batch.episodes] == ["", "", name, name]


async def test_a_fork_that_fails_goes_on_from_the_same_state_once_more() -> None:
    buffer = make_buffer(CONFIG, [], attempts=2)
    for ticket in await _admitted(buffer):
        await buffer.settle(four_turns(ticket))
    first, other = await _admitted(buffer)
    await buffer.settle(failed(first))
    (again,) = await _admitted(buffer)
    assert (again.member, again.attempt, again.fork) == (first.member, 1, first.fork)
    assert again.seed not in (first.seed, other.seed)


async def test_the_next_member_is_the_parent_where_the_first_failed_for_good() -> None:
    buffer = make_buffer(CONFIG, [], attempts=2)
    first, second = await _admitted(buffer)
    await buffer.settle(failed(first))
    (again,) = await _admitted(buffer)
    await buffer.settle(four_turns(second))
    assert await _admitted(buffer) == [], "the first may yet end well"
    await buffer.settle(failed(again))
    assert {ticket.fork.parent for ticket in await _admitted(buffer) if ticket.fork} == {second.episode_id}


@pytest.mark.parametrize("ends", [lambda ticket: build_episode(ticket, [(2, 0)]), failed], ids=["one turn", "failed"])
async def test_without_a_state_to_go_on_from_members_are_played_from_the_start_and_counted(ends) -> None:
    buffer = make_buffer(CONFIG, [])
    for ticket in await _admitted(buffer):
        await buffer.settle(ends(ticket))
    tickets = await _admitted(buffer)
    assert [(ticket.member, ticket.fork) for ticket in tickets] == [(2, None), (3, None)]
    assert buffer.num_unforked == 2


async def test_new_groups_leave_waiting_forks_their_room_in_the_bound() -> None:
    config = replace_config(groups_per_step=2)
    buffer = make_buffer(config, [], places=100)
    tickets = await _admitted(buffer)
    assert sorted((t.group, t.member) for t in tickets) == [(0, 0), (0, 1), (1, 0), (1, 1)], "8 may start, 4 are forks'"
    for ticket in tickets:
        await buffer.settle(four_turns(ticket))
    for ticket in await _admitted(buffer):
        await buffer.settle(four_turns(ticket))
    assert await attempt(buffer.take(*at(0))) is not None


async def test_others_are_not_kept_waiting_by_forks_whose_parent_plays() -> None:
    buffer = make_buffer(replace_config(max_staleness=1), [], places=100)
    tickets = await _admitted(buffer)
    assert {ticket.group for ticket in tickets} == {0, 1}, "the second group starts although the first waits"


def replace_config(**options: object) -> BufferConfig:
    return BufferConfig(**{**CONFIG.model_dump(), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"forks": 4}, "some member must be played from the start"), ({"forks": 1}, "set 2 or more, or 0")],
)
def test_forks_need_a_parent_and_each_other(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        replace_config(**options)


def forked(turn: int) -> Episode:
    """Three replies of 2, 3 and 4 tokens by the versions 0, 1 and 2, pinned up to a turn."""
    ticket = replace(build_ticket("train-000000-3", member=3), fork=Fork("train-000000-0", turn, 0))
    return build_episode(ticket, [(2, 0), (3, 1), (4, 2)])


def test_only_tokens_behind_the_state_are_trained() -> None:
    episode = forked(1)
    (view,) = train_view(episode, "main", PolicyVersion(0, 2), 4)
    (whole,) = train_view(replace(episode, ticket=build_ticket()), "main", PolicyVersion(0, 2), 4)
    # 3 of prompt, 2 sampled, 2, 3 sampled, 2, 4 sampled
    assert whole.loss_mask.nonzero()[0].tolist() == [3, 4, 7, 8, 9, 12, 13, 14, 15]
    assert view.loss_mask.nonzero()[0].tolist() == [12, 13, 14, 15]
    assert view.staleness.max() == 0, "what the parent drew is context"
    assert view.trajectory.sampled.tolist() == whole.trajectory.sampled.tolist()
    assert view.trajectory.versions == whole.trajectory.versions
    assert (episode.num_sampled_tokens, episode.num_pinned_tokens) == (4, 5)


def test_a_fork_is_not_withheld_for_the_age_of_what_is_pinned() -> None:
    config = replace_config(staleness="withhold", max_staleness=1)
    group = Group(0, build_ticket().task, 4, {"main": 0}, "fake", 4, forks=2)
    group.episodes = [build_episode(build_ticket(), [(2, 0), (3, 1), (4, 2)]), forked(0), forked(1)]
    batch = build_batch([group], "main", PolicyVersion(0, 2), config)
    assert [len(episode.trajectories) for episode in batch.episodes] == [0, 1, 1]
    assert [episode.pinned_tokens for episode in batch.episodes] == [0, 2, 5]
    assert [episode.fork for episode in batch.episodes] == ["", "train-000000-0@0", "train-000000-0@1"]


async def test_the_ledger_says_what_is_a_fork_and_counts_each_token_where_it_was_drawn() -> None:
    lines: list[LedgerLine] = []
    buffer = make_buffer(CONFIG, lines)
    played = []
    for _ in range(2):
        for ticket in await _admitted(buffer):
            played.append(four_turns(ticket, reward=float(ticket.member)))
            await buffer.settle(played[-1])
    await attempt(buffer.take(*at(0)))
    await asyncio.sleep(0)
    await buffer.trained(*at(1))
    by_name = {line.episode_id: line for line in lines}
    sampled = {0: 2, 1: 2 + 3, 2: 2 + 3 + 4}
    for episode in played:
        line, fork = by_name[episode.episode_id], episode.ticket.fork
        pinned = sampled[fork.turn] if fork else 0
        assert (line.fork, line.pinned_tokens) == (fork.name if fork else "", pinned)
        assert (line.sampled_tokens, line.trained_tokens, line.masked_tokens) == (14 - pinned, 14 - pinned, 0)


def test_forks_and_others_have_a_spread_of_their_own() -> None:
    group = Group(0, build_ticket().task, 4, {"main": 0}, "fake", 4, forks=2)
    others = [four_turns(build_ticket(f"train-000000-{m}", member=m), reward=1.0) for m in (0, 1)]
    group.episodes = [*others, replace(forked(0), reward=0.0), replace(forked(0), reward=0.0)]
    assert not group.has_spread("main"), "no advantage comes of it: forks are not compared with others"
    group.episodes[-1] = replace(forked(0), reward=0.5)
    assert group.has_spread("main")
