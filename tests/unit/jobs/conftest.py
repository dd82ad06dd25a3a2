from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.bad_case import RECIPE


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound recipe in the working folder, beside its model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_model)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path
