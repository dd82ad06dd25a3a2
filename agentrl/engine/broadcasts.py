"""Weights that arrive by broadcast, aside, while the event loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.engine.collective import Receive, WeightGroups
from agentrl.engine.request import BadRequestError, field_of
from agentrl.engine.unpickler import DTYPES
from agentrl.engine.weights import StagedWeights, WeightStore
from agentrl.weights.flattened import plan_layout, unflatten


@dataclass(frozen=True, slots=True)
class _Announced:
    """Tensors that come together: as one run of bytes, or one by one."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    is_flat: bool

    @classmethod
    def of(cls, body: dict[str, Any], is_flat: bool) -> _Announced:
        """Read an announcement. Raises BadRequestError."""
        names, dtypes, shapes = body.get("names"), body.get("dtypes"), body.get("shapes")
        if not isinstance(names, list) or not isinstance(dtypes, list) or not isinstance(shapes, list):
            raise BadRequestError("names, dtypes and shapes must be lists")
        if not len(names) == len(dtypes) == len(shapes) or len({*map(str, names)}) != len(names):
            raise BadRequestError("names, dtypes and shapes must be equally many, and each name once")
        for dtype in dtypes:
            if str(dtype).removeprefix("torch.") not in DTYPES:
                raise BadRequestError(f"dtype {dtype!r} is not known; known: {sorted(DTYPES)}")
        for name, shape in zip(names, shapes, strict=True):
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise BadRequestError(f"the shape of {name} must be a list of sizes, got {shape!r}")
        known = [DTYPES[str(dtype).removeprefix("torch.")] for dtype in dtypes]
        return cls(names, known, [tuple(shape) for shape in shapes], is_flat)

    def receive(self, receive: Receive, store: WeightStore, device: torch.device) -> Callable[[], StagedWeights]:
        """Fill memory that nobody reads; returns what hands it to the store."""
        if self.is_flat:
            layout = plan_layout(self.names, self.dtypes, self.shapes)
            flat = torch.empty(layout[-1].end_idx if layout else 0, dtype=torch.uint8, device=device)
            receive([flat])
            return lambda: store.adopt(unflatten(flat, layout)).with_digests()
        pairs = zip(self.shapes, self.dtypes, strict=True)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pairs]
        receive(tensors)
        return lambda: store.adopt(dict(zip(self.names, tensors, strict=True))).with_digests()


async def read_broadcast(body: dict[str, Any], groups: WeightGroups, store: WeightStore) -> StagedWeights:
    """Receive what a request announces: tensors, as SGLang's updates do, or several ``buckets``, each one run of bytes.

    Waits for: the sender. Unblocked by: its bytes, its end, or the groups' deadline.

    Raises:
        BadRequestError: incomplete request, tensors that the model lacks, or a group that fails. The group is left
            then: what is sent for this request would be taken for what comes next.
    """
    name = field_of(body, "group_name", str)
    device = groups.device(name)
    try:
        announced = _parse(body)
        for part in announced:
            store.check(dict(zip(part.names, part.shapes, strict=True)))
    except BadRequestError as error:
        groups.drop(name)
        raise BadRequestError(f"{error}; group {name} was left") from error

    def receive_all(receive: Receive) -> StagedWeights:
        # While one bucket is taken in, the next one is on its way.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="take-bucket") as taker:
            taken = [taker.submit(part.receive(receive, store, device)) for part in announced]
        staged = StagedWeights()
        for bucket in taken:
            staged = staged.with_more(bucket.result())
        return staged

    return await groups.receive(name, receive_all)


def _parse(body: dict[str, Any]) -> list[_Announced]:
    if "buckets" not in body:
        layout = body.get("load_format")
        if layout not in (None, "flattened_bucket"):
            raise BadRequestError(f"load_format {layout!r} is not served; use null or 'flattened_bucket'")
        return [_Announced.of(body, is_flat=layout is not None)]
    buckets = body["buckets"]
    if not isinstance(buckets, list) or not all(isinstance(bucket, dict) for bucket in buckets):
        raise BadRequestError("buckets must be a list of objects with names, dtypes and shapes")
    return [_Announced.of(bucket, is_flat=True) for bucket in buckets]
