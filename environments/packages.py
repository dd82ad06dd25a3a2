"""Packages of others that an environment plays: found, and of a version that was tried."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from packaging.specifiers import SpecifierSet

from agentrl.config.base import ConfigModel
from agentrl.types.errors import ConfigError


class PackagedOptions(ConfigModel):
    """Options of an environment that is made of another's package."""

    any_version: bool = False
    """Play a version of the package that was not tried with this adapter."""


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution that is imported where its episodes are played, and nowhere else.

    Example: ``Package("textarena", "==0.7.4")`` is installed by ``pip install 'textarena==0.7.4'``.
    """

    distribution: str
    tried: str
    """Versions that the tests play, as a requirement says them."""
    more: str = ""
    """What else its installation needs, as pip takes it. Example: ``--no-deps``."""

    @property
    def requirement(self) -> str:
        """As pip and a recipe's ``environment.requirements`` take it."""
        return f"{self.distribution}{self.tried}"

    def load(self, module: str, options: PackagedOptions) -> ModuleType:
        """Import one of its modules. Raises ConfigError if it is missing, or of a version that was not tried."""
        install = " ".join(f"pip install {self.more} '{self.requirement}'".split())
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            missing = f"{self.distribution} is not installed in the Python that plays it. Install it there by {install}"
            if self.more:  # a virtual environment of the run's own is installed without
                raise ConfigError(f"{missing}, and name that Python as environment.interpreter") from None
            raise ConfigError(
                f"{missing}, or have the run do so: "
                f'environment.placement = "venv", environment.requirements = ["{self.requirement}"]'
            ) from None
        if not options.any_version and not SpecifierSet(self.tried).contains(found, prereleases=True):
            raise ConfigError(
                f"{self.distribution} is {found}, and was tried as {self.tried}. Install that by {install}, or try "
                "this one: environment.options.any_version = true"
            )
        return importlib.import_module(module)
