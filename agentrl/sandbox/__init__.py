"""Sandboxes: where the commands of episodes run, kept by a process that outlives those who use them."""
