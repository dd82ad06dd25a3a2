"""A reward model from end to end: a run's episodes, or played ones, become a folder whose scorer values their turns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl.models.reward_folder import stated_version
from agentrl.scorers import prm
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.prm import PrmConfig
from agentrl.types.score import scored_turns
from agentrl.types.turn_score import ScoredTurn, check_turn_score
from tests.integration import runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def worth(turn: ScoredTurn) -> tuple[float, float]:
    """An expert for whom long contexts are worth more."""
    return turn.reply_start / 100, len(turn.token_ids) / 100


async def test_a_runs_episodes_and_played_ones_become_models_whose_scores_transformers_confirms(
    tiny_model: Path, tmp_path: Path
) -> None:
    trained = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model))
    assert trained.returncode == 0, trained.stderr
    run, folder = tmp_path / "runs" / "test-seed0", tmp_path / "prm"
    labels = "tests.integration.test_prm_command:worth"
    fitted = runs.agentrl("prm", "train", run, "--output", folder, "--labels", labels, "--passes", "2")
    assert fitted.returncode == 0, fitted.stderr
    episodes = [episode for file in archive_files(run / "episodes") for episode in read_consumed(file)]
    judged = [episode for episode in episodes if episode.reward is not None]
    assert len(judged) >= 24, "three steps of two groups of four"
    assert re.search(rf"of {len(judged)} episodes, ", fitted.stdout), fitted.stdout
    assert "states of unseen tasks: correlation" in fitted.stdout
    first = stated_version(folder)
    assert first is not None
    assert f"version {first.name}" in fitted.stdout

    scorer = await prm.build(PrmConfig(name="worth", model=folder), ScorerSetting({"main": tiny_model}))
    network = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    turns = [turn for episode in judged[:6] for turn in scored_turns(episode)]
    for turn, score in zip(turns, await scorer.score(turns), strict=True):
        with torch.no_grad():
            values = network(torch.tensor([turn.token_ids.tolist()])).logits[0, :, 0]
        expected = (values[-1].item(), values[turn.reply_start - 1].item())
        assert (check_turn_score(turn, score).value, score.prior) == pytest.approx(expected, abs=1e-4)
        assert score.version == f"prm:{first.name}"

    refused = runs.agentrl("prm", "train", run, "--output", folder)
    assert refused.returncode == 1
    assert "exists already" in refused.stderr
    recipe, *overrides = runs.train_arguments(tmp_path, tiny_model)[1:]
    played = ("--episodes", "12", "--passes", "1", "--replace")
    replaced = runs.agentrl("prm", "train", recipe, *overrides, "--output", folder, *played)
    assert replaced.returncode == 0, replaced.stderr
    assert re.search(r"of 12 episodes, ", replaced.stdout), replaced.stdout
    second = stated_version(folder)
    assert second is not None
    assert second.name != first.name
    (score,) = await scorer.score(turns[:1])
    assert score.version == f"prm:{second.name}", "the scorer that was there has not taken the new model"
