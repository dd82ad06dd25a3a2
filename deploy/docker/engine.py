"""A private Docker engine for tests: ``engine.py start`` prints its URL, ``engine.py stop`` removes all that it was.

It shares nothing with another engine of the machine, touches no network, and needs no registry: its one image is made
of the Python that runs this, with pytest, and of busybox. Both commands can be repeated.
"""

from __future__ import annotations

import compileall
import hashlib
import importlib.metadata
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import docker
import docker.errors

IMAGE = "agentrl-python:local"
PACKAGES = ("docker.io", "busybox-static", "procps")
BUSYBOX = Path("/bin/busybox")
# Not needed in a sandbox, most of it large.
LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "dist-packages",
    "config-*",
)
START_S, STOP_S, INSTALL_S = 120.0, 60.0, 300.0
ROOT = Path(__file__).resolve().parents[2]
# Short, since a socket's path may have 107 characters; one for each clone.
FOLDER = Path(tempfile.gettempdir(), f"agentrl-docker-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}")
CGROUP = FOLDER.name
URL = f"unix://{FOLDER}/docker.sock"


def start() -> None:
    """Install what is missing, start the engine unless it answers, make the image unless it has it; print the URL."""
    FOLDER.mkdir(exist_ok=True)
    install()
    if not answers():
        start_engine()
    client = docker.APIClient(URL, version="auto", timeout=START_S)
    try:
        client.inspect_image(IMAGE)
    except docker.errors.ImageNotFound:
        make_image(client)
    sys.stdout.write(f"{URL}\n")


def stop() -> None:
    """End the engine with its containers, and remove its folder."""
    if answers():
        client = docker.APIClient(URL, version="auto", timeout=STOP_S)
        for entry in client.containers(all=True):
            try:
                client.remove_container(entry["Id"], force=True)
            except docker.errors.APIError as error:
                sys.stderr.write(f"{error}\n")
    pid = engine_pid()
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if not wait_for(lambda: engine_pid() is None, STOP_S):
            os.kill(pid, signal.SIGKILL)
    remove_mounts()
    remove_groups()
    shutil.rmtree(FOLDER, ignore_errors=True)


def install() -> None:
    """Get engine and busybox by apt where they are missing; exits with a sentence where that is impossible."""
    if shutil.which("dockerd") and shutil.which("ps") and BUSYBOX.exists():
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit(
            f"dockerd, ps and {BUSYBOX} are needed: install a Docker engine and a static busybox, or run this as root "
            f"on Debian or Ubuntu, where it installs {' and '.join(PACKAGES)}"
        )
    log = FOLDER / "apt.log"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=300"]
    with log.open("w") as output:
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run(
                ["apt-get", *wait, *command], env=environment, stdout=output, stderr=output, timeout=INSTALL_S
            )
            if done.returncode:
                sys.exit(f"apt-get {command[0]} failed:\n{tail(log)}")


def start_engine() -> None:
    """Start dockerd and wait for its answer."""
    if os.geteuid() != 0:
        sys.exit("a Docker engine is started by root only; start one, and name it by DOCKER_HOST")
    log = FOLDER / "dockerd.log"
    (FOLDER / "docker.pid").unlink(missing_ok=True)
    paths = {"--data-root": "data", "--exec-root": "exec", "--pidfile": "docker.pid"}
    command = ["dockerd", "-H", URL, *(word for key, name in paths.items() for word in (key, str(FOLDER / name)))]
    command += ["--containerd-namespace", CGROUP, "--containerd-plugins-namespace", f"{CGROUP}-plugins"]
    command += ["--cgroup-parent", f"/{CGROUP}"]
    command += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    with log.open("w") as output:
        engine = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    if not wait_for(lambda: answers() or engine.poll() is not None, START_S) or not answers():
        engine.kill()
        sys.exit(f"dockerd does not start:\n{tail(log)}")


def answers() -> bool:
    """Whether the engine does."""
    if not (FOLDER / "docker.sock").exists():
        return False
    try:
        return bool(docker.APIClient(URL, timeout=STOP_S).ping())
    except docker.errors.DockerException:
        return False


def engine_pid() -> int | None:
    """The engine's process, if it lives."""
    try:
        pid = int((FOLDER / "docker.pid").read_text())
        state = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    return pid if "(dockerd)" in state and ") Z " not in state else None


def make_image(client: docker.APIClient) -> None:
    """Make a root file system of this Python and busybox, and import it."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        root = Path(folder, "root")
        lay_out(root)
        copy_python(root)
        archive = Path(folder, "root.tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(root, ".", filter=as_in_image)
        name, tag = IMAGE.split(":")
        changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8", "WORKDIR /workspace"]
        client.import_image_from_file(str(archive), repository=name, tag=tag, changes=changes)


def lay_out(root: Path) -> None:
    """Folders, users, busybox with all its names, and other shells where there are any."""
    for name in ("bin", "usr/bin", "usr/lib", "tmp", "etc", "proc", "sys", "dev", "workspace"):
        (root / name).mkdir(parents=True)
    shutil.copy2(BUSYBOX, root / "bin/busybox")
    applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/workspace:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    for shell in filter(None, map(shutil.which, ("dash", "bash"))):
        target = root / "bin" / Path(shell).name
        target.unlink(missing_ok=True)
        shutil.copy2(shell, target)
        copy_libraries(root, [Path(shell)])


def copy_python(root: Path) -> None:
    """The interpreter, its library and pytest, at the places that they have here."""
    program = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    target = root / library.relative_to("/")
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*LEFT_OUT, "__pycache__"), symlinks=True)
    (root / program.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, root / program.relative_to("/"))
    for name in ("python3", "python"):
        link = root / "usr/bin" / name
        if not link.exists():
            link.symlink_to(program)
    copy_libraries(root, [program, *library.glob("lib-dynload/*.so")])
    for name in needed_by("pytest"):
        copy_package(name, target)
    # Nothing can be written there later.
    compileall.compile_dir(
        target, quiet=2, stripdir=str(root), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )


def copy_libraries(root: Path, programs: list[Path]) -> None:
    """What programs are linked with."""
    found = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    for path in sorted(set(re.findall(r"(/\S+) \(0x", found))):
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def needed_by(name: str) -> set[str]:
    """A package that is installed here, with those that it needs."""
    names, waiting = set[str](), [name]
    while waiting:
        current = waiting.pop()
        names.add(current)
        for wanted in importlib.metadata.requires(current) or ():
            if ";" not in wanted:
                other = re.split(r"[^A-Za-z0-9._-]", wanted, maxsplit=1)[0]
                waiting += [other] if other not in names else []
    return names


def copy_package(name: str, target: Path) -> None:
    """The files of an installed package, without its programs."""
    for file in importlib.metadata.files(name) or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), target / file)


def as_in_image(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """All is root's, but for the workspace."""
    entry.uid = entry.gid = 1000 if entry.name == "./workspace" else 0
    entry.uname = entry.gname = ""
    return entry


def remove_mounts() -> None:
    """Take away the mounts that an engine leaves that was killed."""
    lines = Path("/proc/mounts").read_text().splitlines()
    places = [line.split()[1] for line in lines if line.split()[1].startswith(f"{FOLDER}/")]
    for place in sorted(places, reverse=True):
        subprocess.run(["umount", place], check=False)


def remove_groups() -> None:
    """Take away its empty control groups."""
    for folder in (*Path("/sys/fs/cgroup").glob(f"*/{CGROUP}"), *Path("/sys/fs/cgroup").glob(CGROUP)):
        for child in sorted((*folder.rglob("*/"), folder), reverse=True):
            try:
                child.rmdir()
            except OSError as error:
                sys.stderr.write(f"{error}\n")


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came to hold in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def tail(log: Path) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


if __name__ == "__main__":
    if sys.argv[1:] not in (["start"], ["stop"]):
        sys.exit("engine.py start|stop")
    start() if sys.argv[1] == "start" else stop()
