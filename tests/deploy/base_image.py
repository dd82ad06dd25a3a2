"""A base for deploy/images that no registry has to give: this Python, and the packages of others that it has here.

The builds install agentrl itself on it, without a network: pip has every requirement of the extras there, or fails.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import docker
import docker.errors

from deploy.docker import engine as maker

BASE = "agentrl-base:local"
PYTHON = str(Path(sys.executable).resolve())
LIBRARIES = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1", "libseccomp.so.2", "libz.so.1"),
    *("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1"),
)
# Tools of the tests, and what is only compiled against or looked at in a browser.
LEFT_OUT = (
    "agentrl*",
    "__editable__*",
    "mypy*",
    "*__mypyc*",
    "ruff*",
    "kubernetes_validate*",
    "hypothesis*",
)
INNER_LEFT_OUT = ("torch/include", "torch/test", "ray/dashboard/client", "ray/rllib")


def make_base(client: docker.APIClient) -> None:
    """Import the image unless the engine has it."""
    try:
        client.inspect_image(BASE)
    except docker.errors.ImageNotFound:
        with tempfile.TemporaryDirectory(dir=maker.FOLDER) as folder:
            _import(client, Path(folder, "root"))


def _import(client: docker.APIClient, root: Path) -> None:
    maker.lay_out(root)
    (root / "tmp").chmod(0o1777)
    maker.copy_python(root)
    for library in _libraries():
        maker.copy_libraries(root, [library])
        (root / "usr/lib" / library.name).write_bytes(library.read_bytes())
    inner = f".{sysconfig.get_path('stdlib')}/site-packages"
    packages = Path(sysconfig.get_path("purelib"))
    command = ["tar", "-c", "--owner=0", "--group=0", "--numeric-owner"]
    command += [f"--exclude={name}" for name in INNER_LEFT_OUT]
    # Names of packages are moved; those of the root begin with a dot. Targets of links stay as they are.
    command += [f"--transform=s,^[^./],{inner}/&,S", "-C", str(root), ".", "-C", str(packages), *_entries(packages)]
    name, tag = BASE.split(":")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
        changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 LD_LIBRARY_PATH=/usr/lib"]
        client.import_image_from_stream(tar.stdout, repository=name, tag=tag, changes=changes)
    assert tar.returncode == 0, "tar could not pack the base image"


def _entries(packages: Path) -> list[str]:
    names = sorted(path.name for path in packages.iterdir() if not path.name.startswith("."))
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in LEFT_OUT)]


def _libraries() -> list[Path]:
    """Where this machine has the libraries that wheels take for granted."""
    lines = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout.splitlines()
    places = {line.split()[0]: Path(line.rpartition("=> ")[2]) for line in lines if "=>" in line and "x86-64" in line}
    return [places[name].resolve().with_name(name) for name in LIBRARIES]
