"""Calls of an actor, each with a deadline, and what the loss of the actor or its node reads as."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError, RayError

from agentrl.cluster.nodes import Node
from agentrl.process.place import PlaceLostError

CALL_S = 60.0
"""Deadline of a call; calls that wait answer much sooner."""


class ActorCalls:
    """Calls one `ProcessActor`. Once it does not answer it is lost for good, and killed should it come back.

    `lost` then says why, as ``its node 10.77.0.3 cannot be reached``.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name
        self._host = ""
        self.lost: str | None = None

    async def start(self, deadline_s: float) -> Node:
        """The actor's node. Waits for: the actor to be up. Unblocked by: it, the deadline.

        Raises:
            PlaceLostError: it did not come up.
        """
        node: Node = await self.call("node", deadline_s=deadline_s)
        self._host = node.host
        return node

    async def call(self, method: str, *arguments: object, deadline_s: float = CALL_S) -> Any:
        """The method's result. Waits for: it. Unblocked by: it, the actor's end, the deadline.

        Raises:
            PlaceLostError: the actor or its node is gone.
        """
        if self.lost is None:
            try:
                async with asyncio.timeout(deadline_s):
                    return await getattr(self._actor, method).remote(*arguments)
            except TimeoutError:
                self._lose(f"{self._where} has not answered for {deadline_s:.0f} s")
            except ActorUnavailableError:
                self._lose(f"{self._where} cannot be reached")
            except RayActorError as error:
                self._lose(f"{self._where} has lost the place: {_reason(error)}")
            except ActorUnschedulableError as error:
                self._lose(f"{self._where} is gone: {_reason(error)}")
        raise PlaceLostError(f"{self._name}: {self.lost}")

    def kill(self) -> None:
        """End the actor, and with it its children; safe to call twice."""
        self._lose("the place was given back")

    @property
    def _where(self) -> str:
        return f"its node {self._host}" if self._host else "the node chosen for it"

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            with contextlib.suppress(RayError, ValueError):  # it has ended by itself
                ray.kill(self._actor)


def _reason(error: RayError) -> str:
    """The first sentence of the last line of Ray's account. Example: ``The actor is dead because its node has died``"""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0].rstrip(".") if lines else type(error).__name__
