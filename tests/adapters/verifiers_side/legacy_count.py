"""An environment of verifiers 0.3: it asks for three counts, whatever is answered."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


class CountEnv(vf.MultiTurnEnv):
    """Asks again until `max_turns` are over."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"and behind that {len(messages)}?"}]


def load_environment(rows: int = 6) -> vf.Environment:
    """Rows that differ in their question; half a point for each that was answered to its end."""

    async def heard_all(state) -> float:
        return float(len(state["trajectory"]) == 3)

    asked = [{"question": f"what is the count of name {number}?", "answer": str(number)} for number in range(rows)]
    rubric = vf.Rubric(funcs=[heard_all], weights=[0.5])
    return CountEnv(dataset=Dataset.from_list(asked), rubric=rubric, max_turns=3, system_prompt="Count.")
