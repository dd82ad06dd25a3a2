"""Attempts to get out of a sandbox, to spoil it for others, or to outlive it."""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from agentrl.protocols import Sandbox
from agentrl.sandbox.archives import files_of, read_file
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, CommandResult, Ended, SandboxSpec
from tests.storms.escape_targets import Outside

MEMORY, PROCESSES, DISK, OUTPUT = 64 << 20, 24, 16 << 20, 20_000
FEW = 16  # processes that a backend may need beside the command's
HARMLESS = ("network", "abstract_socket", "host_files", "links")
"""Attempts that leave a machine as it was even where nothing contains them."""
MARKS = ("3010", "3011")
"""Words on the command lines of what an attempt leaves running."""
MEMORY_ATTEMPTS = ("memory", "memory_of_many")
SPEC = SandboxSpec(memory_bytes=MEMORY, processes=PROCESSES, disk_bytes=DISK, cpus=1.0)
_PYTHON = ("python3", "-I", "-c")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: does what it can in a sandbox; returns what is wrong by its own account, and what it brought out."""

    name: str
    act: Callable[[Sandbox, Outside], Awaitable[tuple[list[str], bytes]]]


Judge = Callable[[CommandResult], list[str]]


def _no_fault(result: CommandResult) -> list[str]:
    return []


def _said_escaped(result: CommandResult) -> list[str]:
    return ["it says that it got through"] if b"ESCAPED" in result.stdout else []


def _script(
    name: str, source: str, judge: Judge = _said_escaped, timeout_s: float = 60.0, python: bool = True
) -> Attempt:
    """An attempt by a program; names in capitals with a dollar stand for what is outside."""

    async def act(sandbox: Sandbox, targets: Outside) -> tuple[list[str], bytes]:
        text = source
        for key, value in (
            ("$SECRET", targets.secret_file),
            ("$KEPT", targets.kept_file),
            ("$PORT", targets.port),
            ("$ABSTRACT", targets.abstract),
            ("$PID", targets.process.pid),
        ):
            text = text.replace(key, str(value))
        arguments = (*_PYTHON, text) if python else ("sh", "-c", text)
        command = Command(arguments, timeout_s=timeout_s, max_output_bytes=OUTPUT)
        result = await sandbox.run(command, secrets.token_hex(8))
        return judge(result), result.stdout + result.stderr

    return Attempt(name, act)


def _ran_into_memory(result: CommandResult) -> list[str]:
    return [] if b"ALL" not in result.stdout else ["it has more memory than its limit"]


def _within(result: CommandResult) -> list[str]:
    size = int(result.stdout.split()[-1]) if result.stdout.split() else 0
    return [] if size <= DISK else [f"it wrote {size} bytes of at most {DISK}"]


def _flood_is_cut(result: CommandResult) -> list[str]:
    is_cut = len(result.stdout) <= OUTPUT and result.stdout_bytes > OUTPUT
    return [] if is_cut and result.ended is Ended.TIMEOUT else ["its output was not cut, or it was not stopped"]


def _most_processes(result: CommandResult) -> list[str]:
    counts = [int(line) for line in result.stdout.split() if line.isdigit()]
    return (
        [] if max(counts, default=0) <= PROCESSES + FEW else [f"it had {max(counts)} processes of at most {PROCESSES}"]
    )


async def _links(sandbox: Sandbox, targets: Outside) -> tuple[list[str], bytes]:
    """Links in the place of files that the platform reads and writes."""
    make = f"ln -s {targets.secret_file} a; ln -s {targets.folder} b; ln -s {targets.kept_file} c; ln -s / d; mkfifo e"
    await sandbox.run(Command(("sh", "-c", make)), secrets.token_hex(8))
    brought = repr(await files_of(sandbox, "/workspace", 1 << 20)).encode()
    for path in ("a", "b/secret", f"d{targets.secret_file}"):
        try:
            brought += await read_file(sandbox, path, 1 << 20)
        except EpisodeError as error:
            brought += str(error).encode()
    for path in ("c", "b/kept"):
        try:
            await sandbox.write(path, _one(b"another content"))
        except EpisodeError as error:
            brought += str(error).encode()
    return [], brought


async def _archive_climbs_out(sandbox: Sandbox, targets: Outside) -> tuple[list[str], bytes]:
    """An archive whose members are outside, or behind a link that an earlier member is."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("way")
        link.type, link.linkname = tarfile.SYMTYPE, str(targets.folder)
        archive.addfile(link)
        for name in (f"..{targets.kept_file}", f"../../../..{targets.kept_file}", str(targets.kept_file), "way/kept"):
            member = tarfile.TarInfo(name)
            member.size = 5
            archive.addfile(member, io.BytesIO(b"other"))
    try:
        await sandbox.unpack(_one(buffer.getvalue()), "/workspace")
    except EpisodeError as error:
        return [], str(error).encode()
    return [], b""


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


ATTEMPTS = (
    _script(
        "network",
        """
import socket
for address in (("127.0.0.1", $PORT), ("8.8.8.8", 53), ("1.1.1.1", 80), ("169.254.169.254", 80)):
    try:
        socket.create_connection(address, 2); print("ESCAPED")
    except OSError as error:
        print(error)
""",
    ),
    _script(
        "abstract_socket",
        """
import socket
s = socket.socket(socket.AF_UNIX); s.settimeout(2)
try:
    s.connect("\\0$ABSTRACT"); print("ESCAPED")
except OSError as error:
    print(error)
""",
    ),
    _script(
        "raw_packets",
        """
import socket
for family, kind in ((socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_INET, socket.SOCK_RAW)):
    try:
        socket.socket(family, kind, 255); print("ESCAPED")
    except OSError as error:
        print(error)
""",
    ),
    _script("host_files", "cat $SECRET /proc/1/root$SECRET /proc/*/root$SECRET /etc/shadow", _no_fault, python=False),
    _script(
        "host_writes",
        "for f in $KEPT /usr/bin/x /etc/x /lib/x /proc/1/root$KEPT; do echo hello > $f && echo ESCAPED $f; done",
        _said_escaped,
        python=False,
    ),
    _script("fork_bomb", "b() { b | b & }; b; sleep 60", _no_fault, timeout_s=3, python=False),
    _script(
        "many_processes",
        """
import os, time
count = 1
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
        count += 1
except OSError:
    pass
print(count)
""",
        _most_processes,
    ),
    _script(
        "memory", f"a = bytearray({MEMORY * 2}); a[::4096] = b'x' * len(a[::4096]); print('ALL')", _ran_into_memory
    ),
    _script(
        "memory_of_many",
        f"""
import os
for n in range(8):
    if os.fork() == 0:
        a = bytearray({MEMORY // 4}); a[::4096] = b'x' * len(a[::4096])
        import time; time.sleep(3); os._exit(0)
done = [os.wait()[1] for n in range(8)]
print('ALL' if not any(done) else 'some were killed')
""",
        _ran_into_memory,
    ),
    _script(
        "disk",
        """
import os
total = 0
for folder in ("/workspace", "/tmp", "/dev/shm", "/var/tmp", "/run"):
    for n in range(64):
        try:
            with open(f"{folder}/f{n}", "wb", buffering=0) as file:
                for _ in range(4):
                    total += file.write(b"x" * 262144)
        except OSError:
            break
print(total)
""",
        _within,
        timeout_s=60,
    ),
    _script("output_flood", "yes", _flood_is_cut, timeout_s=15, python=False),
    _script(
        "daemon", "setsid sh -c 'sleep 3010' > /dev/null 2>&1 & setsid nohup sleep 3011 &", _no_fault, python=False
    ),
    Attempt("links", _links),
    Attempt("archive_climbs_out", _archive_climbs_out),
    _script(
        "ptrace",
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, $PID):
    if libc.ptrace(16, pid, 0, 0) == 0: print("ESCAPED")
try:
    open("/proc/$PID/mem", "r+b"); print("ESCAPED")
except OSError as error:
    print(error)
""",
    ),
    _script(
        "mounts",
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/tmp/m", exist_ok=True)
for call in (lambda: libc.mount(b"none", b"/tmp/m", b"tmpfs", 0, None), lambda: libc.unshare(0x10000000),
             lambda: libc.unshare(0x00020000), lambda: libc.chroot(b"/tmp"), lambda: libc.umount2(b"/proc", 2),
             lambda: libc.mount(b"/", b"/tmp/m", None, 4096, None), lambda: libc.setns(0, 0)):
    if call() == 0: print("ESCAPED")
""",
    ),
    _script(
        "proc",
        """
import os
paths = {"/proc/sys/kernel/core_pattern": "|/tmp/x", "/proc/sysrq-trigger": "h", "/proc/sys/vm/drop_caches": "1",
         "/proc/self/oom_score_adj": "-1000", "/sys/kernel/uevent_helper": "/tmp/x"}
for path, text in paths.items():
    try:
        os.write(os.open(path, os.O_WRONLY), text.encode()); print("ESCAPED", path)
    except OSError as error:
        print(error)
for path in ("/proc/kcore", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda"):
    try:
        open(path, "rb").read(1); print("ESCAPED", path)
    except OSError as error:
        print(error)
""",
    ),
    _script(
        "devices",
        """
import os, stat
for kind, number in ((stat.S_IFBLK, (8, 0)), (stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (1, 1))):
    try:
        os.mknod("/tmp/dev", 0o666 | kind, os.makedev(*number)); print("ESCAPED")
    except OSError as error:
        print(error)
""",
    ),
    _script("signals", "kill -9 $PID; kill -9 -1", _no_fault, python=False),
    _script(
        "privileges",
        """
import ctypes, os, re
status = open("/proc/self/status").read()
if int(re.search(r"CapEff:\\s*(\\w+)", status)[1], 16) or not re.search(r"NoNewPrivs:\\s*1", status): print("ESCAPED")
for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.chown("/tmp", 0, 0), lambda: os.nice(-5)):
    try:
        call(); print("ESCAPED")
    except OSError as error:
        print(error)
""",
    ),
    _script(
        "kernel_interfaces",
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
names = {"bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "keyctl": 250, "add_key": 248, "io_uring_setup": 425}
for name, number in names.items():
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: print("ESCAPED", name)
""",
    ),
    _script(
        "effect_log",
        """
import os, socket
print(*(f"ESCAPED {name}" for name in os.environ if name.startswith("AGENTRL")))
for root, folders, files in os.walk("/"):
    if root.startswith(("/proc", "/sys")): folders.clear()
    for name in files + folders:
        path = os.path.join(root, name)
        try:
            if os.path.exists(path) and (os.stat(path).st_mode & 0o170000) == 0o140000:
                socket.socket(socket.AF_UNIX).connect(path); print("ESCAPED", path)
        except OSError:
            pass
""",
        timeout_s=60,
    ),
)
