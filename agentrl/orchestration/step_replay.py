"""Does one step of a run again, by the run's own trainer, and says what became of every token."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl import codec
from agentrl.orchestration.config import RunConfig, chosen_policy
from agentrl.orchestration.redo import weights_digest
from agentrl.orchestration.replay_plan import ReplayPlan, plan_replay
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.orchestration.step_record import StepRecord, read_steps
from agentrl.orchestration.tally import metric_prefix
from agentrl.orchestration.token_status import ExplainedEpisode, explained_episodes, token_rows
from agentrl.process.local_place import LocalPlaces
from agentrl.telemetry.json_lines import read_json_lines
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.trainer.config import TrainerConfig
from agentrl.types.errors import ConfigError, StorageError

Device = Literal["cpu", "cuda"]
_SPEED = "trainer/tokens_per_s"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One value as the run recorded it and as the replay found it."""

    name: str
    recorded: float | str
    replayed: float | str

    @property
    def is_equal(self) -> bool:
        """To the last bit."""
        return self.recorded == self.replayed


@dataclass(frozen=True, slots=True, eq=False)
class StepReplay:
    """A step that was done again.

    `comparisons` are empty where the run recorded nothing to compare with. `differences` are those between the
    run's trainer and the replay's that let results differ in their last digits.
    """

    plan: ReplayPlan
    episodes: tuple[ExplainedEpisode, ...]
    comparisons: tuple[Comparison, ...]
    differences: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether everything that can be compared is equal."""
        return all(comparison.is_equal for comparison in self.comparisons)

    def count(self) -> Counter[str]:
        """Tokens of all episodes by status."""
        return sum((episode.count() for episode in self.episodes), Counter())


async def replay_step(
    path: Path,
    number: int,
    device: Device = "cpu",
    episode: str | None = None,
    policy: str | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> StepReplay:
    """Do step `number` again, which made the version of that step. Nothing in the run's folder changes.

    One trainer rank begins with the nearest older checkpoint and does the steps in between again.

    Args:
        path: the run's folder.
        number: of the step.
        device: where the rank computes.
        episode: refuse, before anything is started, unless the step's groups have an episode of this name.
        policy: whose step; None for the only trained one.
        on_progress: hears how many steps are done, of how many, and what comes next.

    Raises:
        ConfigError: no run there, the step cannot be replayed, or it knows no such episode; names those that would do.
        StorageError: journal or checkpoint cannot be read.
        TrainerError: the trainer failed.
    """
    run = RunDirectory.open(path)
    record = await asyncio.to_thread(read_steps, run, chosen_policy(run.config(), policy))
    plan = plan_replay(run, record, number)
    names = record.names(number)
    if episode is not None and episode not in names:
        raise ConfigError(f"step {number} knows no episode '{episode}'; it knows {', '.join(names)}")
    return await _Replayer(run, record, plan, device, on_progress).run()


def write_token_rows(replay: StepReplay, tokenizer: FastTokenizer, file: Path) -> int:
    """One JSON object a line for every token, in the order of episodes; returns their number. Raises StorageError."""
    count = 0
    try:
        with file.open("wb") as lines:
            for row in (row for episode in replay.episodes for row in token_rows(episode, tokenizer.decode)):
                lines.write(codec.to_json(row) + b"\n")
                count += 1
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error}; choose another file") from error
    return count


class _Replayer:
    """One replay of one policy's step."""

    def __init__(
        self,
        run: RunDirectory,
        record: StepRecord,
        plan: ReplayPlan,
        device: Device,
        on_progress: Callable[[int, int, str], None],
    ) -> None:
        self._run, self._record, self._plan, self._on_progress = run, record, plan, on_progress
        config = run.config()
        self._policy = record.policy
        settings = config.policies[self._policy]
        self._differences = _differences(settings.trainer, device)
        self._config = _alone(config, device)

    async def run(self) -> StepReplay:
        """Start a trainer, bring it to the step, do that, end the trainer."""
        with tempfile.TemporaryDirectory(prefix="agentrl-replay-") as folder:
            runtime = ProcessRuntime(self._config, Path(folder), LocalPlaces())
            try:
                return await self._replay(runtime, Path(folder))
            finally:
                await runtime.close()

    async def _replay(self, runtime: ProcessRuntime, folder: Path) -> StepReplay:
        plan = self._plan
        self._say(0, "starting the trainer")
        trainer = await plan.start(self._config, runtime)
        version = plan.version
        *before, last = plan.steps
        for done, taken in enumerate(before):
            self._say(done, f"redoing step {taken.step + 1}")
            version = (await trainer.step(plan.batch(self._config, taken, version), is_redo=True)).version
        self._say(len(before), f"replaying step {plan.number}")
        batch = plan.batch(self._config, last, version)
        explanation = await trainer.explain_step(batch)
        prefix = metric_prefix(self._policy, self._config.trained)
        comparisons = _compare_metrics(self._run, plan.number, prefix, explanation.report.metrics)
        recorded = self._record.digest(plan.number)
        if recorded is not None:
            manifest = await trainer.stage(explanation.report.version, folder / "weights")
            comparisons.append(Comparison("weights", recorded, weights_digest(manifest)))
        self._say(len(plan.steps), f"replayed step {plan.number}")
        left_out = self._record.left_out(plan.number)
        max_staleness = self._config.buffer_of(self._policy).staleness_bound
        return StepReplay(
            plan=plan,
            episodes=explained_episodes(last, batch, explanation, left_out, max_staleness),
            comparisons=tuple(comparisons),
            differences=self._differences,
        )

    def _say(self, done: int, text: str) -> None:
        self._on_progress(done, len(self._plan.steps), text)


def _alone(config: RunConfig, device: Device) -> RunConfig:
    """The configuration with one rank."""
    changes = {"ranks": 1, "device": device}
    policies = {
        name: policy.model_copy(update={"trainer": policy.trainer.model_copy(update=changes)})
        for name, policy in config.policies.items()
    }
    return config.model_copy(update={"policies": policies})


def _differences(trainer: TrainerConfig, device: Device) -> tuple[str, ...]:
    found = []
    if trainer.ranks != 1:
        found.append(f"the run trained on {trainer.ranks} ranks, the replay on one")
    if trainer.device != device:
        found.append(f"the run trained on {trainer.device}, the replay on {device}")
    return tuple(found)


def _compare_metrics(run: RunDirectory, number: int, prefix: str, metrics: dict[str, float]) -> list[Comparison]:
    """The trainer's metrics of the step in ``metrics.jsonl``, but for speeds, beside those of the replay.

    In the file their names begin with `prefix`.
    """
    rows = read_json_lines(run.metrics) if run.metrics.is_file() else []
    recorded = [row for row in rows if row["step"] == number and f"{prefix}{_SPEED}" in row]
    own = {name.removeprefix(prefix): value for name, value in (recorded[-1] if recorded else {}).items()}
    return [
        Comparison(name, value, metrics[name])
        for name, value in own.items()
        if name.startswith("trainer/") and name != _SPEED and name in metrics
    ]
