"""What the tests of a GPU and its benchmark compute on, on any device: models, batches, an engine, a rank."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.testing.builders import build_ticket
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.episode import Episode, Node, SampledColumns
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.trajectory import Trajectory, build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan

FIRST = PolicyVersion(0, 0)
GROUP = 4
# No token ends a reply, so that figures are of the lengths that were asked for.
NO_STOP: tuple[int, ...] = ()
LOAD_S = 300.0


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model of random weights."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    is_tied: bool
    context: int = 8192

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters that take part in a matrix product for each token: all but input embedding and norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.hidden * self.vocabulary

    def step_flops(self, lengths: Sequence[int]) -> float:
        """Floating-point operations of one step over sequences of these lengths, forward and backward.

        6 N for each token, with N = `num_matrix_parameters`, and for attention 6 layers heads head_dim L^2 of a
        sequence of L tokens: scores and values are 4 heads head_dim L^2 in the forward pass, of which the causal half
        counts, and twice that in the backward pass. What is computed again to save memory does not count.
        """
        products = 6 * self.num_matrix_parameters * sum(lengths)
        return products + 6 * self.layers * self.heads * self.head_dim * sum(length**2 for length in lengths)


TINY = Shape(
    layers=2, hidden=64, heads=4, key_heads=2, head_dim=16, feed_forward=128, vocabulary=512, is_tied=False
)  # fmt: skip
# The shape of Qwen3-0.6B, whose tokenizer and weights are not needed here.
BASE = Shape(
    layers=28, hidden=1024, heads=16, key_heads=8, head_dim=128, feed_forward=3072, vocabulary=151_936, is_tied=True
)
SHAPES = {"tiny": TINY, "base": BASE}


def make_model(folder: Path, shape: Shape, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model of random weights, every parameter drawn, made on the device where that is quicker."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        initializer_range=0.08 if shape.hidden < 256 else 0.02,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        network = Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    network.generation_config = GenerationConfig()
    disable_progress_bar()
    network.cpu().save_pretrained(folder)
    return folder


def plain(model: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers alone runs it, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def plain_logprobs(network: PreTrainedModel, prompt: np.ndarray, reply: np.ndarray) -> np.ndarray:
    """Log-probabilities of the tokens of a reply behind a prompt, by a forward pass of `plain`."""
    ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
    table_TV = network(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return table_TV.gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def draw_ids(shape: Shape, count: int, num_tokens: int, seed: int) -> list[np.ndarray]:
    """Random token ids, [num_tokens] int32 each."""
    return list(np.random.default_rng(seed).integers(0, shape.vocabulary, (count, num_tokens)).astype(np.int32))


def all_selected(ids: np.ndarray) -> TokenSequence:
    """A text whose every token but the first is learned."""
    selected = np.arange(1, len(ids))
    unused = np.zeros(len(selected), np.float32)
    return TokenSequence(ids, selected, unused, unused, unused, unused, unused, None)


def trajectory_of(prompt: np.ndarray, reply: Generation) -> Trajectory:
    """A prompt and its reply as an episode of one turn holds them."""
    sample = SampledColumns(reply.logprobs, reply.versions, reply.kv_versions, reply.kept_tokens, reply.routed_experts)
    nodes = (Node(0, None, "agent", 0, prompt), Node(1, 0, "agent", 0, reply.token_ids, sample))
    (whole,) = build_trajectories(Episode(build_ticket(), (), nodes, ()))
    return whole


def batch_of(trajectories: Sequence[Trajectory], version: PolicyVersion = FIRST) -> TrainBatch:
    """Groups of four episodes of one turn each, of which every second is rewarded."""
    episodes = []
    for number, whole in enumerate(trajectories):
        trained = TrainTrajectory(whole, whole.sampled, np.zeros(len(whole.token_ids), np.int32))
        episodes.append(TrainEpisode(f"e{number}", number // GROUP, float(number % 2), (trained,)))
    return TrainBatch("main", version, tuple(episodes))


def made_batch(model: Path, shape: Shape, count: int, seed: int = 0) -> TrainBatch:
    """Replies of 40 random tokens behind 9, with the log-probabilities that plain transformers gives them."""
    network = plain(model)
    pairs = list(zip(draw_ids(shape, count, 9, seed), draw_ids(shape, count, 40, seed + 1), strict=True))
    return batch_of([trajectory_of(p, _sampled(r, plain_logprobs(network, p, r))) for p, r in pairs])


def guessed_batch(shape: Shape, count: int, num_tokens: int, version: PolicyVersion) -> TrainBatch:
    """Replies of `num_tokens` less a few, with the log-probability of a uniform draw: for measuring speed alone."""
    prompts = draw_ids(shape, count, 8, version.step)
    replies = draw_ids(shape, count, num_tokens - 8, version.step + 1)
    guess = np.full(num_tokens - 8, -np.log(shape.vocabulary), np.float32)
    pairs = zip(prompts, replies, strict=True)
    return batch_of([trajectory_of(prompt, _sampled(reply, guess)) for prompt, reply in pairs], version)


def _sampled(reply: np.ndarray, logprobs: np.ndarray) -> Generation:
    spans = (VersionSpan(FIRST, 0, len(reply)),)
    return Generation(reply, logprobs.astype(np.float32), spans, spans, FinishReason.LENGTH)


def trainer_config(device: str, dtype: str = "float32", kind: str = "sgd", rate: float = 0.05, **more: Any) -> Any:
    """A trainer of one rank."""
    optimizer = OptimizerConfig(kind=kind, learning_rate=rate, max_grad_norm=1e9)  # type: ignore[arg-type]
    kind_of_device = "cuda" if device.startswith("cuda") else device
    return TrainerConfig(device=kind_of_device, dtype=dtype, optimizer=optimizer, **more)  # type: ignore[arg-type]


@contextmanager
def trainer_rank(model: Path, folder: Path, config: TrainerConfig) -> Iterator[TrainerRank]:
    """The only rank of a trainer, in this process."""
    folder.mkdir(exist_ok=True)
    spec = RankSpec(
        policy="main",
        model=str(model),
        version=FIRST,
        rank=0,
        num_ranks=1,
        rendezvous=str(folder / "rendezvous"),
        temperature=1.0,
        trainer=config.model_dump(),
        algorithm=AlgorithmConfig().model_dump(),
    )
    rank = TrainerRank(spec)
    try:
        rank.load()
        yield rank
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        (folder / "rendezvous").unlink(missing_ok=True)


async def start_engine(model: Path, logs: Path, device: str, dtype: str, **args: Any) -> EngineProcess:
    """An embedded engine on a device."""
    config = EmbeddedEngineConfig(args={"device": device, "dtype": dtype, **args}, start_s=LOAD_S)
    launch = EngineLaunch("main", "engine", model, FIRST, config, False, logs)
    client = ClientConfig(load_s=LOAD_S)
    return await EngineProcess.start(launch, client, LocalPlace())


async def draw_replies(engine: EngineClient, prompts: Sequence[np.ndarray], num_tokens: int) -> list[Generation]:
    """A reply to each prompt, all at once."""
    requests = [request_of(f"draw-{number:08d}", prompt, num_tokens, number) for number, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def request_of(rid: str, prompt: np.ndarray, num_tokens: int, seed: int) -> GenerationRequest:
    """A request for so many tokens."""
    return GenerationRequest(rid, rid, prompt, num_tokens, NO_STOP, Sampling(), seed)


def at(batch: TrainBatch, version: PolicyVersion) -> TrainBatch:
    """The batch as one for another version."""
    return dataclasses.replace(batch, version=version)


def used_bytes(device: str) -> int | None:
    """Memory of the GPU that all processes together use; None of a CPU."""
    if not device.startswith("cuda"):
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def reset_peak(device: str) -> None:
    """Begin to watch how much memory this process takes of the GPU."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: str) -> int | None:
    """The most that this process's tensors took of the GPU since `reset_peak`; None of a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None


def synchronize(device: str) -> None:
    """Wait until the GPU has computed what was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
