"""What the publications of one policy have done, counted since the run's process began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.types.batch import Receipt
from agentrl.weights.drain import Drained


class PublishPhase(StrEnum):
    """What an engine goes through for new weights, or for a new name of those that it has (RENAME)."""

    PREPARE = "prepare"
    PAUSE = "pause"
    SWAP = "swap"
    RENAME = "rename"
    RECEIPT = "receipt"
    RESUME = "resume"
    CANARY = "canary"


@dataclass(slots=True)
class PublishCounts:
    """Counters of a publisher; all only grow.

    `receipts` are those that proved their engine, `refused` those that did not, for their checksums or the canary.
    `unchanged` are engines that held the weights of a version already and were only told its name. `aborted` are
    requests that a pause interrupted, `paused_s` the seconds that engines stood still, summed over engines. Of the
    run's requests that an engine had when it began to drain, `drained` ended in time and `cut` did not; `drain_s` are
    the seconds that engines drained, summed over engines.
    `loaded_bytes` are the staged sizes of what engines came to serve. `failed` counts engines by the phase in which
    they failed, `resyncs` those that came back after they were set aside.
    """

    receipts: int = 0
    refused: int = 0
    unchanged: int = 0
    aborted: int = 0
    paused_s: float = 0.0
    drained: int = 0
    cut: int = 0
    drain_s: float = 0.0
    loaded_bytes: int = 0
    resyncs: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def proven(self, receipt: Receipt, num_bytes: int) -> None:
        """An engine has proven that it serves a version, for which it took so many bytes."""
        self.receipts += 1
        self.aborted += receipt.aborted
        self.paused_s += receipt.gap_s
        self.loaded_bytes += num_bytes

    def has_drained(self, drained: Drained) -> None:
        """An engine was let finish before a pause."""
        self.drained += drained.finished
        self.cut += drained.cut
        self.drain_s += drained.seconds

    def metrics(self) -> dict[str, float]:
        """By name, under ``publish/``; a phase in which nothing failed is 0."""
        return {
            "publish/receipts_total": float(self.receipts),
            "publish/refused_receipts_total": float(self.refused),
            "publish/unchanged_total": float(self.unchanged),
            "publish/aborted_requests_total": float(self.aborted),
            "publish/paused_s_total": self.paused_s,
            "publish/drained_requests_total": float(self.drained),
            "publish/cut_requests_total": float(self.cut),
            "publish/drain_s_total": self.drain_s,
            "publish/loaded_bytes_total": float(self.loaded_bytes),
            "publish/resyncs_total": float(self.resyncs),
            **{f"publish/failed_{phase}_total": float(self.failed[phase]) for phase in PublishPhase},
        }
