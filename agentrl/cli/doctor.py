"""``agentrl doctor``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import typer

from agentrl.cli.errors import reported

_PACKAGES = ("torch", "transformers", "renderers", "tokenizers", "safetensors", "aiohttp", "pydantic")
_MIN_FREE_BYTES = 2 << 30


@reported
def doctor() -> None:
    """Check what training needs on this machine, and say what to do about what is missing."""
    checks: list[Callable[[], Iterator[tuple[bool, str]]]] = [_packages, _hardware, _disk, _plugins]
    is_well = True
    for check in checks:
        for is_good, text in check():
            is_well = is_well and is_good
            typer.secho(f"{'ok ' if is_good else 'BAD'}  {text}", fg=None if is_good else "red")
    if not is_well:
        raise typer.Exit(1)


def _packages() -> Iterator[tuple[bool, str]]:
    for name in _PACKAGES:
        try:
            yield True, f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield False, f"{name} is not installed; pip install -e . -c constraints.txt"


def _hardware() -> Iterator[tuple[bool, str]]:
    cores = len(os.sched_getaffinity(0))
    yield cores >= 2, f"{cores} processor cores" + ("" if cores >= 2 else "; engine and trainer will share one")
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


def _plugins() -> Iterator[tuple[bool, str]]:
    from agentrl import registry
    from agentrl.types.errors import ConfigError

    for group in (registry.ENVIRONMENTS, registry.SCAFFOLDS):
        for plugin in registry.list_plugins(group):
            try:
                registry.load_plugin(group, plugin.name)
            except ConfigError as error:
                yield False, f"{group} {plugin.name}: {error}"
            else:
                yield True, f"{group} {plugin.name} ({plugin.distribution})"
