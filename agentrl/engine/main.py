"""Runs an embedded engine until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

import torch

from agentrl.engine.http import HttpServer
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer
from agentrl.engine.verification import check_engine
from agentrl.models.verification import require
from agentrl.process.loop import run_async
from agentrl.process.parent import STOP_SIGNALS
from agentrl.process.ports import bind
from agentrl.types.errors import ConfigError

_EXIT_S = 5.0


def run_engine(
    options: EngineOptions, supervised: bool, on_ready: Callable[[str], None] = lambda address: None
) -> NoReturn:
    """Load the model and serve it, until a signal to stop comes unless it is `supervised`; ends the process.

    `on_ready` is told the address as soon as requests are taken.

    Raises:
        ConfigError: the machine lacks the device, the port cannot be had, the model cannot be loaded, or its
            architecture is not one that the engine computes rightly.
    """
    _check_device(options.device)
    torch.set_num_threads(options.threads)
    with bind(options.host, options.port) as listener:
        require(check_engine(options.model))
        server = EngineServer(options)
        # From here on whoever connects waits for the answer instead of being refused.
        listener.listen()
        on_ready(f"http://{options.host}:{listener.getsockname()[1]}")
        run_async(_serve(server, options.token, listener, () if supervised else STOP_SIGNALS))


def _check_device(name: str) -> None:
    """Raises ConfigError if there is no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device: {error}; give cpu, cuda or cuda:N") from error
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} finds {num_gpus} CUDA devices here; give cpu or a smaller "
            "number, or install a build of torch for this machine's GPUs"
        )


async def _serve(
    server: EngineServer, token: str | None, listener: socket.socket, stops: Iterable[signal.Signals]
) -> NoReturn:
    """Step and take calls. Nobody listens at the port before this.

    Waits for: one of the signals `stops`. Unblocked by: it, behind the step under way; a step that fails ends the
    process as well.
    """
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in stops:
        loop.add_signal_handler(number, interrupted.set)
    steps = asyncio.create_task(server.scheduler.run(), name="engine-steps")
    serving = asyncio.create_task(HttpServer(server, token).serve(sockets=[listener]), name="engine-http")
    for task in (steps, serving):
        task.add_done_callback(_exit_if_failed)
    await interrupted.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_S), server.scheduler.between_steps():
            steps.cancel()
    # Clients that still wait see their connections close; a thread that computes would crash an interpreter's own end.
    os._exit(0)


def _exit_if_failed(task: asyncio.Task[None]) -> None:
    """What fails here would leave every request waiting for ever: end the process instead."""
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception())
        os._exit(1)
