from __future__ import annotations

import asyncio
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from agentrl.buffer.step_journal import NoStepJournal
from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.gateway.starting import LazyGateway
from agentrl.orchestration.evaluation import Evaluator, Exam
from agentrl.orchestration.players import build_scaffold
from agentrl.orchestration.scoring import Scoring
from agentrl.orchestration.shutdown import first_failure
from agentrl.orchestration.transcripts import Teacher
from agentrl.orchestration.warmstart import WarmStart, _find_gguf, _fixed_texts, _Pool, _shuffled_for_ever, _without
from agentrl.orchestration.warmstart_config import GgufModel, LessonConfig, load_warmstart_config
from agentrl.orchestration.worker_assembly import forget_nothing, local_pool
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.rollouts.episode_log import NoJournal
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.rollouts.worker import LocalWorker
from agentrl.scorers.verifier import Verifier
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.scripted import ScriptedEngine, expert_script
from agentrl.testing.tiny import tiny_chat
from agentrl.trainer.sequence import supervised_sequence
from agentrl.types.batch import WeightsManifest
from agentrl.types.episode import StopReason
from agentrl.types.errors import Boundary, ConfigError, EngineError, EnginesLostError, EpisodeError, StalledError
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion
from agentrl_scaffolds.tool_calling import ToolCalling

LIMITS = Limits(8, 4096, 512, 5.0, 60.0)
FIXED = "You may call one or more functions to assist with the user query."


def test_every_pass_has_each_index_once_in_an_order_of_its_own():
    order = _shuffled_for_ever(50, seed=3)
    first, second = (list(itertools.islice(order, 50)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == list(itertools.islice(_shuffled_for_ever(50, seed=3), 50))


def test_fixed_text_is_what_all_transcripts_share_between_control_tokens():
    texts = [f"<|im_start|>{FIXED}<|im_end|>question {n}, which is also long enough to count<|im_end|>" for n in "ab"]
    assert _fixed_texts(texts) == [FIXED]
    assert _without(texts[0], [FIXED]).startswith("<|im_start|> <|im_end|>question a")


def test_a_missing_model_package_is_refused_with_a_remedy():
    source = GgufModel(kind="gguf", package="no_such_package", file="model.gguf")
    with pytest.raises(ConfigError, match=r"package 'no_such_package' with model\.gguf is not installed; `make"):
        _find_gguf(source)


async def test_a_teachers_episodes_are_its_own_messages_in_the_pupils_tokens(tiny_model):
    definition = load_environment("sql")
    options = definition.parse_options({})
    chat = tiny_chat(tiny_model)
    told = []
    teacher = Teacher(definition, options, InlineHost(definition, options, 5.0), ToolCalling(), LIMITS)
    episodes = await teacher.play("expert", chat, range(66), seed=0, on_episode=told.append)
    assert told == [64, 66]
    assert [episode.ticket.task.ordinal for episode in episodes] == list(range(66))
    assert {(e.reward, e.stop_reason, len(e.turns)) for e in episodes} == {(1.0, StopReason.ANSWERED, 3)}
    [trajectory] = build_trajectories(episodes[0])
    sequence = supervised_sequence(trajectory)
    assert chat.tokenizer.decode(trajectory.token_ids[sequence.selected].tolist()).count("<|im_end|>") == 3


async def test_a_teacher_plays_a_list_of_tasks_epoch_by_epoch(tiny_model):
    definition = replace(load_environment("sql"), num_tasks=lambda options: 3)
    options = definition.parse_options({})
    teacher = Teacher(definition, options, InlineHost(definition, options, 5.0), ToolCalling(), LIMITS)
    episodes = await teacher.play("expert", tiny_chat(tiny_model), range(6), seed=0)
    ordinals = [episode.ticket.task.ordinal for episode in episodes]
    assert sorted(ordinals[:3]) == sorted(ordinals[3:]) == [0, 1, 2]


async def test_an_expert_whose_episode_fails_stops_the_warm_start(tiny_model):
    options = FaultyOptions(fault="raise", at="score")
    broken = load_environment("sql").experts["random"]
    definition = type(faulty)(
        "faulty", "", faulty.sample_task, faulty.create, FaultyOptions, {"random": broken}, placement="inline"
    )
    teacher = Teacher(definition, options, InlineHost(definition, options, 5.0), ToolCalling(), LIMITS)
    with pytest.raises(StalledError, match=r"episode random-0 of expert 'random' failed: environment\(score\)"):
        await teacher.play("random", tiny_chat(tiny_model), range(1), seed=0)


def evaluator(chat, options: FaultyOptions, names: tuple[str, ...] = ("faulty",)) -> Evaluator:
    engine = ScriptedEngine(chat, expert_script(lambda _messages, rng: Message(Role.ASSISTANT, str(rng.random()))))
    hosts = {name: InlineHost(faulty, options, 5.0) for name in names}
    runners = {
        name: EpisodeRunner(
            {"agent": Player("main", engine, chat, Sampling())}, ToolCalling(), host, Verifier(5.0), NoJournal(), LIMITS
        )
        for name, host in hosts.items()
    }
    pool = local_pool(
        LocalWorker("evaluator", runners, None, forget_nothing, LazyGateway()), WorkerJournals(), forget_nothing
    )
    exam = Exam(pool, hosts, dict.fromkeys(names, ("main",)), seed=0, concurrency=16)
    return Evaluator({"main": engine}, {}, exam, Scoring(dict.fromkeys(names, ()), NoStepJournal()))


async def test_evaluations_of_two_versions_draw_the_same_random_numbers(tiny_model):
    chat = tiny_chat(tiny_model)
    results = [await evaluator(chat, FaultyOptions()).run("main", PolicyVersion(0, step), 10) for step in (0, 5)]
    assert [(r.mean, len(r.rewards), r.num_failed, r.turns) for r in results] == [(1.0, 10, 0, 1.0)] * 2
    first, second = ([e.nodes[-1].token_ids.tolist() for e in r.sample] for r in results)
    assert first == second
    assert len({tuple(ids) for ids in first}) == 8


class _Renaming:
    """A transport that brings an engine a version's name, and counts."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, engine: ScriptedEngine, manifest: WeightsManifest) -> None:
        self.sent.append(f"{manifest.policy} {manifest.version}")
        await engine.rename(manifest.version)


async def test_episodes_of_an_evaluation_name_the_weights_of_all_policies_and_each_is_loaded_once(tiny_model):
    chat, transport = tiny_chat(tiny_model), _Renaming()
    judge = evaluator(chat, FaultyOptions())
    judge._engines["partner"] = ScriptedEngine(chat, lambda session, messages: Message(Role.ASSISTANT, "1"))
    judge._transports = {"main": transport, "partner": transport}
    manifests = [WeightsManifest(name, PolicyVersion(0, 3), "", {}, 0) for name in ("main", "partner")]
    for manifest in [*manifests, *manifests]:
        await judge.load(manifest)
    evaluation = await judge.run("main", PolicyVersion(0, 3), 2)
    assert transport.sent == ["main 0.3", "partner 0.3"]
    assert evaluation.sample[0].ticket.started_at == dict.fromkeys(("main", "partner"), PolicyVersion(0, 3))


async def test_environments_are_evaluated_at_once_with_episodes_of_their_own(tiny_model):
    both = await evaluator(tiny_chat(tiny_model), FaultyOptions(), ("a", "b")).run("main", PolicyVersion(0, 0), 6)
    assert both.by_environment == {"a": (1.0,) * 6, "b": (1.0,) * 6}
    assert (both.num_failed, len(both.rewards)) == (0, 12)
    assert both.metrics()["eval/b/reward_mean"] == 1.0


async def test_a_policy_without_an_environment_to_be_evaluated_in_is_told_so(tiny_model):
    with pytest.raises(ConfigError, match="no environment in which policy 'other' is trained"):
        await evaluator(tiny_chat(tiny_model), FaultyOptions()).run("other", PolicyVersion(0, 0), 4)


async def test_an_evaluation_of_which_nothing_is_left_is_an_error(tiny_model):
    with pytest.raises(StalledError, match=r"all 4 evaluation episodes failed; the last: environment\(reward\)"):
        await evaluator(tiny_chat(tiny_model), FaultyOptions(fault="nan")).run("main", PolicyVersion(0, 0), 4)


async def test_an_evaluation_whose_engine_does_not_answer_has_lost_it(tiny_model, monkeypatch):
    """So that the run goes on from its checkpoint, though the end of the engine's machine is not known yet."""

    async def unreached(*arguments: object) -> None:
        raise EpisodeError(Boundary.ENGINE, "unreachable", "Connection refused")

    async def gone(*arguments: object) -> None:
        raise EngineError("engine at http://10.0.0.1:1: Connection refused")

    judge = evaluator(tiny_chat(tiny_model), FaultyOptions())
    monkeypatch.setattr(ScriptedEngine, "generate", unreached)
    with pytest.raises(EnginesLostError, match=r"all 4 evaluation episodes failed; the last: engine\(unreachable\)"):
        await judge.run("main", PolicyVersion(0, 0), 4)
    monkeypatch.setattr(ScriptedEngine, "pause", gone)
    with pytest.raises(EnginesLostError, match=r"the engine of the evaluation does not answer: .*Connection refused"):
        await judge.load(WeightsManifest("main", PolicyVersion(0, 1), "", {}, 0))


def test_a_scaffold_that_refuses_its_options_is_named():
    assert isinstance(build_scaffold(ScaffoldConfig(options={"system_prompt": "count"})), ToolCalling)
    with pytest.raises(ConfigError, match=r"scaffold 'tool_calling' does not take options \{'prompt': 'count'\}"):
        build_scaffold(ScaffoldConfig(options={"prompt": "count"}))
    with pytest.raises(ConfigError, match="'datetime:timedelta' is a timedelta, which has no `run`"):
        build_scaffold(ScaffoldConfig(name="datetime:timedelta"))
    with pytest.raises(ConfigError, match="'math:pi' is a float, not a class"):
        build_scaffold(ScaffoldConfig(name="math:pi"))


def test_programs_are_refused_where_the_gateway_is_not_installed(monkeypatch):
    program = ScaffoldConfig(name="program", options={"command": ["my-agent"]})
    build_scaffold(program)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ConfigError, match=r"fastapi is not installed; install agentrl\[gateway\]"):
        build_scaffold(program)


def test_of_several_failures_the_first_that_is_no_cancellation_counts():
    engine, stall = EngineError("engine 0 died"), StalledError("no batch")
    inner = BaseExceptionGroup("produce", [asyncio.CancelledError(), engine])
    assert first_failure(BaseExceptionGroup("loops", [asyncio.CancelledError(), inner, stall])) is engine


class _Pupil:
    """A trainer whose checks come out as they are told."""

    def __init__(self, checks: list[float]) -> None:
        self._checks = iter(checks)

    async def supervised_step(self, batch: list, fall: float) -> float:
        return 1.0

    async def supervised_loss(self, sequences: list) -> float:
        return next(self._checks)


async def test_one_check_that_comes_out_low_by_chance_does_not_end_a_lesson(tmp_path):
    warm_start = _warm_start(tmp_path / "model")
    lesson = LessonConfig(expert="expert", transcripts=1, max_steps=450, enough_nats=0.1)
    pool = _Pool([SimpleNamespace(selected=[0])], [SimpleNamespace(selected=[0])])
    steps, nats = await warm_start._teach(_Pupil([0.3, 0.09, 0.25, 0.1, 0.05, 0.0]), lesson, pool, decay_steps=0)
    assert (steps, nats) == (125, 0.05)


async def test_a_made_student_has_the_tokenizer_and_the_template_of_its_teacher(tmp_path, tiny_model):
    warm_start = _warm_start(tmp_path / "student", "lessons=[]", f"model.tokenizer={tiny_model}", "seed=7")
    await warm_start.run()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "student" / name).read_bytes() == (tiny_model / name).read_bytes()
    size = json.loads((tmp_path / "student" / "config.json").read_text())["vocab_size"]
    assert size == Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab_size()


def test_a_teacher_without_a_tokenizer_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in model folder .*teacher"):
        _warm_start(tmp_path / "student", f"model.tokenizer={tmp_path / 'teacher'}")
    assert list(tmp_path.iterdir()) == []


def _warm_start(output: Path, *overrides: str) -> WarmStart:
    observer = SimpleNamespace(on_phase=lambda text: None, on_progress=lambda done, total, text: None)
    recipe = Path(__file__).parents[3] / "environments" / "sql" / "warmstart.toml"
    return WarmStart(load_warmstart_config(recipe, [f"output={output}", *overrides]), observer)
