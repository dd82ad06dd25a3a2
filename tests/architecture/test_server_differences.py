from __future__ import annotations

import ast


def test_every_trait_of_a_server_has_its_row_in_the_table_and_is_read_by_a_test(root):
    folder = root / "tests" / "integration"
    table = (root / "deploy" / "sglang-cpu" / "README.md").read_text()
    tests = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "server_traits.py")
    traits = _fields(ast.parse((folder / "server_traits.py").read_text()), "ServerTraits")
    assert traits
    assert [trait for trait in traits if f"| `{trait}` |" not in table] == []
    assert [trait for trait in traits if f"traits.{trait}" not in tests] == []


def _fields(tree: ast.Module, name: str) -> list[str]:
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [ast.unparse(entry.target) for entry in found.body if isinstance(entry, ast.AnnAssign)]
