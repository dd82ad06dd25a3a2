"""Plays a game as TextArena's users do: python textarena_player.py GAME SEED PLAYERS ACTION...; prints JSON."""

from __future__ import annotations

import json
import sys

import textarena

game, seed, players, *actions = sys.argv[1:]
env = textarena.make(game)
env.reset(num_players=int(players), seed=int(seed))
seen = []
for action in actions:
    seen.append(env.get_observation())
    done, _ = env.step(action)
    if done:
        break
rewards, _ = env.close()
print(json.dumps({"seen": seen, "rewards": rewards and [rewards[player] for player in range(int(players))]}))
