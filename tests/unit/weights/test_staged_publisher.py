from __future__ import annotations

import asyncio

import pytest

from agentrl.inference.router import EngineRouter
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.errors import EngineError, PublishError
from agentrl.types.version import PolicyVersion
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import ReceiptError, StagedPublisher, check_receipt

OLD, NEW = PolicyVersion(0, 3), PolicyVersion(0, 4)
MANIFEST = WeightsManifest("main", NEW, "/staged/0.4", {"a": "11", "b": "22"}, 100)


class RecordingEngine:
    """Writes down the control calls it gets; `failing` is the one that raises, `slow` waits for the gate."""

    def __init__(self, name: str, failing: str | None = None) -> None:
        self.name, self.failing = name, failing
        self.calls: list[str] = []
        self.version = OLD
        self.checksums = {"a": "11", "b": "22"}
        self.gate = asyncio.Event()
        self.gate.set()

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await self.gate.wait()
        if name == self.failing:
            raise EngineError(f"{name} broke")

    async def pause(self) -> int:
        await self._call("pause")
        return 2

    async def update_weights_from_disk(self, path: str, version: PolicyVersion) -> None:
        assert path == "/staged/0.4"
        await self._call("swap")
        self.version = version

    async def receipt(self) -> Receipt:
        await self._call("receipt")
        return Receipt(self.name, self.version, self.checksums, 0.0, 0)

    async def resume(self) -> None:
        await self._call("resume")

    async def abort_all(self) -> None:
        await self._call("abort_all")


def _publisher(*engines: RecordingEngine) -> tuple[StagedPublisher, EngineRouter]:
    router = EngineRouter(engines)  # type: ignore[arg-type]
    return StagedPublisher(router, DiskTransport()), router


async def test_each_engine_is_paused_swapped_checked_and_resumed_in_this_order() -> None:
    engines = RecordingEngine("x"), RecordingEngine("y")
    publisher, router = _publisher(*engines)
    receipts = await publisher.publish(MANIFEST)
    assert [(receipt.engine, receipt.version, receipt.aborted) for receipt in receipts] == [
        ("x", NEW, 2),
        ("y", NEW, 2),
    ]
    assert all(engine.calls == ["pause", "swap", "receipt", "resume"] for engine in engines)
    assert publisher.aborted_total == 4
    assert router.healthy == ["x", "y"]


async def test_a_slow_engine_does_not_keep_the_others_paused() -> None:
    slow, quick = RecordingEngine("slow"), RecordingEngine("quick")
    slow.gate.clear()
    publisher, _ = _publisher(slow, quick)
    publishing = asyncio.create_task(publisher.publish(MANIFEST))
    await asyncio.sleep(0.01)
    assert quick.calls[-1] == "resume"
    assert not publishing.done()
    slow.gate.set()
    assert len(await publishing) == 2


@pytest.mark.parametrize("phase", ["pause", "swap", "receipt", "resume"])
async def test_an_engine_that_fails_in_a_phase_is_set_aside_with_its_name(phase: str) -> None:
    broken, good = RecordingEngine("broken", phase), RecordingEngine("good")
    publisher, router = _publisher(broken, good)
    assert [receipt.engine for receipt in await publisher.publish(MANIFEST)] == ["good"]
    assert router.aside == {"broken": f"{phase} of version 0.4 failed: {phase} broke"}
    assert broken.calls[-2:] == [phase, "abort_all"], "what waits inside must come back"
    broken.failing = None
    assert len(await publisher.publish(MANIFEST)) == 2
    assert router.aside == {}


async def test_requests_wait_inside_no_engine_that_cannot_even_abort() -> None:
    broken, good = RecordingEngine("broken", "pause"), RecordingEngine("good")
    publisher, router = _publisher(broken, good)

    async def gone() -> None:
        raise EngineError("gone")

    broken.abort_all = gone  # type: ignore[method-assign]
    await publisher.publish(MANIFEST)
    assert router.healthy == ["good"]


async def test_an_engine_with_a_wrong_receipt_is_not_resumed() -> None:
    lying, good = RecordingEngine("lying"), RecordingEngine("good")
    lying.checksums = {"a": "11", "b": "33"}
    publisher, router = _publisher(lying, good)
    await publisher.publish(MANIFEST)
    assert "resume" not in lying.calls
    assert (
        "receipt of version 0.4 failed: 1 of 2 tensors differ from the published ones, such as b"
        in (router.aside["lying"])
    )


async def test_with_no_engine_left_the_error_names_policy_version_and_each_phase() -> None:
    publisher, _ = _publisher(RecordingEngine("x", "swap"), RecordingEngine("y", "receipt"))
    message = "version 0.4 of policy 'main' reached no engine: x: swap: swap broke; y: receipt: receipt broke"
    with pytest.raises(PublishError, match=message):
        await publisher.publish(MANIFEST)


def test_a_receipt_of_another_version_is_refused() -> None:
    with pytest.raises(ReceiptError, match=r"serves version 0\.3 instead of 0\.4"):
        check_receipt(Receipt("x", OLD, MANIFEST.checksums, 0.0, 0), MANIFEST)


def test_an_engine_with_names_of_its_own_is_taken_at_its_version() -> None:
    check_receipt(Receipt("x", NEW, {"fused_ab": "99"}, 0.0, 0), MANIFEST)
    check_receipt(Receipt("x", NEW, {"a": "11", "fused": "99"}, 0.0, 0), MANIFEST)
    check_receipt(Receipt("x", NEW, {}, 0.0, 0), MANIFEST)
