from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress

import pytest
from recording_engine import MANIFEST, NEW, OLD, RecordingEngine

from agentrl.inference.calls import LostAnswerError
from agentrl.inference.fleet import EngineState, Fleet
from agentrl.types.batch import Canary, Receipt, WeightsManifest
from agentrl.types.errors import EngineError, EngineTakenError, PublishError
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.receipts import ReceiptBook, ReceiptError, check_receipt

FIRST = WeightsManifest("main", OLD, "/model", {}, 0)


def _publisher(*engines: RecordingEngine, **settings: float) -> tuple[StagedPublisher, Fleet]:
    fleet = Fleet(engines, OLD)  # type: ignore[arg-type]
    return StagedPublisher(fleet, DiskTransport(), PublishConfig(**settings), FIRST), fleet


async def test_each_engine_is_paused_swapped_checked_and_resumed_in_this_order() -> None:
    engines = RecordingEngine("x"), RecordingEngine("y")
    publisher, fleet = _publisher(*engines)
    receipts = await publisher.publish(MANIFEST)
    assert [(receipt.engine, receipt.version, receipt.aborted) for receipt in receipts] == [
        ("x", NEW, 2),
        ("y", NEW, 2),
    ]
    assert all(engine.calls == ["pause", "swap", "receipt", "resume"] for engine in engines)
    assert fleet.healthy == ["x", "y"]


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
    publisher, fleet = _publisher(broken, good)
    assert [receipt.engine for receipt in await publisher.publish(MANIFEST)] == ["good"]
    assert fleet.aside == {"broken": f"{phase} of version 0.4 failed: {phase} broke"}
    assert broken.calls[-2:] == [phase, "abort_all"], "what waits inside must come back"
    assert publisher.counts.failed == {phase: 1}
    assert [receipt.engine for receipt in await publisher.publish(MANIFEST)] == ["good"], "it is left to sync"
    broken.failing = None
    assert isinstance(await publisher.sync("broken"), Receipt)
    assert fleet.aside == {}


async def test_requests_wait_inside_no_engine_that_cannot_even_abort() -> None:
    broken, good = RecordingEngine("broken", "pause"), RecordingEngine("good")
    publisher, fleet = _publisher(broken, good)

    async def gone() -> None:
        raise EngineError("gone")

    broken.abort_all = gone  # type: ignore[method-assign]
    await publisher.publish(MANIFEST)
    assert fleet.healthy == ["good"]


async def test_an_engine_with_a_wrong_receipt_is_not_resumed() -> None:
    lying, good = RecordingEngine("lying"), RecordingEngine("good")
    lying.checksums = {"a": "11", "b": "33"}
    publisher, fleet = _publisher(lying, good)
    await publisher.publish(MANIFEST)
    assert "resume" not in lying.calls
    assert (
        "receipt of version 0.4 failed: 1 of 2 tensors differ from the published ones, such as b"
        in (fleet.aside["lying"])
    )


async def test_with_no_engine_left_the_error_names_policy_version_and_each_phase() -> None:
    publisher, _ = _publisher(RecordingEngine("x", "swap"), RecordingEngine("y", "receipt"))
    message = "version 0.4 of policy 'main' reached no engine: x: swap of version 0.4 failed: swap broke; y: receipt of"
    with pytest.raises(PublishError, match=message):
        await publisher.publish(MANIFEST)


def test_a_receipt_of_another_version_is_refused() -> None:
    with pytest.raises(ReceiptError, match=r"serves version 0\.3 instead of 0\.4"):
        check_receipt(Receipt("x", OLD, MANIFEST.checksums, 0.0, 0), MANIFEST)


def test_an_engine_with_names_of_its_own_is_taken_at_its_version() -> None:
    check_receipt(Receipt("x", NEW, {"fused_ab": "99"}, 0.0, 0), MANIFEST)
    check_receipt(Receipt("x", NEW, {"a": "11", "fused": "99"}, 0.0, 0), MANIFEST)
    check_receipt(Receipt("x", NEW, {}, 0.0, 0), MANIFEST)


def _receipt(engine: str, checksums: dict[str, str], version=NEW) -> Receipt:
    return Receipt(engine, version, checksums, 0.0, 0)


def test_engines_of_one_layout_must_serve_the_same() -> None:
    book = ReceiptBook()
    book.enter(_receipt("x", {"fused": "99"}), MANIFEST)
    book.enter(_receipt("y", {"fused": "99"}), MANIFEST)
    book.enter(_receipt("other", {"fused_otherwise": "77"}), MANIFEST)
    with pytest.raises(ReceiptError, match="1 of 1 tensors differ from engine y's, such as fused"):
        book.check(_receipt("z", {"fused": "98"}), MANIFEST)


def test_new_weights_under_unchanged_checksums_are_the_old_weights() -> None:
    book = ReceiptBook()
    book.enter(_receipt("x", {"fused": "99"}), MANIFEST)
    newer = dataclasses.replace(MANIFEST, version=NEW.next(), checksums={"a": "12", "b": "22"})
    with pytest.raises(ReceiptError, match=r"still serves the weights of version 0\.4, called 0\.5"):
        book.check(_receipt("x", {"fused": "99"}, NEW.next()), newer)
    same = dataclasses.replace(MANIFEST, version=NEW.next())
    book.check(_receipt("x", {"fused": "99"}, NEW.next()), same)


@pytest.mark.parametrize(
    ("scores", "message"),
    [([-1.0, -2.06], "differ by 6.00e-02 nats"), ([-1.0], "1 tokens of a canary of 2"), ([-1.0, float("nan")], "nan")],
)
async def test_an_engine_that_says_other_things_of_the_canary_is_set_aside(scores: list[float], message: str) -> None:
    wrong, good = RecordingEngine("wrong"), RecordingEngine("good")
    wrong.scores, good.scores = scores, [-1.0, -2.04]
    publisher, fleet = _publisher(wrong, good)
    manifest = dataclasses.replace(MANIFEST, canary=Canary((5, 6, 7), (-1.0, -2.0)))
    assert [receipt.engine for receipt in await publisher.publish(manifest)] == ["good"]
    assert "canary of version 0.4 failed" in fleet.aside["wrong"]
    assert message in fleet.aside["wrong"]


async def test_a_version_is_proven_only_after_its_canary() -> None:
    engine = RecordingEngine("x")
    engine.scores = [-1.0]
    publisher, fleet = _publisher(engine)
    seen = []

    async def score(ids: tuple[int, ...]) -> list[float]:
        member = fleet.members["x"]
        seen.append((member.proving, member.version, member.proof.is_set()))
        return [-1.0]

    engine.score = score  # type: ignore[method-assign]
    await publisher.publish(dataclasses.replace(MANIFEST, canary=Canary((5, 6), (-1.0,))))
    member = fleet.members["x"]
    assert seen == [(NEW, OLD, False)]
    assert (member.proving, member.version, member.proof.is_set()) == (None, NEW, True)


async def test_a_publication_without_engines_waits_for_one_that_comes_back() -> None:
    engine = RecordingEngine("x", "swap")
    fleet = Fleet([engine], OLD)  # type: ignore[list-item]
    publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), FIRST, wait_s=20.0)
    publishing = asyncio.create_task(publisher.publish(MANIFEST))
    while fleet.members["x"].state is not EngineState.STALE:
        await asyncio.sleep(0)
    engine.failing = None
    await publisher.sync("x")
    assert [receipt.version for receipt in await publishing] == [NEW]


async def test_a_slow_engine_does_not_hold_the_next_version_back_and_catches_up() -> None:
    slow, quick = RecordingEngine("slow"), RecordingEngine("quick")
    slow.gate.clear()
    publisher, fleet = _publisher(slow, quick, patience_s=0.0)
    assert [receipt.engine for receipt in await publisher.publish(MANIFEST)] == ["quick"]
    newer = dataclasses.replace(MANIFEST, version=NEW.next())
    assert [receipt.version for receipt in await publisher.publish(newer)] == [NEW.next()]
    assert slow.calls == ["pause"]
    slow.gate.set()
    while fleet.members["slow"].version != NEW.next():
        await asyncio.sleep(0)
    assert fleet.members["slow"].served == [OLD, NEW, NEW.next()]
    await publisher.close()


async def test_an_engine_that_comes_back_while_a_version_is_published_gets_that_version_too() -> None:
    back, good = RecordingEngine("back", "swap"), RecordingEngine("good")
    publisher, fleet = _publisher(back, good)
    await publisher.publish(MANIFEST)
    back.failing = None
    back.gate.clear()
    syncing = asyncio.create_task(publisher.sync("back"))
    await asyncio.sleep(0)
    newer = dataclasses.replace(MANIFEST, version=NEW.next())
    assert [receipt.engine for receipt in await publisher.publish(newer)] == ["good"]
    back.gate.set()
    receipt = await syncing
    assert isinstance(receipt, Receipt)
    assert receipt.version == NEW.next()
    assert fleet.members["back"].version == NEW.next()


async def test_what_befalls_a_slow_engine_in_the_background_is_raised_by_the_next_publication() -> None:
    slow, quick = RecordingEngine("slow"), RecordingEngine("quick")
    slow.gate.clear()
    publisher, _ = _publisher(slow, quick, patience_s=0.0)

    async def taken() -> Receipt:
        raise EngineTakenError("engine slow belongs to another run")

    slow.receipt = taken  # type: ignore[method-assign]
    await publisher.publish(MANIFEST)
    slow.gate.set()
    await asyncio.sleep(0.01)
    with pytest.raises(EngineTakenError, match="belongs to another run"):
        await publisher.publish(dataclasses.replace(MANIFEST, version=NEWER))
    await publisher.close()


async def test_an_engine_that_failed_the_canary_is_no_measure_for_its_likes() -> None:
    wrong, good = RecordingEngine("wrong"), RecordingEngine("good")
    wrong.checksums, good.checksums = {"fused": "13"}, {"fused": "99"}
    wrong.scores, good.scores = [-3.0, -2.0], [-1.0, -2.0]
    publisher, fleet = _publisher(wrong, good)
    manifest = dataclasses.replace(MANIFEST, canary=Canary((5, 6, 7), (-1.0, -2.0)))
    await publisher.publish(manifest)
    assert fleet.healthy == ["good"]
    await publisher.publish(dataclasses.replace(manifest, version=NEW.next()))
    assert fleet.healthy == ["good"]


async def test_at_the_start_engines_prove_what_they_hold_without_a_swap() -> None:
    engines = RecordingEngine("right"), RecordingEngine("wrong"), RecordingEngine("broken", "score")
    engines[0].scores, engines[1].scores = [-1.0, -2.0], [-1.0, -2.5]
    first = dataclasses.replace(FIRST, canary=Canary((5, 6, 7), (-1.0, -2.0)))
    fleet = Fleet(engines, OLD)  # type: ignore[arg-type]
    publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), first)
    await publisher.prove()
    assert fleet.healthy == ["right"]
    assert engines[0].calls == ["receipt", "score"]
    assert "canary of version 0.3 failed: the canary's log-probabilities differ by 5.00e-01" in fleet.aside["wrong"]
    assert fleet.aside["broken"] == "canary of version 0.3 failed: score broke"
    assert publisher.counts.failed == {"canary": 2}
    assert (publisher.counts.receipts, publisher.counts.refused) == (1, 1), "a call that fails refuses no receipt"


async def test_an_engine_that_holds_another_version_at_the_start_is_set_aside() -> None:
    engine = RecordingEngine("x")
    engine.version = NEW
    publisher, fleet = _publisher(engine)
    await publisher.prove()
    assert fleet.aside == {"x": "receipt of version 0.3 failed: serves version 0.4 instead of 0.3"}


NEWER = PolicyVersion(0, 5)
UNCHANGED = dataclasses.replace(MANIFEST, version=NEWER, unchanged_since=NEW)


async def test_a_version_of_the_same_weights_is_told_and_proven_without_a_pause() -> None:
    engine = RecordingEngine("x")
    publisher, fleet = _publisher(engine)
    await publisher.publish(MANIFEST)
    engine.calls.clear()
    receipt = (await publisher.publish(UNCHANGED))[0]
    assert engine.calls == ["rename", "receipt"]
    assert (receipt.version, receipt.aborted, receipt.gap_s) == (NEWER, 0, 0.0)
    assert fleet.members["x"].version == NEWER
    counted = publisher.metrics()
    assert (counted["publish/unchanged_total"], counted["publish/receipts_total"]) == (1.0, 2.0)
    assert counted["publish/loaded_bytes_total"] == MANIFEST.num_bytes, "for a name no weights are loaded"
    assert counted["publish/sent_bytes_total"] == MANIFEST.num_bytes
    assert counted["publish/aborted_requests_total"] == 2.0
    assert counted["publish/paused_s_total"] > 0


async def test_an_engine_that_missed_the_weights_of_an_unchanged_version_gets_them() -> None:
    engine = RecordingEngine("x")
    publisher, _ = _publisher(engine)
    await publisher.publish(UNCHANGED)
    assert engine.calls == ["pause", "swap", "receipt", "resume"]


async def test_a_restarted_engine_gets_the_weights_that_its_predecessor_held() -> None:
    first, second = RecordingEngine("x"), RecordingEngine("x")
    publisher, fleet = _publisher(first)
    await publisher.publish(MANIFEST)
    fleet.dead("x", "killed")
    fleet.restarted("x", second)  # type: ignore[arg-type]
    publishing = asyncio.create_task(publisher.publish(UNCHANGED))
    await asyncio.sleep(0)
    assert isinstance(await publisher.sync("x"), Receipt)
    with suppress(PublishError):
        await publishing
    assert second.calls == ["pause", "swap", "receipt", "resume"]


@pytest.mark.parametrize("phase", ["rename", "receipt"])
async def test_an_engine_that_cannot_be_renamed_is_set_aside_and_gets_the_weights(phase: str) -> None:
    engine, other = RecordingEngine("x"), RecordingEngine("y")
    publisher, fleet = _publisher(engine, other)
    await publisher.publish(MANIFEST)
    engine.failing = phase
    assert [receipt.engine for receipt in await publisher.publish(UNCHANGED)] == ["y"]
    assert fleet.aside == {"x": f"{phase} of version 0.5 failed: {phase} broke"}
    engine.failing = None
    engine.calls.clear()
    assert isinstance(await publisher.sync("x"), Receipt)
    assert engine.calls == ["pause", "swap", "receipt", "resume"]


async def test_a_name_that_came_though_its_answer_was_lost_is_proven_by_the_receipt() -> None:
    engine = RecordingEngine("x")
    publisher, fleet = _publisher(engine)
    await publisher.publish(MANIFEST)
    rename = engine.rename

    async def lost(version: PolicyVersion) -> None:
        await rename(version)
        raise LostAnswerError("no answer")

    engine.rename = lost  # type: ignore[method-assign]
    assert [receipt.version for receipt in await publisher.publish(UNCHANGED)] == [NEWER]
    assert fleet.healthy == ["x"]


async def test_other_weights_under_the_name_of_an_unchanged_version_are_found() -> None:
    engine, other = RecordingEngine("x"), RecordingEngine("y")
    publisher, fleet = _publisher(engine, other)
    await publisher.publish(MANIFEST)
    engine.checksums = {"a": "11", "b": "33"}
    await publisher.publish(UNCHANGED)
    assert "1 of 2 tensors differ from the published ones" in fleet.aside["x"]
