"""The frame that engines ask for around weights that arrive piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from agentrl.protocols import Engine
from agentrl.types.errors import EngineError, EngineRefusedError

# The embedded engine then serves nothing of the update; SGLang has served its buckets already.
_DISCARD = {"discard": True}


@asynccontextmanager
async def weight_update(engine: Engine) -> AsyncIterator[None]:
    """Begin and end a weight update; servers that know no such calls need none.

    A session that a failed attempt left open is ended first: the engine allows one.

    Raises:
        EngineError: the engine refuses.
    """
    has_session = await _begin(engine)
    try:
        yield
    except BaseException:
        if has_session:
            with contextlib.suppress(EngineError):
                await engine.control("/end_weight_update", _DISCARD)
        raise
    if has_session:
        await engine.control("/end_weight_update", {})


async def _begin(engine: Engine) -> bool:
    try:
        await engine.control("/begin_weight_update", {})
    except EngineRefusedError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return False
        await engine.control("/end_weight_update", _DISCARD)
        await engine.control("/begin_weight_update", {})
    return True
