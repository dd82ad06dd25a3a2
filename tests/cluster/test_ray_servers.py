"""Servers of environments that a run starts on nodes of its cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.cluster.config import MemberResources
from agentrl.cluster.places import RayPlaces
from agentrl.orchestration.served import TOKEN_VARIABLE, EnvironmentServers
from agentrl.process.place import PlaceLostError
from agentrl.testing.tiny import make_tiny_model
from agentrl.testing.virtual_cluster import NodeShape
from agentrl.types.errors import ConfigError
from tests.cluster.test_ray_places import DEADLINE_S, is_on, until
from tests.cluster.test_ray_sandboxes import machine, sessions_at, worker
from tests.storms.task_sampling import task_sampler
from tests.storms.worker_pools import DIALOGUE, make_run, nothing, playing

pytestmark = pytest.mark.timeout(600)
NUM_EPISODES, NUM_CALLS = 8, sum(len(message.tool_calls) for message in DIALOGUE)


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    return make_tiny_model(shared / "server-model")


async def test_sessions_on_a_server_outlive_the_node_of_a_worker_and_end_with_the_servers(
    cluster, config, shared, model, tmp_path
):
    folder = shared / "servers"
    folder.mkdir()
    count_file = folder / "count.txt"
    served = {"placement": "served", "options": {"count_file": str(count_file)}}
    run = make_run(model, tmp_path / "served", environment=served)
    [section] = run.config().environments.values()
    tasks = task_sampler(section, seed=0)
    home = cluster.add_node(NodeShape(cpus=1, resources={"servers": 1}))
    config = config.model_copy(update={"environments": MemberResources(resources={"servers": 1})})
    places = RayPlaces.open(config, frozenset({TOKEN_VARIABLE}))
    try:
        async with EnvironmentServers.started(run.config(), places, folder) as servers:
            [section] = servers.config.environments.values()
            assert [url.rpartition(":")[0] for url in section.servers] == [f"http://{home.host}"]
            remote = {key: getattr(section, key) for key in ("placement", "servers", "token_variable", "options")}
            run = make_run(model, folder / "run", environment=remote, rollout={"workers": 2})
            losing = asyncio.create_task(servers.run())
            async with playing(run, places=places) as pool:
                lost = machine(cluster, worker(pool, "worker-1"))
                pool.engine.held_turn = 1
                tickets = [pool.ticket(number, task=tasks(number)) for number in range(NUM_EPISODES)]
                playing_all = asyncio.gather(*(pool.pool.play(ticket, (), nothing) for ticket in tickets))
                await until(lambda: len(sessions_at(pool, 1)) == NUM_EPISODES)
                cluster.kill_node(lost)
                await until(lambda: pool.pool.metrics()["workers/handed_over_total"] == NUM_EPISODES / 2)
                pool.engine.released.set()
                episodes = await playing_all
                assert not losing.done()
                cluster.kill_node(home)
                with pytest.raises(PlaceLostError, match=rf"{home.host}.* ended .*and it was the last"):
                    await asyncio.wait_for(losing, DEADLINE_S)
    finally:
        await places.close()
        cluster.add_node()
    assert [(episode.failure, len(episode.turns)) for episode in episodes] == [(None, len(DIALOGUE))] * NUM_EPISODES
    effects = [line.split()[0] for line in count_file.read_text().splitlines()]
    assert len(effects) == len(set(effects)) == NUM_EPISODES * NUM_CALLS


async def test_an_environment_that_cannot_be_served_is_named_and_leaves_no_server(
    cluster, places, model, tmp_path, shared
):
    folder = shared / "servers-broken"
    folder.mkdir()
    served = {"placement": "served", "options": {"nothing_like_it": 1}}
    run = make_run(model, tmp_path, environment=served)
    with pytest.raises(ConfigError, match=r"environments\.\w+: .*nothing_like_it"):
        async with EnvironmentServers.started(run.config(), places, folder):
            pass
    assert not any(is_on(node, "agentrl.serving") for node in cluster.nodes)
