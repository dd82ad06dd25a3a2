"""A child process from its first instruction: ``python -m agentrl.process.child MODULE ARGUMENTS`` runs a module.

It ends with its parent before MODULE is imported, which takes seconds with torch, and minutes on a busy machine: a run
that is killed while it starts leaves nothing behind that goes on importing.
"""

from __future__ import annotations

import gc
import runpy
import sys

from agentrl.process.parent import die_with_parent, ignore_stop_signals

# Of objects: by default the collector looks for garbage after every 700 new ones, which is a sixth of the start of a
# process that loads torch and transformers.
_NEW_OBJECTS = 10_000


def main() -> None:
    """Become the module, with the arguments behind its name."""
    ignore_stop_signals()
    die_with_parent()
    gc.set_threshold(_NEW_OBJECTS)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
