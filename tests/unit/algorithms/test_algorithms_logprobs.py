from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.algorithms import logprobs as subject

ROWS, HIDDEN, VOCABULARY = 7, 5, 11


def draw(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def chunked_logprobs(hidden, head, targets, temperature, chunk_tokens, kept=None) -> torch.Tensor:
    def head_logits(hidden_CH: torch.Tensor) -> torch.Tensor:
        logits_CV = torch.nn.functional.linear(hidden_CH, head)
        return logits_CV.float() if logits_CV.dtype is torch.bfloat16 else logits_CV

    return subject.chunked_logprobs(hidden, head_logits, targets, temperature, chunk_tokens, kept)


def kept_sets(targets: torch.Tensor) -> list[list[int]]:
    """Sets of one to four ids with the target among them."""
    return [sorted({int(t), *((int(t) + 3 * k) % VOCABULARY for k in range(i % 4))}) for i, t in enumerate(targets)]


def ragged(sets: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([i for kept in sets for i in kept])
    return ids, torch.tensor([0, *torch.tensor([len(kept) for kept in sets]).cumsum(0).tolist()])


def naive(hidden, head, targets, temperature, sets=None) -> torch.Tensor:
    out = []
    for row in range(len(targets)):
        logits = [sum(hidden[row, k] * head[v, k] for k in range(HIDDEN)) / temperature for v in range(VOCABULARY)]
        allowed = range(VOCABULARY) if sets is None else sets[row]
        out.append(logits[int(targets[row])] - torch.log(sum(torch.exp(logits[v]) for v in allowed)))
    return torch.stack(out)


def test_log_probabilities_by_hand():
    # Logits 0, log 2, log 5: probabilities 1/8, 2/8, 5/8; over the kept {0, 1} only 1/3, 2/3.
    head = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    hidden, targets = torch.ones(2, 1), torch.tensor([1, 0])
    assert chunked_logprobs(hidden, head, targets, 1.0, 8).exp().tolist() == pytest.approx([0.25, 0.125])
    kept = ragged([[0, 1], [0, 1]])
    assert chunked_logprobs(hidden, head, targets, 1.0, 8, kept).exp().tolist() == pytest.approx([2 / 3, 1 / 3])
    # Temperature 1/2 squares the odds: 1, 4, 25.
    assert chunked_logprobs(hidden, head, targets, 0.5, 8).exp().tolist() == pytest.approx([4 / 30, 1 / 30])


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_a_naive_loop(truncated, temperature):
    hidden, head, targets = draw()
    sets = kept_sets(targets) if truncated else None
    mine = chunked_logprobs(hidden, head, targets, temperature, 3, ragged(sets) if sets else None)
    right = naive(hidden, head, targets, temperature, sets)
    torch.testing.assert_close(mine, right)
    outer = torch.arange(1.0, ROWS + 1, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(mine, (hidden, head), outer), torch.autograd.grad(right, (hidden, head), outer)
    )


@pytest.mark.parametrize("truncated", [False, True])
def test_the_size_of_a_chunk_changes_neither_values_nor_gradients(truncated):
    hidden, head, targets = draw()
    kept = ragged(kept_sets(targets)) if truncated else None
    results = []
    for chunk in (1, 2, ROWS - 1, ROWS, 100):
        logprobs = chunked_logprobs(hidden, head, targets, 0.8, chunk, kept)
        results.append((logprobs, *torch.autograd.grad(logprobs.square().sum(), (hidden, head))))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("truncated", [False, True])
def test_gradients_pass_a_finite_difference_check(truncated):
    hidden, head, targets = draw(seed=1)
    kept = ragged(kept_sets(targets)) if truncated else None
    assert torch.autograd.gradcheck(lambda h, w: chunked_logprobs(h, w, targets, 0.9, 3, kept), (hidden, head))


def test_kept_sets_of_everything_change_nothing():
    hidden, head, targets = draw()
    kept = ragged([list(range(VOCABULARY))] * ROWS)
    torch.testing.assert_close(
        chunked_logprobs(hidden, head, targets, 1.0, 3, kept), chunked_logprobs(hidden, head, targets, 1.0, 3)
    )


def test_a_token_kept_alone_was_certain():
    hidden, head, targets = draw()
    kept = ragged([[int(target)] for target in targets])
    assert chunked_logprobs(hidden, head, targets, 1.0, 3, kept).tolist() == pytest.approx([0.0] * ROWS)


def test_temperature_zero_counts_as_one():
    hidden, head, targets = draw()
    torch.testing.assert_close(
        chunked_logprobs(hidden, head, targets, 0.0, 3), chunked_logprobs(hidden, head, targets, 1.0, 3)
    )


def test_the_whole_table_of_logits_never_exists():
    rows, vocabulary, chunk = 64, 300, 8
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (vocabulary,):
                largest = max(largest, out.numel())
            return out

    hidden, head = torch.randn(rows, HIDDEN, requires_grad=True), torch.randn(vocabulary, HIDDEN, requires_grad=True)
    with Watch():
        chunked_logprobs(hidden, head, torch.zeros(rows, dtype=torch.int64), 1.0, chunk).sum().backward()
    assert largest == chunk * vocabulary


def test_low_precision_is_raised_before_the_softmax():
    hidden, head, targets = draw(dtype=torch.bfloat16)
    logprobs = chunked_logprobs(hidden, head, targets, 1.0, 3)
    logits = torch.nn.functional.linear(hidden, head).float()
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])


@pytest.mark.parametrize("truncated", [False, True])
def test_no_rows_have_no_log_probabilities_and_a_gradient_of_zero(truncated):
    hidden, head, _ = draw(dtype=torch.float32)
    kept = (torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)) if truncated else None
    none = chunked_logprobs(hidden[:0], head, torch.zeros(0, dtype=torch.int64), 1.0, 3, kept)
    assert none.shape == (0,)
    assert none.dtype is torch.float32
    for gradient, of in zip(torch.autograd.grad(none.sum(), (hidden, head)), (hidden, head), strict=True):
        assert torch.equal(gradient, torch.zeros_like(of))
