"""One trainer rank as a process: the object that the driver's handle calls."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.models.verification import require
from agentrl.process.crash_points import crash_point
from agentrl.process.interfaces import interface_of
from agentrl.process.ports import LOOPBACK
from agentrl.process.server import serve
from agentrl.trainer.adapter import stage_adapter
from agentrl.trainer.advantages import batch_advantages, token_advantages, unscored_tokens
from agentrl.trainer.canary import compute_canary
from agentrl.trainer.checkpoint import restore_checkpoint, save_checkpoint, stage_weights
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.explanation import LossTrace
from agentrl.trainer.logprob_mismatch import no_replay_gap
from agentrl.trainer.minibatches import split_batch
from agentrl.trainer.model import load_policy
from agentrl.trainer.optimizer import OptimizerSet, decayed
from agentrl.trainer.selection import places_in_loss, select_sequences
from agentrl.trainer.sequence import TokenSequence
from agentrl.trainer.step import run_step, run_supervised
from agentrl.trainer.verification import check_trainer
from agentrl.types.batch import Canary, StepReport, TrainBatch, WeightsManifest
from agentrl.types.errors import ConfigError
from agentrl.types.explanation import StepExplanation
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import ADAPTER_FOLDER

_CANARY_TOKENS = 48
_TCP = "tcp://"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# The loss of a batch in which every advantage is 0 is 0, and so is its gradient: no weight moves.
_NOTHING_LEARNED = {"trainer/loss": 0.0, "trainer/grad_norm": 0.0, "trainer/optimizer_steps": 0.0}


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank is started with.

    `rendezvous` is the path of a file that all ranks see, or ``tcp://HOST:PORT`` of rank 0's machine. `host` is the
    address of its own, on whose GPUs `num_devices` ranks compute, this one on the one of number `device`. Engines
    compute there too if it `shares_devices`.
    """

    policy: str
    model: str
    version: PolicyVersion
    rank: int
    num_ranks: int
    rendezvous: str
    temperature: float
    trainer: dict[str, Any]
    algorithm: dict[str, Any]
    host: str = LOOPBACK
    device: int = 0
    num_devices: int = 1
    shares_devices: bool = False


class TrainerRank:
    """Holds a shard of the policy. All ranks get the same calls in the same order."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._config = TrainerConfig.model_validate(spec.trainer)
        self._algorithm = AlgorithmConfig.model_validate(spec.algorithm)
        self._version = spec.version
        self._unchanged_since: PolicyVersion | None = spec.version
        self._is_unproven = True
        self._canary_ids: list[int] = []

    def load(self) -> dict[str, int]:
        """Meet the other ranks and load model and optimizer; returns sizes. Every rank's first call.

        Raises:
            ConfigError: the model cannot be loaded, its architecture is not one that the trainer computes rightly, or
                the machine has fewer GPUs than ranks.
        """
        spec = self._spec
        torch.set_num_threads(self._config.threads)
        if spec.rank == 0:
            require(check_trainer(Path(spec.model)))
        torch.manual_seed(0)
        if self._config.device == "cuda":
            _take_gpu(spec.device, spec.num_devices)
        dist.init_process_group(
            "nccl" if self._config.device == "cuda" else "gloo",
            store=_meet(spec),
            rank=spec.rank,
            world_size=spec.num_ranks,
        )
        self._policy = load_policy(Path(spec.model), self._config)
        self._optimizer = OptimizerSet(self._policy, self._config.optimizer)
        return {"parameters": sum(p.numel() for p in self._policy.parameters())}

    def step(self, batch: TrainBatch, is_redo: bool = False) -> StepReport:
        """Learn from one batch, in one optimizer step or several: version v to v+1.

        Repeating the call for a batch that is part of the weights already is refused. A redo of a step on record
        masks what mismatches and ends at none of it: the next new step passes the gate.
        """
        return self._step(batch, None, is_redo)

    def explain_step(self, batch: TrainBatch) -> StepExplanation:
        """The same step as a redo, and what the loss made of each token. Only of one rank, which sees them all."""
        if self._spec.num_ranks > 1:
            raise ValueError(f"a step is explained by one rank, this trainer has {self._spec.num_ranks}")
        trace = LossTrace()
        report = self._step(batch, trace, is_redo=True)
        credited = token_advantages(batch, self._algorithm)
        places = places_in_loss(batch, credited, self._algorithm)
        return StepExplanation(
            report=report,
            advantages=tuple(batch_advantages(batch, self._algorithm)),
            token_advantages=tuple(map(tuple, credited)),
            terms=trace.by_trajectory(batch, places),
        )

    def _step(self, batch: TrainBatch, trace: LossTrace | None, is_redo: bool) -> StepReport:
        if batch.version != self._version:
            raise ValueError(f"the batch is for version {batch.version}, the trainer is at {self._version}")
        started = time.monotonic()
        sequences = select_sequences(batch, self._algorithm)
        minibatches = split_batch(batch, sequences, self._algorithm)
        metrics = {**_NOTHING_LEARNED, "trainer/unscored_tokens": float(unscored_tokens(batch, self._algorithm))}
        if sequences:
            self._canary_ids = sequences[0].token_ids[:_CANARY_TOKENS].tolist()
            temperature = self._spec.temperature
            if self._reports_gap:
                metrics |= no_replay_gap(self._policy, sequences, self._config, temperature)
            metrics |= run_step(
                self._policy,
                self._optimizer,
                sequences,
                self._algorithm,
                self._config,
                temperature,
                self._is_unproven,
                trace,
                minibatches,
                is_redo,
                decayed(self._config.optimizer, self._version.step),
            )
            self._is_unproven &= is_redo or metrics["trainer/fresh_tokens"] == 0
        if self._spec.shares_devices and self._config.device == "cuda":
            torch.cuda.empty_cache()  # else the allocator keeps it from the engines
        seconds = time.monotonic() - started
        metrics["time/train_step_s"] = seconds
        num_tokens = sum(len(s.token_ids) for minibatch in minibatches for s in minibatch.sequences)
        metrics["trainer/tokens_per_s"] = num_tokens / seconds
        self._version = self._version.next()
        if metrics["trainer/optimizer_steps"]:
            self._unchanged_since = self._version
        crash_point("trainer.stepped")
        return StepReport(self._version, metrics)

    @property
    def _reports_gap(self) -> bool:
        interval = self._config.gap_report_interval_steps
        return interval > 0 and self._version.step % interval == 0

    def supervised_step(self, sequences: list[TokenSequence], lr_scale: float) -> float:
        """One step of maximum likelihood; returns the loss before it, in nats over all tokens."""
        self._unchanged_since = None  # it makes no version: nobody can tell any more which has these weights
        return run_supervised(self._policy, self._optimizer, sequences, self._config, lr_scale)

    def supervised_loss(self, sequences: list[TokenSequence]) -> float:
        """Negative log-likelihood in nats over all tokens, without an update."""
        return run_supervised(self._policy, None, sequences, self._config, 0.0)

    def canary(self, token_ids: list[int]) -> Canary:
        """What the present weights say of tokens, which later weights are proven by until a step brings others.

        Raises ValueError of less than two tokens.
        """
        self._canary_ids = token_ids[:_CANARY_TOKENS]
        canary = compute_canary(self._policy, self._canary_ids, self._config.device)
        if canary is None:
            raise ValueError(f"a canary needs two tokens, got {token_ids}")
        return canary

    def stage(self, version: PolicyVersion, folder: str) -> WeightsManifest:
        """Write the current weights, or with LoRA the adapters alone, where engines can read them."""
        if version != self._version:
            raise ValueError(f"asked to stage version {version}, the trainer is at {self._version}")
        what = self._policy, Path(self._spec.model), self._spec.policy, version
        if self._config.lora is not None:
            manifest = stage_adapter(*what, self._config.lora, Path(folder))
        else:
            manifest = stage_weights(*what, Path(folder))
        crash_point("trainer.staged")
        canary = compute_canary(self._policy, self._canary_ids, self._config.device)
        return dataclasses.replace(manifest, canary=canary, unchanged_since=self._unchanged_since)

    def rebase(self, version: PolicyVersion) -> None:
        """Call the present weights a version of a later epoch. Raises ValueError if the step differs."""
        if version.step != self._version.step:
            raise ValueError(f"the trainer is at {self._version}, which cannot be called {version}")
        # Nobody knows which weights engines hold of the lost epoch.
        self._version = self._unchanged_since = version

    def save(self, folder: str) -> None:
        """Write weights, merged with their adapters if there are any, and all that training goes on from."""
        path = Path(folder)
        what = self._policy, Path(self._spec.model), self._spec.policy, self._version
        stage_weights(*what, path)
        crash_point("trainer.saved")
        if self._config.lora is not None:
            stage_adapter(*what, self._config.lora, path / ADAPTER_FOLDER)
        save_checkpoint(self._policy, self._optimizer, path)

    def restore(self, folder: str) -> None:
        """Go on from what `save` wrote."""
        restore_checkpoint(self._policy, self._optimizer, Path(folder))


def _meet(spec: RankSpec) -> Store:
    """By what the ranks find each other. Raises ConfigError if no interface has the address of this one."""
    if not spec.rendezvous.startswith(_TCP):
        # Not by a URL of the file, in which a folder's name could have characters that mean something.
        file = FileStore(spec.rendezvous, spec.num_ranks)
        file.set_timeout(default_pg_timeout)
        return file
    # gloo would go by this machine's name, which may stand for its loopback.
    if _GLOO_INTERFACE not in os.environ:
        os.environ[_GLOO_INTERFACE] = interface_of(spec.host)
    host, _, port = spec.rendezvous.removeprefix(_TCP).rpartition(":")
    is_first = spec.rank == 0
    return TCPStore(host, int(port), spec.num_ranks, is_first, default_pg_timeout, wait_for_workers=False)


def _take_gpu(number: int, num_ranks: int) -> None:
    """Compute on a GPU of this machine. Raises ConfigError if there are fewer than ranks here."""
    num_gpus = torch.cuda.device_count()
    if num_ranks > num_gpus:
        raise ConfigError(
            f"trainer.device = cuda with {num_ranks} ranks, and torch {torch.__version__} finds {num_gpus} CUDA "
            'devices here; lower trainer.ranks, set trainer.device = "cpu", or install a build of torch for the GPUs'
        )
    torch.cuda.set_device(number)


def main() -> None:
    """Entry of the process: ``python -m agentrl.trainer.rank SPEC_JSON FD``."""
    spec = msgspec.json.decode(sys.argv[1], type=RankSpec)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(TrainerRank(spec), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # All that it had to leave is on disk; torch would take itself apart for a second, and the run's end would wait.
    os._exit(0)


if __name__ == "__main__":
    main()
