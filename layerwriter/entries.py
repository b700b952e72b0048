"""The entries of a layer, as they are put into the tar: one short function for each kind of file.

Attributes are read through file descriptors, so that no path is looked up twice, and files are opened with O_NOATIME:
taking a layer leaves no trace in the container.
"""

from __future__ import annotations

import errno
import os
import stat
from fcntl import ioctl

from layerwriter import header
from layerwriter.layer import LayerError, shown
from layerwriter.links import Links
from layerwriter.overlay import Marks, split_xattrs
from layerwriter.walk import ENCODING, ERRORS, FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from layerwriter.sink import Sink

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_REGULAR = 0o100000

_OPEN_UNSEEN = _OPEN_FILE | os.O_NOATIME
_LACKING = (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS)
"""Errors of a file system that has no attributes, or no flags."""

_SMALL = 256 << 10
"""Bytes up to which a file is read in one piece, straight behind its header."""

_ALIGNED = 1 << 20
"""Bytes from which a file's data is aligned in the tar, so that it can share extents."""

_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS
_FLAGS = (
    (0x08, b"S"),  # FS_SYNC_FL
    (0x10, b"i"),  # FS_IMMUTABLE_FL
    (0x20, b"a"),  # FS_APPEND_FL
    (0x40, b"d"),  # FS_NODUMP_FL
    (0x80, b"A"),  # FS_NOATIME_FL
    (0x10000, b"D"),  # FS_DIRSYNC_FL
)
"""Inode flags that a program in a container may set and see, with chattr's letters."""
_ANY_FLAG = 0x100F8
_NO_FLAGS = bytes(4)

_ZEROS = bytes(header.BLOCK)
_END = 2 * header.BLOCK + header.BLOCK
"""Bytes at most behind an entry's data: what fills its last block, and the end of the tar."""

_NAMED = 20
"""Names that a note of one kind lists; the rest is counted."""

_UNMARKED = Marks()


def alias(path: bytes) -> bytes:
    """The name in the tar of a path in which a component begins with `.wh.`.

    Every OCI tool takes such a name for a deletion. The component's dot becomes a comma, which keeps the length in
    bounds, and the true path goes into a record of our own.
    """
    return b"/".join([b"," + part[1:] if part.startswith(b".wh.") else part for part in path.split(b"/")])


class Entries:
    """Puts entries into a sink.

    `prefix` is b"trusted." or b"user.", where the overlay keeps attributes of its own in an upper directory, or None
    for a merged tree, where all attributes are the container's.
    """

    quick = True
    """Whether a file with nothing unusual may be put past _emit()."""

    def __init__(self, sink: Sink, prefix: bytes | None) -> None:
        self.sink = sink
        self.count = 0
        self._prefix = prefix
        self._links = Links()
        self._lost: dict[str, list[str]] = {}
        self._lost_count: dict[str, int] = {}

    def directory(self, fd: int, path: bytes) -> Marks:
        """An open directory without its contents; `path` is b"" for the root. Returns the overlay's marks on it."""
        found = os.fstat(fd)
        records, marks = self._attributes(fd, path)
        flags = _flags(fd) + marks.protected
        if flags:
            records += self._flag_record(flags, path)
        self._emit(path + b"/" if path else b"./", header.DIRECTORY, found, records)
        if marks.opaque:
            # In front of the children: some tools remove what they find when they meet the mark.
            self._mark(path + b"/.wh..wh..opq" if path else b".wh..wh..opq", b"")
        return marks

    def files(
        self, directory: int, names: Iterator[tuple[str, int]], prefix: bytes, whiteouts: bool = False
    ) -> tuple[str, int] | None:
        """Put what `names` has, each with its kind, as long as they are regular files. Returns the first that is not.

        The directory is open as `directory`, and its path with a `/` is `prefix`. `whiteouts`: it may hold whiteouts of
        the attribute kind. Everything waits for this loop, so what an ordinary small file needs is in it, and nothing
        is looked up twice.
        """
        sink, encode = self.sink, header.encode_plain
        for name, kind in names:
            if kind != FILE:
                return name, kind
            path = prefix + name.encode(ENCODING, ERRORS)
            fd, head = -1, b""
            try:
                try:
                    fd = os.open(name, _OPEN_UNSEEN, dir_fd=directory)
                except PermissionError:  # O_NOATIME is for the owner and CAP_FOWNER
                    fd = os.open(name, _OPEN_FILE, dir_fd=directory)
                found = os.fstat(fd)
                size = found.st_size
                if (
                    self.quick
                    and found.st_nlink == 1
                    and size <= _SMALL
                    and found.st_blocks * 512 >= size
                    and found.st_mode & 0o170000 == _REGULAR
                    and b".wh." not in path
                    and not os.listxattr(fd)
                    and not int.from_bytes(ioctl(fd, _GETFLAGS, _NO_FLAGS), "little") & _ANY_FLAG
                ):
                    head = encode(path, found)
                if not head:
                    self._file(fd, path, found, whiteouts)
                    continue
                used = sink.used
                stop = used + len(head) + size + -size % 512
                if stop + _END > sink.room:
                    sink.refuse(stop - used, shown(path))
                if stop > sink.capacity:
                    sink.flush()
                    stop -= used
                    used = 0
                view = sink.view
                start = used + len(head)
                end = start + size
                sink.used = stop
                view[used:start] = head
                if size:
                    if os.readv(fd, (view[start:end],)) != size:
                        raise changed(path)
                    view[end:stop] = _ZEROS[: stop - end]
                self.count += 1
            except OSError as failure:
                if failure is sink.failure:
                    raise
                if head or failure.errno not in _LACKING or not self.quick:
                    raise LayerError(f"{shown(path)}: {failure.strerror}") from failure
                # A file system without attributes, or without flags: every file is asked for both with care.
                self.quick = False
                self._file(fd, path, found, whiteouts)
            finally:
                if fd >= 0:
                    os.close(fd)
        return None

    def _file(self, fd: int, path: bytes, found: os.stat_result, whiteouts: bool) -> None:
        """A regular file that is unusual in some way, and open."""
        if found.st_mode & 0o170000 != _REGULAR:
            raise changed(path)
        records, marks = self._attributes(fd, path)
        if marks.whiteout and whiteouts and found.st_size == 0:
            self.whiteout(path)
            return
        if found.st_nlink > 1 and self._linked(found, path):
            return
        flags = _flags(fd) + marks.protected
        if flags:
            records += self._flag_record(flags, path)
        size = found.st_size
        if size > _SMALL or found.st_blocks * 512 < size:
            self._large(fd, path, found, records)
            return
        self._emit(path, header.REGULAR, found, records, size)
        if self.sink.copy(fd, 0, size) != size:
            raise changed(path)
        self.sink.pad()

    def special(self, directory: int, name: str, path: bytes) -> None:
        """Anything that is neither a directory nor a regular file."""
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFCHR and found.st_rdev == 0:
            self.whiteout(path)
            return
        # The *xattr calls take no directory descriptor; this is the kernel's own way to say one in a path.
        records, _ = self._attributes(f"/proc/self/fd/{directory}/{name}", path)
        if found.st_nlink > 1 and self._linked(found, path):
            return
        if kind == stat.S_IFLNK:
            target = os.fsencode(os.readlink(name, dir_fd=directory))
            self._emit(path, header.SYMLINK, found, records, link=target)
        elif kind == stat.S_IFIFO:
            self._emit(path, header.FIFO, found, records)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            device = (os.major(found.st_rdev), os.minor(found.st_rdev))
            self._emit(
                path, header.CHARACTER if kind == stat.S_IFCHR else header.BLOCK_DEVICE, found, records, device=device
            )
        elif kind == stat.S_IFSOCK:
            # tar has no sockets. Other tools make an empty file of it, on which connect() fails as on a dead socket.
            self._emit(path, header.REGULAR, found, records + header.record(b"FERMATA.kind", b"socket"))
            self._lose("socket", "its path is carried, but not what listens on it", path)
        else:
            raise changed(path)

    def whiteout(self, path: bytes) -> None:
        """The deletion of `path`."""
        head, slash, name = path.rpartition(b"/")
        if b".wh." in path and alias(path) != path:
            records = header.record(b"FERMATA.path", path) + header.record(b"FERMATA.kind", b"whiteout")
            self._mark(alias(head) + slash + b".wh." + alias(name), records)
        else:
            self._mark(head + slash + b".wh." + name, b"")

    def notes(self) -> tuple[str, ...]:
        """A sentence for each kind of thing that could not be carried, with the names."""
        notes = []
        for kind, names in self._lost.items():
            more = self._lost_count[kind] - len(names)
            notes.append(f"{kind}: {', '.join(names)}{f' and {more} more' if more else ''}")
        return tuple(notes)

    def _attributes(self, target: int | str, path: bytes) -> tuple[bytes, Marks]:
        try:
            names = os.listxattr(target, follow_symlinks=isinstance(target, int))
        except OSError as failure:
            if failure.errno != errno.ENOTSUP:
                raise
            names = []
        if not names:
            return b"", _UNMARKED
        found = [(os.fsencode(n), os.getxattr(target, n, follow_symlinks=isinstance(target, int))) for n in names]
        visible, marks = found, _UNMARKED
        if self._prefix is not None:
            visible, marks = split_xattrs(found, self._prefix, path)
        visible.sort()
        return b"".join([header.xattr_record(name, value) for name, value in visible]), marks

    def _emit(
        self,
        path: bytes,
        kind: bytes,
        found: os.stat_result,
        records: bytes,
        size: int = 0,
        *,
        link: bytes = b"",
        device: tuple[int, int] = (0, 0),
        aligned: int = -1,
        sparse: bool = False,
    ) -> None:
        """Put an entry's header. `size` bytes of data are the caller's to put; `aligned` is as encode()'s position."""
        name = path
        if b".wh." in path:
            name = alias(path)
            if name != path:
                records += header.record(b"FERMATA.path", path.rstrip(b"/"))
                self._lose("name that begins with .wh.", "only this project's reader restores it", path)
        if sparse:
            records += header.record(b"GNU.sparse.name", name)
            above, slash, last = name.rpartition(b"/")
            name = above + slash + b"GNUSparseFile.0/" + last
        head = header.encode(
            name,
            kind,
            mode=found.st_mode & 0o7777,
            uid=found.st_uid,
            gid=found.st_gid,
            size=size,
            mtime=found.st_mtime_ns,
            atime=found.st_atime_ns,
            link=link,
            device=device,
            records=records,
            position=aligned,
        )
        self._put_head(head, path, size)

    def _mark(self, path: bytes, records: bytes) -> None:
        self._put_head(header.encode(path, header.REGULAR, records=records), path, 0)

    def _put_head(self, head: bytes, path: bytes, size: int) -> None:
        sink = self.sink
        length = len(head)
        if sink.used + length + size + _END > sink.room:
            sink.refuse(length + size, shown(path))
        self.count += 1
        if length > sink.capacity - sink.used:
            sink.put(head)
        else:
            sink.view[sink.used : sink.used + length] = head
            sink.used += length

    def _linked(self, found: os.stat_result, path: bytes) -> bool:
        """Put a hard link if the inode was met under another name, else remember this one."""
        target = self._links.first(found, path)
        if target is None:
            return False
        records = b""
        name = target
        if b".wh." in target:
            name = alias(target)
            if name != target:
                records = header.record(b"FERMATA.linkpath", target)
        self._emit(path, header.LINK, found, records, link=name)
        return True

    def _large(self, fd: int, path: bytes, found: os.stat_result, records: bytes) -> None:
        """A file that is large, or sparse, or both."""
        size = found.st_size
        sink = self.sink
        position = sink.position if size >= _ALIGNED else -1
        parts = extents(fd, size)
        if parts == [(0, size)]:
            self._emit(path, header.REGULAR, found, records, size, aligned=position)
        else:
            self._sparse(path, found, records, parts, position)
        for offset, length in parts:
            shared = sink.share(fd, offset, length)
            if sink.copy(fd, offset + shared, length - shared) != length - shared:
                raise changed(path)
        sink.pad()

    def _sparse(
        self, path: bytes, found: os.stat_result, records: bytes, parts: list[tuple[int, int]], position: int
    ) -> None:
        """The header and the map of a sparse file, in the format that GNU tar calls pax 1.0 and Go reads too."""
        ends_with_data = parts and sum(parts[-1]) == found.st_size
        listed = parts if ends_with_data else [*parts, (found.st_size, 0)]
        text = b"%d\n" % len(listed) + b"".join([b"%d\n%d\n" % part for part in listed])
        text += bytes(-len(text) % 512)
        records += (
            header.record(b"GNU.sparse.major", b"1")
            + header.record(b"GNU.sparse.minor", b"0")
            + header.record(b"GNU.sparse.realsize", b"%d" % found.st_size)
        )
        self._emit(
            path,
            header.REGULAR,
            found,
            records,
            len(text) + sum([length for _, length in parts]),
            aligned=position + len(text) if position >= 0 else -1,
            sparse=True,
        )
        self.sink.put(text)

    def _flag_record(self, flags: bytes, path: bytes) -> bytes:
        for letter, meaning in ((b"i", "immutable"), (b"a", "append-only")):
            if letter in flags:
                self._lose(f"{meaning} flag", "only this project's reader restores it", path)
        return header.record(b"FERMATA.flags", bytes(sorted(set(flags))))

    def _lose(self, kind: str, what: str, path: bytes) -> None:
        key = f"{kind} ({what})"
        self._lost_count[key] = self._lost_count.get(key, 0) + 1
        names = self._lost.setdefault(key, [])
        if len(names) < _NAMED:
            names.append(shown(path))


def extents(fd: int, size: int) -> list[tuple[int, int]]:
    """The parts of a file that are not holes, as (offset, length)."""
    parts = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as failure:
            if failure.errno != errno.ENXIO:
                raise
            break
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < end:
            parts.append((start, end - start))
    return parts


def _flags(fd: int) -> bytes:
    try:
        value = int.from_bytes(ioctl(fd, _GETFLAGS, _NO_FLAGS), "little")
    except OSError as failure:
        if failure.errno in _LACKING:
            return b""
        raise
    if not value & _ANY_FLAG:
        return b""
    return b"".join([letter for bit, letter in _FLAGS if value & bit])


def changed(path: bytes) -> LayerError:
    return LayerError(f"{shown(path)} changed while the layer was written: freeze the container first")
