"""Whole runs with engine and trainer on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.testing.tiny import make_tiny_model
from tests.integration import runs

pytestmark = pytest.mark.long

STEPS = 4
# The first in turn, where the engine is deterministic and every step has tokens of the very weights that it trains.
MODES = {
    "in_turn": ("float32", ("buffer.max_staleness=0",)),
    "bfloat16": ("bfloat16", ()),
    "lora": ("bfloat16", ("policies.main.trainer.lora={rank = 4}",)),
}


def overrides_of(dtype: str, device: str, transport: str, bound: float) -> list[str]:
    return [
        f"steps={STEPS}",
        f'policies.main.engine={{kind = "embedded", args = {{device = "{device}", dtype = "{dtype}"}}}}',
        f"policies.main.trainer.device={device}",
        f"policies.main.trainer.dtype={dtype}",
        f"policies.main.trainer.max_gap_nats={bound}",
        f"policies.main.publish.max_canary_gap_nats={bound}",
        f"policies.main.publish.transport={transport}",
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_trains_on_the_device_and_publishes_through_its_memory(
    mode: str, device: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    dtype, more = MODES[mode]
    place = "cuda:0" if device == "cuda" else "cpu"
    transport = '{kind = "adapter"}' if mode == "lora" else f'{{kind = "tensors", device = "{place}"}}'
    model = make_tiny_model(tmp_path / "model")
    arguments = runs.train_arguments(tmp_path, model, *overrides_of(dtype, device, transport, bounds[dtype]), *more)
    result = runs.agentrl(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    assert runs.state(run)["status"] == "finished"
    steps = [row for row in runs.metrics(run) if "time/train_step_s" in row]
    assert [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    fresh = [row for row in steps if row.get("trainer/fresh_tokens")]
    assert len(fresh) == STEPS if mode == "in_turn" else fresh
    assert max(row["trainer/fresh_gap_max_nats"] for row in fresh) < bounds[dtype]
    assert sum(row["outcome"] == "trained" for row in runs.rows(run / "ledger.jsonl")) == STEPS * 8
