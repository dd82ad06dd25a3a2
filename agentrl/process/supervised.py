"""Runs somebody else's command, which then ends with its parent: ``python -m agentrl.process.supervised COMMAND``."""

from __future__ import annotations

import os
import sys

from agentrl.process.parent import die_with_parent


def main() -> None:
    """Become the command; the wish to die with the parent survives that."""
    command = sys.argv[1:]
    die_with_parent()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
