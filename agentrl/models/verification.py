"""Trainer and engine, each held against the unmodified model of transformers before they start; and what was found.

The check compares log-probabilities on a small random model of the folder's architecture (see `probe`), in float64 on
the CPU, where both sides agree with transformers to about 3e-6 nats: transformers computes some softmaxes in float32.
What differs by more than `MAX_GAP_NATS` is refused, whatever the reason, known or not. Verdicts are remembered in
``$XDG_CACHE_HOME/agentrl/verdicts`` (``~/.cache`` by default) under a hash of configuration, code and versions, so
that a check is paid once; delete the folder to have it made again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

import agentrl
from agentrl.config.cache import cache_folder
from agentrl.models.probe import Probe, make_probe
from agentrl.models.support import read_config, refusal
from agentrl.models.verified import VERIFIED
from agentrl.types.errors import ConfigError

MAX_GAP_NATS = 1e-4
_UNMEASURED = float("inf")
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check of one side found of an architecture.

    `side` is ``trainer`` or ``engine``; `max_gap_nats` the largest difference of a log-probability, infinite where
    none could be measured; `reason` says why it is not verified, and is empty if it is.

    Example: ``Verdict("mistral", "engine", True, 1.7e-06, "")``.
    """

    architecture: str
    side: str
    is_verified: bool
    max_gap_nats: float
    reason: str


def require(verdict: Verdict) -> None:
    """Raises ConfigError, with what was found and what to do, unless the verdict is good."""
    if not verdict.is_verified:
        known = ", ".join(architecture.model_type for architecture in VERIFIED)
        raise ConfigError(
            f"the {verdict.side} cannot run models of type {verdict.architecture}: {verdict.reason}. Choose a model of "
            f"a type that is verified: {known}"
        )


def verify(folder: Path, side: str, packages: Sequence[str], measure: Callable[[Probe], float]) -> Verdict:
    """Hold one side against plain transformers, or remember what came of it.

    Args:
        folder: the model folder.
        side: ``trainer`` or ``engine``.
        packages: of ours whose code takes part, such as ``engine``; with another code the check is made again.
        measure: the largest difference of the side's log-probabilities from the probe's, in nats.

    Raises:
        ConfigError: the folder holds no model.
    """
    config = read_config(folder)
    file = _verdict_file(folder, side, packages)
    if file is not None and (known := _read(file)) is not None:
        return known
    verdict, is_lasting = _judge(config, side, measure)
    if file is not None and is_lasting:
        _write(file, verdict)
    return verdict


def _judge(config: PreTrainedConfig, side: str, measure: Callable[[Probe], float]) -> tuple[Verdict, bool]:
    """The verdict, and whether it holds: a pass that failed may have lacked memory or room on the disk."""

    def refused(reason: str, gap: float = _UNMEASURED) -> Verdict:
        return Verdict(config.model_type, side, False, gap, reason)

    if (reason := refusal(config)) is not None:
        return refused(reason), True
    with tempfile.TemporaryDirectory(prefix="agentrl-probe-") as folder:
        try:
            probe = make_probe(config, Path(folder))
        except Exception as error:  # noqa: BLE001 - whatever keeps transformers from running a model is the answer
            return refused(f"transformers cannot run a small copy of it: {_brief(error)}"), False
        try:
            gap = measure(probe)
        except ConfigError as error:
            return refused(str(error)), True
        except Exception as error:  # noqa: BLE001 - models of others fail in ways of their own, which is the answer
            return refused(f"its forward pass fails with agentrl's attention: {_brief(error)}"), False
    if gap <= MAX_GAP_NATS:
        return Verdict(config.model_type, side, True, gap, ""), True
    reason = (
        f"its log-probabilities are up to {gap:.2g} nats off those of the same model in plain transformers, more than "
        f"{MAX_GAP_NATS:g}: it has a feature that agentrl does not know"
    )
    return refused(reason, gap), True


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _verdict_file(folder: Path, side: str, packages: Sequence[str]) -> Path | None:
    """Where the verdict is remembered; None if this user has no home."""
    values = json.loads((folder / "config.json").read_text())
    stable = {name: value for name, value in values.items() if name not in _VOLATILE}
    digest = hashlib.sha256(json.dumps([side, stable, torch.__version__, transformers.__version__]).encode())
    root = Path(agentrl.__file__).parent
    for package in sorted({"models", *packages}):
        for source in sorted((root / package).glob("*.py")):
            digest.update(source.read_bytes())
    cache = cache_folder()
    return None if cache is None else cache / "verdicts" / f"{digest.hexdigest()[:32]}.json"


def _read(file: Path) -> Verdict | None:
    """A remembered verdict; None if there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        values: Any = json.loads(file.read_text())
        if isinstance(values, dict) and values.keys() == {field.name for field in fields(Verdict)}:
            return Verdict(**values)
    return None


def _write(file: Path, verdict: Verdict) -> None:
    """Remember a verdict, whole or not at all; a folder that cannot be written costs the check another time."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(asdict(verdict), part)
        Path(part.name).replace(file)
