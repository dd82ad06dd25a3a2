"""Scorers: who judges episodes and their turns.

- **The verifier** asks the live environment at the end of play.
- **Functions of episodes** are given the record of an episode, later.
- **Scorers of turns** (`Scorer` in `agentrl.protocols`) are given each turn as soon as it is on record, while the agent
  acts on: process-reward models, judges, teachers. They are found by the entry points ``agentrl.scorers``
  (`definition.py`); the tier that asks them, `agentrl.scoring`, has queues, batches, deadlines and their cache.

Each score is a record of its own (`agentrl.types.score` makes the rewards of them), so one that comes late, twice or
not at all is neither lost nor mistaken for a zero. Scores of turns make no reward by themselves: a policy's credit
rule (`agentrl.algorithms.credit`) says what becomes of them.
"""
