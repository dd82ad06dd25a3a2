"""Tensors as the text that an engine's tensor update takes: base64 of a pickle."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

from agentrl.weights.flattened import FlattenedTensorMetadata, flatten

NamedTensors = Sequence[tuple[str, torch.Tensor]]
SGLANG_METADATA = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")


def plain_payload(tensors: NamedTensors) -> str:
    """The tensors themselves, for any host; ``load_format`` null."""
    return _encode(pickle.dumps([(name, tensor.detach()) for name, tensor in tensors]))


def bucket_payload(tensors: NamedTensors) -> str:
    """The tensors as one run of bytes, for any host; ``load_format`` "flattened_bucket".

    SGLang finds its own class in it, although none of SGLang is needed here.
    """
    flat, layout = flatten(tensors)
    buffer = io.BytesIO()
    _BucketPickler(buffer, protocol=4).dump({"flattened_tensor": flat, "metadata": layout})
    return _encode(buffer.getvalue())


def shared_payload(tensors: NamedTensors) -> str:
    """Handles of the tensors' memory, for one reader on this host; ``load_format`` null.

    Moves CPU tensors into shared memory in place; on CUDA hands out IPC handles. This process, and the
    tensors in it, must live until the engine has answered.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    try:
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump([(name, tensor.detach()) for name, tensor in tensors])
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return _encode(buffer.getvalue())


class _BucketPickler(pickle._Pickler):
    """Writes our metadata class under SGLang's name; only the Python pickler lets a global be renamed."""

    # Methods of the Python pickler that its annotations leave out, as they do `save_global`.
    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def save_global(self, obj: object, name: str | None = None) -> None:
        """Any other global as usual."""
        if obj is not FlattenedTensorMetadata:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + "\n".join([*SGLANG_METADATA, ""]).encode())
        self.memoize(obj)

    dispatch = {**pickle._Pickler.dispatch, type: save_global}  # type: ignore[dict-item]


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
