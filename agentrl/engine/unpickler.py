"""Reads tensors from a pickle without letting it run code."""

from __future__ import annotations

import base64
import io
import pickle
import struct
from typing import Any

import torch

from agentrl.engine.request import BadRequestError

_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "FloatStorage"),
    ("torch", "DoubleStorage"),
    ("torch", "HalfStorage"),
    ("torch", "BFloat16Storage"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.storage", "_load_from_bytes"),
}
# What damaged bytes raise, found by damaging them.
_DAMAGE = (
    pickle.UnpicklingError, struct.error, EOFError, ValueError, TypeError, LookupError, ArithmeticError,
    AttributeError, AssertionError, ImportError, MemoryError, RuntimeError,
)  # fmt: skip


class _TensorUnpickler(pickle.Unpickler):
    """Finds only what a pickled list of tensors needs."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed global of that name; storages are read with weights_only."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if (module, name) not in _ALLOWED:
            raise BadRequestError(f"the payload asks for {module}.{name}; only plain tensors are read")
        return super().find_class(module, name)


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def load_named_tensors(payload: str) -> dict[str, torch.Tensor]:
    """Tensors by name from base64 of a pickled list of pairs or dict, as SGLang's tensor updates and adapters are.

    Raises:
        BadRequestError: not base64, not a pickle, asks for anything but tensors, or has another shape.
    """
    try:
        data = base64.b64decode(payload, validate=True)
        pairs = _TensorUnpickler(io.BytesIO(data)).load()
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        tensors = {name: tensor for name, tensor in pairs}  # noqa: C416 - unpacking checks the shape
    except BadRequestError:
        raise
    except _DAMAGE as error:
        raise BadRequestError(f"serialized_named_tensors cannot be read: {error}") from error
    if not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in tensors.items()):
        raise BadRequestError("serialized_named_tensors must be pairs of a name and a tensor")
    return tensors
