"""Fits a reward model to labelled states: a policy's body with a fresh head at every token, by regression."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from agentrl.models.reward import head_outputs, use_device
from agentrl.types.errors import ConfigError

_WARMUP = 0.1
_CLIP_NORM = 1.0
_SORTED_BATCHES = 8
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledContext:
    """One context with the worth of some of its states.

    Example: prompt of 19 tokens and a reply of 12 in an episode of reward 1 give ``positions [18, 30]`` and
    ``labels [1., 1.]``.
    """

    token_ids: np.ndarray  # [L] int32
    positions: np.ndarray  # [P] int64, the last tokens of the states
    labels: np.ndarray  # [P] float32


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a reward model is fitted; the learning rate rises for a tenth of the steps and falls to zero."""

    passes: int = 3
    contexts_per_step: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    threads: int = 2
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How a model's values of unseen states compare with their labels.

    `correlation` is Pearson's, `auc` the chance that a state of a label above the mean is valued above one of a label
    below it; either is NaN where all labels or values are alike. `error` is the mean squared error, and `variance` that
    of the labels, the error of who says their mean. `states` counts the labels.
    """

    states: int
    error: float
    variance: float
    correlation: float
    auc: float

    @classmethod
    def of(cls, values: np.ndarray, labels: np.ndarray) -> FitQuality:
        """Compare values [P] with labels [P]."""
        values, labels = np.asarray(values, np.float64), np.asarray(labels, np.float64)
        spread = values.std() * labels.std()
        both = ((values - values.mean()) * (labels - labels.mean())).mean()
        return cls(
            states=len(labels),
            error=float(((values - labels) ** 2).mean()),
            variance=float(labels.var()),
            correlation=float(both / spread) if spread > 0 else math.nan,
            auc=_auc(values, labels > labels.mean()),
        )


def fit_reward_model(
    base: Path,
    train: Sequence[LabelledContext],
    check: Sequence[LabelledContext],
    options: FitOptions,
    target: Path,
    on_progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> FitQuality:
    """Fit the body in `base` with a new head, and write the best of its passes to `target`, tokenizer included.

    The best is the one with the least error on `check`, whose quality is returned. `target` can be loaded by
    ``AutoModelForTokenClassification``.

    Raises:
        ConfigError: the model in `base` cannot have such a head.
    """
    torch.manual_seed(options.seed)
    use_device("a fit", options.device, options.threads)
    network = _fresh(base, float(np.concatenate([context.labels for context in train]).mean()))
    torch.nn.Module.to(network, torch.device(options.device))
    optimizer = torch.optim.AdamW(network.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    steps = options.passes * math.ceil(len(train) / options.contexts_per_step)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    best, quality = copy.deepcopy(network.state_dict()), _quality(network, check, options)
    rng, step = random.Random(options.seed), 0
    for _ in range(options.passes):
        network.train()
        for batch in _batches(train, options.contexts_per_step, rng):
            values_P, labels_P = _values(network, batch, options.device)
            loss = torch.nn.functional.mse_loss(values_P, labels_P)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), _CLIP_NORM)
            optimizer.step()
            schedule.step()
            step += 1
            on_progress(step, steps, f"error {loss.item():.3f}, {quality.error:.3f} of unseen states")
        found = _quality(network, check, options)
        if found.error < quality.error:
            best, quality = copy.deepcopy(network.state_dict()), found
    network.load_state_dict(best)
    _save(network, base, target)
    return quality


def _fresh(base: Path, mean_label: float) -> PreTrainedModel:
    """The body with a head that says the mean label of every state. Raises ConfigError."""
    disable_progress_bar()
    verbosity = get_verbosity()
    set_verbosity_error()  # that the head is new is meant
    try:
        config = AutoConfig.from_pretrained(base, num_labels=1, problem_type="regression", classifier_dropout=0.0)
        network: PreTrainedModel = AutoModelForTokenClassification.from_pretrained(
            base, config=config, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the model in {base} cannot become a reward model: {error}; choose another with --base"
        ) from error
    finally:
        set_verbosity(verbosity)
    head = dict(network.named_children()).get("score")
    if not isinstance(head, torch.nn.Linear) or head.bias is None:
        raise ConfigError(
            f"the model in {base} is no decoder with a head `score` over tokens; choose another with --base"
        )
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(mean_label)
    return network


def _rate(step: int, steps: int) -> float:
    warmup = max(_WARMUP * steps, 1.0)
    return min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1.0))


def _batches(contexts: Sequence[LabelledContext], size: int, rng: random.Random) -> Iterator[Sequence[LabelledContext]]:
    """Contexts in a random order, those of about one length together: what pads them is computed as well."""
    order = rng.sample(range(len(contexts)), len(contexts))
    batches: list[list[int]] = []
    for start in range(0, len(order), size * _SORTED_BATCHES):
        window = sorted(order[start : start + size * _SORTED_BATCHES], key=lambda n: len(contexts[n].token_ids))
        batches += [window[first : first + size] for first in range(0, len(window), size)]
    rng.shuffle(batches)
    for batch in batches:
        yield [contexts[n] for n in batch]


def _values(
    network: PreTrainedModel, batch: Sequence[LabelledContext], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [P] and labels [P] of all states of a batch."""
    contexts, positions = [c.token_ids for c in batch], [c.positions.tolist() for c in batch]
    labels_P = torch.from_numpy(np.concatenate([context.labels for context in batch]))
    return head_outputs(network, contexts, positions, device)[:, 0], labels_P.to(device)


@torch.no_grad()
def _quality(network: PreTrainedModel, contexts: Sequence[LabelledContext], options: FitOptions) -> FitQuality:
    network.eval()
    pairs = [
        _values(network, contexts[start : start + options.contexts_per_step], options.device)
        for start in range(0, len(contexts), options.contexts_per_step)
    ]
    values, labels = (torch.cat(parts).cpu().numpy() for parts in zip(*pairs, strict=True))
    return FitQuality.of(values, labels)


def _auc(values: np.ndarray, is_high: np.ndarray) -> float:
    """By the ranks of the values; those that are alike share theirs."""
    num_high = int(is_high.sum())
    num_low = len(values) - num_high
    if not num_high or not num_low:
        return math.nan
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[is_high].sum() - num_high * (num_high + 1) / 2) / (num_high * num_low))


def _save(network: PreTrainedModel, base: Path, target: Path) -> None:
    network.save_pretrained(target)
    for pattern in _TOKENIZER_FILES:
        for file in base.glob(pattern):
            (target / file.name).write_bytes(file.read_bytes())
