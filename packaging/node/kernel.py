"""System calls that Python 3.10's standard library lacks. Each raises an OSError that names its path."""

from __future__ import annotations

import ctypes
import os

# <sched.h>
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
# <sys/mount.h>
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
# <sys/prctl.h>
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """mount(2); ``kind`` is the file system type, ``data`` its own options."""
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            os.fsencode(data) if data else None,
        ),
        f"mount {kind or 'bind'} {source} on {target} ({data or 'no options'})",
    )


def bind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND)


def rbind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)


def detach(target: str) -> None:
    """Take ``target`` and every mount under it out of this namespace, even while in use."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def change_root(new: str) -> None:
    """Make ``new``, a mount point, the root of this mount namespace, and drop the old one.

    A chroot is not enough: the kernel refuses to create user namespaces in one, and CRIU needs that.
    ``pivot_root(".", ".")`` stacks the old root on the new, so no directory for it is needed (pivot_root(2), NOTES).
    """
    os.chdir(new)
    _check(_libc.pivot_root(b".", b"."), f"pivot_root {new}")
    detach(".")
    os.chdir("/")


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, instead of those of PID 1."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def set_name(name: str) -> None:
    _check(_libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl PR_SET_NAME")
