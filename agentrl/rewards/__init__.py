"""Scorers: who judges episodes. Here the environment's own verifier; other kinds join beside it."""
