"""Runs an embedded engine until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from agentrl.engine.calls import CallServer
from agentrl.engine.link import Kind, Message
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer
from agentrl.engine.verification import check_engine
from agentrl.models.verification import require
from agentrl.process.loop import run_async
from agentrl.process.parent import STOP_SIGNALS, stops_held_back
from agentrl.types.errors import ConfigError, EngineError

_EXIT_S = 5.0


def run_engine(options: EngineOptions, attended: bool) -> None:
    """Load the model and serve it, until a signal to stop comes unless it is `attended`.

    Raises:
        ConfigError: the machine lacks the device, the model cannot be loaded, or its architecture is not one that the
            engine computes rightly.
        EngineError: the port cannot be had, or the process that speaks HTTP has ended.
    """
    _check_device(options.device)
    torch.set_num_threads(options.threads)
    front = FrontProcess.start(options.host, options.port)
    try:
        require(check_engine(options.model))
        is_told_to = run_async(_serve(EngineServer(options), options.token, front, () if attended else STOP_SIGNALS))
    finally:
        front.close()
    if not is_told_to:
        raise EngineError(
            f"nobody speaks HTTP at port {options.port} for this engine any more: the process that does has ended, and "
            "its last words are above"
        )


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


@dataclass(frozen=True, slots=True)
class FrontProcess:
    """The process that speaks HTTP, and this end of the socket to it; it ends when that is closed."""

    process: subprocess.Popen[bytes]
    link: socket.socket

    @classmethod
    def start(cls, host: str, port: int) -> FrontProcess:
        """Start it; it has the port at once, and takes calls when it is told that the engine is ready.

        Raises:
            EngineError: the port is somebody else's, or the host not this machine.
        """
        with _bound(host, port) as listener, stops_held_back():
            ours, theirs = socket.socketpair()
            with theirs:
                descriptors = [theirs.fileno(), listener.fileno()]
                command = [sys.executable, "-m", "agentrl.engine.front", *map(str, descriptors)]
                return cls(subprocess.Popen(command, pass_fds=descriptors), ours)

    def close(self) -> None:
        """Let it end, and the port be free."""
        self.link.close()
        try:
            self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the port, which shows before a model is loaded whether it can be had."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        message = f"port {port} of {host} cannot be had: {error}; give another --port, or another --host"
        raise EngineError(message) from error
    return listener


async def _serve(server: EngineServer, token: str | None, front: FrontProcess, stops: Iterable[signal.Signals]) -> bool:
    """Whether the engine was told to end, by one of the signals `stops`; if not, its front has ended.

    Waits for: such a signal, or the front's end. Unblocked by: these; a step that fails ends the process. A step that
    does not end in time is left to the end of the process.
    """
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in stops:
        loop.add_signal_handler(number, interrupted.set)
    calls = CallServer(server, token)
    await loop.create_unix_connection(lambda: calls.link, sock=front.link)
    steps = asyncio.create_task(server.scheduler.run(), name="engine-steps")
    steps.add_done_callback(_exit_if_failed)
    calls.link.send(Message(Kind.READY))
    waits = [asyncio.create_task(event.wait()) for event in (interrupted, calls.ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    try:
        async with asyncio.timeout(_EXIT_S), server.scheduler.between_steps():
            steps.cancel()
    except TimeoutError:  # a thread that computes while the interpreter ends would crash the process
        os._exit(0 if interrupted.is_set() else 1)
    calls.link.close()
    return interrupted.is_set()


def _exit_if_failed(task: asyncio.Task[None]) -> None:
    """A step loop that fails would leave every request waiting for ever: end the process instead."""
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception())
        os._exit(1)
