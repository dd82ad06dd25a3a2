"""The dashboard as Grafana reads it, and the names that it and the alerts ask Prometheus for."""

from __future__ import annotations

import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agentrl.serving.board import Board
from agentrl.serving.health import metrics_text
from agentrl.serving.options import SessionLimits
from agentrl.serving.table import SessionTable
from tests.deploy.monitoring import FOLDER, ROOT, alert_rules, dashboard, panels

NAME = re.compile(r"\bagentrl_[a-z0-9_]+\b")
QUOTED = re.compile(r'"[^"]*"')


def test_the_dashboard_is_of_a_form_that_grafana_has():
    board = dashboard()
    assert isinstance(board["schemaVersion"], int)
    assert board["uid"] == "agentrl"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_overlap():
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_name_that_is_asked_for_is_served():
    asked = [rule["expr"] for rule in alert_rules().values()]
    asked += [target["expr"] for panel in panels() for target in panel["targets"]]
    asked += [variable["definition"] for variable in dashboard()["templating"]["list"] if "definition" in variable]
    names = {name for expression in asked for name in NAME.findall(QUOTED.sub("", expression))}
    assert len(names) > 30
    assert names - _of_servers() - _of_runs() == set()


def test_the_dashboard_finds_what_its_provisioning_gives_it():
    folder = FOLDER / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert [source["type"] for source in sources if source["isDefault"]] == ["prometheus"]
    providers = yaml.safe_load((folder / "dashboards" / "agentrl.yml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yml").read_text())
    mounted = {volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]}
    assert f"{providers[0]['options']['path']}/agentrl.json" in mounted


def _of_servers() -> set[str]:
    """Names of samples on the page of an environment server."""
    page = metrics_text(SessionTable({}, SessionLimits(), Board(1))).decode()
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def _of_runs() -> set[str]:
    """Names that a run is documented to serve."""
    return set(NAME.findall((ROOT / "agentrl" / "telemetry" / "README.md").read_text()))
