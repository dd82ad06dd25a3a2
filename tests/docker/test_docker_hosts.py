"""Snapshots, several engines, and what is left when a keeper is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import docker
import docker.errors
import pytest

from agentrl.sandbox.docker import DockerBackend, DockerOptions, definition
from agentrl.sandbox.docker_keeper import KEEPER_LABEL, SANDBOX_LABEL, KeeperName
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.sandbox import SandboxSpec
from tests.docker.playing import IMAGE, containers, run, shell, until

KEEPER = """
import asyncio, sys
from agentrl.sandbox.docker import DockerOptions, definition
from agentrl.types.sandbox import SandboxSpec
from tests.docker.playing import IMAGE, shell

async def keep():
    backend = await definition.start(DockerOptions(hosts=(sys.argv[1],), image=IMAGE), "killed")
    places = [await backend.create(SandboxSpec()) for _ in range(2)]
    await places[0].snapshot("s")
    print(backend._keeper, flush=True)
    await asyncio.gather(*(shell(place, "setsid sleep 1000 & sleep 1000") for place in places))

asyncio.run(keep())
"""
NAMED = "from agentrl.sandbox.docker_keeper import KeeperName; print(KeeperName.of_this_process(), flush=True); input()"


def other_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


@pytest.fixture
async def two_hosts(url, tmp_path):
    """The engine under two URLs, each by a link that can be taken away; and a backend over both."""
    links = [tmp_path / "one.sock", tmp_path / "two.sock"]
    for link in links:
        link.symlink_to(url.removeprefix("unix://"))
    hosts = tuple(f"unix://{link}" for link in links)
    backend = await definition.start(DockerOptions(hosts=hosts, image=IMAGE, per_host=2), "tests")
    yield backend, links
    await backend.close()


def taken(backend: DockerBackend) -> list[int]:
    return [engine.taken for engine in backend._engines]


async def test_a_sandbox_begins_with_the_files_of_a_snapshot(backend):
    place = await backend.create(SandboxSpec())
    await shell(
        place, "mkdir -p a/b; echo one > a/b/file; chmod 750 a; ln -s a/b/file link; echo '#!/bin/sh' > x; chmod +x x"
    )
    await place.snapshot("first")
    await shell(place, "echo two > a/b/file")
    await place.close()
    for _ in range(2):
        copy = await backend.create(SandboxSpec(), "first")
        ran = await shell(copy, "cat link; stat -c %a a; readlink link; test -x x && echo mine > new && ls")
        assert ran.text == "one\n750\na/b/file\na\nlink\nnew\nx\n"
    await backend.forget("first")
    await backend.forget("first")
    with pytest.raises(EpisodeError) as raised:
        await backend.create(SandboxSpec(), "first")
    assert raised.value.failure.kind == "snapshot"


async def test_a_snapshot_does_not_depend_on_the_path_of_the_task(backend):
    place = await backend.create(SandboxSpec(environment={"PATH": "/workspace:/bin:/usr/bin"}))
    await shell(place, "printf '#!/bin/sh\\necho forged' > tar; chmod +x tar")
    await place.snapshot("kept")
    ran = await run(await backend.create(SandboxSpec(), "kept"), "cat", "tar")
    assert ran.text == "#!/bin/sh\necho forged"


async def test_a_workspace_that_cannot_be_kept_is_told(backend):
    place = await backend.create(SandboxSpec(disk_bytes=4 << 20))
    await shell(place, "echo x > secret; chmod 0 secret")
    with pytest.raises(EpisodeError, match="secret") as raised:
        await place.snapshot("unreadable")
    assert raised.value.failure.kind == "snapshot"
    await shell(place, "rm -f secret; truncate -s 1000000000 holes")
    with pytest.raises(EpisodeError, match="larger") as raised:
        await place.snapshot("endless")
    assert raised.value.failure.kind == "snapshot"
    assert (await run(place, "true")).code == 0


async def test_sandboxes_go_where_most_places_are_free(two_hosts):
    backend, _ = two_hosts
    places = [await backend.create(SandboxSpec()) for _ in range(3)]
    assert sorted(taken(backend)) == [1, 2]
    places.append(await backend.create(SandboxSpec()))
    assert taken(backend) == [2, 2]
    with pytest.raises(EpisodeError, match="2 sandboxes each") as raised:
        await backend.create(SandboxSpec())
    assert raised.value.failure.kind == "unavailable"
    await places[0].close()
    await places[0].close()
    assert sorted(taken(backend)) == [1, 2]
    await backend.create(SandboxSpec())
    assert taken(backend) == [2, 2]


async def test_a_host_that_does_not_answer_is_passed_over_until_it_does(two_hosts, caplog):
    backend, links = two_hosts
    target = links[0].readlink()
    links[0].unlink()
    places = [await backend.create(SandboxSpec()) for _ in range(2)]
    assert taken(backend) == [0, 2]
    assert str(links[0]) in caplog.text
    with pytest.raises(EpisodeError, match="1 of 2 do not answer"):
        await backend.create(SandboxSpec())
    links[0].symlink_to(target)
    await until(lambda: "answers again" in caplog.text, "the host is taken back")
    await backend.create(SandboxSpec())
    assert taken(backend) == [1, 2]
    assert (await run(places[0], "true")).code == 0


async def test_a_snapshot_fills_a_sandbox_on_another_host(two_hosts):
    backend, _ = two_hosts
    place = await backend.create(SandboxSpec())
    await shell(place, "echo carried > file")
    await place.snapshot("moved")
    copy = await backend.create(SandboxSpec(), "moved")
    assert taken(backend) == [1, 1]
    assert (await run(copy, "cat", "file")).text == "carried\n"


async def test_an_image_that_is_not_there_is_named_and_leaves_nothing(backend, engine):
    with pytest.raises(EpisodeError, match="docker pull no-such-image:9") as raised:
        await backend.create(SandboxSpec(image="no-such-image:9"))
    assert raised.value.failure.kind == "image"
    assert containers(engine) == {}
    assert taken(backend) == [0]


async def test_an_image_without_a_shell_is_named_and_leaves_nothing(backend, engine):
    made = engine.create_container(IMAGE, ["rm", "/bin/sh"], host_config=engine.create_host_config(network_mode="none"))
    engine.start(made["Id"])
    assert engine.wait(made["Id"], timeout=60)["StatusCode"] == 0
    engine.commit(made["Id"], "agentrl-shellless", "local")
    engine.remove_container(made["Id"])
    try:
        with pytest.raises(EpisodeError, match="needs /bin/sh") as raised:
            await backend.create(SandboxSpec(image="agentrl-shellless:local"))
        assert raised.value.failure.kind == "image"
        await until(lambda: containers(engine) == {}, "nothing is left")
    finally:
        engine.remove_image("agentrl-shellless:local", force=True)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unix:///nowhere/docker.sock", "No such file"),
        ("tcp://127.0.0.1:9", "refused"),
        ("https://127.0.0.1:2376", "forward the engine's socket"),
        ("ssh://somewhere", "forward the engine's socket"),
    ],
)
async def test_without_an_engine_the_error_names_the_host_and_what_to_do(host, words):
    with pytest.raises(ConfigError, match=words) as raised:
        await definition.start(DockerOptions(hosts=(host,)), "tests")
    assert host in str(raised.value)


async def test_the_host_of_the_environment_is_used_where_none_is_named(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///of-the-environment.sock")
    with pytest.raises(ConfigError, match="of-the-environment"):
        await definition.start(DockerOptions(), "tests")


async def test_one_silent_host_of_several_is_no_error_at_the_start(url):
    options = DockerOptions(hosts=("unix:///nowhere.sock", url), image=IMAGE)
    backend = await definition.start(options, "tests")
    try:
        assert (await run(await backend.create(SandboxSpec()), "true")).code == 0
    finally:
        await backend.close()


async def test_a_killed_keeper_leaves_nothing(url, engine):
    keeper = other_process(KEEPER, url)
    assert keeper.stdout is not None
    label = f"{KEEPER_LABEL}={await asyncio.to_thread(keeper.stdout.readline)}".strip()
    assert len(containers(engine, label)) == 2
    os.kill(keeper.pid, signal.SIGKILL)
    keeper.wait(60)
    await until(lambda: containers(engine, label) == {}, "all containers are gone")


async def test_containers_of_keepers_that_are_gone_are_removed_and_no_others(url, engine):
    """Containers that were never started do not end by themselves."""
    gone, live = other_process(NAMED), other_process(NAMED)
    assert gone.stdout is not None
    assert live.stdout is not None
    names = {"gone": gone.stdout.readline().strip(), "live": live.stdout.readline().strip()}
    gone.communicate("\n", 60)
    own = KeeperName.of_this_process()
    names["of another boot"] = str(KeeperName("other", own.namespace, 1 << 22, "1"))
    names["of another namespace"] = str(KeeperName(own.boot, "pid:[1]", 1 << 22, "1"))
    names["with the number of another"] = str(KeeperName(own.boot, own.namespace, live.pid, "1"))
    made = {
        engine.create_container(IMAGE, ["true"], labels={SANDBOX_LABEL: "x", KEEPER_LABEL: name})["Id"]: what
        for what, name in names.items()
    }
    try:
        backend = await definition.start(DockerOptions(hosts=(url,), image=IMAGE), "tests")
        await backend.close()
        left = {made[entry["Id"]] for entry in engine.containers(all=True) if entry["Id"] in made}
        assert left == {"live", "of another boot", "of another namespace"}
    finally:
        live.communicate("\n", 60)
        for container in made:
            await asyncio.to_thread(_remove, engine, container)


async def test_the_end_of_a_backend_removes_all_that_it_made(url, engine):
    backend = await definition.start(DockerOptions(hosts=(url,), image=IMAGE), "tests")
    places = [await backend.create(SandboxSpec()) for _ in range(2)]
    making = asyncio.create_task(backend.create(SandboxSpec()))
    await asyncio.sleep(0.05)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await backend.close()
    await until(lambda: containers(engine) == {}, "nothing is left")
    await backend.close()
    with pytest.raises(EpisodeError):
        await run(places[0], "true")


async def test_many_sandboxes_run_commands_at_once(backend):
    places = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(12)))
    ran = await asyncio.gather(*(shell(place, f"echo {i}; sleep 1; echo {i}") for i, place in enumerate(places)))
    assert [one.text for one in ran] == [f"{i}\n{i}\n" for i in range(12)]


def _remove(engine: docker.APIClient, container: str) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        engine.remove_container(container, force=True)
