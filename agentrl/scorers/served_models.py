"""What kinds that ask a server have in common: its token, and whether its tokenizer is that of the policies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.tokens.vocabulary import vocabulary_difference
from agentrl.types.errors import ConfigError


def read_token(scorer: str, variable: str | None) -> str | None:
    """The content of the environment variable that a recipe names. Raises ConfigError if that is not set."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"scorer '{scorer}': the environment variable {variable} is not set; put the key there")
    return token


def served_tokenizer(scorer: str, url: str, info: Mapping[str, Any], given: Path | None) -> Path:
    """The folder of the tokenizer of what an SGLang-protocol server serves, as its ``/model_info`` or a recipe says.

    Raises:
        ConfigError: it is not on this machine.
        KeyError: the server does not say.
    """
    folder = given or Path(str(info.get("tokenizer_path") or info["model_path"]))
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"scorer '{scorer}': {url} has its tokenizer at {folder}, which is not here; give a folder with a copy of "
            "its tokenizer.json as `tokenizer`"
        )
    return folder


def check_tokenizer(scorer: str, what: str, tokenizer: Path, models: Mapping[str, Path], remedy: str) -> None:
    """Whether token ids mean the same to a scorer's model and to the policies whose turns it judges.

    Raises:
        ConfigError: they do not; says that `scorer` `what`, such as ``has a PRM of another tokenizer``.
    """
    for policy, folder in models.items():
        if difference := vocabulary_difference(folder, tokenizer):
            raise ConfigError(f"scorer '{scorer}' {what} than policy '{policy}': {difference}; {remedy}")
