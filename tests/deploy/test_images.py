"""Each Dockerfile is built on a base without a network, and what is in the image runs there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from docker.errors import BuildError

from agentrl.sandbox.docker import DockerOptions, definition
from agentrl.types.sandbox import SandboxSpec
from tests.deploy.base_image import BASE, PYTHON, make_base
from tests.docker.playing import shell

# The first makes the base, which is of a gigabyte.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "images"
OFFLINE = "--no-index --no-build-isolation --no-compile"
BUILD_S = 240.0


@dataclass(frozen=True)
class Ended:
    """A container's exit status and what it wrote."""

    code: int
    text: str


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    """The engine, with the base on it."""
    url = os.environ.get("DOCKER_HOST", "")
    assert url, "DOCKER_HOST names no engine; run `make test-docker`, which starts one"
    client = docker.DockerClient(url, version="auto", timeout=BUILD_S)
    make_base(client.api)
    yield client
    client.close()


def build(engine: docker.DockerClient, name: str, **arguments: str) -> str:
    """Build an image of deploy/images as somebody who has no network, and give its tag."""
    tag = f"agentrl-{name}:test"
    given = {"BASE": BASE, "PYTHON": PYTHON, "PIP_ARGS": OFFLINE, **arguments}
    file = str(FOLDER / f"{name}.Dockerfile")
    engine.images.build(path=str(ROOT), dockerfile=file, tag=tag, buildargs=given, network_mode="none", rm=True)
    return tag


def run(engine: docker.DockerClient, tag: str, *words: str, **options) -> Ended:
    """Run a command of an image to its end, without a network."""
    container = engine.containers.run(tag, list(words) or None, detach=True, network_mode="none", **options)
    try:
        code = container.wait(timeout=BUILD_S)["StatusCode"]
        return Ended(code, container.logs().decode())
    finally:
        container.remove(force=True)


def test_there_is_a_file_for_each_part():
    names = {path.stem for path in FOLDER.glob("*.Dockerfile")}
    assert names == {"trainer", "engine", "environment", "sandbox"}
    for path in FOLDER.glob("*.Dockerfile"):
        assert "\nARG BASE=" in path.read_text()
        assert "\nFROM ${BASE}\n" in path.read_text()


@pytest.mark.parametrize("name", ["trainer", "engine"])
def test_the_doctor_finds_all_well_in_an_image(engine, name):
    ended = run(engine, build(engine, name))
    assert ended.code == 0, ended.text
    assert "ok   torch " in ended.text
    assert "ok   agentrl.environments sql" in ended.text


def test_the_doctor_misses_nothing_but_the_trainer_in_the_image_of_environments(engine):
    ended = run(engine, build(engine, "environment"), "doctor", "--extra", "serve")
    assert ended.code == 0, ended.text
    assert "ok   fastapi " in ended.text
    assert "ok   agentrl.environments sql" in ended.text


def test_a_requirement_that_the_base_lacks_fails_the_build(engine):
    with pytest.raises(BuildError) as caught:
        build(engine, "environment", REQUIREMENTS="no-such-package-of-agentrl")
    assert "no-such-package-of-agentrl" in "".join(line.get("stream", "") for line in caught.value.build_log)


async def test_commands_of_agents_run_in_the_image_of_sandboxes(engine):
    tag = build(engine, "sandbox")
    backend = await definition.start(DockerOptions(hosts=(os.environ["DOCKER_HOST"],), image=tag), "images")
    try:
        place = await backend.create(SandboxSpec(memory_bytes=256 << 20, processes=32))
        ran = await shell(place, "id -u; pwd; python3 -m pytest --version 2>&1; echo hello > it; cat it")
    finally:
        await backend.close()
    assert ran.text.splitlines()[:2] == ["1000", "/workspace"]
    assert "pytest 9" in ran.text
    assert ran.text.splitlines()[-1] == "hello"
