"""TRL's trainer on one batch: run in TRL's environment, it shares no code with agentrl.

python step.py JOB: a JSON file with `model`, `threads`, `steps`, `rows`, `learning_rate` and `sequences`, each with
`token_ids`, `trained` (True for tokens in the loss), `logprobs` (of these tokens, under the weights before the first
step) and `advantage`. Prints one line of JSON: loss and gradient norm of each step, the processor seconds of the steps
but the first, and the most memory that the process held.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad


def batch_of(sequences: list[dict], num_items: int) -> dict[str, torch.Tensor]:
    """Inputs of `compute_loss`: prompts padded on the left, completions on the right."""
    prompts, completions, masks, old_logprobs = [], [], [], []
    for sequence in sequences:
        first = sequence["trained"].index(True)
        prompts.append(torch.tensor(sequence["token_ids"][:first]))
        completions.append(torch.tensor(sequence["token_ids"][first:]))
        trained = torch.tensor(sequence["trained"][first:])
        masks.append(trained.long())
        old_logprobs.append(torch.zeros(len(trained)).masked_scatter(trained, torch.tensor(sequence["logprobs"])))
    return {
        "prompt_ids": pad(prompts, 0, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(p) for p in prompts], 0, padding_side="left"),
        "completion_ids": pad(completions, 0),
        "completion_mask": pad([torch.ones_like(c) for c in completions], 0),
        "tool_mask": pad(masks, 0),
        "old_per_token_logps": pad(old_logprobs, 0),
        "advantages": torch.tensor([sequence["advantage"] for sequence in sequences]),
        "num_items_in_batch": torch.tensor(num_items),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = job["rows"]
    config = GRPOConfig(
        output_dir=str(Path(sys.argv[1]).parent / "trl"),
        per_device_train_batch_size=rows,
        num_generations=rows,
        loss_type="dapo",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": "a"}] * rows),
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)
    sequences = sorted(job["sequences"], key=lambda sequence: len(sequence["token_ids"]))
    num_items = sum(sum(sequence["trained"]) for sequence in sequences)
    batches = [batch_of(sequences[i : i + rows], num_items) for i in range(0, len(sequences), rows)]
    losses, norms, started = [], [], 0.0
    for step in range(job["steps"]):
        if step == 1:
            started = time.process_time()
        total = 0.0
        for batch in batches:
            loss = trainer.compute_loss(model, batch)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    used_s = time.process_time() - started
    peak_kb = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
    print(json.dumps({"losses": losses, "norms": norms, "processor_s": used_s, "peak_bytes": 1024 * peak_kb}))


if __name__ == "__main__":
    main()
