"""What the replay contract is worth: the gap of token log-probabilities between engine and trainer, with and without.

Every pair of figures is a mean absolute difference in nats over tokens that an embedded engine drew from the
very weights, or nearly, that the trainer holds; `_off` is a trainer that knows neither the engine's experts nor
its kept sets, `_on` one that replays them, and `_ratio` is their quotient.

`routing`: a mixture of experts (2 layers, 8 experts, 2 for each token) whose routers hold two directions with
four experts to each, apart by noise of 1e-5: nearly tied. Engine and trainer differ in nothing but that noise, so
many choices differ and the weights of what is chosen hardly do. Where choices are clear the same noise changes
few of them: the ratio is that of near-ties. Float32 on both sides.
`bf16`: the same kind of model with plain random routers and identical weights, served in bfloat16 and trained in
float32. Here rounding itself is part of both figures; replay takes away only what other experts add.
`mask`: a dense model, sampled with top_k 20 and top_p 0.9; float32 on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.testing.builders import build_ticket
from agentrl.testing.tiny import make_tiny_model
from agentrl.testing.tiny_moe import make_tiny_moe_model
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import load_policy
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence, supervised_sequence
from agentrl.types.episode import Episode, Node, SampledColumns
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion
from tests.benchmarks.report import report

NUM_SEQUENCES = 16
PROMPT_TOKENS = 16
REPLY_TOKENS = 128
NOISE = 1e-5
MASK = Sampling(top_k=20, top_p=0.9)
ROUTING = Sampling(routing=(2, 2))


async def served_by(model: Path, logs: Path, sampling: Sampling, seed: int, **args: Any) -> list[TokenSequence]:
    """Replies of an engine to random prompts, all at once."""
    rng = np.random.default_rng(seed)
    launch = EngineLaunch("main", "engine", model, PolicyVersion(0, 0), EmbeddedEngineConfig(args=args), False, logs)
    engine = await EngineProcess.start(launch, ClientConfig(), LocalPlace())
    prompts = rng.integers(3, 300, (NUM_SEQUENCES, PROMPT_TOKENS)).astype(np.int32)
    names = [f"rid-{number:08d}" for number in range(NUM_SEQUENCES)]
    requests = [
        GenerationRequest(name, name, prompt, REPLY_TOKENS, (), sampling, seed + number)
        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    try:
        replies = await asyncio.gather(*(engine.client.generate(request) for request in requests))
    finally:
        await engine.close()
    return [as_sequence(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]


def as_sequence(prompt: np.ndarray, reply: Generation) -> TokenSequence:
    """A prompt and its reply as an episode would hold them."""
    sample = SampledColumns(reply.logprobs, reply.versions, reply.kv_versions, reply.kept_tokens, reply.routed_experts)
    nodes = (Node(0, None, "agent", 0, prompt), Node(1, 0, "agent", 0, reply.token_ids, sample))
    (whole,) = build_trajectories(Episode(build_ticket(), (), nodes, ()))
    return replace(supervised_sequence(whole), kept_tokens=whole.kept_tokens, routed_experts=whole.routed_experts)


def gaps(name: str, model: Path, sequences: list[TokenSequence]) -> dict[str, float]:
    """Mean absolute gap of a float32 trainer of a model folder, without and with replay."""
    policy = load_policy(model, TrainerConfig())
    batch = pack(sequences, "cpu")
    with torch.no_grad():
        off, on = (float((policy(b, 1.0) - batch.behaviour_S).abs().mean()) for b in (batch.without_replay(), batch))
    return {f"{name}_off": off, f"{name}_on": on, f"{name}_ratio": round(off / on, 1)}


def copy_with_tied_routers(model: Path, folder: Path, seed: int) -> Path:
    """The model with two directions in each router, four experts to each, apart by noise of one seed."""
    shutil.copytree(model, folder)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in network.model.layers:
            weight = layer.mlp.gate.weight
            noise = NOISE * torch.randn(weight.shape, generator=generator)
            weight.copy_(weight[:2].repeat_interleave(4, 0) + noise)
    network.save_pretrained(folder)
    return folder


async def serve_all(folder: Path, seed: int) -> dict[str, tuple[Path, list[TokenSequence]]]:
    """For each pair of figures the trainer's model and what the engine said."""
    moe = make_tiny_moe_model(folder / "moe", seed)
    dense = make_tiny_model(folder / "dense", seed)
    sides = [copy_with_tied_routers(moe, folder / f"tied-{number}", seed + number) for number in (1, 2)]
    return {
        "routing": (sides[0], await served_by(sides[1], folder, ROUTING, seed)),
        "bf16": (moe, await served_by(moe, folder, ROUTING, seed, dtype="bfloat16")),
        "mask": (dense, await served_by(dense, folder, MASK, seed)),
    }


def measure(folder: Path, seed: int) -> dict[str, float]:
    """All figures."""
    served = asyncio.run(serve_all(folder, seed))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    figures: dict[str, float] = {}
    try:
        for name, (model, sequences) in served.items():
            figures |= gaps(name, model, sequences)
            figures[f"{name}_tokens"] = sum(len(s.selected) for s in sequences)
    finally:
        dist.destroy_process_group()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report("replay_gap", **measure(Path(folder), seed), seed=seed)


if __name__ == "__main__":
    main()
