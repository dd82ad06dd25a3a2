"""Hands out places on the nodes of a Ray cluster, by the resources that a role takes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl import codec
from agentrl.cluster.actor import ProcessActor, Started
from agentrl.cluster.calls import ActorCalls
from agentrl.cluster.config import RayRuntimeConfig, resources_of
from agentrl.cluster.joining import join, leave, watch_cluster
from agentrl.cluster.nodes import Node, describe, fits, free_nodes, own_host
from agentrl.cluster.process import RayProcess
from agentrl.process.place import Place, PlaceLostError, PlacesLostError, ProcessLaunch, Role
from agentrl.process.threads import run_in_thread

_START_S = 180.0  # an actor's process imports what it needs from a disk that others may share
_LOOK_S = 2.0
_REMOVE_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seats:
    """A placement group: resources of one node for each of its members, which are given back together."""

    group: PlacementGroup
    taken: int

    async def give_back(self) -> None:
        """One member needs it no more."""
        self.taken -= 1
        if self.taken == 0:
            await _remove(self.group)


class RayPlace:
    """A share of a node: an actor that starts children there."""

    def __init__(
        self, calls: ActorCalls, node: Node, seats: _Seats | None, team: str, variables: frozenset[str]
    ) -> None:
        self._calls, self._node, self._seats, self.team, self._variables = calls, node, seats, team, variables
        self.is_closed = False

    @property
    def host(self) -> str:
        """Address of the node."""
        return self._node.host

    @property
    def node(self) -> str:
        """Id of the node."""
        return self._node.node_id

    @property
    def is_there(self) -> bool:
        """Whether it was neither given back nor lost, as far as this process knows."""
        return not self.is_closed and self._calls.lost is None

    async def start(self, launch: ProcessLaunch) -> RayProcess:
        """Start a child there. Raises OSError, PlaceLostError."""
        ours = {name: os.environ[name] for name in self._variables if name in os.environ}
        launch = replace(launch, environment={**ours, **launch.environment})
        started: Started = await self._calls.call("start", codec.encode(launch))
        if not started.pid:
            raise OSError(started.error_number, f"{started.error} (on node {self.host})")
        return await RayProcess.of(self._calls, started.pid, launch.has_socket)

    async def free_port(self) -> int:
        """A port of the node that nobody listens on now. Raises PlaceLostError."""
        port: int = await self._calls.call("free_port")
        return port

    async def close(self) -> None:
        """End the actor, with all that it started, and give its resources back; safe to call twice."""
        if not self.is_closed:
            self.is_closed = True
            self._calls.kill()
            if self._seats is not None:
                await self._seats.give_back()


@dataclass(slots=True)
class RayPlaces:
    """Places of one run, which joins a cluster for it.

    A member of a team has a placement group of its own, on the node with room that has the fewest of the team; ranks
    that work together have one group for all, on as few nodes as have room.

    Example: ``places = RayPlaces.open(config)``, ``place = await places.take(Role.WORKER, "worker-1")``.
    """

    config: RayRuntimeConfig
    _has_joined: bool
    _variables: frozenset[str]
    _taken: list[RayPlace] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _on_the_way: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Members of a team, by it and the address of a node, that have chosen the node and are not there yet."""

    @classmethod
    def open(cls, config: RayRuntimeConfig, variables: frozenset[str] = frozenset()) -> RayPlaces:
        """Join the cluster; children have those of the `variables` that this process's environment has.

        Takes seconds, on the main thread. Raises ConfigError.
        """
        return cls(config, join(config), variables)

    @property
    def host(self) -> str:
        """Address of this process's node."""
        return own_host()

    @property
    def is_elastic(self) -> bool:
        """As the recipe says."""
        return self.config.elastic

    async def take(self, role: Role, name: str, team: str = "") -> RayPlace:
        """A place for one process.

        Waits for: room. Unblocked by: it; or `wait_s`, in which nobody of its team had a place if the run is elastic.
        Raises PlaceLostError.
        """
        share = resources_of(self.config, role)
        node = self._least_used(await run_in_thread("nodes", free_nodes), share, team)
        if node is None:  # whichever has room first
            return (await self._seat(placement_group([share]), share, [name], team))[0]
        self._on_the_way[team, node.host] += 1
        try:
            group = placement_group([share], strategy="STRICT_PACK", _soft_target_node_id=node.node_id)
            return (await self._seat(group, share, [name], team))[0]
        finally:
            self._on_the_way[team, node.host] -= 1

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        """A place for each of several processes, all or none. Waits and raises as `take` does."""
        share = resources_of(self.config, role)
        return list(await self._seat(placement_group([share] * len(names), strategy="PACK"), share, names, ""))

    async def beside(self, place: Place, name: str) -> RayPlace:
        """A place on the same node, for which nothing is counted. Raises PlaceLostError."""
        found = await self._start(
            name, None, "", num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)
        )
        self._note([found])
        return found

    async def watch(self) -> None:
        """Waits for: the end of the cluster's head, or of this machine's node. Raises PlacesLostError then."""
        try:
            await watch_cluster()
        except PlacesLostError:
            self._has_joined = False  # there is nothing left to leave, and Ray would wait for it
            raise

    async def close(self) -> None:
        """Give all places back, and leave the cluster; safe to call twice."""
        for place in self._taken:
            await place.close()
        self._taken.clear()
        if self._has_joined:
            self._has_joined = False
            leave()

    def _least_used(self, nodes: Sequence[Node], share: Mapping[str, float], team: str) -> Node | None:
        """The node with the fewest members of a team, then with the most CPUs free; None if none has room."""
        members = Counter(place.host for place in self._taken if place.team == team and place.is_there)

        def order(node: Node) -> tuple[float, float]:
            return members[node.host] + self._on_the_way[team, node.host], -node.resources["CPU"]

        return min((node for node in nodes if fits(share, node.resources)), key=order, default=None)

    def _has_another(self, team: str) -> bool:
        return team != "" and any(place.team == team and place.is_there for place in self._taken)

    async def _seat(
        self, group: PlacementGroup, share: Mapping[str, float], names: Sequence[str], team: str
    ) -> list[RayPlace]:
        """Places in a group. Waits for: room for all. Unblocked by: it, a deadline."""
        try:
            await self._wait_for_room(group, share, names, team)
            seats = _Seats(group, len(names))
            starts = (self._start_in(seats, number, name, share, team) for number, name in enumerate(names))
            places = await asyncio.gather(*starts)
        except BaseException:
            await _remove(group)  # ends the actors in it, too
            raise
        self._note(places)
        return places

    async def _wait_for_room(
        self, group: PlacementGroup, share: Mapping[str, float], names: Sequence[str], team: str
    ) -> None:
        """Waits for: room for all. Unblocked by: it, or `wait_s` without anybody of the team."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not await run_in_thread(f"room-{names[0]}", lambda: group.wait(_LOOK_S)):
            if self.config.elastic and self._has_another(team):
                began = loop.time()
            if loop.time() > began + self.config.wait_s:
                free = await run_in_thread("nodes", free_nodes)
                raise PlaceLostError(
                    f"no room for {', '.join(names)} in {self.config.wait_s:.0f} s: each asks for {describe(share)}, "
                    f"and there is free {'; '.join(f'{node.host}: {describe(node.resources)}' for node in free)}. Add "
                    "nodes, ask for less in [runtime], or raise runtime.wait_s"
                )

    async def _start_in(self, seats: _Seats, number: int, name: str, share: Mapping[str, float], team: str) -> RayPlace:
        """An actor in one seat."""
        others = {resource: amount for resource, amount in share.items() if resource not in ("CPU", "GPU")}
        return await self._start(
            name,
            seats,
            team,
            num_cpus=share["CPU"],
            num_gpus=share.get("GPU", 0),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(seats.group, number),
        )

    async def _start(self, name: str, seats: _Seats | None, team: str, **options: Any) -> RayPlace:
        """An actor by options of Ray's. Waits for: it to be up. Unblocked by: it, a deadline. Raises PlaceLostError."""
        actor = ray.remote(ProcessActor).options(name=f"{name}-{next(self._numbers)}", **options)
        calls = ActorCalls(actor.remote(os.getcwd()), name)
        try:
            return RayPlace(calls, await calls.start(_START_S), seats, team, self._variables)
        except BaseException:
            calls.kill()
            raise

    def _note(self, places: list[RayPlace]) -> None:
        """They are to be closed, and those need not be that were."""
        self._taken = [place for place in self._taken if not place.is_closed] + places


async def _remove(group: PlacementGroup) -> None:
    """Give a group's resources back, and end the actors in it. Waits for: the head. Unblocked by: it, or a deadline.

    A head that is gone keeps nothing, and one that is slow takes the group away later.
    """
    try:
        async with asyncio.timeout(_REMOVE_S):
            await run_in_thread("give-back", lambda: remove_placement_group(group))
    except (TimeoutError, RayError) as error:
        _log.warning("the room of a process was not given back in time: %s", error)
