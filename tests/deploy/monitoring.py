"""What deploy/monitoring has, and promtool, which judges it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
PROMTOOL = ROOT / ".venv" / "promtool" / "promtool"
PROMTOOL_S = 60.0


def promtool(*words: str | Path, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    """Run it in a folder."""
    assert PROMTOOL.exists(), "promtool is not there; run `make test-jobs`, which gets it"
    return subprocess.run(
        [PROMTOOL, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=PROMTOOL_S, check=False
    )


def alert_rules() -> dict[str, dict[str, Any]]:
    """Rules of deploy/monitoring/alerts.yml by the alert's name."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana" / "dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Panels of the dashboard that show data."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
