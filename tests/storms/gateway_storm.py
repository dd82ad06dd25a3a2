"""A storm over the gateway: programs call it by the official SDKs while weights are published and connections break.

Two engines serve a scripted policy by the real protocol, behind the real router, fleet and publisher. Each episode is
held against what its engines delivered, and against the conversations that its programs had.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from agentrl.envs.inline import InlineHost
from agentrl.gateway import calls, connections
from agentrl.gateway.starting import LazyGateway
from agentrl.inference.config import ClientConfig, FleetConfig, SGLangEngineConfig
from agentrl.protocols import ScaffoldContext
from agentrl.rollouts import runner
from agentrl.rollouts.conversations import Conversations
from agentrl.rollouts.replies import session_key
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.chaos import ChaosEngine, Fault, FaultKind, FaultPhase
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model, tiny_chat
from agentrl.types.episode import Episode
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits
from tests.storms.abort_layers import ForgetfulEngine
from tests.storms.cutting_proxy import CuttingProxy
from tests.storms.deliveries import Delivery, Faults, Graph, check_episode, join
from tests.storms.fault_stage import Setting, Stage, playing, started
from tests.storms.gateway_clients import speaking
from tests.storms.gateway_programs import Program
from tests.storms.played_tree import PlainFormat, PlayedTree

PROTECTIONS = ("retries", "connections", "messages", "partials")
"""What is switched off in turn: calls that are sent again are known, an answer is taken for lost with its connection,
contexts are found by messages, and what an aborted request had is kept."""

_ROOT = Path(__file__).parents[2]
_LIMITS = Limits(max_turns=1 << 20, max_context_tokens=8192, max_reply_tokens=512, tool_s=60.0, total_s=900.0)
_CUT_SHARE = 0.2
_CALM_S = 0.6
_LOST_REPLY_EVERY_S = 3.0
_DEADLINE_S = 900.0
_ANSWER = Message(Role.ASSISTANT, "done")


@dataclass(frozen=True)
class StormPlan:
    """How long it blows: at least so many calls and publications; without a protection until a fault is found.

    `num_at_once` episodes are in play, of some 20 calls each.
    """

    folder: Path
    num_calls: int
    num_publishes: int
    seed: int = 0
    without: str = ""
    num_at_once: int = 5


@dataclass
class StormReport:
    """What a storm did and found; `client_errors` says of each error what it was, of those that it did not provoke."""

    calls: int = 0
    publishes: int = 0
    episodes: int = 0
    sampled_tokens: int = 0
    aborts: int = 0
    client_errors: list[str] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    did: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        return not (self.client_errors or self.faults.tokens_wrong or self.faults.branches_wrong)


@dataclass
class RecordedStage(Stage):
    """A stage that notes whose requests were answered, by their ids, in that order."""

    received: dict[str, str] = field(default_factory=dict)

    async def _launch(self, name: str) -> ChaosEngine:
        actor = await super()._launch(name)
        answer = actor.generate

        async def generate(request: GenerationRequest) -> Generation:
            generation = await answer(request)
            self.received[request.rid] = request.session
            return generation

        actor.generate = generate  # type: ignore[method-assign]
        return actor

    def deliveries(self, session: str) -> list[Delivery]:
        """What was delivered to a session, as the engines wrote it down."""
        lines = (self.logs / "deliveries.jsonl").read_text().splitlines()
        written = {line["rid"]: line for line in map(_parsed, lines) if line}
        return [_delivery(written[rid]) for rid, whose in self.received.items() if whose == session]


class ByTokensAlone(Conversations):
    """The protection switched off: what continues a reply is found by its tokens, rendered again."""

    def _extended(self, *arguments: object) -> None:
        return None


async def storm(plan: StormPlan) -> StormReport:
    """Waits for: the calls and publications of the plan. Unblocked by: these, or `_DEADLINE_S`."""
    plan.folder.mkdir(parents=True)
    shape = TINY_SHAPE.model_copy(update={"context_tokens": _LIMITS.max_context_tokens})
    even, odd, wrong = (make_tiny_model(plan.folder / f"model-{n}", n, shape) for n in range(3))
    config = SGLangEngineConfig(
        kind="sglang",
        command=[sys.executable, "-m", "tests.servers.scripted_engine"],
        args={"max_running_requests": 8, "deliveries": str(plan.folder / "deliveries.jsonl")},
        env={"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
    )
    setting = Setting(
        config,
        ClientConfig(generate_s=120.0, control_s=30.0, load_s=60.0, connect_s=10.0),
        FleetConfig(probe_s=2.0, suspect_s=30.0, dead_s=60.0, wait_s=240.0),
        calm_s=_CALM_S,
    )
    stage = RecordedStage((even, odd), wrong, plan.folder, setting)
    async with started(stage, "main-0", "main-1"), asyncio.timeout(_DEADLINE_S):
        with _without(plan.without):
            return await _Storm(stage, plan).rage()


class _Storm:
    """One storm: episodes in play, and what came of those that have ended."""

    def __init__(self, stage: RecordedStage, plan: StormPlan) -> None:
        self._stage, self._plan = stage, plan
        self._rng = random.Random(plan.seed)
        self._form = PlainFormat(stage.models[0])
        self._gateway = LazyGateway()
        self._report = StormReport()
        self._played = 0

    async def rage(self) -> StormReport:
        async with playing(self._stage, 0) as play:
            striking = asyncio.create_task(self._strike_for_ever())
            episodes = asyncio.create_task(self._play_all())
            try:
                await asyncio.wait({play, episodes}, return_when=asyncio.FIRST_COMPLETED)
                if play.done():
                    play.result()
                await episodes
            finally:
                striking.cancel()
                episodes.cancel()
                await self._gateway.close()
        return self._report

    async def _play_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.num_at_once):
                group.create_task(self._play_on())

    async def _play_on(self) -> None:
        while not self._is_over():
            self._played += 1
            await self._play(self._played)

    def _is_over(self) -> bool:
        if self._plan.without and not self._report.is_clean:
            return True
        return self._report.calls >= self._plan.num_calls and self._report.publishes >= self._plan.num_publishes

    async def _play(self, number: int) -> None:
        """One episode, and what is wrong with it."""
        router = self._stage.router
        # Of every third, or else no reply would come to its end on a machine that publishes faster than it draws.
        engine = ForgetfulEngine(_Named(router), 3) if self._plan.without == "partials" else router
        players = {"main": Player("main", engine, tiny_chat(self._stage.models[0]), Sampling())}
        scaffold = _Storming(self._form, random.Random(f"{self._plan.seed}/{number}"))
        host = InlineHost(faulty, FaultyOptions(), _LIMITS.tool_s)
        plays = EpisodeRunner(
            players, scaffold, host, Verifier(_LIMITS.tool_s), RecordingJournal(), _LIMITS, self._gateway
        )
        ticket = replace(build_ticket(f"storm-{number}"), seed=number)
        episode = await plays.run(plays.open(ticket), _nothing)
        session = session_key(ticket, "main")
        router.end_session(session)
        self._judge(episode, scaffold, self._stage.deliveries(session))

    def _judge(self, episode: Episode, scaffold: _Storming, deliveries: Sequence[Delivery]) -> None:
        report, program = self._report, scaffold.program
        report.faults.add(check_episode(episode, deliveries))
        report.faults.add(scaffold.tree.check(Graph(episode.nodes), join(deliveries)))
        report.client_errors += [] if program is None else program.errors
        if episode.failure is not None:
            report.client_errors.append(f"the episode failed: {episode.failure}")
        if program is not None:
            report.did.update(program.counts)
            # A connection that broke without anybody's doing is an error that the program saw.
            too_many = program.counts["cut_off"] - scaffold.cuts.total()
            report.client_errors += ["a connection broke"] * max(0, too_many)
        report.did.update({f"cut_{cut}": number for cut, number in scaffold.cuts.items()})
        report.counted.update(episode.counts)
        report.calls += len(scaffold.tree.asked)
        report.episodes += 1
        report.sampled_tokens += episode.num_sampled_tokens
        report.aborts += sum(turn.aborts for turn in episode.turns)
        report.publishes = min(member.version.step for member in self._stage.fleet.members.values())
        print(
            f"{report.calls} calls, {report.publishes} publications, {report.aborts} aborts, "
            f"{report.faults.tokens_wrong} tokens and {report.faults.branches_wrong} branches wrong, "
            f"{len(report.client_errors)} errors",
            file=sys.stderr,
            flush=True,
        )

    async def _strike_for_ever(self) -> None:
        """Let an engine lose a reply every few seconds."""
        while True:
            await asyncio.sleep(_LOST_REPLY_EVERY_S)
            actor = self._rng.choice(list(self._stage.actors.values()))
            actor.arm(Fault(FaultKind.LOST_REPLY, FaultPhase.GENERATE))
            self._report.did["lost_replies"] += 1


class _Storming:
    """A scaffold whose program speaks to the gateway over a proxy that cuts connections."""

    def __init__(self, form: PlainFormat, rng: random.Random) -> None:
        self._form, self._rng = form, rng
        self.program: Program | None = None
        self.tree = PlayedTree(form)
        self.cuts: Counter[str] = Counter()

    async def run(self, context: ScaffoldContext) -> None:
        await context.start()
        async with context.gateway() as access, CuttingProxy.standing(access.url, self._rng, _CUT_SHARE) as proxy:
            async with speaking(access, proxy.url) as speakers, speaking(access, access.url) as again:
                self.program = Program(speakers, again, self._form, self._rng)
                self.tree = self.program.tree
                await self.program.run()
            self.cuts.update({str(cut): number for cut, number in proxy.cuts.items()})
            await context.step(_ANSWER)


class _Named:
    """The router under a name, as a layer of engines wants it."""

    name = "router"

    def __init__(self, router: object) -> None:
        self.generate = router.generate


@contextmanager
def _without(protection: str) -> Iterator[None]:
    """Switch a protection off inside the block; what an aborted request had is thrown away elsewhere."""
    patch: AbstractContextManager[object]
    match protection:
        case "retries":
            patch = mock.patch.object(calls, "_name_of", side_effect=itertools.count())
        case "connections":
            patch = mock.patch.object(connections.Listener, "close", lambda listener, **_: listener.dismiss())
        case "messages":
            patch = mock.patch.object(runner, "Conversations", ByTokensAlone)
        case _:
            patch = nullcontext()
    with patch:
        yield


def _parsed(line: str) -> dict:
    """A line of the record; empty for one that an engine's end has cut."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def _delivery(line: dict) -> Delivery:
    answer, meta = line["answer"], line["answer"]["meta_info"]
    spans = meta["weight_versions"]
    return Delivery(
        line["rid"],
        line["seed"],
        line["prompt"],
        answer["output_ids"],
        [entry[0] for entry in meta["output_token_logprobs"]],
        [span["version"] for span in spans for _ in range(span["start"], span["end"])],
        meta["finish_reason"]["type"],
    )


async def _nothing() -> None:
    return
