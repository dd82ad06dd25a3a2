"""Plays games by their own packages alone, without agentrl: reads what to play as JSON, and prints what it saw."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any


def gymnasium(play: dict[str, Any]) -> list[Any]:
    """Rewards and ends of numbered actions, behind the first observation."""
    import gymnasium

    game = gymnasium.make(play["game"], **play["arguments"])
    observation, _ = game.reset(seed=play["seed"])
    steps = [game.step(action) for action in play["actions"]]
    return [int(observation), *([int(seen), float(reward), over] for seen, reward, over, _, _ in steps)]


def gem(play: dict[str, Any]) -> list[Any]:
    """Observations with what gem appends to them, rewards and ends of actions, behind the first observation."""
    import gem

    game = gem.make(play["game"])
    observation, info = game.reset(seed=play["seed"])
    steps = [game.step(action) for action in play["actions"]]
    return [f"{observation}\n{info['suffix']}", *([f"{s[0]}\n{s[4]['suffix']}", s[1], s[2]] for s in steps)]


def textworld(play: dict[str, Any]) -> list[Any]:
    """What the game of a seed says, its scores, and its walk-through."""
    import textworld

    options = textworld.GameOptions()
    options.seeds, options.path = play["seed"], tempfile.mkdtemp() + "/own.z8"
    options.nb_rooms, options.nb_objects, options.quest_length = play["world"]
    file, made = textworld.make(options)
    game = textworld.start(file, textworld.EnvInfos(score=True, max_score=True))
    begun = game.reset()
    seen = [[begun.feedback, begun.max_score]]
    for command in made.metadata["walkthrough"]:
        state, score, _ = game.step(command)
        seen.append([state.feedback, score])
    game.close()
    return [made.metadata["walkthrough"], *seen]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({"gymnasium": gymnasium, "gem": gem, "textworld": textworld}[asked["package"]](asked)))
