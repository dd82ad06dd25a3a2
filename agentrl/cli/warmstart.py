"""``agentrl warmstart``."""

from __future__ import annotations

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.recipes import OverridesArgument, RecipeArgument, find_recipe
from agentrl.process.loop import run_async


@reported
@needs("train")
def warmstart(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Make a model or take one, and let it imitate an environment's expert."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.warmstart import WarmStart
    from agentrl.orchestration.warmstart_config import load_warmstart_config

    config = load_warmstart_config(find_recipe(recipe), overrides or [])
    with PhaseProgress() as progress:
        report = run_async(WarmStart(config, progress).run())
        learned = (
            f"{report.steps} steps"
            if report.episode_nats is None
            else (f"{report.steps} steps, {report.episode_nats:.2f} nats an unseen episode")
        )
        progress.console.print(
            f"[green]{report.output}[/green]: {report.parameters:,} parameters, {learned}, {report.seconds:.0f} s"
        )
