"""Ledger lines for tests of what is told from them."""

from __future__ import annotations

from typing import Any

from agentrl.buffer.ledger import LedgerLine


def trained(group: int, member: int = 0, tokens: int = 10, masked: int = 0, **details: Any) -> LedgerLine:
    """An episode whose tokens but `masked` entered a loss."""
    return _line(group, member, "trained", "", sampled_tokens=tokens, trained_tokens=tokens - masked, **details)


def dropped(group: int, member: int = 0, reason: str = "too_old", tokens: int = 10, **details: Any) -> LedgerLine:
    """An episode that was never trained."""
    return _line(group, member, "dropped", reason, sampled_tokens=tokens, trained_tokens=0, **details)


def _line(group: int, member: int, outcome: str, reason: str, **details: Any) -> LedgerLine:
    masked = details["sampled_tokens"] - details["trained_tokens"] if outcome == "trained" else 0
    values = {
        "episode_id": f"train-{group:06d}-{member}",
        "task": f"fake/train/{group}",
        "attempt": 0,
        "stop": "answered",
        "reward": 1.0,
        "turns": 3,
        "masked_tokens": masked,
        "seconds": 1.5,
        "tool_s": 0.25,
        "step": 1,
    }
    return LedgerLine(group=group, member=member, outcome=outcome, reason=reason, **{**values, **details})
