"""Each scaffold is run again against its record, cut off behind any entry of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scaffold_parts import NAME, Game, alone, calls_of, shape_of
from test_compaction import facts_game
from test_compaction import sql_game as compacted_sql_game
from test_fenced_blocks import BLOCK
from test_fenced_blocks import RIGHT as RUN_RIGHT
from test_multi_agent import sql_game as joint_game
from test_react import QUERY
from test_react import RIGHT as REACT_RIGHT

from agentrl.journal.history import build_history
from agentrl.journal.reading import read_journal
from agentrl_scaffolds.bash import _ADVICE as BASH_ADVICE
from agentrl_scaffolds.bash import Bash
from agentrl_scaffolds.code_act import CodeAct
from agentrl_scaffolds.react import _ADVICE, React

GAMES: dict[str, Callable[[], Game]] = {
    "react": lambda: alone("sql", React(), {**REACT_RIGHT, **_misread(REACT_RIGHT, _ADVICE, QUERY)}),
    "code_act": lambda: alone("sql", CodeAct(), RUN_RIGHT),
    "bash": lambda: alone(
        "sql", Bash(), {**RUN_RIGHT, **_misread(RUN_RIGHT, BASH_ADVICE, BLOCK.replace("sql", "bash", 1))}
    ),
    "compaction": lambda: facts_game(1),
    "compaction of calls": lambda: compacted_sql_game(1),
    "multi_agent": joint_game,
}


def _misread(right: dict[str, str], advice: str, then: str) -> dict[str, str]:
    """The first reply cannot be read, the second does as it is told."""
    return {next(iter(right)): "```", advice: then}


@pytest.mark.parametrize("name", GAMES)
async def test_an_episode_cut_off_behind_any_entry_ends_as_if_it_never_had_been(name, chat, tmp_path: Path) -> None:
    whole = await GAMES[name]().play_on(chat, tmp_path / "whole", 1, None)
    assert whole.failure is None
    assert len(whole.turns) >= 2
    ids = [effect for effect, _, _ in calls_of(whole)]
    assert len(set(ids)) == len(ids)
    entries = read_journal(tmp_path / "whole").lives[NAME].entries
    asked: list[int] = []
    for end in range(1, len(entries)):
        game = GAMES[name]()
        resumed = await game.play_on(chat, tmp_path / f"{end}", 2, build_history(entries[:end]))
        assert (resumed.failure, resumed.reward) == (None, whole.reward), f"cut behind entry {end}"
        assert shape_of(resumed) == shape_of(whole), f"cut behind entry {end}"
        asked.append(sum(len(engine.requests) for engine in game.engines.values()))
    assert asked == sorted(asked, reverse=True)
    assert set(asked) == set(range(len(whole.turns) + 1)), "what is on record was not asked for again"
