"""Runs whose attached engines die and are started again by somebody else, or are not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from engine_server import running_engine

from agentrl.process.ports import free_port
from agentrl.types.version import PolicyVersion
from tests.integration import runs

pytestmark = pytest.mark.long

QUICK = tuple(f"policies.main.fleet.{deadline}" for deadline in ("probe_s=0.2", "suspect_s=1.0", "dead_s=1.5"))
ENDLESS = (runs.ENDLESS, "checkpoint.interval_steps=1", "buffer.max_staleness=2")
GIVEN_UP_BEFORE_S = 6.0  # more than four failed attempts to bring weights take


class Engines:
    """Engines that nobody restarts but the test: `stop` kills one, `start` starts it again at the same address."""

    def __init__(self, model: Path, folder: Path, count: int) -> None:
        self._model, self._folder = model, folder
        self._ports = [free_port() for _ in range(count)]
        self._running: dict[int, ExitStack] = {}
        for number in range(count):
            self.start(number)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def start(self, number: int) -> None:
        self._running[number] = ExitStack()
        log = self._folder / f"engine-{number}.log"
        self._running[number].enter_context(running_engine(self._model, log, port=self._ports[number]))

    def stop(self, number: int) -> None:
        self._running.pop(number).close()

    def step_served_by(self, number: int) -> int:
        """Of the weights that an engine calls its own."""
        label = httpx.get(f"{self.urls[number]}/model_info", trust_env=False, timeout=60.0).json()["weight_version"]
        version = label.partition("@")[0]
        return 0 if version == "default" else PolicyVersion.parse(version).step

    def close(self) -> None:
        for number in list(self._running):
            self.stop(number)


class Run:
    """A run in a process of its own that goes on until it is ended."""

    def __init__(self, folder: Path, model: Path, engines: Engines, start_s: float) -> None:
        self.folder, self.log = folder / "runs" / "test-seed0", folder / "run.log"
        urls = ", ".join(f'"{url}"' for url in engines.urls)
        attached = f'policies.main.engine={{kind = "attached", urls = [{urls}], start_s = {start_s}}}'
        with self.log.open("w") as output:
            self.process = runs.start(folder, model, attached, *QUICK, *ENDLESS, output=output)

    @property
    def step(self) -> int:
        return runs.metrics(self.folder)[-1]["step"]

    @property
    def said(self) -> str:
        """Its output on one line."""
        return " ".join(self.log.read_text().split())

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(row["step"] >= step for row in runs.metrics(self.folder)))

    def wait_until(self, is_so: Callable[[], bool], within_s: float = 90.0) -> None:
        until = time.monotonic() + within_s
        while not is_so():
            assert self.process.poll() is None, f"the run ended: {self.said}"
            assert time.monotonic() < until, f"the run goes on without that: {self.said}"
            time.sleep(0.05)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(90) == runs.STOPPED, self.said


@pytest.fixture
def engines(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tiny_model, tmp_path, request.param)
    yield engines
    engines.close()


@pytest.mark.parametrize("engines", [1], indirect=True)
def test_a_run_waits_for_its_only_engine_and_brings_it_the_newest_weights(
    engines: Engines, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, tiny_model, engines, start_s=120.0)
    run.wait_for_step(2)
    engines.stop(0)
    gone = time.monotonic()
    run.wait_until(lambda: "does not answer; waiting for it since" in run.said)
    run.wait_until(lambda: time.monotonic() - gone > GIVEN_UP_BEFORE_S)
    engines.start(0)
    run.wait_for_step(run.step + 4)
    assert f"engine main-0 at {engines.urls[0]} does not answer" in run.said
    run.end()
    gaps = [row["trainer/fresh_gap_max_nats"] for row in runs.metrics(run.folder) if row.get("trainer/fresh_tokens")]
    assert max(gaps) < 1e-3, "tokens of an engine that had not the newest weights were trained"


@pytest.mark.parametrize("engines", [2], indirect=True)
def test_a_run_goes_on_with_the_other_engine_and_takes_the_first_back(
    engines: Engines, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, tiny_model, engines, start_s=120.0)
    run.wait_for_step(1)
    engines.stop(1)
    run.wait_until(lambda: "engine main-1 is dead" in run.said)
    run.wait_for_step(run.step + 2)
    engines.start(1)
    step = run.step
    run.wait_until(lambda: engines.step_served_by(1) >= step)
    run.end()


@pytest.mark.parametrize("engines", [1], indirect=True)
def test_an_engine_that_does_not_come_back_is_named_with_how_long_was_waited_and_what_to_do(
    engines: Engines, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, tiny_model, engines, start_s=3.0)
    run.wait_for_step(1)
    engines.stop(0)
    assert run.process.wait(300) != 0
    message = runs.state(run.folder)["message"]
    assert f"engine main-0 at {engines.urls[0]} has not answered for 3 s (engine.start_s = 3)" in message
    assert "start it there" in message
    assert "esume the run" in message


@pytest.mark.parametrize("engines", [1], indirect=True)
def test_a_staged_file_that_is_cut_short_is_named_and_staged_anew_by_the_resumption(
    engines: Engines, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, tiny_model, engines, start_s=120.0)
    run.wait_for_step(1)
    engines.stop(0)
    run.wait_until(lambda: "does not answer; waiting for it since" in run.said)
    staged = sorted(
        (run.folder / "weights" / "main").glob("*/model.safetensors"), key=lambda path: path.stat().st_mtime
    )
    for path in staged:  # the trainer may stage one more, and another be sent first
        os.truncate(path, path.stat().st_size // 2)
    engines.start(0)
    assert run.process.wait(300) != 0
    message = runs.state(run.folder)["message"]
    assert any(f"staged weights are damaged: {path}" in message for path in staged)
    assert "resume the run" in message
    step = runs.version(run.folder)["step"]
    runs.end_at(run.folder, step + 2)
    resumed: subprocess.CompletedProcess[str] = runs.agentrl("resume", run.folder)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert runs.version(run.folder)["step"] == step + 2
