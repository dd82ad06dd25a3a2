"""No test fails because the machine is slow: hypothesis, too, sets no limit of time to an example."""

from __future__ import annotations

import ast

from hypothesis import HealthCheck, settings


def test_examples_may_take_as_long_as_they_need():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_no_test_sets_a_limit_of_its_own(test_modules):
    limits = []
    for module in test_modules:
        for call in (n for n in ast.walk(module.tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "settings"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            # A list of its own takes the place of the profile's.
            checks = given.get("suppress_health_check", "too_slow")
            is_patient = "too_slow" in checks or checks == "list(HealthCheck)"
            if "deadline" in given or not is_patient:
                limits.append(f"{module.where}:{call.lineno}")
    assert limits == []
