"""What the replay contract is worth: the gap of token log-probabilities between engine and trainer, with and without.

Every pair of figures is a mean absolute difference in nats over tokens that the engine's side drew from the
very weights, or nearly, that the trainer holds; `_off` is a trainer that knows neither the engine's experts nor
its kept sets, `_on` one that replays them, and `_ratio` is their quotient.

`routing`: a mixture of experts (2 layers, 8 experts, 2 for each token) whose routers hold two directions with
four experts to each, apart by noise of 1e-5: nearly tied. Engine and trainer differ in nothing but that noise, so
many choices differ and the weights of what is chosen hardly do. Of a model whose choices are clear the same
noise would change fewer, and on both sides less. Float32 on both sides.
`bf16`: the same kind of model with plain random routers, identical weights, computed in bfloat16 on the engine's
side and in float32 by the trainer. Here rounding itself is part of both figures; replay takes away only what
other experts add.
`mask`: the embedded engine samples a dense model with top_k 20 and top_p 0.9; float32 on both sides.

For `routing` and `bf16` a forward pass of transformers stands for the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.engines import EngineLaunch, EngineProcess
from agentrl.testing.tiny import make_tiny_model
from agentrl.testing.tiny_moe import make_tiny_moe_model
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import load_policy
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence, supervised_sequence
from agentrl.types.generation import GenerationRequest, KeptTokens, Sampling
from agentrl.types.trajectory import NOT_ROUTED, NOT_SAMPLED, Trajectory
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig
from tests.benchmarks.report import report

NUM_SEQUENCES = 16
PROMPT_TOKENS = 16
REPLY_TOKENS = 128
NOISE = 1e-5
MASK = Sampling(top_k=20, top_p=0.9)


def as_sequence(
    token_ids: np.ndarray, logprobs: np.ndarray, kept: KeptTokens | None = None, routed: np.ndarray | None = None
) -> TokenSequence:
    """A prompt and a reply whose tokens all count alike."""
    turns = np.full(len(token_ids), NOT_SAMPLED, np.int16)
    turns[PROMPT_TOKENS:] = 0
    columns = np.zeros(len(token_ids), np.float32)
    columns[PROMPT_TOKENS:] = logprobs
    plain = Trajectory("agent", token_ids, turns, (turns >= 0).astype(np.float32), columns, (), None)
    return replace(supervised_sequence(plain), kept_tokens=kept, routed_experts=routed)


@torch.no_grad()
def sampled_by(network: PreTrainedModel, seed: int) -> list[TokenSequence]:
    """Replies of a network of experts to random prompts, with its log-probabilities and its routing."""
    torch.manual_seed(seed)
    prompts = torch.randint(3, network.config.vocab_size, (NUM_SEQUENCES, PROMPT_TOKENS))
    limits = {"max_new_tokens": REPLY_TOKENS, "min_new_tokens": REPLY_TOKENS}
    whole = network.generate(prompts, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0, **limits)
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, output: seen.append(output[2]))
        for layer in network.model.layers
    ]
    logprobs = network(whole).logits.float().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    chosen = logprobs[:, PROMPT_TOKENS - 1 : -1].gather(2, whole[:, PROMPT_TOKENS:, None])[:, :, 0]
    routed = torch.stack(seen, 1).unflatten(0, whole.shape).to(torch.int16)
    routed[:, -1] = NOT_ROUTED
    rows = zip(whole.numpy().astype(np.int32), chosen.numpy(), routed.numpy(), strict=True)
    return [as_sequence(ids, values, routed=experts) for ids, values, experts in rows]


async def served_by(model: Path, logs: Path, sampling: Sampling, seed: int) -> list[TokenSequence]:
    """Replies of an embedded engine to random prompts."""
    rng = np.random.default_rng(seed)
    launch = EngineLaunch("engine", model, PolicyVersion(0, 0), EmbeddedEngineConfig(), False, logs)
    engine = await EngineProcess.start(launch, ClientConfig(), PublishConfig())
    sequences = []
    try:
        for number in range(NUM_SEQUENCES):
            prompt = rng.integers(3, 300, PROMPT_TOKENS).astype(np.int32)
            rid = f"rid-{number:08d}"
            request = GenerationRequest(rid, rid, prompt, REPLY_TOKENS, (), sampling, seed)
            reply = await engine.client.generate(request)
            token_ids = np.concatenate([prompt, reply.token_ids])
            sequences.append(as_sequence(token_ids, reply.logprobs, reply.kept_tokens))
    finally:
        await engine.close()
    return sequences


def gaps(name: str, model: Path, sequences: list[TokenSequence]) -> dict[str, float]:
    """Mean absolute gap of a float32 trainer of a model folder, without and with replay."""
    policy = load_policy(model, TrainerConfig())
    batch = pack(sequences, "cpu")
    with torch.no_grad():
        off, on = (float((policy(b, 1.0) - batch.behaviour_S).abs().mean()) for b in (batch.without_replay(), batch))
    return {f"{name}_off": off, f"{name}_on": on, f"{name}_ratio": round(off / on, 1)}


def tie_routers(network: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Give each router two directions with four experts to each, apart by noise of one seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in network.model.layers:
            weight = layer.mlp.gate.weight
            noise = NOISE * torch.randn(weight.shape, generator=generator)
            weight.copy_(weight[:2].repeat_interleave(4, 0) + noise)
    return network


def load_plain(model: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def measure(folder: Path, seed: int) -> dict[str, float]:
    """All figures."""
    moe = make_tiny_moe_model(folder / "moe", seed)
    tied = load_plain(moe, torch.float32)
    engine = tie_routers(load_plain(moe, torch.float32), seed + 1)
    tie_routers(tied, seed + 2).save_pretrained(folder / "tied")
    dense = make_tiny_model(folder / "dense", seed)
    replies = asyncio.run(served_by(dense, folder, MASK, seed))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        return {
            **gaps("routing", folder / "tied", sampled_by(engine, seed)),
            **gaps("bf16", moe, sampled_by(load_plain(moe, torch.bfloat16), seed)),
            **gaps("mask", dense, replies),
            "tokens": sum(len(s.selected) for s in replies),
        }
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report("replay_gap", **measure(Path(folder), seed), seed=seed)


if __name__ == "__main__":
    main()
