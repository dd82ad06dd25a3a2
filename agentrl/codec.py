"""One encoding for everything that crosses a process border: msgpack, typed by the dataclasses.

Numpy arrays travel as ``[dtype, shape, bytes]``. Decoding is by the declared type, so a wrong shape of
record is an error at the border and not a surprise behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Bytes of a record made of dataclasses, containers, scalars and numpy arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_pack_array)


def decode(data: bytes, kind: TypeForm[T]) -> T:
    """The record of type `kind` that `encode` wrote.

    Raises:
        msgspec.ValidationError: the bytes are not such a record; the message names the field.
    """
    record: T = msgspec.msgpack.decode(data, type=kind, dec_hook=_unpack_array)
    return record


def to_json(value: object) -> bytes:
    """The record as JSON for people and common tools; arrays become lists."""
    return msgspec.json.encode(value, enc_hook=_list_array)


def from_json(data: bytes, kind: TypeForm[T]) -> T:
    """The record of type `kind` that `to_json` wrote."""
    record: T = msgspec.json.decode(data, type=kind, dec_hook=_array_of_list)
    return record


def _pack_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot cross a process border")


def _unpack_array(kind: type, value: tuple[str, list[int], bytes]) -> np.ndarray:
    if kind is not np.ndarray:
        raise NotImplementedError(f"cannot decode {kind.__name__}")
    dtype, shape, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()


def _list_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON")


def _array_of_list(kind: type, value: Mapping[str, Any]) -> np.ndarray:
    if kind is not np.ndarray:
        raise NotImplementedError(f"cannot decode {kind.__name__}")
    return np.asarray(value["values"], dtype=np.dtype(value["dtype"]))
