"""agentrl's trainer beside TRL's: the same weights, sequences, advantages and optimizer, one process and core each.

Two batches: `demo`, 64 episodes of the SQL environment, which begin with the same instructions, for the demo's model;
and `llama`, sequences of unlike lengths that share nothing, for a Llama of 135 million parameters. TRL pads the rows of
a forward pass to the longest, agentrl packs them.

Figures for each: `speed_ratio`, tokens by processor second of agentrl over TRL's, without the first step;
`memory_ratio`, the most memory that the process held; `loss_gap`, the largest difference of a step's loss, whose ratios
are taken against log-probabilities that plain transformers gave before the first step; `norm_gap`, the same of the
gradient's norm, over TRL's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.learning_vs_trl import TRL_PYTHON, TRL_SIDE
from tests.benchmarks.report import report

LEARNING_RATE = 1e-4
_LENGTHS = (32, 48, 64, 96, 128, 160, 192, 256, 288, 320, 384, 512)


def demo_job(folder: Path) -> dict[str, Any]:
    """64 episodes of the clumsy expert, and a model that has seen one step of them."""
    from agentrl.cli.demo import recipe
    from agentrl.envs.hosting import build_host
    from agentrl.orchestration.players import build_scaffold
    from agentrl.orchestration.transcripts import Teacher
    from agentrl.orchestration.warmstart import WarmStart
    from agentrl.orchestration.warmstart_config import load_warmstart_config
    from agentrl.tokens.chat import ChatFormat
    from agentrl.types.trajectory import build_trajectories
    from agentrl_environments.sql import definition
    from agentrl_environments.sql.tasks import SqlOptions

    lesson = "lessons=[{expert = 'clumsy', transcripts = 64, max_steps = 1}]"
    config = load_warmstart_config(recipe("warmstart.toml"), [f"output={folder / 'demo-model'}", lesson])

    class Quiet:
        def on_phase(self, text: str) -> None: ...

        def on_progress(self, done: int, total: int, text: str) -> None: ...

    asyncio.run(WarmStart(config, Quiet()).run())
    chat = ChatFormat.load(config.output, config.chat)
    host = asyncio.run(build_host(config.environment, 30.0, folder))
    teacher = Teacher(definition, SqlOptions(), host, build_scaffold(config.scaffold), config.limits.build())
    episodes = asyncio.run(teacher.play("clumsy", chat, range(64), 1))
    sequences = [
        {"token_ids": whole.token_ids.tolist(), "trained": whole.sampled.tolist(), "advantage": float(number % 3 - 1)}
        for number, episode in enumerate(episodes)
        for whole in build_trajectories(episode)
    ]
    return {"model": str(config.output), "steps": 21, "rows": 64, "micro_batch_tokens": 8192, "sequences": sequences}


def llama_job(folder: Path) -> dict[str, Any]:
    """Random tokens for a model of random weights, of the shape of SmolLM2-135M."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from agentrl.testing.tiny import save_tiny_tokenizer

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = folder / "llama"
    LlamaForCausalLM(shape).save_pretrained(model)
    save_tiny_tokenizer(model)
    draw = np.random.default_rng(0)
    sequences = []
    for number, length in enumerate(_LENGTHS):
        prompt = length // 4
        trained = [False] * prompt + [bool(place % 8 < 6) for place in range(length - prompt)]
        ids = draw.integers(0, shape.vocab_size, length).tolist()
        sequences.append({"token_ids": ids, "trained": trained, "advantage": float(number % 3 - 1)})
    return {"model": str(model), "steps": 3, "rows": 4, "micro_batch_tokens": 2048, "sequences": sequences}


def plain_logprobs(job: dict[str, Any]) -> None:
    """Give every sequence the log-probabilities of its trained tokens under the model, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    for sequence in job["sequences"]:
        ids = torch.tensor(sequence["token_ids"])
        with torch.no_grad():
            table_LV = model(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = table_LV.gather(1, ids[1:, None])[:, 0]
        sequence["logprobs"] = logprobs[torch.tensor(sequence["trained"][1:])].tolist()


def train(job: dict[str, Any]) -> None:
    """agentrl's side, in a process of its own: prints what TRL's side prints."""
    import torch
    import torch.distributed as dist

    from agentrl.algorithms.config import AlgorithmConfig, NoCorrectionConfig, PpoConfig
    from agentrl.trainer.config import OptimizerConfig, TrainerConfig
    from agentrl.trainer.model import load_policy
    from agentrl.trainer.optimizer import OptimizerSet
    from agentrl.trainer.sequence import TokenSequence
    from agentrl.trainer.step import run_step

    torch.set_num_threads(job["threads"])
    rendezvous = Path(job["model"]).parent / f"rendezvous-{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    optimizer = OptimizerConfig(learning_rate=job["learning_rate"])
    config = TrainerConfig(optimizer=optimizer, micro_batch_tokens=job["micro_batch_tokens"])
    policy = load_policy(Path(job["model"]), config)
    steps = OptimizerSet(policy, optimizer)
    num_trained = sum(sum(sequence["trained"]) for sequence in job["sequences"])
    sequences = []
    for sequence in job["sequences"]:
        selected = np.flatnonzero(sequence["trained"])
        ones, nothing = np.ones(len(selected), np.float32), np.zeros(len(selected), np.float32)
        sequences.append(
            TokenSequence(
                token_ids=np.asarray(sequence["token_ids"][: selected[-1] + 1], np.int32),
                selected=selected,
                logprobs=np.asarray(sequence["logprobs"], np.float32),
                advantages=sequence["advantage"] * ones,
                scales=ones / num_trained,
                turns=nothing,
                staleness=ones,
                kept_tokens=None,
            )
        )
    loss = PpoConfig(clip_low=0.2, clip_high=0.2, proximal="behaviour")
    algorithm = AlgorithmConfig(loss=loss, correction=NoCorrectionConfig(), aggregation="token")
    losses, norms, started = [], [], 0.0
    for step in range(job["steps"]):
        if step == 1:
            started = time.process_time()
        metrics = run_step(policy, steps, sequences, algorithm, config, 1.0, is_gate=False)
        losses.append(metrics["trainer/loss"])
        norms.append(metrics["trainer/grad_norm"])
    used_s = time.process_time() - started
    peak_kb = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    print(json.dumps({"losses": losses, "norms": norms, "processor_s": used_s, "peak_bytes": 1024 * peak_kb}))
    dist.destroy_process_group()


def compare(name: str, job: dict[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """The figures of one batch."""
    plain_logprobs(job)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**job, "threads": threads, "learning_rate": LEARNING_RATE}))
    sides = {
        "agentrl": [sys.executable, "-m", "tests.benchmarks.trainer_vs_trl", "--job", str(path)],
        "trl": [str(TRL_PYTHON), str(TRL_SIDE / "step.py"), str(path)],
    }
    results = {}
    for side, command in sides.items():
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{side} failed on the batch {name}:\n{done.stderr[-3000:]}")
        results[side] = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = results["agentrl"], results["trl"]
    tokens = (job["steps"] - 1) * sum(len(sequence["token_ids"]) for sequence in job["sequences"])
    return {
        "speed_ratio": round(theirs["processor_s"] / ours["processor_s"], 3),
        "memory_ratio": round(ours["peak_bytes"] / theirs["peak_bytes"], 3),
        "loss_gap": max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)),
        "norm_gap": max(abs(a - b) / b for a, b in zip(ours["norms"], theirs["norms"], strict=True)),
        "tokens_per_s": [round(tokens / side["processor_s"]) for side in (ours, theirs)],
        "peak_mb": [round(side["peak_bytes"] / 1e6) for side in (ours, theirs)],
        "last_loss": ours["losses"][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        train(json.loads(arguments.job.read_text()))
        return
    if not TRL_PYTHON.exists():
        raise SystemExit("TRL is not installed; run `make bench BENCH=trainer_vs_trl`")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {"demo": demo_job(folder), "llama": llama_job(folder)}
        figures = {batch: compare(batch, job, folder, threads=1) for batch, job in jobs.items()}
    report("trainer_vs_trl", **figures)


if __name__ == "__main__":
    main()
