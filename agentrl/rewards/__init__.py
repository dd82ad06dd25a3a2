"""Scorers: who judges episodes.

The verifier asks the live environment at the end of play. All others are given the record of the episode, later, and
need no environment. Each score is a record of its own (`agentrl.types.score` makes the rewards of them), so one that
comes late, twice or not at all is neither lost nor mistaken for a zero.
"""
