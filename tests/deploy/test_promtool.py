"""Prometheus's own tool reads the scrape, the alerts and the dashboard's expressions, and plays each alert."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy.alert_cases import CASES
from tests.deploy.monitoring import FOLDER, alert_rules, panels, promtool

pytestmark = pytest.mark.jobs


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of deploy/monitoring, where the file with the token is there as promtool wants it."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "environment_token").write_text("secret")
    scrape = tmp_path / "prometheus.yml"
    scrape.write_text(scrape.read_text().replace("/run/secrets/", ""))
    return tmp_path


def test_the_scrape_is_a_configuration_of_prometheus(copied: Path):
    done = promtool("check", "config", "prometheus.yml", folder=copied)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_a_misspelt_key_of_the_scrape_is_refused(copied: Path):
    scrape = copied / "prometheus.yml"
    scrape.write_text(scrape.read_text().replace("static_configs", "static_config"))
    done = promtool("check", "config", "prometheus.yml", folder=copied)
    assert done.returncode != 0
    assert "static_config" in done.stdout + done.stderr


def test_alerts_are_rules_of_prometheus():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    assert {case.alert for case in CASES if case.fires} == set(alert_rules())
    assert {case.alert for case in CASES if not case.fires} == set(alert_rules())


@pytest.mark.parametrize("fires", [True, False], ids=["fire", "are quiet"])
def test_alerts_do_as_their_cases_say(fires: bool, tmp_path: Path):
    rules = alert_rules()
    groups = [case.group(rules) for case in CASES if case.fires == fires]
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    (tmp_path / "cases.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": groups}))
    done = promtool("test", "rules", "cases.yml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_expressions_of_every_panel_are_of_prometheus(tmp_path):
    variables = {"$__rate_interval": "5m", "$__range": "1h", "$instance": ".*", "$policy": ".*", "$server": ".*"}
    rules = []
    for panel in panels():
        for number, target in enumerate(panel["targets"]):
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, f"{panel['title']}: a variable that the dashboard does not have: {expression}"
            rules.append({"record": f"panel_{panel['id']}:{number}", "expr": expression})
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", "panels.yml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
