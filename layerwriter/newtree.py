"""A new tree while the entries of a layer are added to it.

The layer is not trusted. Every name is looked up one component at a time from an open directory of the new tree,
symlinks are never followed, and the tree holds only what came out of this layer: nothing leads out of it.
"""

from __future__ import annotations

import os
from fcntl import ioctl

from layerwriter import header
from layerwriter.crew import Crew, Directory
from layerwriter.header import DIRECTORY, LINK, REGULAR, SYMLINK
from layerwriter.layer import WRITE, LayerError, shown
from layerwriter.overlay import escape_xattr
from layerwriter.reader import OPAQUE, WHITEOUT, Entry
from layerwriter.walk import Descent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from layerwriter.crew import Job
    from layerwriter.source import Source

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SMALL = 256 << 10
"""Bytes up to which a file is made by the crew."""
_DEEP = 48
"""Levels from which nothing is left to the crew: directories up there are closed and opened again."""
_IMPLIED = 1 << 20
"""Bytes of paths of directories that have no entry of their own in a layer: they have to be remembered."""

_ACCESS_ACL, _DEFAULT_ACL = b"system.posix_acl_access", b"system.posix_acl_default"
_GETFLAGS, _SETFLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_FLAGS = {0x53: 0x08, 0x64: 0x40, 0x41: 0x80, 0x44: 0x10000}  # S, d, A, D
"""Inode flags by chattr's letters. overlayfs keeps `i` and `a` in an attribute and not on the inode."""
_ALL_FLAGS = 0x100C8

_FIFO, _CHARACTER, _BLOCK, _SOCKET = 0o010000, 0o020000, 0o060000, 0o140000
_SPECIAL = {header.FIFO: _FIFO, header.CHARACTER: _CHARACTER, header.BLOCK_DEVICE: _BLOCK}

_TWICE = "it is in the layer twice, or is both there and deleted"


class _Place(Directory):
    """A directory of the new tree that is not complete: what has to wait until its children are there.

    Its times, which children change, and what children would inherit: the default ACL and the inode flags.
    """

    __slots__ = ("acl", "atime", "flags", "mtime")

    def __init__(self, fd: int) -> None:
        super().__init__(fd, self.complete)
        self.atime = self.mtime = self.flags = 0
        self.acl: bytes | None = None

    def complete(self) -> None:
        if self.acl is not None:
            os.setxattr(self.fd, _DEFAULT_ACL, self.acl)
        os.utime(self.fd, ns=(self.atime, self.mtime))
        if self.flags:
            _set_flags(self.fd, self.flags)


class NewTree:
    """The tree, and the directory that the last entry went into. `root` is an open, empty directory.

    `prefix` is b"trusted." or b"user.": where the overlay will look for attributes of its own.
    """

    def __init__(self, root: int, prefix: bytes) -> None:
        self._prefix = prefix
        self._descent = Descent(root)
        self._parts: list[bytes] = []
        self._here = b""
        self._places = [_Place(root)]
        self._implied: set[bytes] = {b""}
        self._implied_bytes = 0
        self._inheriting = False
        self._crew = Crew(self._make_small, _named)
        self._own = (os.geteuid(), os.getegid())
        self._umask = _umask()
        for acl in (_ACCESS_ACL, _DEFAULT_ACL):
            _drop_xattr(root, acl)

    def copy_root(self, old: int) -> None:
        """Give the root what another directory has, for a layer without an entry for it."""
        found = os.fstat(old)
        root = self._places[0]
        root.atime, root.mtime, root.gid = found.st_atime_ns, found.st_mtime_ns, found.st_gid
        os.fchown(root.fd, found.st_uid, found.st_gid)
        os.fchmod(root.fd, found.st_mode & 0o7777)
        own = self._prefix + b"overlay."
        for name in os.listxattr(old):
            raw = os.fsencode(name)
            if raw == _DEFAULT_ACL:
                root.acl = os.getxattr(old, name)
                self._inheriting = True
            elif not raw.startswith(own):
                os.setxattr(root.fd, raw, os.getxattr(old, name))

    def add(self, entry: Entry, source: Source, number: int) -> None:
        """Make one entry, with its data from the source. `number` is for errors: raises LayerError."""
        try:
            self._add(entry, source, number)
        except (LayerError, OSError, OverflowError, ValueError) as failure:
            if failure is self._crew.failure:  # of an earlier entry, which it names
                raise
            raise _named((number, entry, b"", memoryview(b"")), failure) from failure

    def finish(self) -> None:
        """Complete the directories that are still open, the root last."""
        self._go(b"")
        self._crew.drain(self._places[0])
        self._places[0].complete()
        if _umask() != self._umask:
            raise LayerError("the process's umask was changed while the layer was applied")

    def close(self) -> None:
        self._crew.close()
        self._descent.close()

    def _add(self, entry: Entry, source: Source, number: int) -> None:
        path, kind = entry.path, entry.kind
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
        place = self._places[-1]
        if kind == REGULAR:
            if entry.size <= _SMALL and entry.sparse is None and len(self._parts) < _DEEP:
                data = source.take(entry.size)
                if len(data) < entry.size:
                    raise _cut_off()
                self._crew.put(place, (number, entry, name, data))
            else:
                self._make_large(entry, place, name, source)
        elif kind == LINK:
            self._link(entry, place, name)
        elif kind == WHITEOUT:
            os.mknod(name, _CHARACTER, 0, dir_fd=place.fd)
        else:
            self._make_special(entry, place, name)

    def _make_small(self, job: Job, place: Directory) -> None:
        _, entry, name, data = job
        fd = os.open(name, _CREATE, entry.mode & 0o777, dir_fd=place.fd)
        try:
            if data:
                _write(fd, data)
            self._dress(fd, entry, place.gid)
        finally:
            os.close(fd)

    def _make_large(self, entry: Entry, place: _Place, name: bytes, source: Source) -> None:
        fd = os.open(name, _CREATE, entry.mode & 0o777, dir_fd=place.fd)
        try:
            if entry.sparse is not None:
                os.ftruncate(fd, entry.size)
            for offset, length in ((0, entry.size),) if entry.sparse is None else entry.sparse:
                shared = source.share(fd, offset, length)
                os.lseek(fd, offset + shared, os.SEEK_SET)
                left = length - shared
                while left:
                    part = source.some(left)
                    if not part:
                        raise _cut_off()
                    left -= len(part)
                    _write(fd, part)
            self._dress(fd, entry, place.gid)
        finally:
            os.close(fd)

    def _link(self, entry: Entry, place: _Place, name: bytes) -> None:
        """A hard link. Its target is of an earlier entry, and is found without following a symlink."""
        above, _, target = entry.link.rpartition(b"/")
        if not target:
            raise LayerError("it is a hard link to the root")
        self._crew.drain(place)
        descent = Descent(self._descent.root)
        try:
            source = place.fd
            if above != self._here:
                for part in above.split(b"/") if above else ():
                    descent.enter(part)
                source = descent.fd
            found = os.stat(target, dir_fd=source, follow_symlinks=False)
            if found.st_mode & 0o170000 == _CHARACTER and found.st_rdev == 0:
                raise LayerError(f"it is a hard link to {shown(entry.link)}, which is deleted")
            os.link(target, name, src_dir_fd=source, dst_dir_fd=place.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as failure:
            raise LayerError(
                f"it is a hard link to {shown(entry.link)}, which is not a file in front of it in the layer"
            ) from failure
        finally:
            descent.close()

    def _make_special(self, entry: Entry, place: _Place, name: bytes) -> None:
        """A symlink, FIFO, device or socket: made, then dressed by name, which is safe in a tree that is ours alone."""
        if entry.kind == SYMLINK:
            os.symlink(entry.link, name, dir_fd=place.fd)
        else:
            if entry.kind == header.CHARACTER and entry.device == (0, 0):
                raise LayerError(
                    "a character device 0:0 is how an overlay marks a deletion, and a layer has other marks for that: "
                    "was it made of an upper directory by a tool that does not know overlays?"
                )
            kind = _SPECIAL.get(entry.kind, _SOCKET)
            os.mknod(name, kind | 0o600, os.makedev(*entry.device), dir_fd=place.fd)
        # The *xattr calls take no directory descriptor; this is the kernel's own way to say one in a path.
        where = b"/proc/self/fd/%d/%b" % (place.fd, name)
        os.lchown(where, entry.uid, entry.gid)
        if entry.kind != SYMLINK:
            os.chmod(where, entry.mode)
        self._set_xattrs(where, entry)
        os.utime(where, ns=(entry.atime, entry.mtime), follow_symlinks=False)

    def _directory(self, entry: Entry) -> None:
        path = entry.path
        if path in self._implied:
            # So far it was only the parent of an earlier entry; this is its own.
            self._go(path)
            self._implied.discard(path)
            place = self._places[-1]
        elif not path:
            raise LayerError(_TWICE)
        else:
            above, _, name = path.rpartition(b"/")
            if above != self._here:
                self._go(above)
            os.mkdir(name, 0o700, dir_fd=self._places[-1].fd)
            place = self._enter(name)
        for index, (name, value) in enumerate(entry.xattrs):
            if name == _DEFAULT_ACL:
                place.acl = value
                del entry.xattrs[index]
                break
        place.flags = _flag_bits(entry.flags)
        if place.acl is not None or place.flags:
            self._inheriting = True
        place.atime, place.mtime, place.gid = entry.atime, entry.mtime, entry.gid
        os.fchown(place.fd, entry.uid, entry.gid)
        os.fchmod(place.fd, entry.mode)
        self._set_xattrs(place.fd, entry)

    def _dress(self, fd: int, entry: Entry, place_gid: int) -> None:
        """Owner, mode, attributes, times, flags, in this order: a new owner takes setuid and capabilities away."""
        # A new file has this process's owner and group, but the directory's group in one with setgid, or where the file
        # system gives every file its directory's group.
        if (entry.uid, entry.gid) != self._own or place_gid != entry.gid:
            os.fchown(fd, entry.uid, entry.gid)
        # It was made with this mode already, less what the umask takes and what making does not give.
        if entry.mode & (self._umask | 0o7000):
            os.fchmod(fd, entry.mode)
        if entry.xattrs or entry.flags:
            self._set_xattrs(fd, entry)
        os.utime(fd, ns=(entry.atime, entry.mtime))
        if entry.flags:
            _set_flags(fd, _flag_bits(entry.flags))

    def _set_xattrs(self, target: int | bytes, entry: Entry) -> None:
        follow = isinstance(target, int)
        for name, value in entry.xattrs:
            try:
                os.setxattr(target, escape_xattr(name, self._prefix), value, follow_symlinks=follow)
            except (OSError, ValueError) as failure:
                raise LayerError(f"its attribute {shown(name)} cannot be set: {failure}") from failure
        protected = bytes([letter for letter in entry.flags if letter in b"ai"])
        if protected:
            os.setxattr(target, self._prefix + b"overlay.protattr", protected, follow_symlinks=follow)

    def _go(self, path: bytes) -> None:
        """Make a directory of the new tree the current one. Missing ones are made, as other tools do."""
        parts = path.split(b"/") if path else []
        common = 0
        for one, other in zip(parts, self._parts, strict=False):
            if one != other:
                break
            common += 1
        while len(self._parts) > common:
            place = self._places.pop()
            self._parts.pop()
            # First, as the way up may lead through `..` of a directory that the crew closes as soon as it is left.
            self._descent.release()
            if not self._crew.leave(place):
                try:
                    place.complete()
                finally:
                    os.close(place.fd)
            self._places[-1].fd = self._descent.fd  # another one, if it had to be closed for being far up
        self._here = b"/".join(self._parts)
        for part in parts[common:]:
            self._enter_again(part)

    def _enter(self, name: bytes) -> _Place:
        """Open a directory just made in the current one, and make it the current one."""
        if len(self._parts) < _DEEP:
            self._crew.send(self._places[-1])
        else:
            self._crew.drain(self._places[-1])
        place = _Place(self._descent.enter(name))
        self._parts.append(name)
        self._places.append(place)
        self._here = b"/".join(self._parts)
        return place

    def _enter_again(self, name: bytes) -> None:
        """Open a directory that was complete once, or make one that has no entry of its own so far."""
        self._crew.drain(self._places[-1])  # its times are read back, so it must have its children
        here = self._here + b"/" + name if self._here else name
        try:
            place = self._enter(name)
        except FileNotFoundError:
            self._implied_bytes += len(here)
            if self._implied_bytes > _IMPLIED:
                raise LayerError("too many directories above it have no entry of their own") from None
            self._implied.add(here)
            os.mkdir(name, 0o755, dir_fd=self._places[-1].fd)
            place = self._enter(name)
            os.fchown(place.fd, 0, 0)
            os.fchmod(place.fd, 0o755)
        except OSError as failure:
            raise LayerError(f"it is inside {shown(here)}, which is not a directory of the layer") from failure
        found = os.fstat(place.fd)
        place.atime, place.mtime, place.gid = found.st_atime_ns, found.st_mtime_ns, found.st_gid
        if self._inheriting:
            place.acl = _drop_xattr(place.fd, _DEFAULT_ACL)
            place.flags = _clear_flags(place.fd)


def _named(job: Job | None, failure: BaseException) -> BaseException:
    """The error of an entry, with its number and its name."""
    if not isinstance(failure, (LayerError, OSError, OverflowError, ValueError)):
        return failure
    text: object = failure
    if isinstance(failure, FileExistsError):
        text = _TWICE
    elif isinstance(failure, OSError):
        text = failure.strerror
    where = "a directory" if job is None else f"entry {job[0]}, {shown(job[1].path)}"
    error = LayerError(f"{where}: {text}")
    error.__cause__ = failure
    return error


def _umask() -> int:
    """The process's umask, which only /proc tells without changing it (Linux 4.7)."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o777


def _write(fd: int, data: memoryview) -> None:
    done = os.write(fd, data[:WRITE])
    while done < len(data):
        done += os.write(fd, data[done : done + WRITE])


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
        bits |= _FLAGS.get(letter, 0)
    return bits


def _set_flags(fd: int, bits: int) -> None:
    if bits:
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
    found = value & _ALL_FLAGS
    if found:
        ioctl(fd, _SETFLAGS, (value & ~found).to_bytes(4, "little"))
    return found


def _cut_off() -> LayerError:
    return LayerError("the file ends in the middle of its data: it was cut off")
