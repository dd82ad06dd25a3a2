"""Gradients of windowed, capped and sunken attention against transformers' own backward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_models_equality import make_case, plain, sequence

from agentrl.models import attention as subject
from agentrl.trainer.model import PolicyModel, load_network
from agentrl.trainer.packing import pack


@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "gemma3_text", "gpt_oss", "phi", "cohere2"])
@pytest.mark.parametrize("scores_at_once", [2**24, 600])
def test_the_gradient_of_every_parameter_is_that_of_transformers(name, scores_at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "_SCORES_AT_ONCE", scores_at_once)
    monkeypatch.setattr("agentrl.trainer.attention._WINDOWED_ROWS", 512 if scores_at_once > 600 else 5)
    case = make_case(name, tmp_path)
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal(sum(len(text) - 1 for text in case.texts)))
    policy = PolicyModel(load_network(case.folder, torch.float64), chunk_tokens=13)
    (policy(pack([sequence(text) for text in case.texts], "cpu"), 0.8) * weights).sum().backward()
    network, chosen = plain(case.folder), []
    for text in case.texts:
        logprobs_TV = (network(torch.from_numpy(text)[None]).logits[0] / 0.8).log_softmax(-1)
        chosen.append(logprobs_TV[:-1].gather(1, torch.from_numpy(text[1:])[:, None])[:, 0])
    (torch.cat(chosen) * weights).sum().backward()
    for (key, mine), (other_key, other) in zip(
        policy.network.named_parameters(), network.named_parameters(), strict=True
    ):
        assert key == other_key
        assert other.grad is not None
        assert float(other.grad.abs().max()) > 1e-6, f"{key} has no gradient, which proves nothing"
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("name", ["phi", "mixtral"])
def test_nothing_random_acts_in_the_trainer(name, tmp_path):
    case = make_case(name, tmp_path)
    network = load_network(case.folder, torch.float64)
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    network.config.attention_dropout = 0.5
    policy = PolicyModel(network, chunk_tokens=13)
    batch = pack([sequence(text) for text in case.texts], "cpu")
    first, second = policy(batch, 1.0), policy(batch, 1.0)
    assert torch.equal(first, second)
