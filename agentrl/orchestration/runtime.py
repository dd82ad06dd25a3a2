"""The runtime: engines and trainer ranks as processes, at the places that a run has."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from itertools import chain
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.config import PolicyConfig, RunConfig
from agentrl.orchestration.engines import Attachment, EngineProcess, attachments, let_go
from agentrl.process.place import Place, PlaceLostError, Places, Role
from agentrl.protocols import Engine
from agentrl.trainer.handle import TrainerHandle
from agentrl.types.errors import ConfigError, EngineError, EnginesLostError, TrainerLostError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode


class ProcessRuntime:
    """Starts what a run needs and ends all of it, whatever happened. Engines bear the run's `mark`.

    Places are whoever's who handed the runtime's out; it gives back what it took.
    """

    def __init__(self, config: RunConfig, logs: Path, places: Places, mark: str | None = None) -> None:
        self._config, self._logs, self._places, self._mark = config, logs, places, mark
        self._token = secrets.token_urlsafe()
        self._taken: dict[str, list[Place]] = {}
        self._processes: dict[str, EngineProcess] = {}
        self._launches: dict[str, EngineLaunch] = {}
        self._attached: dict[str, tuple[Attachment, EngineClient]] = {}
        self._restarts: Counter[str] = Counter()
        self._trainers: list[TrainerHandle] = []
        self._watches: list[asyncio.Task[None]] = []
        self._later: dict[str, list[partial[Coroutine[None, None, Engine]]]] = {}
        self._late: dict[str, set[asyncio.Task[Engine]]] = {}
        self._irreplaceable_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start_engines(self, policy: str, model: Path, version: PolicyVersion) -> list[Engine]:
        """The engines that serve a policy's rollouts, or one of them where `late_engine` gives the others.

        Raises:
            ConfigError, EngineError, EngineTakenError: one does not start, or is another run's.
        """
        config = self._policy(policy)
        if isinstance(config.engine, AttachedEngineConfig):
            found = attachments(policy, config.engine, config.client, config.publish.pause_mode, version, self._mark)
            async with asyncio.TaskGroup() as attaching:
                tasks = [attaching.create_task(self._attach(attachment)) for attachment in found]
            return [task.result() for task in tasks]
        # In an elastic run others might take the room of what the run cannot begin without.
        num_first = 1 if self._places.is_elastic else config.engine.count
        starts = [
            partial(
                self._launch if number < num_first else self._launch_late,
                policy,
                f"engine-{policy}-{number}",
                model,
                version,
                number,
                config.publish.pause_mode,
            )
            for number in range(config.engine.count)
        ]
        self._later[policy] = starts[num_first:]
        return list(await asyncio.gather(*(start() for start in starts[:num_first])))

    async def late_engine(self, policy: str) -> Engine:
        """Waits for: room for one more engine of a policy, and its start; never if it has all of them.

        Raises:
            ConfigError, EngineError: it found room and did not start, and is not waited for any more.
        """
        late = self._late.setdefault(policy, set())
        late.update(asyncio.create_task(start()) for start in self._later.pop(policy, ()))
        if not late:
            never: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
            return await never
        done, _ = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        late.remove(first)
        return first.result()

    async def start_side_engine(self, role: str, policy: str, model: Path, version: PolicyVersion) -> Engine:
        """An engine apart from the rollouts', whose weights whoever asks for it alone decides."""
        name = f"engine-{policy}-{role}"
        config = self._policy(policy).engine
        if isinstance(config, AttachedEngineConfig):
            raise ConfigError(
                f"{role} needs an engine of its own, which an attached engine cannot be; set "
                "evaluation.interval_steps=0 and evaluation.final_tasks=0, and have no self_teacher"
            )
        # Nothing is in flight when it takes weights, and no request names a part of the cache: it must be flushed.
        engine = await self._launch(policy, name, model, version, config.count, PauseMode.ABORT)
        self._watches.append(asyncio.create_task(self._report_end(name), name=f"watch-{name}"))
        return engine

    async def start_trainer(self, policy: str, model: Path, version: PolicyVersion) -> TrainerHandle:
        """The ranks that train a policy. Raises ConfigError or TrainerError."""
        config = self._policy(policy)
        names = [f"trainer-{policy}-{rank}" for rank in range(config.trainer.ranks)]
        try:
            places = self._taken[f"trainer-{policy}"] = await self._places.gang(Role.TRAINER, names)
        except PlaceLostError as error:
            raise TrainerLostError(f"trainer of policy '{policy}': {error}") from error
        trainer = await TrainerHandle.start(
            policy,
            model,
            version,
            config.trainer,
            config.algorithm,
            self._config.sampling_of(policy).temperature,
            self._logs,
            places,
            self._config.runtime.colocated,
        )
        self._trainers.append(trainer)
        return trainer

    async def engine_ended(self, name: str) -> str:
        """Waits for: the end of an engine's process. Unblocked by: it; never for engines of others."""
        if name in self._attached:
            never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            return await never
        return await self._processes[name].ended()

    async def revive_engine(self, name: str) -> Engine:
        """Start a dead engine anew from its first weights, or wait until somebody else has.

        One that is lost while it starts is started once more.

        Raises:
            EngineError: it was started too often, or did not start.
            EngineTakenError: another run has it by now.
        """
        if name in self._attached:
            attachment, client = self._attached[name]
            await client.close()
            return await self._attach(attachment)
        await self._processes[name].close()
        return await self._start_anew(name, "look at its log")

    async def watch(self) -> None:
        """Waits for: the loss of what nothing replaces, the evaluation's engine or all places. Unblocked by: it.

        Raises:
            EnginesLostError: the engine has ended.
            PlacesLostError: there are no places any more.
        """
        places = asyncio.create_task(self._places.watch(), name="watch-places")
        try:
            ended, _ = await asyncio.wait({places, self._irreplaceable_ended}, return_when=asyncio.FIRST_COMPLETED)
            for loss in ended:
                loss.result()
        finally:
            places.cancel()

    async def close(self) -> None:
        """End everything; safe to call twice."""
        ending = [*self._watches, *chain.from_iterable(self._late.values())]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        # First, since others wait for these.
        await asyncio.gather(*(let_go(client) for _, client in self._attached.values()))
        await asyncio.gather(*(trainer.close() for trainer in self._trainers))
        await asyncio.gather(*(process.close() for process in self._processes.values()))
        await asyncio.gather(*(self._give_back(name) for name in list(self._taken)))

    async def _report_end(self, name: str) -> None:
        """Waits for: the end of one engine. Unblocked by: it, or close."""
        reason = await self._processes[name].ended()
        if not self._irreplaceable_ended.done():
            self._irreplaceable_ended.set_exception(EnginesLostError(f"{reason}\nResume the run to start it again"))

    async def _launch(
        self, policy: str, name: str, model: Path, version: PolicyVersion, number: int, pause_mode: PauseMode
    ) -> Engine:
        config = self._policy(policy).engine
        assert not isinstance(config, AttachedEngineConfig)
        launch = EngineLaunch(
            policy,
            name,
            model,
            version,
            config,
            self._config.is_deterministic,
            self._logs,
            number,
            pause_mode,
            self._mark,
            self._token,
        )
        self._launches[name] = launch
        return await self._start(launch)

    async def _launch_late(
        self, policy: str, name: str, model: Path, version: PolicyVersion, number: int, pause_mode: PauseMode
    ) -> Engine:
        """The same of one that the run does not wait for: it has its further starts from the beginning."""
        try:
            return await self._launch(policy, name, model, version, number, pause_mode)
        except EnginesLostError as error:
            return await self._start_anew(name, str(error))

    async def _start_anew(self, name: str, reason: str) -> Engine:
        """Start an engine once more, and again if it is lost meanwhile. Raises EngineError once that was too often."""
        launch = self._launches[name]
        while self._restarts[name] < launch.config.max_restarts:
            self._restarts[name] += 1
            await self._give_back(name)
            try:
                return await self._start(launch)
            except EnginesLostError as error:
                reason = str(error)
            except ConfigError as error:
                raise EngineError(str(error)) from error
        await self._give_back(name)
        limit = launch.config.max_restarts
        raise EngineError(f"engine.max_restarts = {limit} allows no further start; {reason}")

    async def _attach(self, attachment: Attachment) -> EngineClient:
        client = await attachment.attach()
        self._attached[attachment.name] = attachment, client
        return client

    async def _start(self, launch: EngineLaunch) -> Engine:
        """Raises ConfigError or EngineError; EnginesLostError if it, or its place, is lost meanwhile."""
        try:
            # One apart from the rollouts' is of no team: nothing does its work while it waits.
            is_apart = launch.number >= launch.config.count
            team = launch.name if is_apart else f"engine-{launch.policy}"
            place = await self._places.take(Role.ENGINE, launch.name, team)
        except PlaceLostError as error:
            raise EnginesLostError(f"engine {launch.name} could not be started: {error}") from error
        self._taken[launch.name] = [place]
        process = await EngineProcess.start(launch, self._policy(launch.policy).client, place)
        self._processes[launch.name] = process
        return process.client

    async def _give_back(self, name: str) -> None:
        """Close what was taken for an engine, or for a trainer's ranks."""
        await asyncio.gather(*(place.close() for place in self._taken.pop(name, ())))

    def _policy(self, name: str) -> PolicyConfig:
        return self._config.policies[name]
