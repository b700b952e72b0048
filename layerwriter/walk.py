"""Walking a tree of any depth and any width by directory file descriptors."""

from __future__ import annotations

import os
import stat
import sys

from layerwriter.layer import LayerError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OPEN_AT_ONCE = 64
"""Directories kept open on the way down. A tree may be deeper than a process may have files."""

_BATCH = 16384
"""Names of one directory that are held and sorted at a time: a directory of millions must not fill the memory."""

OTHER, FILE, DIRECTORY = 0, 1, 2

# name.encode(ENCODING, ERRORS) is os.fsencode(name) at a third of its cost.
ENCODING, ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


def open_directory(name: str | bytes, parent: int | None = None) -> int:
    """A directory's file descriptor, for reading it without a trace in its access time."""
    try:
        return os.open(name, OPEN_DIRECTORY | os.O_NOATIME, dir_fd=parent)
    except PermissionError:  # O_NOATIME is for the owner and CAP_FOWNER
        return os.open(name, OPEN_DIRECTORY, dir_fd=parent)


def listing(fd: int, batch_size: int = _BATCH) -> Iterator[tuple[str, int]]:
    """The names in a directory, each with OTHER, FILE or DIRECTORY, sorted so that equal trees make equal layers."""
    with os.scandir(fd) as found:
        while True:
            batch = []
            for entry in found:
                kind = FILE if entry.is_file(follow_symlinks=False) else OTHER
                batch.append((entry.name, DIRECTORY if entry.is_dir(follow_symlinks=False) else kind))
                if len(batch) == batch_size:
                    break
            if not batch:
                return
            batch.sort()
            yield from batch


class Descent:
    """A directory and the open directories above it, up to the root of a walk.

    At most `_OPEN_AT_ONCE` are open at a time. One that had to be closed is opened again by `..` on the way up, which
    is refused if the directory has moved meanwhile.
    """

    __slots__ = ("_fds", "_identities")

    def __init__(self, root: int) -> None:
        self._fds = [root]
        self._identities: list[tuple[int, int]] = []

    @property
    def fd(self) -> int:
        return self._fds[-1]

    @property
    def root(self) -> int:
        return self._fds[0]

    @property
    def depth(self) -> int:
        return len(self._fds) - 1

    def enter(self, name: str | bytes) -> int:
        """Open a directory in the current one and make it the current one."""
        fd = open_directory(name, self._fds[-1])
        if len(self._fds) >= _OPEN_AT_ONCE:
            closing = len(self._fds) - _OPEN_AT_ONCE
            while len(self._identities) <= closing:
                self._identities.append((0, 0))
            found = os.fstat(self._fds[closing])
            self._identities[closing] = (found.st_dev, found.st_ino)
            if closing:
                os.close(self._fds[closing])
                self._fds[closing] = -1
        self._fds.append(fd)
        return fd

    def leave(self) -> None:
        """Go back to the directory above."""
        os.close(self.release())

    def release(self) -> int:
        """Go back to the directory above, and leave the one below open, for the caller to close."""
        above = len(self._fds) - 2
        if self._fds[above] == -1:
            self._fds[above] = open_directory("..", self._fds[-1])
            found = os.fstat(self._fds[above])
            if (found.st_dev, found.st_ino) != self._identities[above]:
                raise LayerError("a directory was moved while the tree was walked: freeze the container first")
        return self._fds.pop()

    def close(self) -> None:
        """Close everything but the root, which is its opener's."""
        for fd in self._fds[1:]:
            if fd != -1:
                os.close(fd)
        del self._fds[1:]


def remove_tree(parent: int, name: str) -> None:
    """Remove a file or a whole tree. Nothing is followed, and a tree of any depth goes."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise LayerError(f"{shown(os.fsencode(name))} cannot be removed: is it immutable?")
    descent = Descent(parent)
    names = [name]
    try:
        below = [listing(descent.enter(name))]
        while below:
            for child, kind in below[-1]:
                if kind == DIRECTORY:
                    below.append(listing(descent.enter(child)))
                    names.append(child)
                    break
                os.unlink(child, dir_fd=descent.fd)
            else:
                below.pop()
                descent.leave()
                os.rmdir(names.pop(), dir_fd=descent.fd)
    finally:
        descent.close()
