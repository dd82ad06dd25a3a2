from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"agentrl": "agentrl", "environments": "agentrl_environments", "scaffolds": "agentrl_scaffolds"}


@dataclass(frozen=True)
class Import:
    """One imported module or name, made absolute; `is_lazy` inside a function, `is_typing` if only for checkers."""

    target: str
    line: int
    is_lazy: bool
    is_typing: bool


@dataclass(frozen=True)
class Module:
    """A source file of ours, parsed."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The unit of the layer rules: ``trainer`` for agentrl.trainer.step, ``codec`` for agentrl.codec."""
        return (*self.name.split("."), "")[1]

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self, is_lazy=False, is_typing=False))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef))


def _imports(node: ast.AST, module: Module, is_lazy: bool, is_typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(a.name, child.lineno, is_lazy, is_typing) for a in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            yield from (Import(f"{base}.{a.name}", child.lineno, is_lazy, is_typing) for a in child.names)
        else:
            lazy = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = is_typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from _imports(child, module, lazy, typing)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _read(folder: str, package: str) -> list[Module]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """Folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    """Every module that ships."""
    return [module for folder, package in PACKAGES.items() for module in _read(folder, package)]


@pytest.fixture(scope="session")
def platform(modules: list[Module]) -> list[Module]:
    """The modules of agentrl itself, without plugins."""
    return [module for module in modules if module.name.startswith("agentrl.") or module.name == "agentrl"]


@pytest.fixture(scope="session")
def test_modules() -> list[Module]:
    """Every module of the tests."""
    return _read("tests", "tests")
