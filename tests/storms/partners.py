"""Runs of the signals game in processes of their own, and what they leave of each policy, read plainly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.inference.wire import parse_checksums
from agentrl.journal.reading import read_journal

RECIPES = Path(__file__).parents[2] / "environments" / "signals"
FLUENT = "lessons=[{expert='fluent', agent='listener', transcripts=1024, max_steps=100}]"


def warm_start(output: Path, agent: str, *overrides: str) -> Path:
    """A model that acts as an agent by the recipe of its name."""
    _agentrl("warmstart", RECIPES / f"{agent}.toml", f"output={output}", *overrides).check_returncode()
    return output


def start(recipe: str, speaker: Path, listener: Path, folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a run of a recipe, in a process group of its own."""
    models = (f"policies.speaker.model={speaker}", f"policies.listener.model={listener}")
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            _command("train", RECIPES / recipe, *models, f"runs_folder={folder / 'runs'}", *overrides),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def resume(run: Path) -> subprocess.CompletedProcess[bytes]:
    """Let a killed run go on to its end."""
    return _agentrl("resume", run)


def steps_on_record(run: Path) -> dict[str, list[int]]:
    """Steps of each policy that have metrics, in the order in which they were made."""
    rows = _rows(run / "metrics.jsonl")
    names = ("speaker", "listener")
    return {name: [row["step"] for row in rows if _trained_tokens(row, name) is not None] for name in names}


def twice_trained(run: Path) -> list[tuple[str, str]]:
    """Policies and episodes that more than one step of the policy took, by the journal; a redone step counts once."""
    taken = {(t.policy, t.step, name) for t in read_journal(run / "journal").taken for _, of in t.groups for name in of}
    counts = Counter((policy, name) for policy, _, name in taken)
    return [key for key, count in counts.items() if count > 1]


def trained_by(run: Path) -> dict[str, Counter[int]]:
    """Episodes of each policy's steps, by the ledger."""
    found: dict[str, Counter[int]] = {}
    for line in _rows(run / "ledger.jsonl"):
        for policy, step in line["trained_by"].items():
            found.setdefault(policy, Counter())[step] += 1
    return found


def engine_checksums(run: Path, policy: str, model: Path) -> dict[str, str]:
    """What the rollouts' engine of a policy says of its weights, asked while the run goes on; empty without an answer.

    Raises LookupError if there is no such engine.
    """
    for entry in Path("/proc").iterdir():
        line = _arguments(entry) if entry.name.isdigit() else []
        is_engine = "--weight-version" in line and str(model.resolve()) in line
        if is_engine and f"engine-{policy}-0" in _output_of(entry) and str(run) in _output_of(entry):
            url = f"http://127.0.0.1:{line[line.index('--port') + 1]}/weights_checker"
            answer = httpx.post(url, json={"action": "checksum"}, trust_env=False, timeout=30)
            return dict(parse_checksums(answer.raise_for_status().json()))
    raise LookupError(f"no engine of policy '{policy}' of {run}")


def file_checksums(model: Path) -> dict[str, str]:
    """The same of the files of a model."""
    return {name: tensor_checksum(tensor) for name, tensor in load_file(model / "model.safetensors").items()}


def largest_change(before: Path, after: Path) -> float:
    """Largest absolute difference of a weight between the files of two models."""
    first, second = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def weights_left(run: Path, policy: str) -> list[Path]:
    """Folders of weights that a run has made of a policy."""
    return sorted(path.parent for path in run.glob(f"*/{policy}/*/model.safetensors"))


def _trained_tokens(row: dict[str, float], policy: str) -> float | None:
    return row.get(f"{policy}/batch/trained_tokens")


def _rows(file: Path) -> list[dict]:
    """Whole lines alone: the last may be under way."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli.main", *map(str, arguments)]


def _agentrl(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(_command(*arguments), capture_output=True, check=False)


def _arguments(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_text().split("\0")
    except OSError:
        return []


def _output_of(entry: Path) -> str:
    try:
        return os.readlink(entry / "fd" / "1")
    except OSError:
        return ""
