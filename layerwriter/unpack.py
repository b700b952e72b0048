"""A layer, unpacked into an overlay's upper directory: all of it, exactly, or nothing.

The layer is unpacked into a directory beside the upper directory, and the two change places in one step at the end. The
layer is not trusted. Every name is looked up one component at a time from an open directory of the new tree, symlinks
are never followed, and the new tree is only what came out of this layer, so that nothing leads out of it.
"""

from __future__ import annotations

import os
from fcntl import LOCK_EX, LOCK_NB, flock, ioctl

from layerwriter import header
from layerwriter.header import DIRECTORY, LINK, REGULAR, SYMLINK
from layerwriter.layer import DEFAULT_LIMIT, Layer, LayerError, shown
from layerwriter.overlay import escape_xattr
from layerwriter.reader import OPAQUE, WHITEOUT, Entry, Reader
from layerwriter.source import Source
from layerwriter.walk import Descent, open_directory, remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    Path = str | os.PathLike[str]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_GETFLAGS, _SETFLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_FLAGS = {b"S": 0x08, b"d": 0x40, b"A": 0x80, b"D": 0x10000}
"""Inode flags by chattr's letters. `i` and `a` are kept by overlayfs in an attribute and not on the inode."""
_SECOND = 1_000_000_000


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
        fd = os.open(layer, os.O_RDONLY | os.O_CLOEXEC)
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
    tree = _Tree(root, prefix)
    try:
        tree.copy_root(old)
        while (entry := reader.next()) is not None:
            try:
                tree.add(entry, source)
            except LayerError as failure:
                raise LayerError(f"entry {reader.count}, {shown(entry.path)}: {failure}") from failure
            except (OSError, OverflowError) as failure:
                text = failure.strerror if isinstance(failure, OSError) else failure
                raise LayerError(f"entry {reader.count}, {shown(entry.path)}: {text}") from failure
        source.finish()
        tree.finish()
    finally:
        tree.close()
    return reader.count


class _Frame:
    """What has to wait until a directory has its children: its times, and what children would inherit."""

    __slots__ = ("acl", "atime", "flags", "mtime")

    def __init__(self, atime: int, mtime: int) -> None:
        self.atime = atime
        self.mtime = mtime
        self.acl: bytes | None = None
        self.flags = 0


class _Tree:
    """The new tree while entries are added. The current directory is where the last entry went."""

    def __init__(self, root: int, prefix: bytes) -> None:
        self._prefix = prefix
        self._descent = Descent(root)
        self._parts: list[bytes] = []
        self._frames = [_Frame(0, 0)]
        self._here = b""
        self._implied: set[bytes] = {b""}
        self._inheriting = False
        for acl in _ACLS:
            _drop_xattr(root, acl)

    def copy_root(self, old: int) -> None:
        """Give the new root what the old one has, for a layer without an entry for it."""
        found = os.fstat(old)
        fd = self._descent.fd
        os.fchown(fd, found.st_uid, found.st_gid)
        os.fchmod(fd, found.st_mode & 0o7777)
        own = self._prefix + b"overlay."
        for name in os.listxattr(old):
            raw = os.fsencode(name)
            if not raw.startswith(own):
                os.setxattr(fd, raw, os.getxattr(old, name))
        self._frames[0] = _Frame(found.st_atime_ns, found.st_mtime_ns)

    def add(self, entry: Entry, source: Source) -> None:
        """Make one entry, with its data from the source."""
        path = entry.path
        kind = entry.kind
        if kind == DIRECTORY:
            self._directory(entry)
            return
        if kind == OPAQUE:
            self._go(path)
            os.setxattr(self._descent.fd, self._prefix + b"overlay.opaque", b"y", os.XATTR_CREATE)
            return
        if not path:
            raise LayerError("the root of a layer has to be a directory")
        above, _, name = path.rpartition(b"/")
        if above != self._here:
            self._go(above)
        parent = self._descent.fd
        try:
            if kind == REGULAR:
                self._file(entry, parent, name, source)
            elif kind == LINK:
                self._link(entry, parent, name)
            elif kind == WHITEOUT:
                os.mknod(name, 0o020000, 0, dir_fd=parent)
            else:
                self._special(entry, parent, name)
        except FileExistsError as failure:
            raise LayerError("it is in the layer twice, or is both there and deleted") from failure

    def finish(self) -> None:
        """Complete the directories that are still open, the root last."""
        self._go(b"")
        self._complete()

    def close(self) -> None:
        self._descent.close()

    def _file(self, entry: Entry, parent: int, name: bytes, source: Source) -> None:
        fd = os.open(name, _CREATE, 0o600, dir_fd=parent)
        try:
            if entry.sparse is None:
                left = entry.size
                while left:
                    part = source.some(left)
                    if not part:
                        raise _cut_off()
                    left -= len(part)
                    _write(fd, part)
            else:
                os.ftruncate(fd, entry.size)
                for offset, length in entry.sparse:
                    os.lseek(fd, offset, os.SEEK_SET)
                    left = length
                    while left:
                        part = source.some(left)
                        if not part:
                            raise _cut_off()
                        left -= len(part)
                        _write(fd, part)
            self._dress(fd, entry)
            os.utime(fd, ns=(entry.atime, entry.mtime))
            if entry.flags:
                _set_flags(fd, _flag_bits(entry.flags))
        finally:
            os.close(fd)

    def _link(self, entry: Entry, parent: int, name: bytes) -> None:
        """A hard link. Its target was made by an entry before it, and is found without following a symlink."""
        above, _, target = entry.link.rpartition(b"/")
        if not target:
            raise LayerError("it is a hard link to the root")
        try:
            if above == self._here:
                self._make_link(parent, target, parent, name)
                return
            descent = Descent(self._descent.root)
            try:
                for part in above.split(b"/") if above else ():
                    descent.enter(part)
                self._make_link(descent.fd, target, parent, name)
            finally:
                descent.close()
        except (FileNotFoundError, NotADirectoryError, PermissionError) as failure:
            raise LayerError(
                f"it is a hard link to {shown(entry.link)}, which is not a file in front of it in the layer"
            ) from failure

    def _make_link(self, source: int, target: bytes, parent: int, name: bytes) -> None:
        found = os.stat(target, dir_fd=source, follow_symlinks=False)
        if found.st_mode & 0o170000 == 0o020000 and found.st_rdev == 0:
            raise LayerError("it is a hard link to a deleted file")
        os.link(target, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def _special(self, entry: Entry, parent: int, name: bytes) -> None:
        """A symlink, FIFO, device or socket: made, then dressed by name, which is safe in a tree nobody else sees."""
        if entry.kind == SYMLINK:
            os.symlink(entry.link, name, dir_fd=parent)
        else:
            kind = {header.FIFO: 0o010000, header.CHARACTER: 0o020000, header.BLOCK_DEVICE: 0o060000}.get(entry.kind)
            if entry.kind == header.CHARACTER and entry.device == (0, 0):
                raise LayerError(
                    "a character device 0:0 is how an overlay marks a deletion, and a layer has other marks for that: "
                    "was it made of an upper directory by a tool that does not know overlays?"
                )
            os.mknod(name, 0o600 | (kind or 0o140000), os.makedev(*entry.device), dir_fd=parent)
        self._dress(b"/proc/self/fd/%d/%b" % (parent, name), entry)
        os.utime(name, ns=(entry.atime, entry.mtime), dir_fd=parent, follow_symlinks=False)

    def _directory(self, entry: Entry) -> None:
        path = entry.path
        above, _, name = path.rpartition(b"/")
        if path in self._implied:
            # Met only as the parent of an earlier entry; this is its own.
            self._go(path)
            self._implied.discard(path)
        else:
            if not path:
                raise LayerError("the root is in the layer twice")
            if above != self._here:
                self._go(above)
            try:
                os.mkdir(name, 0o700, dir_fd=self._descent.fd)
            except FileExistsError as failure:
                raise LayerError("it is in the layer twice, or is both there and deleted") from failure
            self._descent.enter(name)
            self._parts.append(name)
            self._frames.append(_Frame(0, 0))
            self._here = path
        frame = self._frames[-1]
        frame.atime, frame.mtime = entry.atime, entry.mtime
        frame.flags = _flag_bits(entry.flags)
        for index, (key, value) in enumerate(entry.xattrs):
            if key == _ACLS[1]:
                frame.acl = value
                self._inheriting = True
                del entry.xattrs[index]
                break
        if frame.flags:
            self._inheriting = True
        self._dress(self._descent.fd, entry)

    def _dress(self, target: int | bytes, entry: Entry) -> None:
        """Owner, mode and attributes, in this order: a new owner takes setuid and capabilities away."""
        followed = isinstance(target, int)
        os.chown(target, entry.uid, entry.gid, follow_symlinks=followed)
        if entry.kind != SYMLINK:
            os.chmod(target, entry.mode)
        for name, value in entry.xattrs:
            if b"\0" in name:
                raise LayerError("an extended attribute's name has a zero byte in it")
            try:
                os.setxattr(target, escape_xattr(name, self._prefix), value, follow_symlinks=followed)
            except OSError as failure:
                raise LayerError(f"its attribute {shown(name)} cannot be set: {failure.strerror}") from failure
        protected = b"".join([letter for letter in (b"a", b"i") if letter in entry.flags])
        if protected:
            os.setxattr(target, self._prefix + b"overlay.protattr", protected, follow_symlinks=followed)

    def _go(self, path: bytes) -> None:
        """Make a directory of the new tree the current one."""
        parts = path.split(b"/") if path else []
        common = 0
        for one, other in zip(parts, self._parts, strict=False):
            if one != other:
                break
            common += 1
        while len(self._parts) > common:
            self._complete()
            self._descent.leave()
            self._parts.pop()
            self._frames.pop()
        self._here = b"/".join(self._parts)
        for part in parts[common:]:
            self._enter(part)

    def _enter(self, name: bytes) -> None:
        here = self._here + b"/" + name if self._here else name
        try:
            fd = self._descent.enter(name)
        except FileNotFoundError:
            if len(self._implied) > 10000:
                raise LayerError("too many directories of the layer have no entry of their own") from None
            os.mkdir(name, 0o755, dir_fd=self._descent.fd)
            fd = self._descent.enter(name)
            os.fchown(fd, 0, 0)
            os.fchmod(fd, 0o755)
            self._implied.add(here)
        except OSError as failure:
            raise LayerError(f"it is inside {shown(here)}, which is not a directory of the layer") from failure
        found = os.fstat(fd)
        frame = _Frame(found.st_atime_ns, found.st_mtime_ns)
        if self._inheriting:
            # Entered again: take away once more what the new child would inherit.
            frame.acl = _drop_xattr(fd, _ACLS[1])
            frame.flags = _clear_flags(fd)
        self._frames.append(frame)
        self._parts.append(name)
        self._here = here

    def _complete(self) -> None:
        """Give the current directory what had to wait for its children."""
        frame = self._frames[-1]
        fd = self._descent.fd
        if frame.acl is not None:
            os.setxattr(fd, _ACLS[1], frame.acl)
        os.utime(fd, ns=(frame.atime, frame.mtime))
        if frame.flags:
            _set_flags(fd, frame.flags)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _drop_xattr(fd: int, name: bytes) -> bytes | None:
    try:
        value = os.getxattr(fd, name)
        os.removexattr(fd, name)
    except OSError:  # it has none, or its file system has none
        return None
    return value


def _flag_bits(letters: bytes) -> int:
    bits = 0
    for letter in letters:
        bits |= _FLAGS.get(bytes((letter,)), 0)
    return bits


def _set_flags(fd: int, bits: int) -> None:
    buffer = bytearray(4)
    ioctl(fd, _GETFLAGS, buffer)
    value = int.from_bytes(buffer, "little") | bits
    ioctl(fd, _SETFLAGS, value.to_bytes(4, "little"))


def _clear_flags(fd: int) -> int:
    buffer = bytearray(4)
    try:
        ioctl(fd, _GETFLAGS, buffer)
    except OSError:  # a file system without flags
        return 0
    value = int.from_bytes(buffer, "little")
    found = value & sum(_FLAGS.values())
    if found:
        ioctl(fd, _SETFLAGS, (value & ~found).to_bytes(4, "little"))
    return found


def _cut_off() -> LayerError:
    return LayerError("the file ends in the middle of its data: it was cut off")
