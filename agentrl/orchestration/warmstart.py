"""Warm start: a model learns to imitate an expert, bad habits included, before reinforcement begins."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.config.base import ConfigModel
from agentrl.envs.definition import load_environment
from agentrl.envs.hosting import build_described_host
from agentrl.orchestration.model_files import context_tokens, read_model_files
from agentrl.orchestration.players import build_scaffold
from agentrl.orchestration.preflight import check_context, check_device, check_scaffold
from agentrl.orchestration.program_check import check_program
from agentrl.orchestration.transcripts import Teacher
from agentrl.orchestration.warmstart_config import (
    FolderModel,
    GgufModel,
    LessonConfig,
    MadeModel,
    WarmStartConfig,
)
from agentrl.sandbox.starting import sandboxes
from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.made_templates import made_template
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.tokens.train_tokenizer import CONTROL_TOKENS, copy_tokenizer, make_tokenizer, save_tokenizer
from agentrl.trainer.handle import TrainerHandle
from agentrl.trainer.sequence import TokenSequence, supervised_sequence
from agentrl.types.episode import StopReason
from agentrl.types.errors import AgentRLError, ConfigError
from agentrl.types.task import Limits
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import FIRST_VERSION

_CHECK_INTERVAL_STEPS = 25
_SAMPLE_EPISODES = 256
_LAST_LR_SCALE = 0.05
_NO_LIMIT = 1 << 20


class WarmStartObserver(Protocol):
    """Hears of a warm start's progress."""

    def on_phase(self, text: str) -> None:
        """Something begins that takes a while."""
        ...

    def on_progress(self, done: int, total: int, text: str) -> None:
        """`done` of `total` steps of the phase are done; the total may shrink."""
        ...


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What a warm start did; written beside the model as ``warmstart.json``.

    `episode_nats` is what an unseen episode of the last lesson's expert costs; None without lessons.
    """

    output: str
    parameters: int
    steps: int
    episode_nats: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Pool:
    """Episodes of one lesson: those that are learned from, and unseen ones."""

    train: list[TokenSequence]
    check: list[TokenSequence]


class WarmStart:
    """One warm start, from a recipe to a model folder.

    The stages are methods in the order in which `run` calls them; all that they share is the recipe. Experts are
    functions of the environment's package, so this process imports it, which a run's does not.
    """

    def __init__(self, config: WarmStartConfig, observer: WarmStartObserver) -> None:
        """Raises ConfigError for what shows before anything is started."""
        _check(config)
        self._config, self._observer = config, observer
        self._work = config.output.absolute().with_name(config.output.name + ".making")
        self._definition = load_environment(config.environment.name)
        self._options = self._definition.parse_options(config.environment.options)
        self._check_agents()
        description = self._definition.describe(self._options)
        self._environments = build_described_host(config.environment, description, config.limits.tool_s, self._work)

    async def run(self) -> WarmStartReport:
        """Make or read the model, let it learn, write it to `output`.

        Waits for: the trainer. Unblocked by: its deadlines.

        Raises:
            ConfigError: something in the recipe does not fit.
        """
        started, config = time.monotonic(), self._config
        output = config.output.absolute()
        shutil.rmtree(self._work, ignore_errors=True)
        try:
            self._work.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"output {output} cannot be written: {error}; choose another") from error
        try:
            async with sandboxes(config.sandbox, "warmstart") as keeper:
                described = self._environments.description
                await keeper.start_for([described])
                await check_program(config.scaffold, config.environment, described, config.sandbox.kind)
                parameters, steps, nats, source = await self._make()
            report = WarmStartReport(str(output), parameters, steps, nats, time.monotonic() - started)
            (source / "warmstart.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
            source.rename(output)
        finally:
            await self._environments.close()
            shutil.rmtree(self._work, ignore_errors=True)
        return report

    async def _make(self) -> tuple[int, int, float | None, Path]:
        """The model; its parameters, the steps it took, what an unseen episode costs, and where it lies."""
        parameters = await self._write_first_model()
        if not self._config.lessons:
            return parameters, 0, None, self._work / "model"
        steps, nats = await self._learn(self._work / "model")
        return parameters, steps, nats, self._work / "trained"

    def _check_agents(self) -> None:
        agents = self._definition.agents
        unknown = [lesson.agent for lesson in self._config.lessons if lesson.agent not in (None, *agents)]
        if unknown:
            raise ConfigError(
                f"lessons: no agent '{unknown[0]}' acts in environment '{self._definition.name}'; "
                f"it names {', '.join(agents) or 'none'}"
            )
        for lesson in self._config.lessons:
            self._definition.expert(lesson.expert)

    async def _write_first_model(self) -> int:
        from agentrl.trainer.init_model import (  # loads torch and transformers
            convert_gguf,
            count_parameters,
            make_model,
        )

        folder = self._work / "model"
        source = self._config.model
        if isinstance(source, FolderModel):
            shutil.copytree(source.path, folder)
            return await asyncio.to_thread(count_parameters, folder)
        self._observer.on_phase("making model and tokenizer")

        if isinstance(source, GgufModel):
            return await asyncio.to_thread(convert_gguf, _find_gguf(source), folder)
        if source.tokenizer is None:
            await self._make_tokenizer(source, folder)
        else:
            copy_tokenizer(source.tokenizer, folder)
        return await asyncio.to_thread(make_model, source.shape, folder, self._config.seed)

    async def _make_tokenizer(self, source: MadeModel, folder: Path) -> None:
        """Train a tokenizer on transcripts, written out with a provisional one."""
        template = made_template(self._config.chat)
        save_tokenizer(make_tokenizer([], [], [], 300), folder, template)
        chat = ChatFormat.load(folder, self._config.chat)
        lessons = self._config.lessons
        expert = lessons[-1].expert if lessons else next(iter(self._definition.experts))
        # The provisional tokenizer spells every byte, so the limits in tokens are not yet those of the recipe.
        limits = replace(self._config.limits.build(), max_context_tokens=_NO_LIMIT, max_reply_tokens=_NO_LIMIT)
        episodes = await self._teacher(limits).play(expert, chat, range(_SAMPLE_EPISODES), self._config.seed)
        texts = [chat.tokenizer.decode(t.token_ids) for e in episodes for t in build_trajectories(e)]
        fixed = _fixed_texts(texts)
        corpus = [_without(text, fixed) for text in texts]
        tokenizer = make_tokenizer(corpus, self._definition.words, fixed, source.shape.vocabulary_tokens)
        save_tokenizer(tokenizer, folder, template)

    async def _learn(self, model: Path) -> tuple[int, float]:
        """Let the experts play while the trainer starts, then imitate one after the other."""
        config = self._config
        chat = ChatFormat.load(model, config.chat)
        chat.log_limits()
        starting = asyncio.create_task(
            TrainerHandle.start("warmstart", model, FIRST_VERSION, config.trainer, AlgorithmConfig(), 1.0, self._work)
        )
        try:
            pools = [await self._pool(lesson, chat) for lesson in config.lessons]
            trainer = await starting
            steps, nats = 0, math.inf
            for lesson, pool in zip(config.lessons, pools, strict=True):
                is_last = lesson is config.lessons[-1]
                taken, nats = await self._teach(trainer, lesson, pool, config.decay_steps if is_last else 0)
                steps += taken
            await trainer.stage(FIRST_VERSION, self._work / "trained")
        finally:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, AgentRLError):
                await (await starting).close()
        return steps, nats

    async def _pool(self, lesson: LessonConfig, chat: ChatFormat) -> _Pool:
        self._observer.on_phase(f"{lesson.transcripts} episodes of expert '{lesson.expert}'")
        end = lesson.transcripts + self._config.check_episodes
        sequences = await self._transcripts(lesson, chat, range(end))
        return _Pool(sequences[: lesson.transcripts], sequences[lesson.transcripts :])

    async def _teach(
        self, trainer: TrainerHandle, lesson: LessonConfig, pool: _Pool, decay_steps: int
    ) -> tuple[int, float]:
        """Steps of one lesson; returns their number and what an unseen episode costs after them, in nats."""
        self._observer.on_phase(f"imitating '{lesson.expert}'")
        order = _shuffled_for_ever(len(pool.train), self._config.seed)
        nats, before, step, last = math.inf, math.inf, 0, lesson.max_steps
        while step < last:
            batch = [pool.train[next(order)] for _ in range(self._config.episodes_per_step)]
            fall = max(_LAST_LR_SCALE, min(1.0, (last - step) / decay_steps)) if decay_steps else 1.0
            nll = await trainer.supervised_step(batch, fall)
            loss = nll / sum(len(s.selected) for s in batch)
            step += 1
            if step % _CHECK_INTERVAL_STEPS == 0 or step == last:
                before, nats = nats, await trainer.supervised_loss(pool.check) / len(pool.check)
                # One check may come out low by chance, and what is not learned by then is missing for good.
                if lesson.enough_nats is not None and max(before, nats) <= lesson.enough_nats:
                    last = step
            unseen = f", {nats:.2f} an unseen episode" if math.isfinite(nats) else ""
            self._observer.on_progress(step, last, f"{loss:.3f} nats a token{unseen}")
        return step, nats

    def _teacher(self, limits: Limits) -> Teacher[ConfigModel]:
        scaffold = build_scaffold(self._config.scaffold)
        return Teacher(self._definition, self._options, self._environments, scaffold, limits)

    async def _transcripts(self, lesson: LessonConfig, chat: ChatFormat, ordinals: range) -> list[TokenSequence]:
        expert = lesson.expert

        def tell(done: int) -> None:
            self._observer.on_progress(done, len(ordinals), f"expert '{expert}'")

        teacher = self._teacher(self._config.limits.build())
        episodes = await teacher.play(expert, chat, ordinals, self._config.seed, on_episode=tell)
        cut_off = next((e for e in episodes if e.stop_reason is not StopReason.ANSWERED), None)
        if cut_off is not None:
            raise ConfigError(
                f"episode {cut_off.episode_id} of expert '{expert}' ended by {cut_off.stop_reason} after "
                f"{cut_off.num_tokens} tokens; raise the limits of the recipe"
            )
        trajectories = [trajectory for episode in episodes for trajectory in build_trajectories(episode)]
        return [supervised_sequence(t) for t in trajectories if lesson.agent in (None, t.agent)]


def _check(config: WarmStartConfig) -> None:
    """Raises ConfigError if the output is there already, or model, players or machine are not."""
    if config.output.exists():
        raise ConfigError(f"{config.output.absolute()} exists already; remove it or choose another output")
    above = next(folder for folder in config.output.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"output {config.output.absolute()}: {above} is no folder; choose another output")
    if config.environment.placement == "venv":
        raise ConfigError(
            "environment.placement is venv, and a warm start imports the environment for its experts: install its "
            'package here and set placement = "process"'
        )
    check_scaffold(config.scaffold)
    check_device(config.trainer, "trainer")
    match config.model:
        case FolderModel(path=folder):
            longest = context_tokens(read_model_files(folder).config)
            check_context("limits", config.limits, longest, folder)
        case MadeModel(shape=shape, tokenizer=tokenizer):
            check_context("limits", config.limits, shape.context_tokens, config.output)
            if tokenizer is not None:
                FastTokenizer.load(tokenizer)
        case GgufModel():
            _find_gguf(config.model)


def _shuffled_for_ever(size: int, seed: int) -> Iterator[int]:
    """Indices below `size` in an order that is new at every pass."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(size), size)


def _fixed_texts(texts: list[str]) -> list[str]:
    """Long pieces between control tokens that all texts share: what a template says every time."""
    shared = set.intersection(*(set(_pieces(text)) for text in texts))
    return sorted((piece for piece in shared if len(piece) > 40), key=len, reverse=True)


def _pieces(text: str) -> list[str]:
    for token in CONTROL_TOKENS:
        text = text.replace(token, CONTROL_TOKENS[0])
    return text.split(CONTROL_TOKENS[0])


def _without(text: str, fixed: list[str]) -> str:
    for piece in fixed:
        text = text.replace(piece, " ")
    return text


def _find_gguf(source: GgufModel) -> Path:
    spec = importlib.util.find_spec(source.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(folder) / source.file for folder in folders if (Path(folder) / source.file).is_file()]
    if not found:
        raise ConfigError(
            f"package '{source.package}' with {source.file} is not installed; `make smollm2` installs it without the "
            "packages that it would pull in"
        )
    return found[0]
