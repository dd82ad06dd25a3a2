"""``agentrl doctor``."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.doctor_clusters import check_clusters
from agentrl.cli.errors import reported
from agentrl.cli.extras import missing_packages, remedy
from agentrl.types.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.registry import Plugin

_PACKAGES = {
    "train": ("torch", "transformers", "renderers", "tokenizers", "safetensors", "aiohttp", "pydantic"),
    "serve": ("fastapi", "uvicorn", "prometheus-client", "pydantic"),
}
_MIN_FREE_BYTES = 2 << 30


@reported
def doctor(
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Also reach this Ray cluster: HOST:PORT, or auto for its own.")
    ] = None,
    extra: Annotated[str, typer.Option(help="What this machine is for, by the extra: train, or serve.")] = "train",
) -> None:
    """Check what training needs on this machine, and say what to do about what is missing."""
    checks: list[Callable[[], Iterator[tuple[bool, str]]]] = [partial(_packages, extra), _hardware, _disk, _sandboxes]
    checks += [_scaffolds, _environments, partial(check_clusters, ray)]
    is_well = True
    for check in checks:
        for is_good, text in check():
            is_well = is_well and is_good
            typer.secho(f"{'ok ' if is_good else 'BAD'}  {text}", fg=None if is_good else "red")
    if not is_well:
        raise typer.Exit(1)


def _packages(extra: str) -> Iterator[tuple[bool, str]]:
    if extra not in _PACKAGES:
        raise ConfigError(f"--extra {extra}: name one of {', '.join(_PACKAGES)}")
    missing = missing_packages(extra)
    for name in _PACKAGES[extra]:
        if name not in missing:
            yield True, f"{name} {metadata.version(name)}"
    if missing:
        yield False, f"{', '.join(missing)} are not installed; {remedy(extra)}"


def _hardware() -> Iterator[tuple[bool, str]]:
    cores = len(os.sched_getaffinity(0))
    yield cores >= 2, f"{cores} processor cores" + ("" if cores >= 2 else "; engine and trainer will share one")
    if "torch" in missing_packages("train"):
        return
    import torch

    gpus = torch.cuda.device_count()
    yield True, f"{gpus} GPUs" if gpus else "no GPU: the embedded engine and gloo serve small models"
    yield torch.distributed.is_gloo_available(), "torch.distributed with gloo"


def _disk() -> Iterator[tuple[bool, str]]:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 2**30:.1f} GiB free in {Path.cwd()}"
    yield free >= _MIN_FREE_BYTES, text if free >= _MIN_FREE_BYTES else f"{text}; checkpoints may not fit"
    shm = Path("/dev/shm")
    yield shm.is_dir() and os.access(shm, os.W_OK), "/dev/shm is writable"


def _sandboxes() -> Iterator[tuple[bool, str]]:
    """What commands of environments are kept from; without sandboxes, other environments run all the same."""
    if missing_packages("sandbox"):
        yield True, f"no sandboxes by bwrap; {remedy('sandbox')}"
        return
    from agentrl.sandbox.config import SandboxConfig
    from agentrl.sandbox.starting import running_keeper
    from agentrl.types.sandbox import Guarantee

    async def probe() -> frozenset[Guarantee]:
        async with running_keeper(SandboxConfig(), "doctor") as host:
            return await host.guarantees()

    try:
        found = asyncio.run(probe())
    except ConfigError as error:
        yield True, f"no sandboxes by bwrap: {error}"
        return
    missing = sorted(frozenset(Guarantee) - found)
    but = f"; not {', '.join(missing)}, so tasks that ask for it are refused" if missing else ""
    yield True, f"sandboxes by bwrap enforce {', '.join(sorted(found))}{but}"


def _scaffolds() -> Iterator[tuple[bool, str]]:
    from agentrl import registry

    for plugin in registry.list_plugins(registry.SCAFFOLDS):
        yield _tried(registry.SCAFFOLDS, plugin, partial(registry.load_plugin, registry.SCAFFOLDS, plugin.name))


def _environments() -> Iterator[tuple[bool, str]]:
    """Each is imported by a process of its own, as in a run."""
    from agentrl import registry
    from agentrl.envs.starting import WorkerCommand, start_worker

    async def load(name: str, logs: Path) -> None:
        (await start_worker(WorkerCommand(name, {}, logs), 0)).kill()

    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as logs:
        for plugin in registry.list_plugins(registry.ENVIRONMENTS):
            yield _tried(registry.ENVIRONMENTS, plugin, partial(asyncio.run, load(plugin.name, Path(logs))))


def _tried(group: str, plugin: Plugin, load: Callable[[], object]) -> tuple[bool, str]:
    try:
        load()
    except ConfigError as error:
        return False, f"{group} {plugin.name}: {error}"
    return True, f"{group} {plugin.name} ({plugin.distribution})"
