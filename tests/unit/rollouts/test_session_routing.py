"""The experts of every position are recorded once, from the first engine that forwarded it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_parts import ANSWER, CALL, LIMITS, QUESTION, RESULT, TOOLS, in_turn, make_session

from agentrl.testing.scripted import AbortingEngine
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest, RoutedExperts, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.trajectory import Trajectory, build_trajectories

ROUTING = Sampling(routing=(2, 2))
OTHER = Message(Role.TOOL, "45", tool_call_id="call")


class RoutingEngine(AbortingEngine):
    """Reports for each forwarded position: the position, and the step of the weights that forwarded it."""

    async def generate(self, request: GenerationRequest) -> Generation:
        step = self.version.step
        generation = await super().generate(request)
        if not len(generation.token_ids):
            return generation
        positions = np.arange(request.routed_start, len(request.prompt_ids) + len(generation.token_ids) - 1)
        pair = np.stack([positions, np.full(len(positions), step)], 1)
        experts = np.stack([pair, pair[:, ::-1]], 1)
        return replace(generation, routed_experts=self.spoil(RoutedExperts.narrow(request.routed_start, experts)))

    def spoil(self, routed: RoutedExperts) -> RoutedExperts:
        return routed


def check_rows(trajectory: Trajectory) -> None:
    """Every position but the last names itself and the weights that drew the token behind it."""
    rows = trajectory.routed_experts
    assert rows[:-1, 0, 0].tolist() == list(range(len(rows) - 1))
    assert (rows[:-1, 0] == rows[:-1, 1, ::-1]).all()
    assert (rows[-1] == -1).all()
    for span in trajectory.versions:
        assert (rows[span.start - 1 : span.end - 1, 0, 1] == span.version.step).all()


async def converse(chat, cuts: list[int]) -> tuple[RoutingEngine, list[Trajectory]]:
    """Three turns, then a branch behind the first reply with two more."""
    engine = RoutingEngine(chat, in_turn(CALL, CALL, ANSWER), cuts)
    record, session = make_session(chat, engine, sampling=ROUTING)
    await session.generate([QUESTION], TOOLS)
    await session.generate([RESULT], TOOLS)
    await session.generate([RESULT], TOOLS)
    await session.rewrite([QUESTION, CALL, OTHER], TOOLS)
    await session.generate([RESULT], TOOLS)
    return engine, list(build_trajectories(record.close(0.0)))


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 12), max_size=12))
def test_no_schedule_of_aborts_leaves_a_gap_or_replaces_a_record(chat, cuts):
    _engine, trajectories = asyncio.run(converse(chat, list(cuts)))
    assert len(trajectories) == 2
    for trajectory in trajectories:
        check_rows(trajectory)


async def test_each_request_asks_from_the_end_of_the_record_on(chat):
    engine, _ = await converse(chat, [])
    first, second, third, branch, last = engine.requests
    # The last token of a reply was not forwarded, so its position is the first that the next request asks for.
    ends = [len(chat.open([QUESTION], TOOLS)) + len(chat.complete(CALL)) - 1]
    ends.append(len(second.prompt_ids) + len(chat.complete(CALL)) - 1)
    assert [r.routed_start for r in (first, second, third)] == [0, *ends]
    assert branch.routed_start == ends[0]
    assert last.routed_start == len(branch.prompt_ids) + len(chat.complete(CALL)) - 1


async def test_a_branch_from_the_prompt_asks_for_the_prompt_again(chat):
    engine = RoutingEngine(chat, in_turn(CALL), [])
    record, session = make_session(chat, engine, sampling=ROUTING)
    await session.generate([QUESTION], TOOLS)
    await session.rewrite([QUESTION], TOOLS)
    assert [r.routed_start for r in engine.requests] == [0, 0]
    for trajectory in build_trajectories(record.close(0.0)):
        check_rows(trajectory)


class Shifted(RoutingEngine):
    def spoil(self, routed: RoutedExperts) -> RoutedExperts:
        return RoutedExperts(routed.start + 1, routed.experts)


class Short(RoutingEngine):
    def spoil(self, routed: RoutedExperts) -> RoutedExperts:
        return RoutedExperts(routed.start, routed.experts[:-1])


@pytest.mark.parametrize("engine", [Shifted, Short])
@pytest.mark.parametrize("cuts", [[], [3]])
async def test_a_record_that_does_not_align_is_a_failure_and_never_recorded(chat, engine, cuts):
    record, session = make_session(chat, engine(chat, in_turn(ANSWER), cuts), LIMITS, ROUTING)
    with pytest.raises(EpisodeError, match=r"experts of positions|do not follow") as caught:
        await session.generate([QUESTION])
    assert caught.value.failure.boundary is Boundary.CONTRACT
    assert len(record.close(0.0).nodes) == 1
