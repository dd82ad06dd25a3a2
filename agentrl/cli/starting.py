"""Makes a working package of a plugin for its author to go on from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from agentrl.types.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
# Beside the code, so that `agentrl train NAME/train` finds them.
_BESIDE_CODE = (".py", ".jsonl", ".toml")


def make_package(kind: str, name: str, parent: Path) -> list[Path]:
    """The files of a package called `name`, made from the templates of a kind: ``environment`` or ``scaffold``.

    Raises:
        ConfigError: the name cannot be a module's, or the folder exists.
    """
    module = re.sub(r"[-\s.]+", "_", name.strip()).lower()
    if not module.isidentifier() or not module.isascii() or keyword.iskeyword(module):
        raise ConfigError(f"'{name}' cannot be a package's name; use letters, digits and '-', as in 'word-games'")
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name, or remove it")
    values = {
        "name": name,
        "module": module,
        "distribution": module.replace("_", "-"),
        "class_name": "".join(part.capitalize() for part in module.split("_")),
    }
    made: list[Path] = []
    for template in sorted((TEMPLATES / kind).rglob("*.template")):
        place = template.relative_to(TEMPLATES / kind).with_suffix("")
        is_code = len(place.parts) == 1 and place.suffix in _BESIDE_CODE and place.name != "pyproject.toml"
        file = folder / module / place if is_code else folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(template.read_text()).substitute(values))
        made.append(file)
    return made
