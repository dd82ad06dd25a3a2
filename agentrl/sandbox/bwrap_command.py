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
_NAMES = {
    "passwd": f"agent:x:{_ID}:{_ID}:agent:{WORKSPACE}:/bin/sh\n",
    "group": f"agent:x:{_ID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
}
_OWN = frozenset({"proc", "dev", "tmp", "sys", WORKSPACE.strip("/")})
_NOT_BELOW = ("/proc", "/dev", "/sys", WORKSPACE)
# The limit counts by user namespace, so it is set within. Shells have two names for it, and end at the wrong one.
_COUNT = "if (ulimit -u {0}) 2>/dev/null; then ulimit -u {0}; else ulimit -p {0}; fi"


class BwrapCommand:
    """Makes the command lines of one sandbox, whose files lie in `folder`."""

    def __init__(
        self,
        program: Path,
        image: Path | None,
        read_only: Mapping[Path, Path],
        folder: Path,
        spec: SandboxSpec,
        most_processes: int | None,
    ) -> None:
        """`read_only` says what is seen at a path; `most_processes` is for the shell, where no control group has it."""
        self._program, self._spec = program, spec
        self._enter = ENTER if most_processes is None else f"{_COUNT.format(most_processes)}; {ENTER}"
        self._files = [*_root_files(image), *_own_files(image, folder, read_only)]

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


def _own_files(image: Path | None, folder: Path, read_only: Mapping[Path, Path]) -> list[str]:
    # A root folder is only read: what is not there cannot be put in its place.
    names = [name for name in _NAMES if image is None or (image / "etc" / name).exists()]
    return [
        *("--proc", "/proc", "--dev", "/dev", "--bind", f"{folder}/shm", "/dev/shm", "--remount-ro", "/dev"),
        *("--bind", f"{folder}/tmp", "/tmp", "--bind", f"{folder}/workspace", WORKSPACE),
        *(word for name in names for word in ("--ro-bind-try", f"{folder}/../{name}", f"/etc/{name}")),
        # Behind the sandbox's own /tmp, so that what lies below that of this machine is seen.
        *(word for path, source in read_only.items() for word in ("--ro-bind", str(source), str(path))),
        *("--remount-ro", "/"),
    ]


def write_names(root: Path) -> None:
    """Put beside the sandboxes' folders what tells a program the names of its user and its host."""
    for name, content in _NAMES.items():
        (root / name).write_text(content)


def check_read_only(path: Path) -> Path:
    """A path of this machine that sandboxes may be shown. Raises ValueError for one that they cannot or must not be."""
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{path} is not absolute; give the whole path, without ..")
    if not path.exists():
        raise ValueError(f"{path} is not there; install what commands need of it first")
    own = [f"/{name}" for name in sorted(_OWN) if Path(f"/{name}").is_relative_to(path)]
    own += [name for name in _NOT_BELOW if path.is_relative_to(name)]
    if own:
        raise ValueError(
            f"{path} cannot be shown: a sandbox has {', '.join(sorted(set(own)))} of its own; name a folder"
        )
    return path
