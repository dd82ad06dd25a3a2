"""What the network does to calls and answers: with one engine and with two, while weights are published."""

from __future__ import annotations

import asyncio

import pytest
from engine_server import EngineCalls, Reference
from proxied_fleet import RECOVERY_S, ProxiedFleet, check_logprobs

from agentrl.inference import client
from agentrl.inference.attempts import Cause
from agentrl.testing.fault_proxy import ProxyFault, Rule

pytestmark = [pytest.mark.timeout(900)]

OUTAGE_S = 1.5
RESUME, PAUSE = "/continue_generation", "/pause_generation"
SESSIONS = "session"
CUTS = [
    Rule(ProxyFault.CUT, times=3, rid=SESSIONS),
    Rule(ProxyFault.DELAYED, times=3, seconds=0.5, rid=SESSIONS),
    Rule(ProxyFault.DOUBLED, times=3, rid=SESSIONS),
]
FOREIGN = [
    Rule(ProxyFault.SWAPPED, times=6, rid=SESSIONS),
    Rule(ProxyFault.REPLAYED, times=3, rid=SESSIONS),
    Rule(ProxyFault.EMPTIED, times=3, rid=SESSIONS),
]
LOSSES = [
    Rule(ProxyFault.LOST_ANSWER, times=3, rid=SESSIONS),
    Rule(ProxyFault.LOST_CALL, times=3, rid=SESSIONS),
    Rule(ProxyFault.BAD_GATEWAY, times=3, rid=SESSIONS),
    Rule(ProxyFault.UNAVAILABLE, times=3, rid=SESSIONS),
]
REFUSALS = [Rule(ProxyFault.BUSY, times=3, rid=SESSIONS)]
CANARIES = [Rule(ProxyFault.LOST_ANSWER, times=2), Rule(ProxyFault.SWAPPED, times=4), Rule(ProxyFault.BUSY)]
CONTROLS = [
    [Rule(ProxyFault.LOST_ANSWER, RESUME)],
    [Rule(ProxyFault.LOST_CALL, RESUME, times=2)],
    [Rule(ProxyFault.SILENT, RESUME)],
    [Rule(ProxyFault.DOUBLED, RESUME), Rule(ProxyFault.LOST_ANSWER, PAUSE), Rule(ProxyFault.LOST_CALL, PAUSE)],
    [Rule(ProxyFault.BAD_GATEWAY, PAUSE), Rule(ProxyFault.LOST_ANSWER, "/model_info")],
]


async def _suffer(fleet: ProxiedFleet, name: str, *groups: list[Rule]) -> None:
    await fleet.recover(name)
    for rules in groups:
        await fleet.suffer(name, *rules)
    await fleet.proxies[name].stop()
    await asyncio.sleep(OUTAGE_S)
    await fleet.proxies[name].start()
    async with asyncio.timeout(RECOVERY_S):
        await fleet.recover(name)


def _check(fleet: ProxiedFleet, reference: Reference) -> None:
    """No token is foreign, lost or of other weights than it says."""
    assert fleet.failures == []
    verdict, resent = fleet.verdict(), fleet.router.resent
    assert verdict.committed > 1000
    assert (verdict.foreign, verdict.misversioned) == (0, 0)
    assert verdict.unclaimed <= resent[Cause.FENCED] + resent[Cause.DROPPED], "an answer that came was not taken"
    check_logprobs(fleet, reference, num_replies=40)
    assert resent[Cause.DROPPED] > 0
    assert resent[Cause.MISDELIVERED] > 0


async def test_a_lone_engine_behind_a_faulty_network_loses_no_episode(
    engine: EngineCalls, reference: Reference
) -> None:
    async with ProxiedFleet.playing(a=engine) as fleet:
        await _suffer(fleet, "a", CUTS, FOREIGN, LOSSES, REFUSALS, CANARIES, *CONTROLS)
        assert fleet.clients["a"].repeated_calls[RESUME] >= 4
        assert fleet.router.resent[Cause.BUSY] > 0
    _check(fleet, reference)


async def test_without_the_check_of_identity_a_faulty_network_brings_foreign_tokens(
    engine: EngineCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "mismatch", lambda answer, body: None)
    async with ProxiedFleet.playing(a=engine) as fleet:
        await fleet.recover("a")
        await fleet.suffer("a", Rule(ProxyFault.SWAPPED, times=12, rid=SESSIONS))
    assert fleet.router.resent[Cause.MISDELIVERED] == 0
    assert fleet.verdict().foreign > 0


@pytest.mark.long
async def test_two_engines_behind_a_faulty_network_lose_no_episode(
    engine: EngineCalls, second_engine: EngineCalls, reference: Reference
) -> None:
    async with ProxiedFleet.playing(a=engine, b=second_engine) as fleet:
        await _suffer(fleet, "a", CUTS + FOREIGN, LOSSES + REFUSALS)
        await _suffer(fleet, "b", *CONTROLS[1:4])
    _check(fleet, reference)
