"""An episode of 200,000 tokens through session, journal and packing: how many bytes does a token take at the most?

The engine is scripted and instant, so all memory is the platform's own. Figures: `tokens` of the episode;
`bytes_per_token`, the largest amount of memory that was in use at any time, over all stages; the same for each
stage by itself: playing (context, nodes, requests, journal), reading the journal back, the flat trajectory,
and the trainer's packed batch. `growth` is bytes_per_token over that of an episode half as long: 1 is linear.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agentrl.envs.inline import InlineHost
from agentrl.journal.reading import read_journal
from agentrl.journal.writer import JournalWriter
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.sole_holder import SoleHolder
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import supervised_sequence
from agentrl.types.episode import Episode
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Limits
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl_scaffolds.tool_calling import ToolCalling
from tests.benchmarks.report import report

NUM_TOKENS = 200_000
REPLY_WORDS = 900
T = TypeVar("T")


class WordyEngine:
    """Calls a tool in every reply, with an argument of many words, until the episode is long enough."""

    name = "wordy"

    def __init__(self, chat: ChatFormat, num_tokens: int) -> None:
        call = ToolCall("", "query", {"sql": "count name " * (REPLY_WORDS // 2)})
        self._long = chat.complete(Message(Role.ASSISTANT, "", (call,)))
        self._last = chat.complete(Message(Role.ASSISTANT, "93"))
        self._num_tokens = num_tokens

    async def generate(self, request: GenerationRequest) -> Generation:
        """A long reply, or the last."""
        ids = self._last if len(request.prompt_ids) >= self._num_tokens else self._long
        spans = (VersionSpan(PolicyVersion(0, 0), 0, len(ids)),)
        return Generation(ids, np.full(len(ids), -0.5, np.float32), spans, spans, FinishReason.STOP)


def play(folder: Path, chat: ChatFormat, num_tokens: int) -> Episode:
    """The episode, with every turn on record."""

    async def run() -> Episode:
        writer = JournalWriter(folder, "worker-0")
        limits = Limits(100_000, 10**9, 10**6, 60.0, 3600.0)
        player: Any = Player("main", WordyEngine(chat, num_tokens), chat, Sampling())
        host = InlineHost(faulty, FaultyOptions(), 60.0)
        runner = EpisodeRunner({"agent": player}, ToolCalling(), host, Verifier(60.0), SoleHolder(writer, 1), limits)
        try:
            return await runner.run(runner.open(build_ticket()), _nothing)
        finally:
            await writer.close()

    return asyncio.run(run())


def measured(work: Callable[[], T]) -> tuple[T, int]:
    """A result, and the most bytes that were in use at any time while it was made, the result included."""
    gc.collect()
    tracemalloc.start()
    result = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, peak


def stages(num_tokens: int) -> tuple[int, dict[str, float]]:
    """Tokens of the episode, and bytes per token of each stage."""
    with tempfile.TemporaryDirectory(prefix="agentrl-long-") as name:
        folder = Path(name)
        chat = tiny_chat(make_tiny_model(folder / "model"))
        episode, playing = measured(lambda: play(folder / "journal", chat, num_tokens))
        histories, reading = measured(lambda: read_journal(folder / "journal").lives)
        assert histories[episode.episode_id].episode().num_tokens == episode.num_tokens
        flat, flattening = measured(lambda: build_trajectories(episode)[0])
        _, packing = measured(lambda: pack([supervised_sequence(flat)], "cpu"))
    peaks = {"playing": playing, "reading": reading, "trajectory": flattening, "packing": packing}
    return episode.num_tokens, {stage: round(peak / episode.num_tokens, 1) for stage, peak in peaks.items()}


async def _nothing() -> None:
    """No place is held."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    arguments = parser.parse_args()
    _, half = stages(arguments.tokens // 2)
    tokens, whole = stages(arguments.tokens)
    most = max(whole.values())
    report(
        "long_episode",
        tokens=tokens,
        bytes_per_token=most,
        stages=whole,
        growth=round(most / max(half.values()), 3),
    )


if __name__ == "__main__":
    main()
