from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

MAX_FIELDS = 14


@dataclass(frozen=True)
class Section:
    """A configuration class: its fields, those with a docstring below them, and where it is."""

    name: str
    module: str
    where: str
    fields: tuple[str, ...]
    explained: tuple[str, ...]
    discriminators: tuple[str, ...]


@pytest.fixture(scope="module")
def sections(modules) -> list[Section]:
    classes = [(module, node) for module in modules for node in module.classes()]
    kinds, found = {"ConfigModel"}, []
    while new := [(m, c) for m, c in classes if (m, c) not in found and kinds & set(map(ast.unparse, c.bases))]:
        found += new
        kinds |= {node.name for _, node in new}
    return [_section(module, node) for module, node in found]


def test_there_are_configuration_classes_to_look_at(sections):
    assert {"RunConfig", "WarmStartConfig", "TrainerConfig", "SqlOptions", "EnvironmentSection"} <= {
        section.name for section in sections
    }


def test_a_configuration_class_has_few_fields(sections):
    assert {s.name: len(s.fields) for s in sections if len(s.fields) > MAX_FIELDS} == {}


def test_every_field_is_explained_below_it(sections):
    silent = [f"{s.where} {s.name}.{field}" for s in sections for field in s.fields if field not in s.explained]
    assert silent == []


def test_every_option_is_read_outside_its_class(sections, modules):
    reads = {(module.name, owner, name) for module in modules for owner, name in _reads(module.tree)}
    dead = []
    for section in sections:
        for field in set(section.fields) - set(section.discriminators):
            if not any(n == field and (m, o) != (section.module, section.name) for m, o, n in reads):
                dead.append(f"{section.where} {section.name}.{field}")
    assert dead == [], "options that change nothing"


def _section(module, node: ast.ClassDef) -> Section:
    fields, explained, discriminators = [], [], []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        fields.append(name)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            explained.append(name)
        if _is_single_literal(statement.annotation):
            discriminators.append(name)
    where = f"{module.where}:{node.lineno}"
    return Section(node.name, module.name, where, tuple(fields), tuple(explained), tuple(discriminators))


def _is_single_literal(annotation: ast.expr) -> bool:
    """Whether a field can only say which class it is: pydantic reads it, nobody else."""
    is_literal = isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal"
    return is_literal and not isinstance(annotation.slice, ast.Tuple)


def _reads(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str]]:
    """Attributes that are read, each with the class whose body reads it."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            yield owner, child.attr
        yield from _reads(child, child.name if isinstance(child, ast.ClassDef) else owner)
