"""The driver's side of the trainer: starts the ranks, sends each call to all, ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.process.local_place import LocalPlace
from agentrl.process.parent import CHILD
from agentrl.process.place import Place, PlaceLostError
from agentrl.process.ports import is_loopback
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError, encode_call
from agentrl.process.starting import arithmetic_environment
from agentrl.process.threads import run_in_thread
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import Canary, StepReport, TrainBatch, WeightsManifest
from agentrl.types.errors import ERRORS_BY_NAME, AgentRLError, TrainerError, TrainerLostError
from agentrl.types.explanation import StepExplanation
from agentrl.types.version import PolicyVersion

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_NEWS_S = 0.5


class TrainerHandle:
    """Trainer of one policy: its ranks as child processes, which meet by the file `rendezvous` if they share a machine.

    A call that fails on any rank ends all of them, since ranks that miss a collective wait for ever.
    """

    def __init__(self, policy: str, config: TrainerConfig, ranks: Sequence[ChildProcess], rendezvous: Path) -> None:
        self._policy, self._config = policy, config
        self._ranks, self._rendezvous = list(ranks), rendezvous

    @classmethod
    async def start(
        cls,
        policy: str,
        model: Path,
        version: PolicyVersion,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        logs: Path,
        places: Sequence[Place] = (),
        shares_devices: bool = False,
    ) -> TrainerHandle:
        """Start the ranks, each at its place or all on this machine, and wait until the model is loaded.

        Ranks that share their devices with engines keep no memory there that only a step needs.

        Raises:
            ConfigError: the model cannot be loaded.
            TrainerLostError: a rank or its place was lost, or was not ready in time.
        """
        # Beside the logs, where what a kill leaves is in nobody's way; the file of ranks that are gone misleads others.
        rendezvous = logs.absolute() / f"trainer-{policy}.rendezvous"
        rendezvous.unlink(missing_ok=True)
        handle = cls(policy, config, (), rendezvous)
        spec = {
            "policy": policy,
            "model": str(model),
            "version": version,
            "temperature": temperature,
            "trainer": config.model_dump(),
            "algorithm": algorithm.model_dump(),
            "shares_devices": shares_devices,
        }
        try:
            await handle._start_ranks(spec, logs, places or [LocalPlace()] * config.ranks)
        except PlaceLostError as error:
            handle.kill()
            raise TrainerLostError(f"trainer of policy '{policy}': {error}") from error
        except BaseException:
            handle.kill()
            raise
        await handle._call("load", result=dict[str, int], deadline_s=config.deadlines.start_s)
        return handle

    async def _start_ranks(self, spec: dict[str, object], logs: Path, places: Sequence[Place]) -> None:
        """Each as a process at its place; ranks that have a place in common share its devices."""
        config, meeting = self._config, await meeting_point(places, self._rendezvous)
        environment = arithmetic_environment(config.threads)
        for rank, place in enumerate(places):
            own = {
                "rank": rank,
                "num_ranks": len(places),
                "rendezvous": meeting,
                "host": place.host,
                "device": places[:rank].count(place),
                "num_devices": places.count(place),
            }
            argv = [*CHILD, "agentrl.trainer.rank", msgspec.json.encode({**spec, **own}).decode()]
            name = f"trainer-{self._policy}-{rank}"
            log = logs / f"{name}.log"
            self._ranks.append(await ChildProcess.start(name, argv, log, environment, place=place))

    async def step(self, batch: TrainBatch, is_redo: bool = False) -> StepReport:
        """The step over one batch, or a redo of it. Raises TrainerError."""
        return await self._call("step", batch, is_redo, result=StepReport, deadline_s=self._config.deadlines.step_s)

    async def explain_step(self, batch: TrainBatch) -> StepExplanation:
        """A redo of a step by a single rank, and what it made of each token. Raises TrainerError."""
        deadline_s = self._config.deadlines.step_s
        return await self._call("explain_step", batch, result=StepExplanation, deadline_s=deadline_s)

    async def supervised_step(self, sequences: list[TokenSequence], lr_scale: float) -> float:
        """One step of maximum likelihood. Raises TrainerError."""
        return await self._call(
            "supervised_step", sequences, lr_scale, result=float, deadline_s=self._config.deadlines.step_s
        )

    async def supervised_loss(self, sequences: list[TokenSequence]) -> float:
        """Negative log-likelihood in nats. Raises TrainerError."""
        return await self._call("supervised_loss", sequences, result=float, deadline_s=self._config.deadlines.step_s)

    async def canary(self, token_ids: list[int]) -> Canary:
        """What the present weights say of some tokens, two at least. Raises TrainerError."""
        return await self._call("canary", token_ids, result=Canary, deadline_s=self._config.deadlines.step_s)

    async def stage(self, version: PolicyVersion, folder: Path) -> WeightsManifest:
        """Write the current weights where engines can read them. Raises TrainerError or StorageError."""
        deadline_s = self._config.deadlines.step_s
        return await self._call("stage", version, str(folder), result=WeightsManifest, deadline_s=deadline_s)

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer. Raises TrainerError or StorageError."""
        await self._call("save", str(folder), result=type(None), deadline_s=self._config.deadlines.step_s)

    async def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises TrainerError or StorageError."""
        await self._call("restore", str(folder), result=type(None), deadline_s=self._config.deadlines.step_s)

    async def rebase(self, version: PolicyVersion) -> None:
        """Call the present weights a version of a later epoch. Raises TrainerError."""
        await self._call("rebase", version, result=type(None), deadline_s=self._config.deadlines.step_s)

    async def close(self) -> None:
        """End the ranks; safe to call twice."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        self._rendezvous.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the ranks at once."""
        for rank in self._ranks:
            rank.kill()
        self._rendezvous.unlink(missing_ok=True)

    async def _call(self, method: str, *arguments: object, result: TypeForm[T], deadline_s: float) -> T:
        """Call all ranks; the answer is rank 0's. A thread encodes the call, once for all of them.

        Waits for: every rank. Unblocked by: their replies, the first failure, the deadline.
        """
        calls: list[asyncio.Task[T]] = []
        try:
            request = await run_in_thread("encode", lambda: encode_call(method, arguments))
            for rank in self._ranks:
                call = rank.call_encoded(method, request, result=result, deadline_s=deadline_s)
                calls.append(asyncio.create_task(call))
            done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if not any(task.exception() for task in done):
                return calls[0].result()
            if pending:
                # A rank that misses a dead one may raise before the death, which is the cause, is known.
                done, pending = await asyncio.wait(calls, timeout=_NEWS_S)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        self.kill()
        await asyncio.gather(*pending, return_exceptions=True)
        failed = [error for task in calls if task in done and (error := task.exception())]
        cause = min(failed, key=lambda error: not isinstance(error, ProcessDiedError))
        raise self._explain(method, cause, deadline_s)

    def _explain(self, method: str, error: BaseException, deadline_s: float) -> AgentRLError:
        """A foreign or remote error as one that says which trainer, what it did and what to do."""
        where = f"trainer of policy '{self._policy}'"
        if isinstance(error, RemoteCallError) and error.error in ERRORS_BY_NAME:
            return ERRORS_BY_NAME[error.error](error.message)
        if isinstance(error, RemoteCallError):
            return TrainerError(f"{where}: {error}\n{error.trace}")
        if isinstance(error, ProcessDiedError):
            return TrainerLostError(
                f"{where}: {error}\nSignal 9 mostly means no memory; lower trainer.micro_batch_tokens"
            )
        if isinstance(error, TimeoutError):
            logs = ", ".join(str(rank.log) for rank in self._ranks)
            limit = "start_s" if method == "load" else "step_s"
            message = f"{method} took longer than {deadline_s:g} s; see {logs}, or raise trainer.deadlines.{limit}"
            return TrainerLostError(f"{where}: {message}")
        return TrainerError(f"{where}: {method}: {type(error).__name__}: {error}")


async def meeting_point(places: Sequence[Place], file: Path) -> str:
    """Where ranks meet: the path of a file if all of them are on this machine, else an address of rank 0's.

    Example: ``tcp://10.77.0.3:21774``. Raises PlaceLostError.
    """
    if all(is_loopback(place.host) for place in places):
        return str(file)
    return f"tcp://{places[0].host}:{await places[0].free_port()}"
