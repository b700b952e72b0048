"""A layer, unpacked into an overlay's upper directory: all of it, exactly, or nothing.

The layer is unpacked into a directory beside the upper directory, and the two change places in one step at the end.
"""

from __future__ import annotations

import os
import stat
from fcntl import LOCK_EX, LOCK_NB, flock

from layerwriter.layer import DEFAULT_LIMIT, Layer, LayerError
from layerwriter.newtree import NewTree
from layerwriter.reader import Reader
from layerwriter.source import Source
from layerwriter.walk import open_directory, remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    Path = str | os.PathLike[str]


class Applied:
    """A layer that was applied.

    path      the upper directory
    entries   entries of the layer
    size      bytes of its tar
    With keep_old=True the former content is still beside it, and one of commit() and undo() has to be called.
    """

    __slots__ = ("_locks", "_old", "_parent", "entries", "path", "size")

    def __init__(self, path: str, entries: int, size: int, *, parent: int, old: str, locks: tuple[int, int]) -> None:
        self.path = path
        self.entries = entries
        self.size = size
        self._parent = parent
        self._old = old
        self._locks = locks

    def commit(self) -> None:
        """Remove the former content. Calling it again does nothing."""
        self._finish()

    def undo(self) -> None:
        """Bring the former content back and remove what the layer made. Does nothing after commit()."""
        if self._parent >= 0:
            from layerwriter.syscalls import exchange

            exchange(self._parent, self._old, os.path.basename(self.path))
            self._finish()

    def _finish(self) -> None:
        if self._parent < 0:
            return
        try:
            remove_tree(self._parent, self._old)
        finally:
            for fd in (*self._locks, self._parent):
                os.close(fd)
            self._parent = -1

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.undo()


def apply(
    layer: Path | Layer,
    upperdir: Path,
    *,
    digest: str | None = None,
    replace: bool = False,
    keep_old: bool = False,
    limit: int = DEFAULT_LIMIT,
    xattr_prefix: str = "trusted.",
) -> Applied:
    """Make an upper directory exactly what a layer says, before the overlay is mounted.

    The directory's own owner, mode, times and attributes come from the layer, if it has an entry for it. `digest`
    ("sha256:...") is checked while the file is read; that of a Layer is taken from it. A directory that is not empty is
    refused unless `replace`. `limit` is in bytes of tar. With `keep_old` the caller has to call commit() or undo() on
    what is returned. On any LayerError the upper directory is as it was before.
    """
    if isinstance(layer, Layer):
        digest = digest or layer.digest
        layer = layer.path
    if xattr_prefix not in ("trusted.", "user."):
        raise LayerError(f'xattr prefix {xattr_prefix!r} is not known: it is "trusted." or "user."')
    target = os.path.normpath(os.fspath(upperdir))
    above, name = os.path.split(target)
    parent = old = new = fd = -1
    staging = f".{name}.fermata-{os.urandom(8).hex()}"
    try:
        parent = open_directory(above or ".")
        old = open_directory(name, parent)
        flock(old, LOCK_EX | LOCK_NB)
        _remove_leftovers(parent, name)
        if not replace and os.listdir(old):
            raise LayerError(f"{target} is not empty: its content would be lost (replace=True allows it)")
        fd = _open_regular(layer)
        os.mkdir(staging, 0o700, dir_fd=parent)
        new = open_directory(staging, parent)
        flock(new, LOCK_EX | LOCK_NB)
        source = Source(fd, digest=digest, limit=limit)
        try:
            count = _unpack(source, new, old, xattr_prefix.encode("ascii"))
            size = source.position
        finally:
            source.close()
        from layerwriter.syscalls import exchange

        exchange(parent, staging, name)
    except BaseException as failure:
        if new >= 0:
            remove_tree(parent, staging)
        for opened in (parent, old, new):
            if opened >= 0:
                os.close(opened)
        if isinstance(failure, BlockingIOError):
            raise LayerError(f"another layer is being applied to {target}") from failure
        if isinstance(failure, OSError):
            raise LayerError(f"{os.fspath(layer)} cannot be applied to {target}: {failure}") from failure
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    applied = Applied(target, count, size, parent=parent, old=staging, locks=(old, new))
    if not keep_old:
        applied.commit()
    return applied


def discard(upperdir: Path) -> None:
    """Empty an upper directory, and remove what an apply to it that was killed left beside it.

    For one that was empty before that apply. Its own owner, mode and attributes stay. Raises LayerError.
    """
    target = os.path.normpath(os.fspath(upperdir))
    above, name = os.path.split(target)
    parent = fd = -1
    try:
        parent = open_directory(above or ".")
        fd = open_directory(name, parent)
        _remove_leftovers(parent, name)
        for found in os.listdir(fd):
            remove_tree(fd, found)
    except OSError as failure:
        raise LayerError(f"{target} cannot be emptied: {failure}") from failure
    finally:
        for opened in (parent, fd):
            if opened >= 0:
                os.close(opened)


def bring_back(upperdir: Path, inode: int) -> None:
    """Bring back the content that an apply with keep_old which was killed had put aside, and remove what it made.

    `inode` is the upper directory's st_ino from before that apply. Where it had not come to put it aside, or there was
    no apply at all, the content stays. Raises LayerError.
    """
    target = os.path.normpath(os.fspath(upperdir))
    above, name = os.path.split(target)
    parent = -1
    try:
        parent = open_directory(above or ".")
        if os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino != inode:
            for found in os.listdir(parent):
                aside = found.startswith(f".{name}.fermata-")
                if aside and os.stat(found, dir_fd=parent, follow_symlinks=False).st_ino == inode:
                    from layerwriter.syscalls import exchange

                    exchange(parent, found, name)
                    break
        _remove_leftovers(parent, name)
    except OSError as failure:
        raise LayerError(f"the former content of {target} cannot be brought back: {failure}") from failure
    finally:
        if parent >= 0:
            os.close(parent)


def _open_regular(path: Path) -> int:
    """Open a file without waiting for anybody: a FIFO's open would, for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LayerError(f"{os.fspath(path)} is no regular file")
    return fd


def _remove_leftovers(parent: int, name: str) -> None:
    """Remove what an apply left that was killed: its lock went with it."""
    for found in os.listdir(parent):
        if found.startswith(f".{name}.fermata-"):
            fd = open_directory(found, parent)
            try:
                flock(fd, LOCK_EX | LOCK_NB)
                remove_tree(parent, found)
            except BlockingIOError:
                pass
            finally:
                os.close(fd)


def _unpack(source: Source, root: int, old: int, prefix: bytes) -> int:
    reader = Reader(source)
    tree = NewTree(root, prefix)
    try:
        tree.copy_root(old)
        while (entry := reader.next()) is not None:
            tree.add(entry, source, reader.count)
        source.finish()
        tree.finish()
    finally:
        tree.close()
    return reader.count
