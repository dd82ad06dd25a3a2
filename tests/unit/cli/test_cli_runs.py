from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import codec
from agentrl.buffer.ledger import LedgerLine
from agentrl.cli.main import app
from agentrl.journal.claim import Claim
from agentrl.orchestration.run_directory import RunDirectory, RunState, RunStatus
from agentrl.types.version import PolicyVersion


def line(group: int, member: int, tokens: int, reason: str = "", masked: int = 0) -> LedgerLine:
    return LedgerLine(
        episode_id=f"train-{group:06d}-{member}", task=f"fake/train/{group}", group=group, member=member, attempt=0,
        outcome="dropped" if reason else "trained", reason=reason, stop="answered", reward=1.0, turns=3,
        sampled_tokens=tokens, trained_tokens=0 if reason else tokens - masked, masked_tokens=masked,
        seconds=1.5, tool_s=0.25, step=2,
    )  # fmt: skip


LINES = (
    line(0, 0, 1000), line(0, 1, 3000, masked=600), line(1, 0, 2000, "no_spread"), line(1, 1, 2000, "no_spread"),
    line(2, 0, 5, "run_ended"), line(2, 1, 7, "run_ended"),
)  # fmt: skip


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "folder" / "demo-seed0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "ledger.jsonl").write_bytes(b"".join(codec.to_json(one) + b"\n" for one in LINES))
    return folder


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def rows(output: str) -> list[list[str]]:
    return [text.split() for text in output.splitlines() if text.strip()]


def test_a_folder_alone_lists_its_runs_as_list_does(run):
    listed = call("runs", run.parent)
    assert rows(listed)[1][:3] == ["demo-seed0", "never", "started"]
    assert call("runs", "list", run.parent) == listed


def test_without_a_folder_the_default_one_is_listed(run, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    assert "no runs in runs" in call("runs")
    run.parent.rename("runs")
    assert "demo-seed0" in call("runs")


def test_help_is_help_and_no_folder(run):
    assert {"list", "ledger", "goodput", "bias"} <= {row[0] for row in rows(call("runs", "--help"))}


def test_the_ledger_shows_every_episode_and_sums_by_outcome(run):
    shown = rows(call("runs", "ledger", run))
    assert [
        "train-000000-1",
        "trained",
        "answered",
        "1.000",
        "3",
        "3,000",
        "2,400",
        "600",
        "1.50",
        "0.25",
        "2",
    ] in shown
    assert shown[-3:] == [
        ["trained", "2", "4,000", "3,400", "600"],
        ["dropped:", "no_spread", "2", "4,000", "0", "0"],
        ["dropped:", "run_ended", "2", "12", "0", "0"],
    ]


@pytest.mark.parametrize(
    ("options", "episodes"),
    [
        (["--outcome", "trained"], {"train-000000-0", "train-000000-1"}),
        (["--reason", "no_spread"], {"train-000001-0", "train-000001-1"}),
        (["--outcome", "trained", "--reason", "no_spread"], set()),
        (["--last", "1"], {"train-000002-1"}),
    ],
)
def test_the_ledger_shows_only_what_is_asked_for(run, options, episodes):
    shown = call("runs", "ledger", run, *options)
    assert {row[0] for row in rows(shown) if row[0].startswith("train-")} == episodes


def test_goodput_adds_up_to_all_sampled_tokens(run):
    shown = rows(call("runs", "goodput", run))
    assert [row[:-1] for row in shown[1:4]] == [
        ["dropped:", "no_spread", "4,000", "0.4993"],
        ["trained", "3,400", "0.4244"],
        ["masked", "600", "0.0749"],
    ]
    assert shown[4] == ["dropped:", "run_ended", "12", "0.0015"]
    assert shown[5] == ["sampled", "8,012", "1.0000"]


def test_bias_compares_the_closed_groups_only(run):
    shown = rows(call("runs", "bias", run))
    assert shown[0][:7] == ["2", "of", "4", "episodes", "trained;", "2", "more"]
    [length] = [row for row in shown if row[0] == "length"]
    assert length[1:4] == ["2,000.00", "2,000.00", "1.000"]
    assert length[-1] == "0.250"


def test_what_is_no_run_is_one_message(tmp_path):
    result = CliRunner().invoke(app, ["runs", "bias", str(tmp_path)])
    assert result.exit_code == 1
    assert "is no run folder" in result.output


@pytest.mark.parametrize("status", ["running", "killed"])
def test_a_run_whose_process_is_gone_is_not_running(run, status):
    """The claim names when its process began: number 1 lives, but is another one."""
    directory = RunDirectory(run)
    directory.write_state(RunState(RunStatus.RUNNING, {"main": PolicyVersion(0, 3)}))
    claim = Claim.take(directory.journal)
    file = directory.journal / f"claim-{claim.token:06d}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": os.getpid() if status == "running" else 1}))
    assert rows(call("runs", run.parent))[1] == ["demo-seed0", status, "0.3"]


def test_a_run_of_several_policies_is_listed_with_all_of_them(run):
    versions = {"speaker": PolicyVersion(0, 3), "listener": PolicyVersion(0, 4)}
    RunDirectory(run).write_state(RunState(RunStatus.FINISHED, versions))
    (run / "metrics.jsonl").write_text('{"step": 3, "speaker/eval/reward_mean": 0.5}\n')
    assert " ".join(rows(call("runs", run.parent))[1][2:]) == "speaker 0.3, listener 0.4 speaker 0.500"


def test_bias_has_a_table_for_each_of_several_environments(run):
    lines = [replace(one, environment="sql" if one.group == 0 else "web") for one in LINES]
    (run / "ledger.jsonl").write_bytes(b"".join(codec.to_json(one) + b"\n" for one in lines))
    shown = rows(call("runs", "bias", run))
    assert [row for row in shown if row[0].endswith(":")] == [
        ["sql:", "2", "of", "2", "episodes", "trained"],
        ["web:", "0", "of", "2", "episodes", "trained"],
    ]
    assert len([row for row in shown if row[0] == "length"]) == 1
    assert shown[-1][:4] == ["nothing", "to", "compare", "yet:"]
