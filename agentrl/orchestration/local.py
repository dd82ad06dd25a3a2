"""The local runtime: engines and trainer ranks as processes of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig
from agentrl.orchestration.config import PolicyConfig, RunConfig
from agentrl.orchestration.engines import EngineLaunch, EngineProcess, attach_engines
from agentrl.protocols import Engine
from agentrl.trainer.handle import TrainerHandle
from agentrl.types.errors import ConfigError, EngineError
from agentrl.types.version import PolicyVersion


class LocalRuntime:
    """Starts what a run needs and ends all of it, whatever happened."""

    def __init__(self, config: RunConfig, logs: Path) -> None:
        self._config, self._logs = config, logs
        self._processes: list[EngineProcess] = []
        self._clients: list[EngineClient] = []
        self._trainers: list[TrainerHandle] = []
        self._watches: list[asyncio.Task[None]] = []
        self._engine_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start_engines(self, policy: str, model: Path, version: PolicyVersion) -> list[Engine]:
        """The engines that serve a policy's rollouts. Raises ConfigError or EngineError."""
        config = self._policy(policy)
        if isinstance(config.engine, AttachedEngineConfig):
            clients = await attach_engines(policy, config.engine, config.client, config.publish, version)
            self._clients += clients
            return list(clients)
        names = [f"engine-{policy}-{number}" for number in range(config.engine.count)]
        return list(await asyncio.gather(*(self._launch(policy, name, model, version) for name in names)))

    async def start_evaluation_engine(self, policy: str, model: Path, version: PolicyVersion) -> Engine:
        """An engine apart from the rollouts', whose weights evaluation alone decides."""
        return await self._launch(policy, f"engine-{policy}-evaluation", model, version)

    async def start_trainer(self, policy: str, model: Path, version: PolicyVersion) -> TrainerHandle:
        """The ranks that train a policy. Raises ConfigError or TrainerError."""
        config = self._policy(policy)
        trainer = await TrainerHandle.start(
            policy,
            model,
            version,
            config.trainer,
            config.algorithm,
            self._config.rollout.sampling.temperature,
            self._logs,
        )
        self._trainers.append(trainer)
        return trainer

    async def watch(self) -> None:
        """Waits for: the death of any engine that this runtime started. Raises EngineError then."""
        await self._engine_ended

    async def close(self) -> None:
        """End everything; safe to call twice."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(trainer.close() for trainer in self._trainers))
        await asyncio.gather(*(process.close() for process in self._processes))
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _report_end(self, process: EngineProcess) -> None:
        """Waits for: the end of one engine. Unblocked by: it, or close."""
        try:
            await process.watch()
        except EngineError as error:
            if not self._engine_ended.done():
                self._engine_ended.set_exception(error)

    async def _launch(self, policy: str, name: str, model: Path, version: PolicyVersion) -> Engine:
        config = self._policy(policy)
        if isinstance(config.engine, AttachedEngineConfig):
            raise ConfigError(
                "evaluation needs an engine of its own, which an attached engine cannot be; "
                "set evaluation.interval_steps=0 and evaluation.final_tasks=0"
            )
        launch = EngineLaunch(name, model, version, config.engine, self._config.is_deterministic, self._logs)
        process = await EngineProcess.start(launch, config.client, config.publish)
        self._processes.append(process)
        self._watches.append(asyncio.create_task(self._report_end(process), name=f"watch-{name}"))
        return process.client

    def _policy(self, name: str) -> PolicyConfig:
        return self._config.policies[name]
