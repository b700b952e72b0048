"""The system calls that Python's os module does not have. Each raises OSError."""

from __future__ import annotations

import ctypes
import os

AT_FDCWD = -100
RENAME_EXCHANGE = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def exchange(parent: int, one: str, other: str) -> None:
    """Swap two names of one directory in one step (renameat2 with RENAME_EXCHANGE, Linux 3.15)."""
    _check(_libc.renameat2(parent, os.fsencode(one), parent, os.fsencode(other), RENAME_EXCHANGE), f"{one} and {other}")


# The numbers of system calls from 424 on are the same on every architecture; C libraries learned of these late.
_OPEN_TREE, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 430, 431, 432
_OPEN_TREE_CLONE = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6  # FSCONFIG_*
_MOUNT_ATTR_RDONLY = 1
_CLOEXEC = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
_MS_RDONLY = 1
_MNT_DETACH = 2


def clone_tree(path: str) -> int:
    """A file descriptor of a mount of its own that shows `path` without what is mounted below it (Linux 5.2)."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _check(_libc.syscall(_OPEN_TREE, AT_FDCWD, os.fsencode(path), ctypes.c_uint(flags)), path)


def overlay_view(lowerdirs: list[str], *, userxattr: bool) -> int:
    """A file descriptor of a read-only overlay of directories, the topmost first, that is mounted nowhere."""
    try:
        context = _check(_libc.syscall(_FSOPEN, b"overlay", _CLOEXEC), "fsopen")
        try:
            for lower in lowerdirs:
                _config(context, _SET_STRING, b"lowerdir+", os.fsencode(lower))
            if userxattr:
                _config(context, _SET_FLAG, b"userxattr", None)
            _config(context, _CMD_CREATE, None, None)
            mount = _check(_libc.syscall(_FSMOUNT, context, _CLOEXEC, _MOUNT_ATTR_RDONLY), "fsmount")
        finally:
            os.close(context)
        try:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
        finally:
            os.close(mount)
    except OSError:
        # Before Linux 6.5 an overlay takes no layers one by one. Mounted and detached at once, it is the same.
        return _detached_overlay(lowerdirs, userxattr)


def _config(context: int, command: int, key: bytes | None, value: bytes | None) -> None:
    _check(_libc.syscall(_FSCONFIG, context, command, key, value, 0), "overlay")


def _detached_overlay(lowerdirs: list[str], userxattr: bool) -> int:
    from tempfile import mkdtemp

    options = "lowerdir=" + ":".join(lowerdirs) + (",userxattr" if userxattr else "")
    point = mkdtemp(prefix="fermata-image-")
    try:
        where = os.fsencode(point)
        _check(_libc.mount(b"overlay", where, b"overlay", _MS_RDONLY, os.fsencode(options)), "the image's layers")
        try:
            return os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            _check(_libc.umount2(where, _MNT_DETACH), point)
    finally:
        os.rmdir(point)
