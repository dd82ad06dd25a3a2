"""The engine's side of broadcasts: groups by name, received from in threads and with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from agentrl.engine.request import BadRequestError, field_of
from agentrl.process.threads import run_in_thread
from agentrl.weights.process_group import WeightGroup, join_group, leave_group, receive

Result = TypeVar("Result")
# Fills tensors from a group's sender.
Receive = Callable[[Sequence[torch.Tensor]], None]


class WeightGroups:
    """Groups that weights come through.

    Invariant: a group that failed once is left, since its two ends may be out of step.
    """

    def __init__(self, collective_s: float, device: torch.device) -> None:
        """Weights that come by NCCL are put on `device`, which is the served model's."""
        self._collective_s, self._device = collective_s, device
        self._groups: dict[str, WeightGroup | None] = {}

    async def join(self, body: dict[str, Any]) -> str:
        """Become a member; returns the group's name.

        Waits for: the other members. Unblocked by: their arrival, or the deadline.

        Raises:
            BadRequestError: incomplete request, a name in use, or members that do not come.
        """
        address, name, backend = (field_of(body, key, str) for key in ("master_address", "group_name", "backend"))
        port, rank, world_size = (field_of(body, key, int) for key in ("master_port", "rank_offset", "world_size"))
        if backend not in ("gloo", "nccl") or (backend == "nccl" and self._device.type != "cuda"):
            raise BadRequestError(f"backend {backend!r} is not available here; use gloo, or nccl between GPUs")
        if not 0 < rank < world_size:
            raise BadRequestError(
                f"rank_offset {rank} must be above 0, the sender's, and below world_size {world_size}"
            )
        if name in self._groups:
            raise BadRequestError(f"group {name} exists already; destroy it first")
        self._groups[name] = None

        def meet() -> WeightGroup:
            return join_group(address, port, world_size, rank, name, backend, self._collective_s, self._device)

        # The library begins its own time limit anew each time that it tries to connect.
        meeting = asyncio.ensure_future(run_in_thread(f"join-{name}", meet))
        await asyncio.wait({meeting}, timeout=self._collective_s)
        try:
            if not meeting.done():
                meeting.add_done_callback(_leave_if_met)
                raise TimeoutError(f"not all came within {self._collective_s:g} s")
            self._groups[name] = meeting.result()
        except (RuntimeError, ValueError, OSError) as error:
            del self._groups[name]
            raise BadRequestError(f"group {name} did not form at {address}:{port}: {error}") from error
        return name

    async def receive(self, name: str, work: Callable[[Receive], Result]) -> Result:
        """What `work` makes of what it receives; it runs in a thread and may receive several times.

        Waits for: the sender. Unblocked by: its bytes, its end, the deadline of each receipt, or `leave`.

        Raises:
            BadRequestError: no such group, or it failed; it is left then.
        """
        group = self._of(name)

        def fill(tensors: Sequence[torch.Tensor]) -> None:
            receive(tensors, group, self._collective_s, lambda: self._groups.get(name) is not group)

        try:
            return await run_in_thread(f"receive-{name}", lambda: work(fill))
        except (RuntimeError, TimeoutError) as error:
            self.drop(name)
            raise BadRequestError(f"group {name} failed and was left: {error}") from error

    def device(self, name: str) -> torch.device:
        """Where the group's tensors must be. Raises BadRequestError."""
        return self._of(name).device

    def leave(self, body: dict[str, Any]) -> str:
        """Leave a group, which ends what waits for it; returns its name. Raises BadRequestError."""
        name = field_of(body, "group_name", str)
        self._of(name)
        self.drop(name)
        return name

    def drop(self, name: str) -> None:
        """Leave a group if there is one, without waiting for its last operation."""
        group = self._groups.pop(name, None)
        if group is not None:
            _leave_in_background(group)

    def _of(self, name: str) -> WeightGroup:
        group = self._groups.get(name)
        if group is None:
            raise BadRequestError(f"no group {name}; call init_weights_update_group first")
        return group


def _leave_if_met(meeting: asyncio.Future[WeightGroup]) -> None:
    """Members that came when nobody waited any more."""
    if not meeting.cancelled() and meeting.exception() is None:
        _leave_in_background(meeting.result())


def _leave_in_background(group: WeightGroup) -> None:
    """Leaving waits for the operation under way, whose own time limit ends it."""
    threading.Thread(target=leave_group, args=(group,), name=f"leave-{group.name}", daemon=True).start()
