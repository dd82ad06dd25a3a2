"""Runs an SGLang server that other hosts reach, as ``python -m`` this module with ``VARIABLE LINK COMMAND``.

SGLang takes its token from its command line, which everybody on the machine is shown, or from a configuration file. The
file is in the memory of the server's process, and on the disk is only its name: LINK, which has to end in ``.yaml``.
With the token as ``api-key`` the server asks for it in all calls but those of its health. It writes it to its output,
which nobody else may read from now on.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

from agentrl.process.interfaces import interface_of
from agentrl.process.parent import die_with_parent


def main() -> None:
    """Become the command; the wish to die with the parent survives that."""
    variable, link, *command = sys.argv[1:]
    die_with_parent()
    # Else gloo goes by the machine's name, which may stand for its loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(command[command.index("--host") + 1]))
    _keep_to_its_user(sys.stdout.fileno())
    _put_into_memory(Path(link), json.dumps({"api-key": os.environ.pop(variable)}))
    command += ["--config", link]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


def _keep_to_its_user(output: int) -> None:
    """A log that the server's user alone may read; pipes and terminals have no readers to keep out."""
    if stat.S_ISREG(os.fstat(output).st_mode):
        os.fchmod(output, stat.S_IRUSR | stat.S_IWUSR)


def _put_into_memory(link: Path, content: str) -> None:
    """A file that has no disk below it and is open in this process, whatever it becomes; JSON is YAML."""
    file = os.memfd_create(link.name, 0)  # no MFD_CLOEXEC: the server inherits it
    os.write(file, content.encode())
    link.unlink(missing_ok=True)
    link.symlink_to(f"/proc/self/fd/{file}")


if __name__ == "__main__":
    main()
