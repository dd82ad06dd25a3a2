"""The system calls that commands in a bwrap sandbox may not make."""

from __future__ import annotations

import errno
import os

import pyseccomp  # type: ignore[import-untyped]

REFUSED = (
    # Looking into and steering other processes.
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),
    # Namespaces and mounts, where most ways out of a sandbox begin.
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsmount"),
    *("fsconfig", "fspick", "mount_setattr"),
    # Parts of the kernel that an agent does not need and in which faults are found again and again.
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("keyctl", "add_key", "request_key", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
    *("delete_module", "open_by_handle_at", "name_to_handle_at", "fanotify_init", "quotactl", "swapon", "swapoff"),
    *("reboot", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "acct", "syslog", "lookup_dcookie"),
    *("iopl", "ioperm", "move_pages", "mbind", "migrate_pages", "set_mempolicy", "vhangup", "personality"),
)
_CLONE_NEWUSER = 0x10000000
_TIOCSTI = 0x5412


def make_filter() -> int:
    """A descriptor with the filter, for ``bwrap --seccomp``; refused calls fail with EPERM.

    `clone3` fails as on a kernel without it, so that its flags, which a filter cannot see, are those of `clone`.
    """
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in REFUSED:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    new_user = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _CLONE_NEWUSER, _CLONE_NEWUSER)
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", new_user)
    # Typing into the terminal of whoever started it.
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "ioctl", pyseccomp.Arg(1, pyseccomp.EQ, _TIOCSTI))
    descriptor = os.memfd_create("seccomp", 0)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        rules.export_bpf(file)
    return descriptor
