"""A run whose turns an earlier version of its policy and a function judge; then another function, from its archive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl import codec
from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl.scorers.definition import UNREACHABLE, ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.score import scored_turns
from agentrl.types.turn_score import ScoredTurn, TurnScore
from tests.integration import runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SHARE = "tests.unit.scorers.own_functions:reply_share"
SCORERS = (
    'environment.scorers=[{kind="verifier"}, '
    '{kind="self_teacher", name="self", policy="main", interval_steps=2, late="wait"}, '
    f'{{kind="turn_function", name="share", function="{SHARE}", late="wait"}}]'
)
AGAIN = f'{{kind = "turn_function", name = "again", function = "{SHARE}"}}'


class Absent:
    """A scorer that cannot be reached."""

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        raise EpisodeError(Boundary.SCORER, UNREACHABLE, "nobody is there")

    async def close(self) -> None:
        """Nothing is held."""


async def _absent(config: TurnScorerConfig, setting: ScorerSetting) -> Absent:
    return Absent()


absent = ScorerDefinition("absent", "cannot be reached", TurnScorerConfig, _absent)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with all weights that it published."""
    folder = tmp_path_factory.mktemp("scored")
    options = ("steps=10", "policies.main.publish.keep_versions=20", "environment.options.turns=2", SCORERS)
    limits = ("rollout.limits.max_turns=2", "rollout.limits.max_reply_tokens=24")
    ended = runs.agentrl(*runs.train_arguments(folder, tiny_model, *options, *limits))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "runs" / "test-seed0"


@pytest.fixture(scope="module")
def episodes(run: Path) -> list[Episode]:
    """The archive's, in the order of their tasks, without those that nobody judged."""
    read = [episode for file in archive_files(run / "episodes") for episode in read_consumed(file)]
    judged = [episode for episode in read if episode.reward is not None and "self" in episode.turn_scores]
    assert len(judged) >= 80, "ten steps of two groups of four, each of whose episodes has its scores"
    return sorted(judged, key=lambda episode: episode.ticket.task.ordinal)


def share(turn: ScoredTurn) -> float:
    return (len(turn.token_ids) - turn.reply_start) / len(turn.token_ids)


def test_what_is_required_is_in_the_archive_for_every_turn(episodes: list[Episode]) -> None:
    for episode in episodes:
        turns = list(scored_turns(episode))
        assert [score.key for score in episode.turn_scores["share"]] == [turn.key for turn in turns]
        assert [score.key for score in episode.turn_scores["self"]] == [turn.key for turn in turns]
        assert [score.value for score in episode.turn_scores["share"]] == pytest.approx(list(map(share, turns)))


def test_the_teachers_version_advances_and_its_scores_are_those_of_its_weights(
    run: Path, tiny_model: Path, episodes: list[Episode]
) -> None:
    found: dict[str, tuple[ScoredTurn, TurnScore]] = {}
    for episode in episodes:
        for turn, score in zip(scored_turns(episode), episode.turn_scores["self"], strict=True):
            found.setdefault(score.version.removeprefix("self:"), (turn, score))
    assert len(found) > 1, f"only {list(found)} taught"
    steps = sorted(int(version.removeprefix("0.")) for version in found)
    assert all(later - earlier >= 2 for earlier, later in pairwise(steps))
    for version, (turn, score) in found.items():
        folder = tiny_model if version == "0.0" else run / "weights" / "main" / version
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([turn.token_ids.tolist()])
        with torch.no_grad():
            table = network(ids).logits[0, :-1].log_softmax(-1)
        expected = table.gather(1, ids[0, 1:, None])[turn.reply_start - 1 :, 0].tolist()
        assert score.logprobs is not None
        assert score.logprobs.tolist() == pytest.approx(expected, abs=1e-4), version


def test_scores_stand_beside_their_turns(run: Path) -> None:
    names = runs.agentrl("show", run, "--names").stdout.splitlines()
    shown = runs.agentrl("show", run, names[0].split()[0])
    assert shown.returncode == 0, shown.stderr
    assert len(re.findall(r"self -\d+\.\d\d nats a token", " ".join(shown.stdout.split()))) >= 1, shown.stdout
    assert len(re.findall(r"share 0\.\d\d", " ".join(shown.stdout.split()))) >= 1, shown.stdout


def test_an_archive_is_scored_again_and_only_what_is_missing_is_asked_for(run: Path, episodes: list[Episode]) -> None:
    file = run / "scores" / "again.jsonl"

    def rescored() -> tuple[int, int, int]:
        ended = runs.agentrl("rescore", run, "--scorer", AGAIN)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        said = re.search(r"([\d,]+) turns scored, ([\d,]+) known, ([\d,]+) failed", ended.stdout)
        assert said is not None, ended.stdout
        scored, known, failed = (int(number.replace(",", "")) for number in said.groups())
        return scored, known, failed

    total, known, failed = rescored()
    assert (known, failed) == (0, 0)
    scores = {score.key: score for score in (codec.from_json(line, TurnScore) for line in file.open("rb"))}
    assert len(scores) == total
    for turn in (turn for episode in episodes for turn in scored_turns(episode)):
        assert scores[turn.key].value == pytest.approx(share(turn))
    assert rescored() == (0, total, 0)

    content = file.read_bytes()
    file.write_bytes(content[:-9])
    assert rescored() == (1, total - 1, 0)
    assert sorted(file.read_bytes().splitlines()) == sorted(content.splitlines()), "a line was glued to half a one"

    lines = content.splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:20] + b"\n", *lines[3:]]))
    refused = runs.agentrl("rescore", run, "--scorer", AGAIN)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert f"line 3 of {file} is damaged" in refused.stderr
    file.unlink()


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        ("self", "scorer 'self' asks engines of main, which only a run starts"),
        ("nobody", "the run has no scorer 'nobody' of turns (self, share)"),
        ('{kind = "turn_function", name = "x", function = "nothere:f"}', "nothere:f"),
        ('{kind = "teacher", name = "t", url = "http://127.0.0.1:9"}', "http://127.0.0.1:9 serves no teacher"),
        ('{kind = "combined", name = "all", parts = {share = 1.0}}', "cannot be asked"),
    ],
)
def test_a_scorer_that_cannot_score_an_archive_is_refused_in_one_line(run: Path, scorer: str, says: str) -> None:
    refused = runs.agentrl("rescore", run, "--scorer", scorer)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert says in refused.stderr


def test_a_scorer_that_is_out_of_reach_is_waited_for_as_long_as_its_patience(run: Path) -> None:
    table = '{kind = "tests.integration.test_scored_runs:absent", name = "x", patience_s = 0.5}'
    refused = runs.agentrl("rescore", run, "--scorer", table)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "error: scorer 'x' has not scored a turn within patience_s = 0.5: mend it and call again" in refused.stderr
