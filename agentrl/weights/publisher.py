"""Publishes staged weights: each engine by itself is paused, swaps, proves it, and resumes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from agentrl.inference.router import EngineRouter
from agentrl.protocols import Engine, WeightTransport
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.errors import EngineError, PublishError


class ReceiptError(EngineError):
    """An engine serves something else than what was published."""


class StagedPublisher:
    """Publisher of one policy over the engines of a router.

    Invariant: an engine serves rollouts only with a receipt for the newest published version. One that
    fails in any phase is set aside, its sessions go on elsewhere, and the next publish tries it again.
    """

    def __init__(self, router: EngineRouter, transport: WeightTransport) -> None:
        self._router, self._transport = router, transport
        self.aborted_total = 0

    async def publish(self, manifest: WeightsManifest) -> Sequence[Receipt]:
        """Bring the version to all engines.

        Waits for: every engine's receipt or failure; engines do not wait for each other. Unblocked by:
        the deadlines of the calls.

        Raises:
            PublishError: no engine serves the version; names phase and engine of each failure.
        """
        engines = list(self._router.engines.values())
        results = await asyncio.gather(*(self._publish_to(engine, manifest) for engine in engines))
        receipts = [result for result in results if isinstance(result, Receipt)]
        self.aborted_total += sum(receipt.aborted for receipt in receipts)
        if not receipts:
            failures = "; ".join(str(result) for result in results)
            raise PublishError(
                f"version {manifest.version} of policy '{manifest.policy}' reached no engine: {failures}. "
                "Look at the engines' logs, then resume the run"
            )
        return receipts

    async def _publish_to(self, engine: Engine, manifest: WeightsManifest) -> Receipt | str:
        started = time.monotonic()
        phase = "pause"
        try:
            aborted = await engine.pause()
            phase = "swap"
            await self._transport.send(engine, manifest)
            phase = "receipt"
            receipt = await engine.receipt()
            check_receipt(receipt, manifest)
            phase = "resume"
            await engine.resume()
        except EngineError as error:
            self._router.set_aside(engine.name, f"{phase} of version {manifest.version} failed: {error}")
            await self._return_requests(engine)
            return f"{engine.name}: {phase}: {error}"
        self._router.put_back(engine.name)
        return dataclasses.replace(receipt, aborted=aborted, seconds=time.monotonic() - started)

    async def _return_requests(self, engine: Engine) -> None:
        """Give back what still waits inside an engine that serves nobody any more."""
        try:
            await engine.abort_all()
        except EngineError:
            return  # it is gone, and so are its requests: their sessions notice by themselves


def check_receipt(receipt: Receipt, manifest: WeightsManifest) -> None:
    """Compare what an engine serves with what was staged.

    Checksums are compared by tensor name where both sides have the name; an engine that fuses or shards
    its tensors shares no names, and then only the version counts.

    Raises:
        ReceiptError: another version, or another content under a common name.
    """
    if receipt.version != manifest.version:
        raise ReceiptError(f"serves version {receipt.version} instead of {manifest.version}")
    common = receipt.checksums.keys() & manifest.checksums.keys()
    wrong = sorted(name for name in common if receipt.checksums[name] != manifest.checksums[name])
    if wrong:
        raise ReceiptError(f"{len(wrong)} of {len(common)} tensors differ from the published ones, such as {wrong[0]}")
