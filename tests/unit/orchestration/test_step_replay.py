"""Which steps can be replayed and from where, and the statuses of tokens, without a trainer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.group import Group
from agentrl.buffer.recovery import TakenStep
from agentrl.buffer.staleness import build_batch, train_view
from agentrl.journal.entries import Dropped, Ended, Leased, Scored, Stepped, Taken, TurnCommitted
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import JournalState
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.replay_plan import plan_replay
from agentrl.orchestration.run_directory import Progress, RunDirectory
from agentrl.orchestration.step_record import StepRecord, read_steps
from agentrl.orchestration.token_status import (
    ExplainedEpisode,
    dropped_branches,
    explained_branch,
    explained_episodes,
    token_rows,
)
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.batch import StepReport
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Episode, StopReason
from agentrl.types.errors import Boundary, ConfigError, Failure
from agentrl.types.explanation import StepExplanation, TokenStatus, TokenTerms
from agentrl.types.generation import FinishReason
from agentrl.types.version import PolicyVersion

V3 = PolicyVersion(0, 3)


def history(group: int, member: int, failure: Failure | None = None, is_over: bool = True) -> EpisodeHistory:
    """An episode of one turn that began with the weights of the step before its group's."""
    episode = build_episode(build_ticket(f"train-{group:06d}-{member}", group, member), [(2, 0)])
    turned = TurnCommitted(1, episode.turns[0], episode.nodes, FinishReason.STOP, "digest")
    ended = Ended(1, StopReason.ANSWERED, failure, 0.5)
    verdict = Scored(1, ScoreRecord("verifier", Score(1.0)))
    found = build_history([Leased(episode.ticket, episode.agents, 1), turned, *([verdict, ended] if is_over else [])])
    assert found is not None
    return found


def state_of(steps: int, *lost: str) -> JournalState:
    """Step n took the two members of group n; some episodes are lost."""
    histories = [history(group, member) for group in range(1, steps + 1) for member in range(2)]
    state = JournalState({one.ticket.episode_id: one for one in histories if one.ticket.episode_id not in lost})
    for number in range(1, steps + 1):
        names = (f"train-{number:06d}-0", f"train-{number:06d}-1")
        state.taken.append(Taken("main", PolicyVersion(0, number - 1), ((number, names),)))
        state.stepped.append(Stepped("main", PolicyVersion(0, number), f"digest {number}"))
    return state


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints of steps 2 and 4, and its policy's first model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    table = {
        "name": "demo",
        "steps": 6,
        "runs_folder": tmp_path,
        "policies": {"main": {"model": tmp_path / "model"}},
        "environment": {"name": "sql"},
    }
    run = RunDirectory.create(RunConfig.model_validate(table))
    for step in (2, 4):
        run.checkpoint("main", step).mkdir(parents=True)
        run.write_progress(run.checkpoint("main", step), Progress({"main": PolicyVersion(1, step)}, number=step))
    return run


@pytest.mark.parametrize(
    ("number", "checkpoint", "steps"), [(5, 4, [5]), (6, 4, [5, 6]), (4, 2, [3, 4]), (3, 2, [3]), (2, None, [1, 2])]
)
def test_a_step_is_reached_from_the_nearest_older_weights(run, number, checkpoint, steps):
    plan = plan_replay(run, StepRecord("main", state_of(6), 2), number)
    assert plan.checkpoint == (run.checkpoint("main", checkpoint) if checkpoint else None)
    assert plan.version == (PolicyVersion(1, checkpoint) if checkpoint else PolicyVersion(0, 0))
    assert [taken.step + 1 for taken in plan.steps] == steps
    assert [episode.episode_id for episode in plan.steps[-1].groups[0].episodes] == [
        f"train-{number:06d}-0",
        f"train-{number:06d}-1",
    ]


def test_an_incomplete_checkpoint_is_none(run):
    (run.checkpoint("main", 4) / "progress.json").unlink()
    assert plan_replay(run, StepRecord("main", state_of(6), 2), 5).checkpoint == run.checkpoint("main", 2)


@pytest.mark.parametrize("number", [0, 7])
def test_a_step_that_never_was_names_those_that_were(run, number):
    match = rf"step {number} of .* what step {number} trained is not on record; steps that can be replayed: 1 to 6$"
    with pytest.raises(ConfigError, match=match):
        plan_replay(run, StepRecord("main", state_of(6), 2), number)


def test_an_episode_that_is_gone_is_named_and_so_are_the_steps_that_need_none_of_it(run):
    record = StepRecord("main", state_of(6, "train-000003-1"), 2)
    with pytest.raises(ConfigError, match=r"group 3 .*\['train-000003-1'\]; steps that can be replayed: 1 to 2, 5 to"):
        plan_replay(run, record, 3)
    on_the_way = r"step 4 .* weights before it that are left are checkpoint 000002, and on the way .*'train-000003-1'"
    with pytest.raises(ConfigError, match=on_the_way):
        plan_replay(run, record, 4)


def test_without_the_first_model_steps_before_the_first_checkpoint_are_out_of_reach(run, tmp_path):
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"neither is the policy's first model; steps that can be replayed: 3 to 6$"):
        plan_replay(run, StepRecord("main", state_of(6), 2), 2)


def test_a_run_without_any_step_says_so(run):
    with pytest.raises(ConfigError, match="no step of this run can be replayed"):
        plan_replay(run, StepRecord("main", JournalState(), 2), 1)


def test_a_run_that_kept_no_journal_says_so(run):
    file = run.path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "journal": {"kind": "none"}}))
    with pytest.raises(ConfigError, match=r"kept no journal \(journal\.kind = none\)"):
        read_steps(run, "main")


def test_members_that_a_step_left_out_have_their_reasons():
    state = state_of(1)
    failed, unfinished, dropped = (
        history(1, 2, Failure(Boundary.ENVIRONMENT, "died", "gone")),
        history(1, 3, is_over=False),
        history(1, 4),
    )
    state.lives |= {one.ticket.episode_id: one for one in (failed, unfinished, dropped)}
    state.dropped.append(Dropped(1, (dropped.ticket.episode_id,), "too_late", 0))
    left = StepRecord("main", state, 5).left_out(1)
    assert [(place, episode.ticket.member, reason) for place, episode, reason in left] == [
        (0, 2, "environment_died"),
        (0, 3, "unfinished"),
        (0, 4, "too_late"),
    ]


def test_the_digest_is_that_of_the_step():
    record = StepRecord("main", state_of(3), 2)
    assert record.digest(2) == "digest 2"
    assert record.digest(4) is None


def two_turns() -> Episode:
    """Prompt of 3, reply of 3 by version 0.1, context of 2, reply of 2 by version 0.3."""
    return build_episode(build_ticket(), [(3, 1), (2, 3)])


def test_a_token_older_than_the_bound_is_stale_and_context_is_prompt():
    (view,) = train_view(two_turns(), "main", V3, max_staleness=1)
    terms = TokenTerms(*(np.array([1.0, 2.0], np.float32),) * 5, (TokenStatus.REJECTED, TokenStatus.CLIPPED_HIGH))
    branch = explained_branch(view, terms, np.zeros(10))
    assert branch.statuses == (
        *["prompt"] * 3, *["masked: stale"] * 3, *["prompt"] * 2, "rejected", "clipped: high"
    )  # fmt: skip


def test_a_token_at_the_bound_is_not_stale():
    (view,) = train_view(two_turns(), "main", V3, max_staleness=2)
    terms = TokenTerms(*(np.ones(5, np.float32),) * 5, (TokenStatus.KEPT,) * 5)
    assert explained_branch(view, terms, np.zeros(10)).statuses.count(TokenStatus.STALE) == 0


def test_what_the_trainer_left_out_had_no_advantage():
    (view,) = train_view(two_turns(), "main", V3, max_staleness=1)
    statuses = explained_branch(view, None, np.zeros(10)).statuses
    counted = (TokenStatus.PROMPT, TokenStatus.STALE, TokenStatus.NO_ADVANTAGE)
    assert [statuses.count(status) for status in counted] == [5, 3, 2]


def test_sampled_tokens_of_an_episode_that_is_not_in_the_loss_have_its_reason():
    (branch,) = dropped_branches(two_turns(), "main", V3, 1, "withheld")
    assert [branch.statuses.count(status) for status in ("prompt", "dropped: withheld")] == [5, 5]


def test_rows_say_of_each_token_what_is_known_and_nothing_else():
    (view,) = train_view(two_turns(), "main", V3, max_staleness=1)
    of_tokens = [-0.75, -0.25], [0.78, 1.28], [0.9, 1.1], [0.5, 0.0], [-0.125, 0.25]
    columns = (np.array(values, np.float32) for values in of_tokens)
    credited = np.array([9, 9, 9, -0.5, -0.5, -0.5, 9, 9, -0.75, -0.75], np.float32)
    branch = explained_branch(view, TokenTerms(*columns, (TokenStatus.KEPT, TokenStatus.REJECTED)), credited)
    rows = list(token_rows(ExplainedEpisode(two_turns(), 0, {"agent": 0.0}, {"agent": -0.5}, (branch,)), str))
    assert [row.position for row in rows] == list(range(10))
    prompt, stale, kept, rejected = rows[0], rows[3], rows[8], rows[9]
    assert (prompt.text, prompt.status, prompt.version, prompt.advantage) == ("10", "prompt", None, None)
    assert (stale.version, stale.staleness, stale.behaviour_logprob, stale.trainer_logprob) == ("0.1", 2, -0.5, None)
    assert (kept.turn, kept.version, kept.staleness) == (1, "0.3", 0)
    # What the loss had, with a teacher's term in it; of a token that was not computed what the rule of credit says.
    assert (kept.advantage, rejected.advantage, stale.advantage) == (-0.125, 0.25, -0.5)
    assert (kept.trainer_logprob, kept.ratio, kept.weight) == pytest.approx((-0.75, 0.78, 0.5))
    assert kept.proximal_ratio == pytest.approx(0.9)
    assert (rejected.status, rejected.weight) == ("rejected", 0.0)


def test_tokens_of_all_branches_are_counted():
    episode = two_turns()
    fork = dataclasses.replace(episode.nodes[3], index=4, parent=2)
    views = train_view(dataclasses.replace(episode, nodes=(*episode.nodes, fork)), "main", V3, max_staleness=5)
    found = ExplainedEpisode(episode, 0, {}, {}, tuple(explained_branch(view, None, np.zeros(10)) for view in views))
    assert found.count() == {"prompt": 3 + 2 + 3 + 2, "skipped: no advantage": 3 + 2 + 3 + 2}


def test_an_episode_that_is_withheld_keeps_its_advantage_and_loses_its_tokens():
    old = build_episode(build_ticket("train-000000-0"), [(3, 1), (2, 3)], reward=1.0)
    fresh = build_episode(build_ticket("train-000000-1", member=1), [(4, 3)], reward=0.0)
    failed = build_episode(build_ticket("train-000000-2", member=2), [(1, 3)], reward=None)
    group = Group(0, old.ticket.task, 3, {"main": 1}, episodes=[fresh, old])
    config = BufferConfig(group_size=3, groups_per_step=1, max_staleness=1, staleness="withhold")
    taken = TakenStep("main", V3, (group,))
    batch = build_batch(taken.groups, "main", V3, config)
    terms = TokenTerms(*(np.ones(4, np.float32),) * 5, (TokenStatus.KEPT,) * 4)
    explanation = StepExplanation(
        StepReport(V3.next()), ({"": 1.0}, {"": -1.0}), ((), (np.full(7, -1.0),)), ((), (terms,))
    )
    found = explained_episodes(taken, batch, explanation, [(0, failed, "engine_died")], max_staleness=1)
    of_each = [(e.episode.ticket.member, e.rewards, e.advantages) for e in found]
    assert of_each == [(0, {"agent": 1.0}, {"agent": 1.0}), (1, {"agent": 0.0}, {"agent": -1.0}), (2, {}, {})]
    assert [e.count() for e in found] == [
        {"prompt": 5, "dropped: withheld": 5},
        {"prompt": 3, "kept": 4},
        {"prompt": 3, "dropped: engine_died": 1},
    ]
