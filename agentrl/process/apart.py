"""Runs a module in a child of this process, and ends as it does: ``python -m agentrl.process.apart MODULE ARGUMENTS``.

Processes of Ray kill their children when they end. The module is a child of none of them, and may end in its own time.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Waits for: the module. Unblocked by: its end."""
    pid = os.fork()
    if pid == 0:
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
