"""Weights that arrive by broadcast, in fresh buffers, while the event loop goes on."""

from __future__ import annotations

from typing import Any

import torch

from agentrl.engine.collective import WeightGroups
from agentrl.engine.request import BadRequestError
from agentrl.engine.threads import run_in_thread
from agentrl.engine.unpickler import DTYPES
from agentrl.engine.weights import StagedWeights, WeightStore
from agentrl.weights.flattened import plan_layout, unflatten


async def read_broadcast(body: dict[str, Any], groups: WeightGroups, store: WeightStore) -> StagedWeights:
    """Receive what a request of ``/update_weights_from_distributed`` announces.

    A request that is refused leaves its group: what the sender broadcasts for it would be taken for the
    next bucket.

    Waits for: the sender. Unblocked by: its bytes, its end, or the groups' deadline.

    Raises:
        BadRequestError: incomplete request, tensors that the model lacks, or a group that fails.
    """
    name = body.get("group_name")
    if not isinstance(name, str):
        raise BadRequestError("group_name must be given, a string")
    device = groups.device(name)
    try:
        names, dtypes, shapes = _announced(body)
        store.check(dict(zip(names, shapes, strict=True)))
    except BadRequestError as error:
        groups.drop(name)
        raise BadRequestError(f"{error}; group {name} was left") from error
    if body.get("load_format") == "flattened_bucket":
        layout = plan_layout(names, dtypes, shapes)
        flat = torch.empty(layout[-1].end_idx if layout else 0, dtype=torch.uint8, device=device)
        await groups.receive(name, [flat])
        return await run_in_thread("stage-bucket", lambda: store.stage(unflatten(flat, layout)))
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    await groups.receive(name, tensors)
    return await run_in_thread("stage-tensors", lambda: store.stage(dict(zip(names, tensors, strict=True))))


def _announced(body: dict[str, Any]) -> tuple[list[str], list[torch.dtype], list[tuple[int, ...]]]:
    if body.get("load_format") not in (None, "flattened_bucket"):
        raise BadRequestError(f"load_format {body['load_format']!r} is not served; use null or 'flattened_bucket'")
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
    return names, [DTYPES[str(dtype).removeprefix("torch.")] for dtype in dtypes], [tuple(shape) for shape in shapes]
