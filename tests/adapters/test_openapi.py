"""The environment server's OpenAPI document, tried by schemathesis: whatever is sent, the answer is as documented."""

from __future__ import annotations

import subprocess

from tests.adapters.conftest import ROOT, echo_server

CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"


def test_no_request_is_answered_with_an_error_of_the_server_or_with_what_is_not_documented(tmp_path):
    command = ROOT / ".venv-schemathesis/bin/schemathesis"
    assert command.exists(), f"{command} is not there; run `make test-adapters`, which installs it"
    options = ["--checks", CHECKS, "--max-examples", "20", "--seed", "1", "--continue-on-failure", "--warnings", "off"]
    with echo_server(folder=tmp_path) as url:
        tried = subprocess.run(
            [command, "run", f"{url}/openapi.json", *options, "--no-color"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    assert tried.returncode == 0, tried.stdout[-8000:] + tried.stderr
    assert "Test cases:" in tried.stdout
