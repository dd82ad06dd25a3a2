"""How long an episode waits for the scores of its turns once it has been played, and how stale that makes it.

The scripted scorer takes as long for a batch as the scripted engine for a turn, and episodes have ten turns. Streamed,
the tier asks about each turn while the episode is played; at the end, a scorer of episodes asks about one turn after
the other. Real pool, worker, tier and journal, on a real clock.

Figures: `streaming_latencies` and `at_end_latencies`, from an episode's last reply until it is ready, in latencies of
the scorer, medians; `streaming_most`, `at_end_most`. `streaming_staleness_added` and `at_end_staleness_added`, in
steps: mean staleness of sampled tokens beside that of a run without this scorer (`bare_staleness`), of whole runs by
the real controller on a virtual clock, in which 32 places play a step's eight episodes in two and a half turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.orchestration.config import RunConfig
from agentrl.process.loop import run_async
from agentrl.testing.clock import run_virtual
from agentrl.testing.scorers import SlowScorer
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.types.episode import Episode, Ticket
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.rollout import TurnPlayed
from agentrl.types.score import scored_turns
from tests.benchmarks.report import report
from tests.storms.simulation import SECONDS_PER_TOKEN, TailEngine, run_config, simulate
from tests.storms.worker_pools import DIALOGUE, PlayedPool, make_run, nothing, playing

TURNS = 10
TEN_TURNS = (*[DIALOGUE[0]] * (TURNS - 1), DIALOGUE[-1])
PLACES = 8
_WORDS, _TOKENS_OF_A_WORD = 120, 2
_LIMITS = {"max_turns": TURNS + 2, "max_context_tokens": 1 << 20, "max_reply_tokens": 1 << 20, "total_s": 1e6}
SIMULATED_S = _WORDS * _TOKENS_OF_A_WORD * SECONDS_PER_TOKEN
_latency_s = 0.0


async def one_after_the_other(episode: Episode) -> float:
    """What who scores at the end does: ask the same scorer about each turn. The mean of the turns' values."""
    scorer = SlowScorer(_latency_s)
    answers = [(await scorer.score([turn]))[0] for turn in scored_turns(episode)]
    return statistics.fmean(answer.value for answer in answers if answer.value is not None)


def scorers(way: str, latency_s: float) -> list[dict[str, Any]]:
    """The verifier, and the scorer in one of the ways."""
    global _latency_s
    _latency_s = latency_s
    tier = {"kind": "agentrl.testing.scorers:slow", "name": "slow", "latency_s": latency_s, "late": "wait"}
    function = {"kind": "function", "name": "slow", "function": f"{__name__}:one_after_the_other", "timeout_s": 1e6}
    ways = {
        "streaming": [{**tier, "concurrency": PLACES}],
        "at_end": [{**function, "weight": 1e-6}],
        "bare": [],
    }
    return [{"kind": "verifier"}, *ways[way]]


async def ready_delays(folder: Path, model: Path, way: str, latency_s: float, rounds: int, seed: int) -> list[float]:
    """Seconds from the last reply of each episode until it is ready."""
    environment = {"name": "sql", "options": {}, "scorers": scorers(way, latency_s)}
    run = make_run(model, folder, environment=environment, rollout={"limits": _LIMITS})
    rng, last_s = random.Random(seed), dict[str, float]()
    async with playing(run, TEN_TURNS, latency_s) as pool:
        listen = pool.pool._on_turn
        assert listen is not None

        def on_turn(ticket: Ticket, event: TurnPlayed) -> None:
            last_s[ticket.episode_id] = time.perf_counter()
            listen(ticket, event)

        pool.pool._on_turn = on_turn

        async def play(place: int) -> list[float]:
            await asyncio.sleep(rng.random() * latency_s)
            return [await _one(pool, last_s, place + PLACES * number) for number in range(rounds)]

        found = await asyncio.gather(*map(play, range(PLACES)))
    return [delay for of_place in found for delay in of_place]


async def _one(pool: PlayedPool, last_s: dict[str, float], number: int) -> float:
    played = await pool.pool.play(pool.ticket(number), (), nothing)
    judged = await pool.judge(played)
    assert len(judged.turns) == TURNS
    assert judged.failure is None
    return time.perf_counter() - last_s[judged.episode_id]


class TenTurnEngine(TailEngine):
    """Ten turns of about equal length."""

    def _reply(self, session: str, conversation: Sequence[Message]) -> Message:
        turn = sum(m.role is Role.ASSISTANT for m in conversation)
        words = round(_WORDS * random.Random(f"{session}/{turn}").uniform(0.8, 1.2))
        calls = (ToolCall("", "schema", {}),) if turn < TURNS - 1 else ()
        return Message(Role.ASSISTANT, " ".join(["what"] * words), calls)


def staleness(folder: Path, model: Path, way: str, steps: int) -> float:
    """Mean staleness of the sampled tokens of a simulated run, in steps; its beginning is left out."""
    bare = run_config(model, folder, steps, 0, group_size=4, groups_per_step=2, max_staleness=32)
    table = bare.model_dump(mode="json")
    table["rollout"]["limits"] |= _LIMITS
    table["environments"]["sql"]["scorers"] = scorers(way, SIMULATED_S)
    simulation = run_virtual(simulate(RunConfig.model_validate(table), tiny_chat(model), TenTurnEngine))
    return statistics.fmean(simulation.staleness[steps // 3 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-s", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-scoring-delay-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        delays = {
            way: run_async(ready_delays(folder / way, model, way, given.latency_s, given.rounds, given.seed))
            for way in ("streaming", "at_end")
        }
        stale = {way: staleness(folder / f"simulated-{way}", model, way, given.steps) for way in ("bare", *delays)}
    report(
        "scoring_delay",
        **{f"{way}_latencies": round(statistics.median(of) / given.latency_s, 2) for way, of in delays.items()},
        **{f"{way}_most": round(max(of) / given.latency_s, 2) for way, of in delays.items()},
        bare_staleness=round(stale["bare"], 2),
        **{f"{way}_staleness_added": round(stale[way] - stale["bare"], 2) for way in delays},
        episodes=len(delays["streaming"]),
        turns=TURNS,
        latency_s=given.latency_s,
        steps=given.steps,
        seed=given.seed,
    )


if __name__ == "__main__":
    main()
