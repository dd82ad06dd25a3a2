"""One fault after the other on an engine of two under load: does the run go on, and how soon?

Every kind of fault strikes at every phase where it means something: kill, hang (SIGSTOP), slowness, a lost reply,
a call that comes twice, wrong weights under the right label, and old weights behind everybody's back. The run goes
on when every player has had new tokens after the fault and a newer version is served; it has recovered when the struck
engine serves again, with a receipt.

Figures: `faults`; `recovered`; `named_errors`, runs with nothing to go on with that ended by an error naming engine
and phase, of `hopeless`; `hangs`, faults after which neither happened in 60 s; `held`, faults that took an engine away
and let the run go on only once it was back, or hung it and let nobody have a token until it was given up;
`worst_over_deadline_s`, the longest time from a fault to the run's going on, less the deadlines that are declared for
it; `worst_reply_over_s`, the same until every player has had a whole new reply, which takes `healthy_reply_s` at most
where nothing is struck; `tokens_twice`-like checks are `max_gap`, of every token that was committed, recomputed under
the version that its span names, and `unproven_spans`, spans of old weights that came back.
`found_without_protection`: without receipts wrong weights show as a gap, without the publish fence old weights show as
unproven spans.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from agentrl.inference.attempts import Cause
from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from tests.benchmarks.report import report
from tests.storms.fault_recovery import (
    GAP_LIMIT_NATS,
    PLAYERS,
    make_models,
    play_faults,
    play_hopeless,
    play_unprotected,
)
from tests.storms.fault_stage import EMBEDDED, Setting, Stage, started

EVERYWHERE = (FaultKind.KILL, FaultKind.HANG, FaultKind.SLOW, FaultKind.LOST_REPLY, FaultKind.DUPLICATED)
FAULTS = [Fault(kind, phase) for kind in EVERYWHERE for phase in FaultPhase] + [
    Fault(FaultKind.WRONG_WEIGHTS, FaultPhase.SWAP),
    Fault(FaultKind.OLD_WEIGHTS, FaultPhase.GENERATE),
    Fault(FaultKind.OLD_WEIGHTS, FaultPhase.RESUME),
]


async def measure(folder: Path, faults: list[Fault], setting: Setting, benchmark: str) -> None:
    """Play all faults and the storms without protection, and print the line."""
    models = make_models(folder)
    stage = Stage(*models, folder, setting)
    async with started(stage, "a", "b"):
        outcomes, router = await play_faults(stage, faults), stage.router
        max_gap, unproven_spans = stage.max_gap(), stage.unproven_spans()
        publications = max(member.version.step for member in stage.fleet.members.values())
        gap, unproven = await play_unprotected(stage)
    named = await play_hopeless(models, folder, setting)
    report(
        benchmark,
        faults=len(faults),
        recovered=outcomes.recovered,
        named_errors=named,
        hopeless=2,
        hangs=len(outcomes.hangs),
        hanging=outcomes.hangs,
        held=outcomes.held,
        worst_over_deadline_s=round(outcomes.worst_over_s, 2),
        worst_reply_over_s=round(outcomes.worst_reply_over_s, 2),
        healthy_reply_s=round(outcomes.healthy_reply_s, 2),
        max_gap=max_gap,
        unproven_spans=unproven_spans,
        failed_episodes=len(stage.failed_episodes),
        found_without_protection=gap > GAP_LIMIT_NATS and unproven > 0,
        gap_without_receipts=gap,
        unproven_spans_without_fence=unproven,
        publications=publications,
        regenerated=router.regenerated,
        fenced=router.resent[Cause.FENCED],
        players=PLAYERS,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), FAULTS, EMBEDDED, "fault_recovery"))


if __name__ == "__main__":
    main()
