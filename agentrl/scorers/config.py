"""Which scorers judge an environment's episodes, and what each counts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, SerializeAsAny, Tag

from agentrl import registry
from agentrl.config.base import ConfigModel, parse_config
from agentrl.scorers.definition import ScorerDefinition, TurnScorerConfig
from agentrl.types.errors import ConfigError


class VerifierConfig(ConfigModel):
    """The environment judges by itself, at the end of play."""

    kind: Literal["verifier"] = "verifier"
    """The environment's own verdict."""
    name: str = "verifier"
    """Name of its scores in metrics and records."""
    weight: float = 1.0
    """Its part in the reward; 0 only records."""


class FunctionScorerConfig(ConfigModel):
    """A Python function judges the whole episode, some time after its end.

    No step takes the episode before it has, unless it only records.
    """

    kind: Literal["function"]
    """A function of the recipe's choice."""
    name: str
    """Name of its scores in metrics and records."""
    function: str
    """``module:attribute``; takes an `Episode`, gives a number or a `Score`, and may be a coroutine."""
    weight: float = 1.0
    """Its part in the reward; 0 only records."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one episode."""
    if_missing: Literal["drop", "leave_out"] = "drop"
    """What becomes of an episode that it cannot judge in time: it is dropped, or its reward is that of the others."""


_OF_EPISODES = ("verifier", "function")


def _tag(value: Any) -> str:
    if isinstance(value, VerifierConfig | FunctionScorerConfig):
        return value.kind
    kind = value.get("kind", "verifier") if isinstance(value, dict) else "turns"
    return kind if kind in _OF_EPISODES else "turns"


def _of_its_kind(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = str(value["kind"])
    source = f"scorer '{value['name']}'" if "name" in value else f"a scorer of kind '{kind}'"
    return parse_config(find_definition(kind).config, value, source)


ScorerConfig = Annotated[
    Annotated[VerifierConfig, Tag("verifier")]
    | Annotated[FunctionScorerConfig, Tag("function")]
    | Annotated[SerializeAsAny[TurnScorerConfig], BeforeValidator(_of_its_kind), Tag("turns")],
    Discriminator(_tag),
]
"""One scorer, by its `kind`: ``verifier``, ``function``, or a registered kind of scorers of turns."""


def check_policies(scorer: TurnScorerConfig, frozen: Mapping[str, bool]) -> None:
    """Whether the policies that a scorer names are there, and can be what it wants of them; `frozen` has a recipe's.

    Raises:
        ValueError: they are not.
    """
    asked, followed = scorer.uses_policies(), [name for name in (scorer.snapshots_of(),) if name]
    if unknown := sorted({*asked, *followed, *scorer.policies} - frozen.keys()):
        raise ValueError(f"scorer '{scorer.name}' names policies {unknown}; the recipe has {', '.join(frozen)}")
    if changing := [name for name in asked if not frozen[name]]:
        raise ValueError(
            f"scorer '{scorer.name}' asks policy '{changing[0]}', whose weights change: set "
            f"policies.{changing[0]}.frozen, or take kind self_teacher"
        )
    if still := [name for name in followed if frozen[name]]:
        raise ValueError(f"scorer '{scorer.name}' follows policy '{still[0]}', which is frozen: take kind teacher")


def find_definition(kind: str) -> ScorerDefinition[Any]:
    """The kind of scorers of turns that is registered by a name. Raises ConfigError."""
    if ":" not in kind:
        _check_kind(kind)
    found = registry.load_plugin(registry.SCORERS, kind)
    if not isinstance(found, ScorerDefinition):
        raise ConfigError(f"scorer kind '{kind}' is a {type(found).__name__}, not a ScorerDefinition")
    return found


def _check_kind(kind: str) -> None:
    known = [*_OF_EPISODES, *(plugin.name for plugin in registry.list_plugins(registry.SCORERS))]
    if kind not in known:
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}, and module:attribute"
        raise ConfigError(f"no kind of scorers '{kind}'; {hint}")
