from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.models.reward import RewardModel
from agentrl.models.reward_folder import stated_version
from agentrl.orchestration.prm_training import PrmTraining, labelled_contexts, labeller, recorded_episodes
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.trainer.reward_fit import FitOptions
from agentrl.types.episode import Agent, Episode, Node, Turn
from agentrl.types.errors import Boundary, ConfigError, EpisodeError, Failure
from agentrl.types.turn_score import ScoredTurn

FAST = FitOptions(passes=1, contexts_per_step=8, threads=1)


class _Silent:
    """Hears of progress and says nothing."""

    def on_phase(self, text: str) -> None: ...

    def on_progress(self, done: int, total: int, text: str) -> None: ...


def by_length(turn: ScoredTurn) -> float:
    return float(len(turn.token_ids))


def pair(turn: ScoredTurn) -> tuple[float, None]:
    return float(turn.reply_start), None


def text(turn: ScoredTurn) -> str:
    return "good"


def not_finite(turn: ScoredTurn) -> float:
    return math.nan


def broken(turn: ScoredTurn) -> float:
    raise RuntimeError("no idea")


def own(function: Callable[[ScoredTurn], object]) -> str:
    return f"{__name__}:{function.__name__}"


def forked(episode: Episode) -> Episode:
    """With another reply to the context of its second turn, behind the same nodes."""
    first, last = episode.nodes[2], episode.nodes[-1]
    ids = last.token_ids + 100
    node = Node(len(episode.nodes), first.index, "agent", 2, ids[:3], last.sample)
    return replace(episode, nodes=(*episode.nodes, node), turns=(*episode.turns, Turn(2, "agent", node.index)))


def test_each_state_of_an_episode_gets_its_outcome_once() -> None:
    """Prompt 3, reply 4, context 2, reply 5: states end at tokens 2, 6, 8 and 13."""
    episode = build_episode(build_ticket(), [(4, 0), (5, 0)], reward=0.75)
    (context,) = labelled_contexts(episode, "main", labeller("outcome", "main"))
    assert context.positions.tolist() == [2, 6, 8, 13]
    assert context.labels.tolist() == [0.75] * 4
    assert len(context.token_ids) == 14


def test_branches_have_a_context_each_and_share_no_label_twice() -> None:
    episode = forked(build_episode(build_ticket(), [(4, 0), (5, 0)]))
    contexts = labelled_contexts(episode, "main", labeller("outcome", "main"))
    assert sorted(len(context.token_ids) for context in contexts) == [12, 14]
    assert sorted(context.positions.tolist() for context in contexts) == [[2, 6, 8, 13], [8, 11]]


def test_an_agent_has_its_own_reward_and_other_policies_turns_are_left_out() -> None:
    episode = build_episode(build_ticket(), [(4, 0)])
    episode = replace(
        episode, agents=(Agent("agent", "main"), Agent("other", "frozen")), agent_rewards={"agent": 0.25, "other": 1.0}
    )
    (context,) = labelled_contexts(episode, "main", labeller("outcome", "main"))
    assert context.labels.tolist() == [0.25, 0.25]
    assert labelled_contexts(episode, "frozen", labeller("outcome", "frozen")) == []


def test_an_expert_labels_what_a_reply_leads_to_or_both_states() -> None:
    episode = build_episode(build_ticket(), [(4, 0), (5, 0)])
    (context,) = labelled_contexts(episode, "main", labeller(own(by_length), "main"))
    assert dict(zip(context.positions.tolist(), context.labels.tolist(), strict=True)) == {6: 7.0, 13: 14.0}
    (context,) = labelled_contexts(episode, "main", labeller(own(pair), "main"))
    assert dict(zip(context.positions.tolist(), context.labels.tolist(), strict=True)) == {2: 3.0, 8: 9.0}


@pytest.mark.parametrize("function", [text, not_finite])
def test_an_expert_that_gives_no_number_is_named(function: Callable[[ScoredTurn], object]) -> None:
    episode = build_episode(build_ticket(), [(4, 0)])
    with pytest.raises(ConfigError, match=f"{function.__name__} gave .* give a finite number"):
        labelled_contexts(episode, "main", labeller(own(function), "main"))


def test_an_expert_that_raises_is_named_with_its_error() -> None:
    with pytest.raises(EpisodeError, match=r"scorer\(labels\): .*broken: RuntimeError: no idea"):
        labelled_contexts(build_episode(build_ticket(), [(4, 0)]), "main", labeller(own(broken), "main"))


def test_labels_that_are_no_function_are_named() -> None:
    with pytest.raises(ConfigError, match="--labels expert: give outcome, or a function"):
        labeller("expert", "main")
    with pytest.raises(ConfigError, match="is a FitOptions, not a function"):
        labeller(f"{__name__}:FAST", "main")


def episodes(count: int) -> list[Episode]:
    return [
        build_episode(build_ticket(f"e-{n}", group=n), [(4 + n % 3, 0), (5, 0)], reward=float(n % 2))
        for n in range(count)
    ]


async def test_a_fit_writes_a_model_that_scorers_load_under_the_version_that_it_tells(
    tiny_model: Path, tmp_path: Path
) -> None:
    training = PrmTraining(tmp_path / "prm", tiny_model, "main", labeller("outcome", "main"))
    failed = replace(
        build_episode(build_ticket("f"), [(4, 0)], reward=None),
        failure=Failure(Boundary.ENGINE, "refused", "x"),
        stop_reason=None,
    )
    unjudged = build_episode(build_ticket("u"), [(4, 0)], reward=None)
    report = await training.fit([*episodes(20), failed, unjudged], FAST, _Silent())
    assert report.left_out == {"failed": 1, "without a reward": 1}
    assert (report.episodes, report.states) == (20, 80)
    assert report.quality.states == 4 * 3, "the states of three unseen tasks"
    assert stated_version(tmp_path / "prm") == report.version
    assert RewardModel.load(tmp_path / "prm").version == report.version.name
    assert not (tmp_path / "prm.making").exists()


async def test_a_model_is_replaced_only_where_that_is_asked_for_and_by_another_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    label = labeller("outcome", "main")
    made = episodes(20)
    first = await PrmTraining(tmp_path / "prm", tiny_model, "main", label).fit(made, FAST, _Silent())
    with pytest.raises(ConfigError, match="exists already; remove it, choose another output, or give --replace"):
        PrmTraining(tmp_path / "prm", tiny_model, "main", label)
    again = PrmTraining(tmp_path / "prm", tiny_model, "main", label, is_replacing=True)
    second = await again.fit(made, replace(FAST, learning_rate=FAST.learning_rate / 3), _Silent())
    assert stated_version(tmp_path / "prm") == second.version != first.version
    with pytest.raises(ConfigError, match="is no reward model, and is not replaced by one"):
        PrmTraining(tiny_model, tiny_model, "main", label, is_replacing=True)


async def test_labels_that_are_all_alike_teach_nothing_and_are_named(tiny_model: Path, tmp_path: Path) -> None:
    training = PrmTraining(tmp_path / "prm", tiny_model, "main", labeller("outcome", "main"))
    alike = [replace(episode, reward=1.0) for episode in episodes(6)]
    with pytest.raises(ConfigError, match="all 24 states have the label 1, so there is nothing to learn"):
        await training.fit(alike, FAST, _Silent())
    with pytest.raises(ConfigError, match=r"labelled episodes of 1 tasks, and a fit needs 2 at least"):
        await training.fit(alike[:1], FAST, _Silent())
    assert not (tmp_path / "prm").exists()


def test_a_run_without_an_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the archive of .* holds no episode"):
        recorded_episodes(RunDirectory(tmp_path), 8)


def test_unseen_states_are_of_other_tasks() -> None:
    from agentrl.orchestration.prm_training import _split

    train, check = _split({str(n): [np.array([n])] for n in range(20)}, seed=0)
    assert len(check) == 3
    assert {int(c[0]) for c in train}.isdisjoint(int(c[0]) for c in check)
