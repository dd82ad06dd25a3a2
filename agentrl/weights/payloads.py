"""Tensors as the text that an engine's tensor update takes: base64 of a pickle."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing


def shared_payload(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
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
    return base64.b64encode(buffer.getvalue()).decode()
