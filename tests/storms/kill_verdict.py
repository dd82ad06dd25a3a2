"""Looks at what killed runs leave behind, and says what was lost, done twice or made again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.journal.entries import Ended, Intended, Leased, PartialReply, TurnCommitted
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.reading import read_journal
from agentrl.types.task import Split

EXTERNAL = "schema"
_BYTES_A_TOKEN = 4  # ids are of 32 bits


@dataclass(slots=True)
class KillVerdict:
    """Facts of earlier looks, against which each later one is held.

    `turns_lost` counts turns that were on record and are no more, replies that do not go on from the parts of them
    that were, and turns that acted without being on record;
    `effects_twice` calls that one instance carried out twice, or an external one that ran twice at all;
    `regenerated` turns made again and ended episodes played again; `ledger_gaps` episodes without exactly one line.
    """

    run: Path
    count_file: Path
    turns_lost: int = 0
    regenerated: int = 0
    ledger_gaps: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Sampled tokens of each episode, the most that a look found on record."""
    _turns: dict[tuple[str, int], bytes] = field(default_factory=dict)
    _parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    _intents: set[str] = field(default_factory=set)
    _leased: set[str] = field(default_factory=set)
    _twice: set[str] = field(default_factory=set)
    _unknown: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Read the journal of a run that is dead, and compare."""
        self._compare(self._on_ledger(self._covered_bytes()))

    def _compare(self, final: Counter[str]) -> None:
        histories = read_journal(self.run / "journal").lives
        found: dict[tuple[str, int], bytes] = {}
        open_parts: dict[tuple[str, int], bytes] = {}
        for name, history in histories.items():
            self._leased.add(name)
            # Of an episode that is final, segments may be gone already: its rest says nothing.
            self.turns_lost += name not in final and not history.is_whole
            turns = self._read(name, history, open_parts, name in final)
            found |= turns
            num_bytes = sum(map(len, turns.values())) + len(open_parts.get((name, len(turns)), b""))
            self.tokens[name] = max(self.tokens.get(name, 0), num_bytes // _BYTES_A_TOKEN)
        for key, tokens in self._turns.items():
            self.turns_lost += key[0] not in final and found.get(key) != tokens
        for key, tokens in self._parts.items():
            now = found.get(key, open_parts.get(key, b""))
            self.turns_lost += key[0] not in final and not now.startswith(tokens)
        self._turns = {key: tokens for key, tokens in found.items() if key[0] not in final}
        self._parts = {key: tokens for key, tokens in open_parts.items() if key[0] not in final}
        self._count_effects(set(final))

    def close(self) -> None:
        """The run is finished: every episode that was ever leased has one line."""
        # A run that has ended writes the ends of what was in flight behind its last checkpoint; none follows.
        lines = self._on_ledger()
        self._compare(lines)
        self.ledger_gaps = sum(lines[name] != 1 for name in self._leased | set(lines))

    @property
    def effects_twice(self) -> int:
        """Effects that happened twice."""
        return len(self._twice)

    @property
    def num_turns(self) -> int:
        """Turns that acted."""
        return len(self._intents)

    @property
    def num_episodes(self) -> int:
        """Episodes that were leased."""
        return len(self._leased)

    def _read(
        self, name: str, history: EpisodeHistory, open_parts: dict[tuple[str, int], bytes], is_final: bool
    ) -> dict[tuple[str, int], bytes]:
        """Tokens of the episode's replies; those of a reply that is not whole yet go to `open_parts`."""
        turns: dict[tuple[str, int], bytes] = {}
        parts, has_ended = b"", False
        for entry in history.entries:
            match entry:
                case Leased():
                    self.regenerated += has_ended
                case PartialReply():
                    parts += entry.generation.token_ids.tobytes()
                case TurnCommitted():
                    key = (name, entry.turn.index)
                    self.regenerated += key in turns
                    turns[key] = entry.nodes[-1].token_ids.tobytes()
                    self.turns_lost += not is_final and not turns[key].startswith(parts)
                    parts = b""
                case Intended():
                    self._intents |= {effect.effect_id for effect in entry.effects}
                case Ended():
                    has_ended = True
        if parts:
            open_parts[name, len(turns)] = parts
        return turns

    def _count_effects(self, final: set[str]) -> None:
        # Episodes of an evaluation are on no record: each evaluation plays all of them anew, under the same names.
        effects = [line.split(" ", 2) for line in _lines(self.count_file) if not line.startswith(f"{Split.HELDOUT}-")]
        in_instance = Counter((effect, instance) for effect, instance, _ in effects)
        outside = Counter(effect for effect, _, tool in effects if tool == EXTERNAL)
        self._twice |= {effect for (effect, _), times in in_instance.items() if times > 1}
        self._twice |= {effect for effect, times in outside.items() if times > 1}
        acted = {effect for effect, _, _ in effects if effect.split("/")[0] not in final}
        self.turns_lost += len(acted - self._intents - self._unknown)
        self._unknown |= acted - self._intents

    def _on_ledger(self, num_bytes: int | None = None) -> Counter[str]:
        """Episodes by their number of lines."""
        return Counter(json.loads(line)["episode_id"] for line in _lines(self.run / "ledger.jsonl", num_bytes))

    def _covered_bytes(self) -> int:
        """How far the newest checkpoint knows the ledger; a resumed run cuts off what is behind that."""
        checkpoints = [json.loads(path.read_text()) for path in self.run.glob("checkpoints/*/*/progress.json")]
        return max(checkpoints, key=lambda progress: progress["number"])["ledger_bytes"] if checkpoints else 0


def _lines(file: Path, num_bytes: int | None = None) -> list[str]:
    """Whole lines of a file, or of its first bytes; one that a kill cut off was never finished."""
    if not file.is_file():
        return []
    return [line for line in file.read_bytes()[:num_bytes].decode().split("\n")[:-1] if line]
