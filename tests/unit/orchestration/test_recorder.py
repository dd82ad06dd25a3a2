from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import codec
from agentrl.buffer.config import BufferConfig
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.ledger import Ledger
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.recorder import Recorder, SilentObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.tally import Tally
from agentrl.telemetry.json_lines import JsonLines
from agentrl.telemetry.sinks import JsonlSink
from agentrl.testing.builders import InstantTasks, build_episode, build_ticket
from agentrl.types.batch import Receipt, StepReport
from agentrl.types.episode import Agent, Episode, StopReason
from agentrl.types.errors import Boundary, Failure, StorageError
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion
from tests.metric_table import undocumented

V0 = PolicyVersion(0, 0)


def rows(path: Path) -> list[dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "checksum"} for row in found]


class Watching(SilentObserver):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[float] = []

    def on_step(self, policy: str, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation.mean)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def recorder(run):
    made = Recorder(run, "demo", Watching())
    made.follow({"main": ["fake"]})
    yield made
    made.close()
    made.close()


def buffer_over(recorder: Recorder, step: int = 0) -> MemoryBuffer:
    config = BufferConfig(group_size=2, groups_per_step=1, max_staleness=2)
    terms = BufferTerms(
        {"main": config}, {"fake": EnvironmentTerms(1.0, ("main",))}, {"main": PolicyVersion(0, step)}, 0, 8, 1, 10
    )
    tasks = InstantTasks(lambda n: Task("fake", Split.TRAIN, n))
    return MemoryBuffer(terms, tasks, {}, Ledger(recorder.write_ledger_line))


def failed(name: str, group: int = 0) -> Episode:
    episode = build_episode(build_ticket(name, group), [(2, 0)], reward=None)
    return replace(episode, failure=Failure(Boundary.TIMEOUT, "environment.step", "late"), stop_reason=None)


async def test_a_steps_line_counts_its_episodes_and_its_batch(run, recorder):
    buffer = buffer_over(recorder, step=3)
    tickets = [await buffer.admit() for _ in range(3)]
    first = build_episode(tickets[0], [(2, 0), (4, 3)], 1.0)
    second = replace(build_episode(tickets[1], [(2, 2)], 0.5), stop_reason=StopReason.MAX_TURNS)
    for episode in (first, second):
        recorder.record_episode(episode)
        await buffer.settle(episode)
    recorder.record_episode(failed("bad"))
    batch = await buffer.take("main", PolicyVersion(0, 3))
    await buffer.trained("main", PolicyVersion(0, 4))
    recorder.record_publish("main", [Receipt("a", V0, {}, 0.25, 3, 0.125), Receipt("b", V0, {}, 0.5, 4)])
    recorder.record_step(
        "main", StepReport(PolicyVersion(0, 4), {"trainer/loss": 0.125}), batch, buffer, 1.5, {"engines/dead": 2.0}
    )
    [row] = rows(run.metrics)
    expected = {
        "step": 4,
        "trainer/loss": 0.125,
        "rollout/episodes": 3.0,
        "rollout/reward_mean": 0.75,
        "rollout/turns_mean": 4 / 3,
        "rollout/sampled_tokens_mean": 10 / 3,
        "rollout/failed_fraction": 1 / 3,
        "rollout/failed_timeout_environment.step_fraction": 1 / 3,
        "rollout/stopped_answered_fraction": 1 / 3,
        "rollout/stopped_max_turns_fraction": 1 / 3,
        "batch/reward_mean": 0.75,
        "batch/trained_tokens": 6.0,
        "buffer/staleness_max_steps": 1.0,  # of trained tokens: those of version 0 are masked
        "buffer/staleness_mean_steps": (2 * 3 + 2 * 1) / 8,
        "buffer/masked_fraction": 0.25,
        "buffer/running_episodes": 1,
        "buffer/ready_episodes": 0,
        "goodput/trained_fraction": 0.75,
        "goodput/masked_stale_fraction": 0.25,
        "time/publish_s": 0.5,
        "publish/gap_max_s": 0.125,
        "engines/dead": 2.0,
        "time/wait_for_batch_s": 1.5,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert recorder.max_staleness == 1


async def test_of_several_environments_each_has_its_counts_and_others_than_the_policys_have_none(run, recorder):
    recorder.follow({"main": ["sql", "web"]})
    config = BufferConfig(group_size=2, groups_per_step=2, max_staleness=2)
    terms = BufferTerms(
        {"main": config},
        {name: EnvironmentTerms(1.0, ("main",)) for name in ("sql", "web")},
        {"main": V0}, 0, 8, 1, 10,
    )  # fmt: skip
    tasks = InstantTasks(lambda n: Task("fake", Split.TRAIN, n))
    buffer = MemoryBuffer(terms, tasks, {}, Ledger(recorder.write_ledger_line))
    for ticket in [await buffer.admit() for _ in range(4)]:
        tokens, reward = {"sql": (3, 1.0), "web": (5, 0.25)}[ticket.environment]
        episode = build_episode(ticket, [(tokens, 0)], reward)
        recorder.record_episode(episode)
        await buffer.settle(episode)
    recorder.record_episode(replace(failed("bad"), ticket=replace(build_ticket("bad"), environment="web")))
    recorder.record_episode(replace(failed("other"), ticket=replace(build_ticket("other"), environment="games")))
    batch = await buffer.take("main", V0)
    recorder.record_step("main", StepReport(PolicyVersion(0, 1)), batch, buffer, 0.0, {})
    [row] = rows(run.metrics)
    assert row["rollout/episodes"] == 5.0
    names = {name: value for name, value in row.items() if name.startswith("environment/")}
    assert names == {
        "environment/sql/scored_episodes": 2.0,
        "environment/sql/failed_episodes": 0.0,
        "environment/sql/reward_mean": 1.0,
        "environment/sql/batch_groups": 1.0,
        "environment/sql/batch_episodes": 2.0,
        "environment/sql/trained_tokens": 6.0,
        "environment/web/scored_episodes": 2.0,
        "environment/web/failed_episodes": 1.0,
        "environment/web/reward_mean": 0.25,
        "environment/web/batch_groups": 1.0,
        "environment/web/batch_episodes": 2.0,
        "environment/web/trained_tokens": 10.0,
    }
    assert undocumented(set(row) - {"step", "time"}) == set()
    await buffer.trained("main", V0.next())
    recorder.finish_ledger({"main": 1})
    assert [line["environment"] for line in rows(run.path / "ledger.jsonl")] == ["sql", "sql", "web", "web"]


@pytest.mark.parametrize(("policy", "mean"), [("proposer", 1.0), ("solver", 0.25)])
def test_a_policys_reward_is_that_of_its_own_agents(policy, mean):
    agents = (Agent("writer", "proposer"), Agent("first", "solver"), Agent("second", "solver"))
    rewards = {"writer": 1.0, "first": 0.5, "second": 0.0}
    episode = replace(build_episode(build_ticket("one"), [(2, 0)], 0.5), agents=agents, agent_rewards=rewards)
    tally = Tally(policy, "", [episode.ticket.environment])
    tally.add(episode)
    assert tally.take()["rollout/reward_mean"] == mean


async def test_counts_begin_anew_after_each_step(run, recorder):
    buffer = buffer_over(recorder)
    for step in range(2):
        for _ in range(2):
            episode = build_episode(await buffer.admit(), [(1, 0)])
            recorder.record_episode(episode)
            await buffer.settle(episode)
        batch = await buffer.take("main", PolicyVersion(0, step))
        await buffer.trained("main", PolicyVersion(0, step + 1))
        recorder.record_step("main", StepReport(PolicyVersion(0, step + 1)), batch, buffer, 0.0, {})
    assert [(row["step"], row["rollout/episodes"]) for row in rows(run.metrics)] == [(1, 2.0), (2, 2.0)]
    assert recorder._observer.steps == [1, 2]


async def test_a_step_in_which_no_episode_ended_has_no_mean_of_them(run, recorder):
    buffer = buffer_over(recorder)
    for _ in range(2):
        await buffer.settle(build_episode(await buffer.admit(), [(1, 0)]))
    batch = await buffer.take("main", V0)
    recorder.record_step("main", StepReport(PolicyVersion(0, 1)), batch, buffer, 0.0, {})
    [row] = rows(run.metrics)
    assert {name for name in row if name.startswith("rollout/")} == {"rollout/episodes", "rollout/aborted_generations"}
    assert (row["rollout/episodes"], row["batch/reward_mean"]) == (0.0, 1.0)
    assert not {"time/publish_s", "publish/gap_max_s"} & row.keys()


async def test_the_ledger_has_a_line_for_every_episode(run, recorder):
    buffer = buffer_over(recorder)
    tickets = [await buffer.admit() for _ in range(4)]
    for ticket in tickets[:3]:
        await buffer.settle(build_episode(ticket, [(2, 0)]))
    await buffer.take("main", V0)
    await buffer.trained("main", V0.next())
    buffer.close({})
    assert not rows(run.path / "ledger.jsonl"), "nothing is final before a checkpoint"
    trained = [("train-000000-0", "trained", ""), ("train-000000-1", "trained", "")]
    dropped = [("train-000001-0", "dropped", "run_ended"), ("train-000001-1", "dropped", "run_ended")]
    for step, expected in ((0, dropped), (1, dropped + trained)):  # step 1 is not part of a checkpoint of step 0
        assert recorder.finish_ledger({"main": step}) == (run.path / "ledger.jsonl").stat().st_size
        lines = rows(run.path / "ledger.jsonl")
        assert [(line["episode_id"], line["outcome"], line["reason"]) for line in lines] == expected


def test_one_group_a_step_is_kept_whole_and_every_failed_episode(run, recorder):
    for name, group in (("a", 4), ("b", 5), ("c", 4)):
        recorder.record_episode(build_episode(build_ticket(name, group), [(3, 0)]))
    recorder.record_episode(failed("d", group=9))
    kept = (run.path / "episodes" / "train.jsonl").read_bytes().splitlines()
    episodes = [codec.from_json(line, Episode) for line in kept]
    assert [episode.episode_id for episode in episodes] == ["a", "c"]
    assert episodes[0].nodes[1].token_ids.tolist() == [20, 21, 22]
    assert [row["failure"]["kind"] for row in rows(run.path / "episodes" / "failed.jsonl")] == ["environment.step"]


async def test_an_evaluation_is_a_line_a_sample_and_a_curve(run, recorder):
    sample = (build_episode(build_ticket("heldout-0"), [(2, 0)]),)
    evaluation = Evaluation(V0, {"fake": (1.0, 0.0, 0.0, 1.0)}, num_failed=1, turns=2.5, seconds=3.0, sample=sample)
    await recorder.record_evaluation(evaluation)
    [row] = rows(run.metrics)
    assert (row["eval/reward_mean"], row["eval/reward_standard_error"], row["eval/episodes"]) == (0.5, 0.25, 4.0)
    assert (row["eval/failed_episodes"], row["eval/turns_mean"]) == (1.0, 2.5)
    assert run.curve.read_bytes()[1:4] == b"PNG"
    assert [row["ticket"]["episode_id"] for row in rows(run.path / "episodes" / "heldout.jsonl")] == ["heldout-0"]
    assert recorder._observer.evaluations == [0.5]


def test_a_full_disk_is_an_error_that_names_file_and_remedy_and_closing_adds_no_other():
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(StorageError, match=r"/dev/full cannot be written: .*No space left.*; free space, then resume"):
        lines.append("{}")
    lines.close()
    lines.close()


def test_a_file_that_cannot_be_opened_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/metrics\.jsonl cannot be written"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")


def test_metrics_go_on_behind_those_of_the_run_that_is_resumed(tmp_path):
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: 12.34567)
        sink.write(step, {"trainer/loss": 0.5})
        sink.close()
    expected = [{"step": n, "time": 12.346, "trainer/loss": 0.5} for n in (1, 2)]
    assert rows(tmp_path / "metrics.jsonl") == expected
