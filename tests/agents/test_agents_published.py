"""All agents play at once, in sandboxes, on two real engines whose weights are published about every second."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.gateway.starting import LazyGateway
from agentrl.inference.config import ClientConfig, FleetConfig, SGLangEngineConfig
from agentrl.rollouts.recorded_replies import Generating
from agentrl.rollouts.replies import session_key
from agentrl.sandbox.client import KeeperHost
from agentrl.testing.scripted import Script
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model, tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode, StopReason
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion
from tests.agents.cases import AGENTS, CLAUDE_CODE, CODEX, AgentCase
from tests.agents.episodes import LIMITS, play_episode
from tests.agents.policies import POLICIES
from tests.agents.writing import ONE_FILE, TWO_FILES
from tests.servers.scripted_engine import prompt_name
from tests.storms.deliveries import check_episode
from tests.storms.fault_stage import Setting, playing, started
from tests.storms.gateway_storm import RecordedStage

pytestmark = pytest.mark.timeout(900)
PLAYED = [*((case, ONE_FILE, 1) for case in AGENTS), (CODEX, TWO_FILES, 3), (CLAUDE_CODE, TWO_FILES, 3)]
LEAST_PUBLICATIONS, LEAST_VERSIONS = 10, 4


@dataclass(frozen=True)
class Announced:
    """Tells the engines, ahead of each request, what the script has to say to it."""

    router: Generating
    chat: ChatFormat
    script: Script
    folder: Path

    async def generate(self, request: GenerationRequest) -> Generation:
        reply = self.chat.complete(self.script(request.session, request.conversation)).tolist()
        name = prompt_name(self.prompt_of(request, reply))
        if not (self.folder / name).is_file():
            (self.folder / f"{name}.part").write_text(json.dumps(reply))
            (self.folder / f"{name}.part").rename(self.folder / name)
        return await self.router.generate(request)

    def prompt_of(self, request: GenerationRequest, reply: list[int]) -> list[int]:
        """The request's prompt without the beginning of the reply that it may continue."""
        ids = request.prompt_ids.tolist()
        known = next(n for n in range(len(reply)) if ids[len(ids) - n :] == reply[:n] and self._begins(ids, n))
        return ids[: len(ids) - known]

    def _begins(self, ids: list[int], known: int) -> bool:
        begin = self.chat.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        return ids[len(ids) - known - len(begin) : len(ids) - known] == list(begin)


async def play(
    stage: RecordedStage, gateway: LazyGateway, case: AgentCase, files: list[tuple[str, str]], number: int
) -> Episode:
    chat = tiny_chat(stage.models[0])
    engine = Announced(stage.router, chat, POLICIES[case.name], stage.logs / "replies")
    return await play_episode(case, engine, chat, files, gateway, f"{case.name}-{len(files)}-{number}")


def staged(folder: Path) -> RecordedStage:
    shape = TINY_SHAPE.model_copy(update={"context_tokens": LIMITS.max_context_tokens})
    (folder / "replies").mkdir()
    even, odd, wrong = (make_tiny_model(folder / f"model-{n}", n, shape) for n in range(3))
    args = {"deliveries": str(folder / "deliveries.jsonl"), "replies": str(folder / "replies")}
    config = SGLangEngineConfig(
        kind="sglang",
        command=[sys.executable, "-m", "tests.servers.scripted_engine"],
        args={"max_running_requests": 8, "window": 256, **args},  # prompts of agents are long, and weights come often
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    client = ClientConfig(generate_s=300.0, control_s=60.0, load_s=60.0, connect_s=10.0)
    watch = FleetConfig(probe_s=5.0, suspect_s=60.0, dead_s=120.0, wait_s=300.0)
    return RecordedStage((even, odd), wrong, folder, Setting(config, client, watch, calm_s=1.0))


async def test_no_agent_notices_that_weights_are_published_and_every_token_is_the_engines(
    host: KeeperHost, tmp_path: Path
) -> None:
    stage, gateway = staged(tmp_path), LazyGateway()
    episodes: list[tuple[Episode, int]] = []

    def num_published() -> int:
        return min(member.version.step for member in stage.fleet.members.values())

    def num_aborts() -> int:
        return sum(turn.aborts for episode, _ in episodes for turn in episode.turns)

    def versions() -> set[PolicyVersion]:
        samples = [node.sample for episode, _ in episodes for node in episode.nodes if node.sample]
        return {span.version for sample in samples for span in sample.versions}

    async def play_on() -> None:
        for number in range(100):
            for case, files, branches in PLAYED[:: 1 if number % 2 == 0 else -1]:
                episodes.append((await play(stage, gateway, case, files, number), branches))
            if num_published() >= LEAST_PUBLICATIONS and num_aborts() and len(versions()) >= LEAST_VERSIONS:
                return

    async with started(stage, "main-0", "main-1"), playing(stage, 0) as publishing:
        players = asyncio.create_task(play_on())
        await asyncio.wait({players, publishing}, return_when=asyncio.FIRST_COMPLETED)
        assert players.done(), "the publications have failed"
        await players
        await gateway.close()
    for episode, branches in episodes:
        faults = check_episode(episode, stage.deliveries(session_key(episode.ticket, "main")))
        assert (faults.tokens_wrong, faults.branches_wrong) == (0, 0), faults.notes
        assert (episode.failure, episode.reward, episode.stop_reason) == (None, 1.0, StopReason.ANSWERED)
        assert not {"refused", "sent_again", "unheard"} & episode.counts.keys()
        assert (episode.counts["programs_failed"], len(build_trajectories(episode))) == (0, branches)
    assert num_aborts() > 0
    assert len(versions()) >= LEAST_VERSIONS
    print(f"{sum(len(e.turns) for e, _ in episodes)} calls, {num_published()} publications, {len(versions())} versions")
