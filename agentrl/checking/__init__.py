"""Plays an environment as its author sees it, by messages, and finds out whether what it promises is true."""
