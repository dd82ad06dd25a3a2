"""Pieces of journals for tests: lives of episodes in one writer's segments, and ways to spoil a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agentrl.journal import entries as e
from agentrl.journal.reading import JournalState
from agentrl.journal.segments import SegmentFile, segment_path
from agentrl.testing.builders import build_ticket
from agentrl.types.episode import Agent

AGENTS = (Agent("agent", "main"),)


def lease(episode: str, token: int = 1, taken_over: int = 0) -> e.Leased:
    return e.Leased(build_ticket(episode), AGENTS, token, taken_over)


def intent(number: int, token: int = 1) -> e.Intended:
    """An entry that can be told from others by its number."""
    return e.Intended(token, number, ())


def write_segment(folder: Path, writer: str, number: int, batches: Iterable[list[tuple[str | None, e.Entry]]]) -> Path:
    """A segment whose batches were synced one after the other."""
    segment = SegmentFile.create(segment_path(folder, writer, number), number)
    for batch in batches:
        segment.append([e.pack(episode, entry) for episode, entry in batch])
        segment.sync()
    segment.close()
    return segment.path


def xor(path: Path, start: int, end: int) -> None:
    """Every byte from `start` to `end` becomes another."""
    data = bytearray(path.read_bytes())
    data[start:end] = bytes(byte ^ 0xFF for byte in data[start:end])
    path.write_bytes(data)


def numbers_of(state: JournalState, episode: str) -> list[int]:
    """The numbers of an episode's intents, in order; empty without the episode."""
    life = state.lives.get(episode)
    return [entry.step for entry in life.entries if isinstance(entry, e.Intended)] if life else []
