"""One encoding for everything that crosses a process border: msgpack, typed by the dataclasses.

Numpy arrays travel as ``[dtype, shape, bytes]``. Decoding is by the declared type, so a wrong shape of
record is an error at the border and not a surprise behind it. JSON on disk is sealed: its last member is a checksum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import xxhash

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_PIECE_BYTES = 2**20
_SEAL = re.compile(rb',?"checksum":"([0-9a-f]{16})"\}$')
# What a seal still shows when one of its bytes is another.
_TRACES_OF_SEALS = re.compile(rb'"checksum"|"[0-9a-f]{16}"\}$')


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


def seal(text: bytes) -> bytes:
    """A JSON object with one more member, last: 64 bits of XXH3 over all that is before it.

    Example: ``{"step":3}`` gives ``{"step":3,"checksum":"8c1a6f0b2d9e4475"}``.
    """
    body = text.removesuffix(b"}")
    comma = b"" if body == b"{" else b","
    return b'%s%s"checksum":"%s"}' % (body, comma, xxhash.xxh3_64_hexdigest(body).encode())


def unseal(data: bytes) -> bytes:
    """What `seal` was given; an object without a seal as it is, since an older program wrote it.

    Raises:
        ValueError: a byte is another than when it was sealed.
    """
    text = data.strip()
    found = _SEAL.search(text)
    body = text[: found.start()] if found else b""
    if found and xxhash.xxh3_64_hexdigest(body).encode() == found[1]:
        return body + b"}"
    if found or _TRACES_OF_SEALS.search(text):
        raise ValueError("its checksum is wrong")
    return text


def is_sealed_whole(data: bytes) -> bool:
    """Whether a seal stands somewhere in the bytes: what a crash cut off has none."""
    return re.search(rb'"checksum":"[0-9a-f]{16}"\}', data) is not None


def file_digest(path: Path) -> str:
    """128 bits of XXH3 over a file's bytes. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


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
