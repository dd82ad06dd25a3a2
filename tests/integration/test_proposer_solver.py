from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl_environments.proposals.environment import PROPOSER, SOLVERS
from tests.integration import runs
from tests.storms import proposer_and_solver as pair
from tests.storms.agent_latencies import latencies

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 3
BRIEF = (f"steps={STEPS}", "buffer.groups_per_step=2", "evaluation.tasks=8", "evaluation.final_tasks=8")
LESSON = "lessons=[{{expert='timid', agent='{}', transcripts=128, max_steps=30}}]"


def test_proposer_and_solver_are_trained_each_by_its_own_rewards_and_the_report_has_every_agent(tmp_path: Path) -> None:
    pair.make(tmp_path, 0, proposer=LESSON.format(PROPOSER), solver=LESSON.format(SOLVERS[0]))
    run = pair.train(tmp_path, 0, BRIEF)
    lines = [line for line in runs.assert_whole(run) if line["outcome"] == "trained"]
    for policy in ("proposer", "solver"):
        of_step = Counter(line["trained_by"][policy] for line in lines if policy in line["trained_by"])
        assert of_step == dict.fromkeys(range(1, STEPS + 1), 16)
    trained = {line["episode_id"] for line in lines}  # the run may have ended before others were scored
    episodes = [episode for path in archive_files(run / "episodes") for episode in read_consumed(path)]
    whole = [e for e in episodes if len(e.turns) == 1 + len(SOLVERS) and e.episode_id in trained]
    assert whole
    for episode in whole:
        assert [turn.agent for turn in episode.turns] == [PROPOSER, *SOLVERS]
        right = [episode.agent_rewards[solver] for solver in SOLVERS]
        assert episode.agent_rewards[PROPOSER] == episode.metrics["valid"] * (0 < sum(right) < len(SOLVERS))
    assert all(row.get("solver/trainer/fresh_gap_max_nats", 0.0) < 1e-3 for row in runs.metrics(run))
    figures = pair.learning(run) | latencies(run)
    assert figures["steps"] == {"proposer": STEPS, "solver": STEPS}
    assert {*figures["latency_s"]} == {PROPOSER, *SOLVERS, "joint"}
    assert figures["p90_joint_over_single"] > 1
