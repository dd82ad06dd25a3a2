"""``agentrl env serve`` with a protection taken away: ``python -m tests.storms.server_unprotected env serve ...``.

The variable `VARIABLE` says which: ``request_ids`` carries a call out as often as it comes, ``fencing`` for whoever
asks. Its worker processes run this module, too.
"""

from __future__ import annotations

import os
import sys

from agentrl.cli.main import app
from agentrl.serving import parent, session, worker

VARIABLE = "AGENTRL_SERVER_UNPROTECTED"
NAME = "tests.storms.server_unprotected"
COMMAND = [sys.executable, "-m", NAME, "env", "serve"]


class _Forgetful(set[str]):
    """Ids of calls, of which none is ever known."""

    def __contains__(self, call_id: object) -> bool:
        return False


def _take_away(protection: str) -> None:
    if protection == "fencing":
        session.Session.check_holder = lambda self, token: None  # type: ignore[method-assign]
        return
    begin = session.Session.__init__

    def begin_forgetful(self: session.Session, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        self._ids = _Forgetful()

    session.Session.__init__ = begin_forgetful  # type: ignore[method-assign,assignment]


def main() -> None:
    """Serve as a parent, or as a worker where a descriptor is all that is given."""
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        _take_away(os.environ[VARIABLE])
        worker.main()
    else:
        parent.WORKER_MODULE = NAME
        app()


if __name__ == "__main__":
    main()
