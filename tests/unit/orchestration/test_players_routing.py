from __future__ import annotations

import json

import pytest

from agentrl.orchestration.players import routing_of
from agentrl.rollouts.config import SamplingConfig
from agentrl.types.errors import ConfigError


def test_the_shape_of_routing_is_read_from_the_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 48, "num_experts_per_tok": 8}))
    assert routing_of(tmp_path) == (48, 8)


def test_a_model_without_experts_cannot_report_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"routed_experts needs a model with experts.*num_experts_per_tok"):
        routing_of(tmp_path)


def test_sampling_asks_for_routing_only_where_the_run_wants_it():
    assert SamplingConfig(routed_experts=True).build((2, 4)).routing == (2, 4)
    assert SamplingConfig().build((2, 4)).routing is None
