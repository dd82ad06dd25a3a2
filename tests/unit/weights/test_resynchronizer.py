from __future__ import annotations

import asyncio

import pytest
from recording_engine import MANIFEST, NEW, OLD, RecordingEngine

from agentrl.inference.fleet import Fleet
from agentrl.testing.clock import run_virtual
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError, PublishError
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.resync import Resynchronizer


class GoneEngine(RecordingEngine):
    """No call reaches it until it is back."""

    is_gone = True

    async def _call(self, name: str) -> None:
        if self.is_gone:
            raise EngineError("does not answer")
        await super()._call(name)


FIRST = WeightsManifest("main", OLD, "/model", {}, 0)


def test_an_engine_set_aside_comes_back_with_a_receipt_while_the_others_are_left_alone() -> None:
    async def run() -> None:
        broken, good = RecordingEngine("broken", "swap"), RecordingEngine("good")
        fleet = Fleet([broken, good], OLD)  # type: ignore[list-item]
        publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), FIRST)
        resynchronizer = Resynchronizer(fleet, publisher)
        running = asyncio.create_task(resynchronizer.run())
        await publisher.publish(MANIFEST)
        calls = list(good.calls)
        await asyncio.sleep(1.0)
        assert fleet.healthy == ["good"]
        assert broken.calls.count("swap") == 3, (
            "published, then tried at once and a quarter of a second after that failed"
        )
        broken.failing = None
        await asyncio.sleep(2.0)
        assert fleet.healthy == ["broken", "good"]
        assert fleet.members["broken"].version == NEW
        assert good.calls == calls
        assert publisher.counts.resyncs == 1
        running.cancel()

    run_virtual(run())


def test_an_engine_that_does_not_answer_has_not_failed_however_long_it_is_gone() -> None:
    async def run() -> None:
        engine = GoneEngine("gone")
        fleet = Fleet([engine], OLD)  # type: ignore[list-item]
        publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), FIRST, wait_s=600.0)
        running = asyncio.create_task(Resynchronizer(fleet, publisher).run())
        publishing = asyncio.create_task(publisher.publish(MANIFEST))
        await asyncio.sleep(300.0)
        assert not running.done()
        engine.is_gone = False
        (receipt,) = await publishing
        assert receipt.version == NEW
        running.cancel()

    run_virtual(run())


def test_when_no_engine_takes_the_weights_the_error_names_phase_and_engine() -> None:
    async def run() -> None:
        engines = [RecordingEngine("x", "swap"), RecordingEngine("y", "receipt")]
        fleet = Fleet(engines, OLD)  # type: ignore[arg-type]
        publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), FIRST, wait_s=100.0)
        publishing = asyncio.create_task(publisher.publish(MANIFEST))
        try:
            async with asyncio.timeout(60.0):
                await Resynchronizer(fleet, publisher).run()
        finally:
            publishing.cancel()

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(run())
    error = caught.value.exceptions[0]
    assert isinstance(error, PublishError)
    assert "x: swap of version 0.4 failed: swap broke; y: receipt of version 0.4 failed: receipt broke" in str(error)
