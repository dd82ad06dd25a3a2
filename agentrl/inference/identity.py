"""Whether an answer of ``/generate`` is for the request that was sent, and not for another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import xxhash


def request_hash(ids: Sequence[int] | np.ndarray, sampling: Mapping[str, Any], adapter: str | None) -> str:
    """Digest of what decides the tokens of a request: 128 bits of XXH3.

    Trainer's side and engine compute it alike, each from what it has: numbers count by their value, so that it does
    not matter whether ``1`` or ``1.0`` came over the wire.

    Args:
        ids: the prompt, [P].
        sampling: the ``sampling_params`` of the body.
        adapter: its ``lora_path``.
    """
    digest = xxhash.xxh3_128(np.asarray(ids, np.int64).tobytes())
    plain = {key: _plain(value) for key, value in sampling.items()}
    digest.update(orjson.dumps([plain, adapter], option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def mismatch(answer: object, body: Mapping[str, Any]) -> str | None:
    """Why an answer is not for the request with this body; None if nothing speaks against it.

    Every answer names the request's id. The number of prompt tokens and the request's hash are compared where the
    server gives them: SGLang gives no hash, and no number for a request that was aborted in its queue.

    Example: an answer with ``meta_info.id`` "b" for the body with ``rid`` "a" gives ``its id is 'b'``.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        return "it is no generation"
    ids = body["input_ids"]
    if meta.get("id") != body["rid"]:
        return f"its id is {meta.get('id')!r}"
    if meta.get("prompt_tokens", len(ids)) != len(ids):
        return f"its prompt has {meta['prompt_tokens']!r} tokens, not {len(ids)}"
    if "request_hash" not in meta:
        return None
    if meta["request_hash"] != request_hash(ids, body["sampling_params"], body.get("lora_path")):
        return "its request_hash is that of another prompt, sampling or adapter"
    return None


def _plain(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value
