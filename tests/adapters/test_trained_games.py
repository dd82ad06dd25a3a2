"""Episodes of games and questions by others' packages are trained, of all of them in one run."""

from __future__ import annotations

import pytest

from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from tests.adapters.conftest import packages_python
from tests.adapters.trained import train

CONTEXT_TOKENS = 4096  # the tiny tokenizer makes a token of nearly each letter
TABLES = {
    "lake": 'name = "gym"\noptions = { game = "FrozenLake-v1", arguments = { is_slippery = false } }',
    "numbers": 'name = "gym"\noptions = { source = "gem", game = "game:GuessTheNumber-v0-easy" }',
    "questions": 'name = "reasoning_gym"\noptions.generators = { chain_sum = {}, countdown = {} }',
    "adventure": 'name = "textworld"\noptions = { num_rooms = 2, num_objects = 4, quest_length = 2 }',
}
LIMITS = {"max_turns": 2, "max_context_tokens": CONTEXT_TOKENS, "max_reply_tokens": 1200, "tool_s": 120}


@pytest.mark.usefixtures("beside_packages")
def test_an_episode_of_each_is_trained(tmp_path):
    shape = TINY_SHAPE.model_copy(update={"context_tokens": CONTEXT_TOKENS})
    model = make_tiny_model(tmp_path / "model", shape=shape)
    python = f'interpreter = "{packages_python()}"'
    tables = "".join(f"[environments.{name}]\n{table}\n{python}\n" for name, table in TABLES.items())
    limits = [f"rollout.limits.{name}={value}" for name, value in LIMITS.items()]
    trained = train(tmp_path, model, tables, *limits, f"buffer.groups_per_step={len(TABLES)}")
    # A reply that is cut by its length ends an episode of which the environment has heard nothing.
    heard = {line["environment"] for line in trained.ledger if line["turns"] > 1 or line["stop"] != "length"}
    assert heard == set(TABLES)
