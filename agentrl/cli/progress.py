"""What long commands show while they work, and what they say at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.shutdown import RunSummary
from agentrl.telemetry.curve import sparkline

_PLAIN_INTERVAL_S = 10.0


class PhaseProgress:
    """Phases with a bar each; on a terminal it moves, in a log file it is a line now and then."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, note="")
        self._phase = "starting"
        self._said_at = 0.0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the command began its work."""
        return time.monotonic() - self._began

    def __enter__(self) -> PhaseProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_phase(self, text: str) -> None:
        """A phase begins."""
        self._phase = text
        self._bar.update(self._task, description=text, completed=0, total=None, note="")
        if not self.console.is_terminal:
            self.console.print(text)

    def on_progress(self, done: int, total: int, text: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total, note=text)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._said_at > _PLAIN_INTERVAL_S or done == total):
            self._said_at = now
            self.console.print(f"  {done}/{total} {text}", soft_wrap=True)


class RunProgress(PhaseProgress):
    """Progress of a training run: a bar of steps, a line for every evaluation and every few steps."""

    def __init__(self) -> None:
        super().__init__()
        self._num_idle: Counter[str] = Counter()
        self._names_policies = False

    def __enter__(self) -> RunProgress:
        super().__enter__()
        return self

    def on_start(self, run: str, total_steps: int, policies: Sequence[str]) -> None:
        """The run's folder, length and policies are known."""
        self._names_policies = len(policies) > 1
        self._total = total_steps
        self.console.print(f"run folder: {run}", soft_wrap=True)

    def on_step(self, policy: str, step: int, metrics: dict[str, float]) -> None:
        """Show a policy's step, and say what the trainer would not learn from."""
        who = f"{policy}  " if self._names_policies else ""
        mismatched = metrics.get("trainer/mismatched_sequences", 0.0)
        if mismatched:
            self.console.print(
                f"  step {step:>4}  {who}[red]{mismatched:.0f} sequences masked[/red]: trainer and engine differ by up "
                f"to {metrics['trainer/fresh_gap_max_nats']:.2g} nats on tokens of the same weights",
                soft_wrap=True,
            )
        is_idle = not metrics["trainer/optimizer_steps"]
        self._num_idle[policy] += is_idle
        if is_idle and self._num_idle[policy] == 1:
            self.console.print(
                f"  step {step:>4}  {who}nothing to learn: rewards differ within no group, or no token is young "
                "enough. The version rises and the weights stay; counted from here on",
                soft_wrap=True,
            )
        note = (
            f"{who}reward {metrics['batch/reward_mean']:.2f}  "
            f"staleness {metrics['buffer/staleness_mean_steps']:.1f}  "
            f"aborted {metrics['rollout/aborted_generations']:.0f}  "
            f"step {metrics['time/step_s']:.1f} s"
        )
        if self._num_idle[policy]:
            note += f"  nothing to learn {self._num_idle[policy]} times"
        self.on_progress(step, self._total, note)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Say what an evaluation found."""
        filled = round(evaluation.mean * 24)
        bar = "█" * filled + "░" * (24 - filled)
        who = f"{evaluation.policy}  " if self._names_policies else ""
        found = f"{evaluation.mean:.3f} ± {evaluation.standard_error:.3f}"
        text = f"  step {evaluation.version.step:>4}  {who}held-out {found}"
        self.console.print(f"{text}  [cyan]{bar}[/cyan]  {len(evaluation.rewards)} tasks", soft_wrap=True)


def print_summary(summary: RunSummary, seconds: float) -> None:
    """What a run achieved in how many seconds of the command, where its tokens went, and what to look at."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"\n[bold]{summary.status}[/bold] at version {summary.version} after {seconds:.0f} s, "
        f"{summary.seconds:.0f} s of them with engines and trainer up"
    )
    for policy in summary.versions:
        evaluations = summary.evaluations_of(policy)
        if len(evaluations) > 1:
            first, last = evaluations[0], evaluations[-1]
            of_policy = f"of {policy} " if len(summary.versions) > 1 else ""
            change = f"{of_policy}{first.mean:.3f} -> {last.mean:.3f}"
            console.print(
                f"held-out success {change} ({len(last.rewards)} tasks)  {sparkline([first.mean, last.mean])}"
            )
    shares = ", ".join(
        f"{name.removeprefix('goodput/').removesuffix('_fraction')} {share:.1%}"
        for name, share in summary.goodput.items()
    )
    console.print(f"goodput: {shares or 'no tokens'} of all sampled tokens")
    console.print(
        f"{summary.aborted_generations} generations aborted and resumed, {summary.regenerated_requests} regenerated; "
        f"staleness at most {summary.max_staleness} steps"
    )
    curve = summary.run / "curve.png"
    console.print(f"look at: {curve if curve.exists() else summary.run / 'metrics.jsonl'}")
    console.print(f"         agentrl show {summary.run}          an episode, token by token")
    console.print(f"         tensorboard --logdir {summary.run / 'tensorboard'}")
