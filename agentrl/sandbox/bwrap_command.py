"""The command line of bubblewrap for a command in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.sandbox.streams import ENTER
from agentrl.types.sandbox import WORKSPACE, Command, SandboxSpec

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
_ID = "1000"
_APART = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
    *("--uid", _ID, "--gid", _ID, "--hostname", "sandbox", "--cap-drop", "ALL"),
)
# What a program needs of this machine beside /usr, if no image is given. Nothing of it is secret.
_SYMLINKS = ("bin", "lib", "lib32", "lib64", "sbin")
_OPTIONAL = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime")
_PASSWD = f"agent:x:{_ID}:{_ID}:agent:{WORKSPACE}:/bin/sh\n"
_GROUP = f"agent:x:{_ID}:\n"
_OWN = frozenset({"proc", "dev", "tmp", "sys", WORKSPACE.strip("/")})
# The limit counts by user namespace, so it is set within. Shells have two names for it, and end at the wrong one.
_COUNT = "if (ulimit -u {0}) 2>/dev/null; then ulimit -u {0}; else ulimit -p {0}; fi"


class BwrapCommand:
    """Makes the command lines of one sandbox, whose files lie in `folder`."""

    def __init__(
        self,
        program: Path,
        image: Path | None,
        read_only: tuple[Path, ...],
        folder: Path,
        spec: SandboxSpec,
        most_processes: int | None,
    ) -> None:
        """`most_processes` is for the shell to set, where no control group does."""
        self._program, self._spec = program, spec
        self._enter = ENTER if most_processes is None else f"{_COUNT.format(most_processes)}; {ENTER}"
        self._files = [*_root_files(image), *_binds(read_only), *_own_files(folder)]

    def arguments(
        self, command: Command, seccomp: int, status: int, block: int, network: Mapping[str, str]
    ) -> list[str]:
        """The whole line; the numbers are descriptors of filter, status and of what it waits for."""
        variables = {**_ENVIRONMENT, **network, **self._spec.environment, **command.environment}
        return [
            str(self._program),
            *_APART,
            *("--seccomp", str(seccomp), "--json-status-fd", str(status), "--block-fd", str(block)),
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *self._files,
            *("--chdir", WORKSPACE, "--"),
            *("/bin/sh", "-c", self._enter, "sh", command.folder, *command.arguments),
        ]


def _root_files(image: Path | None) -> list[str]:
    """What is seen beside the sandbox's own folders."""
    if image is not None:
        words: list[str] = []
        for entry in sorted(image.iterdir()):
            if entry.name in _OWN:
                continue
            if entry.is_symlink():
                words += ["--symlink", str(entry.readlink()), f"/{entry.name}"]
            else:
                words += ["--ro-bind", str(entry), f"/{entry.name}"]
        return words
    links = [name for name in _SYMLINKS if Path(f"/{name}").is_symlink()]
    folders = [name for name in _SYMLINKS if not Path(f"/{name}").is_symlink() and Path(f"/{name}").is_dir()]
    return [
        *("--ro-bind", "/usr", "/usr"),
        *(word for name in links for word in ("--symlink", f"usr/{name}", f"/{name}")),
        *(word for name in folders for word in ("--ro-bind", f"/{name}", f"/{name}")),
        *(word for path in _OPTIONAL for word in ("--ro-bind-try", path, path)),
    ]


def _binds(paths: tuple[Path, ...]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind", str(path), str(path))]


def _own_files(folder: Path) -> list[str]:
    return [
        *("--proc", "/proc", "--dev", "/dev", "--bind", f"{folder}/shm", "/dev/shm", "--remount-ro", "/dev"),
        *("--bind", f"{folder}/tmp", "/tmp", "--bind", f"{folder}/workspace", WORKSPACE),
        *("--ro-bind-try", f"{folder}/../passwd", "/etc/passwd", "--ro-bind-try", f"{folder}/../group", "/etc/group"),
        *("--remount-ro", "/"),
    ]


def write_names(root: Path) -> None:
    """Put beside the sandboxes' folders what tells a program the name of its user."""
    (root / "passwd").write_text(_PASSWD)
    (root / "group").write_text(_GROUP)
