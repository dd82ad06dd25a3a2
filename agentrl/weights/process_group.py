"""A process group for weights alone, beside whatever default group its processes have or lack."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from agentrl.process.interfaces import interface_of, own_address

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_POLL_S = 0.0005
_INTERFACE = "GLOO_SOCKET_IFNAME"
_CHOSEN = os.environ.get(_INTERFACE)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One member's side of a group; `device` is where its tensors must be.

    Example: the trainer's side is rank 0 of 2, ``WeightGroup("agentrl-1", ..., torch.device("cpu"))``.
    """

    name: str
    process_group: dist.ProcessGroup
    device: torch.device


def join_group(
    master_address: str,
    master_port: int,
    world_size: int,
    rank: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    gpu: torch.device,
) -> WeightGroup:
    """Meet the other members; rank 0 listens on the port. SGLang's servers join in the same way.

    Under NCCL this member's tensors are on `gpu`, which gloo has no use for. Under gloo it listens at the interface
    from which the master is reached, unless this process's environment has named another.

    Waits for: all members. Unblocked by: their arrival, or `timeout_s`.

    Raises:
        RuntimeError: they did not come in time, or the name is taken.
        OSError: there is no way to the master's address.
    """
    if _CHOSEN is None:
        _listen_towards(master_address)
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    # NCCL's watchdog ends the process when an operation exceeds its time; the receiver's own deadline comes first.
    limit = 2 * timeout if backend == "nccl" else timeout
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        backend,
        PrefixStore(group_name, store),
        group_name=cast("GroupName", group_name),
        timeout=limit,
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return WeightGroup(group_name, group, gpu if backend == "nccl" else torch.device("cpu"))


def _listen_towards(master_address: str) -> None:
    """Else gloo goes by this machine's name, which may stand for its loopback, where no other machine finds it."""
    interface = interface_of(own_address(master_address))
    if os.environ.get(_INTERFACE) != interface:
        os.environ[_INTERFACE] = interface


def leave_group(group: WeightGroup) -> None:
    """Take this process out of the group, even in mid-broadcast."""
    group.process_group.abort()
    dist.destroy_process_group(group.process_group)


def broadcast(tensor: torch.Tensor, group: WeightGroup) -> None:
    """Send a tensor from rank 0. Whoever calls has a deadline and kills this process when it has passed.

    Waits for: the other members. Unblocked by: their receipt, or their end.
    """
    _start_broadcast(tensor.to(group.device), group).wait()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def receive(
    tensors: Sequence[torch.Tensor], group: WeightGroup, deadline_s: float, has_been_left: Callable[[], bool]
) -> None:
    """Fill tensors, one broadcast from rank 0 for each.

    Waits for: the sender. Unblocked by: its bytes, its end, `deadline_s` for all together, or
    `has_been_left` becoming true.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the sender is gone, or the group was left meanwhile.
    """
    end = time.monotonic() + deadline_s
    for tensor in tensors:
        work = _start_broadcast(tensor, group)
        # Polling is the only wait that ends in time on NCCL, where waiting blocks a stream and not the caller.
        while not work.is_completed():
            if has_been_left():
                raise RuntimeError("the group was left")
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came for {deadline_s:g} s")
            time.sleep(_POLL_S)
        work.wait()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def _start_broadcast(tensor: torch.Tensor, group: WeightGroup) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.process_group.broadcast([tensor], options)
