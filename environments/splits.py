"""Which split a text belongs to: a name, a question, a start of a game."""

from __future__ import annotations

import zlib

from agentrl.types.task import Split


def split_of(text: str, one_in: int = 4) -> Split:
    """The split that owns a text, by its checksum alone: one in so many is held out, and never seen in training.

    Example: the same text is always of the same split; of a thousand texts some 250 are held out.
    """
    return Split.HELDOUT if zlib.crc32(text.encode()) % one_in == 0 else Split.TRAIN
