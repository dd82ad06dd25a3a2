"""Starts the real SGLang server beside a CPU build of torch: python launch.py OPTIONS OF sglang.launch_server

Three places of the server take CUDA for granted. Each is given the least that lets it go on; what it computes
stays SGLang's own. Its scheduler and detokenizer are forked, see `fork_processes`; in processes that it
spawns, multiprocessing imports this file again, so the repairs stand at module level.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import multiprocessing
import runpy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _device

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")


def provide_torchvision_operators() -> torch.library.Library | None:
    """Declare the operators whose schemas torchvision looks up when it is imported.

    Its wheel holds CUDA code that cannot be loaded here, and without the schemas the import fails. Nothing calls
    the operators. The declaration lasts as long as the library object that is returned.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent / "_C.so"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return library


def ignore_pinned_memory() -> None:
    """Let requests for pinned memory give ordinary memory: LoRA asks for it on every device, torch refuses.

    torch lists its factory functions when a device context is first used, to redirect them; the list is made here
    first, so that it holds the functions themselves and not what stands before them.
    """
    _device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_options: self


def ignore_host_registration() -> None:
    """Let the buffer of routed experts be registered with a CUDA runtime that is not there."""
    runtime = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.cudart = lambda: runtime


def fork_processes() -> None:
    """Let scheduler and detokenizer begin with what the server has imported already.

    The server spawns them, which a process with a CUDA context must; each then imports all of torch and SGLang anew,
    most of a start on few cores.
    """
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)


def _loads(library: Path) -> bool:
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return True


def _without_pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return make


_torchvision = provide_torchvision_operators()
if not torch.accelerator.is_available():
    ignore_pinned_memory()
    ignore_host_registration()

if __name__ == "__main__":
    if not torch.accelerator.is_available():
        fork_processes()
    # By default Python looks for garbage after every 700 new objects, a good part of what it takes to load SGLang.
    gc.set_threshold(10_000)
    runpy.run_module("sglang.launch_server", run_name="__main__")
