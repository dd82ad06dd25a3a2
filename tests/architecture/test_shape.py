from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match)
VAGUE_MODULES = {"utils", "util", "helpers", "misc", "common"}
# getattr with a default hides a misspelt attribute, so it is for other people's objects only.
FOREIGN_GETATTR = {
    ("agentrl.config.base", "__args__"): "type annotations of any kind",
    ("agentrl.models.attention", "config"): "attention modules of transformers, which may lack it",
    ("agentrl.models.attention", "is_causal"): "attention modules of transformers, which may lack it",
}
BROAD = {"Exception", "BaseException"}
REASON = re.compile(r"# noqa: BLE001 - \w+")


def test_files_are_short(modules, test_modules):
    lengths = {m.where: len(m.text.splitlines()) for m in (*modules, *test_modules)}
    assert {where: n for where, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short(modules):
    lengths = {f"{m.where}:{f.lineno} {f.name}": f.end_lineno - f.lineno + 1 for m in modules for f in m.functions()}
    assert {where: n for where, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def test_functions_are_flat(modules):
    depths = {f"{m.where}:{f.lineno} {f.name}": _depth(f) for m in modules for f in m.functions()}
    assert {where: n for where, n in depths.items() if n > MAX_NESTING} == {}


def test_no_module_is_named_for_nothing_in_particular(modules):
    assert [m.where for m in modules if set(m.name.split(".")) & VAGUE_MODULES] == []


def test_getattr_has_no_default_on_objects_of_ours(modules):
    with_default = [(m.name, call) for m in modules for call in _calls(m.tree, "getattr") if len(call.args) == 3]
    found = {(name, ast.unparse(call.args[1]).strip("'")) for name, call in with_default}
    assert found == set(FOREIGN_GETATTR), "list it with its reason, or drop the default"


def test_a_broad_except_raises_again_or_says_why(modules):
    unexplained = []
    for module in modules:
        lines = module.text.splitlines()
        for handler in (n for n in ast.walk(module.tree) if isinstance(n, ast.ExceptHandler) and _is_broad(n)):
            if not _raises_again(handler) and not REASON.search(lines[handler.lineno - 1]):
                unexplained.append(f"{module.where}:{handler.lineno}")
    assert unexplained == []


def test_only_the_command_line_prints(modules):
    printing = [f"{m.where}:{c.lineno}" for m in modules if m.package != "cli" for c in _calls(m.tree, "print")]
    assert printing == []


def test_nothing_is_left_to_be_done_later(modules, test_modules):
    marker = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    assert [m.where for m in (*modules, *test_modules) if marker.search(m.text)] == []


def test_everything_public_says_what_it_is(modules):
    silent = [f"{m.where}:{line} {name}" for m in modules for line, name, doc in _public(m.tree, m.where) if not doc]
    assert silent == []


def test_the_measure_of_nesting_counts_blocks_and_not_elif():
    flat = ast.parse("def f(x):\n if x:\n  pass\n elif x > 1:\n  pass\n elif x > 2:\n  pass").body[0]
    deep = ast.parse("def f(x):\n for a in x:\n  with a:\n   while x:\n    if a:\n     pass").body[0]
    assert (_depth(flat), _depth(deep)) == (1, 4)


def _depth(node: ast.AST) -> int:
    """Deepest nesting of blocks; a function inside is measured on its own."""
    return max((_depth_of(child, node) for child in ast.iter_child_nodes(node)), default=0)


def _depth_of(child: ast.AST, parent: ast.AST) -> int:
    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    is_elif = isinstance(child, ast.If) and isinstance(parent, ast.If) and parent.orelse == [child]
    return _depth(child) + (isinstance(child, NESTING) and not is_elif)


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(isinstance(n, ast.Name) and n.id in BROAD for n in ast.walk(handler.type))


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether the block ends by raising: the error itself, or one made of it."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and (last.exc is None or last.cause is not None)


def _public(node: ast.AST, name: str) -> Iterator[tuple[int, str, str | None]]:
    """Module, classes and functions that others may use: line, name, docstring."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield getattr(node, "lineno", 1), name, ast.get_docstring(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        is_setter = is_named and any(ast.unparse(entry).endswith(".setter") for entry in child.decorator_list)
        if is_named and not is_setter and not child.name.startswith("_"):
            yield from _public(child, child.name)
