"""Makes an engine that runs already a run's own, and lets it go again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentrl.inference.client import EngineClient
from agentrl.inference.labels import mark_of, unmarked
from agentrl.types.errors import ConfigError, EngineRefusedError
from agentrl.types.version import PolicyVersion

_SETTLE_S = 0.5  # longer than another run's calls take from reading a label to renaming it
_HEALTH_S = 3.0  # SGLang answers in a fraction of it, or after 20 s
# Options of SGLang, and their values with which no token is on its way when it pauses in place.
_EXACT_IN_PLACE: dict[str, tuple[Any, ...]] = {
    "disable_overlap_schedule": (True,),
    "pp_size": (1,),
    "enable_pdmux": (False, None),
    "disaggregation_mode": ("null", None),
}


async def take(engine: EngineClient, version: PolicyVersion, take_over: str | None = None) -> None:
    """Make the engine this run's: its weights are renamed to `version` with the run's mark.

    Of runs that take an engine at the same time the one that writes last has it: each waits a moment and reads the
    mark again. Who writes later yet is noticed by every answer from then on. `take_over` is the mark of a run that is
    gone.

    Raises:
        EngineTakenError: it belongs to another run.
        EngineError: it cannot be reached.
    """
    owner = await _owner(engine)
    if owner not in (None, engine.labels.mark, take_over):
        raise engine.labels.refused(owner)
    await engine.relabel(engine.labels.write(version))
    if engine.labels.mark is None:
        return
    await asyncio.sleep(_SETTLE_S)
    if (owner := await _owner(engine)) != engine.labels.mark:
        raise engine.labels.refused(owner)


async def wake(engine: EngineClient) -> bool:
    """Let an engine that was taken generate, and forget what it keeps of others; returns whether it stood still before.

    SGLang does not say that it is paused, but says nothing of its health then. An engine that refuses to generate, as
    it lacks weights, does so when it has them.

    Raises:
        EngineError: it cannot be reached.
    """
    info = await engine.model_info()
    is_paused = info["paused"] is not None if "paused" in info else not await engine.is_well(_HEALTH_S)
    with suppress(EngineRefusedError):
        await engine.resume()
    # What others hold yet stays, as does everything where SGLang still works at the test of its health. This run's
    # requests do not find it: they name a part of the cache of their own.
    await engine.flush()
    return is_paused


async def release(engine: EngineClient) -> None:
    """Leave the engine so that another run can have it: generating, and without this run's mark.

    One with another mark is left alone.

    Raises:
        EngineError: it cannot be reached.
    """
    label = (await engine.model_info()).get("weight_version")
    if mark_of(label) != engine.labels.mark:
        return
    # First: once the mark is off, a pause may be the next run's.
    if engine.may_be_paused:
        await engine.resume()
    if engine.labels.mark is not None:
        await engine.relabel(unmarked(label))


async def check_swaps_in_place(engine: EngineClient) -> None:
    """Whether the engine can name the weights of every token over a swap in place.

    SGLang counts a request's tokens when its label changes. While it schedules ahead, a result of the old weights is
    in its queue at that moment for some requests and not for others, and no answer says for which.

    Raises:
        ConfigError: it cannot; says what to change.
        EngineError: it cannot be asked.
    """
    if (await engine.model_info()).get("reports_kv_versions"):
        return
    if (wrong := inexact_in_place(await engine.read("/server_info"))) is not None:
        raise ConfigError(
            f"engine {engine.name} at {engine.url} cannot swap weights in place ({wrong}): tokens of the old weights "
            "would bear the new version. Start it with --disable-overlap-schedule, without pipeline stages or "
            'disaggregation; or set publish.pause_mode = "retract" or "abort"'
        )


def inexact_in_place(options: Mapping[str, Any]) -> str | None:
    """The options of a server that let its labels lie over a swap in place, as text; None if there are none.

    Example: ``{"disable_overlap_schedule": False, "pp_size": 1}`` gives ``disable_overlap_schedule = False``.
    """
    wrong = [
        f"{name} = {options.get(name)}" for name, right in _EXACT_IN_PLACE.items() if options.get(name) not in right
    ]
    return ", ".join(wrong) or None


async def _owner(engine: EngineClient) -> str | None:
    return mark_of((await engine.model_info()).get("weight_version"))
