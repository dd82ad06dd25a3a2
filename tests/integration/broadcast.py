"""The sending side of a weight broadcast, as bare as the protocol allows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import Backend, BroadcastOptions, PrefixStore, ProcessGroup, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

_DEADLINE = timedelta(seconds=60)


def join_as_sender(port: int, world_size: int, name: str) -> ProcessGroup:
    """Rank 0 of a gloo group whose other ranks are the shards of a server; blocks until they have come.

    Leave it by `destroy_process_group`: its threads would abort the interpreter's end.
    """
    store = TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=_DEADLINE, wait_for_workers=False)
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=_DEADLINE
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def send(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """One broadcast for each tensor, in order; blocks until all have arrived."""
    for tensor in tensors:
        group.broadcast([tensor.contiguous()], BroadcastOptions()).wait()
