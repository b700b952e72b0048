"""Everything that a program can see of a tree, and how two trees differ."""

from __future__ import annotations

import os
import stat
from fcntl import ioctl
from hashlib import sha256

from layerwriter.entries import extents
from layerwriter.layer import LayerError, shown
from layerwriter.walk import DIRECTORY, FILE, Descent, listing, open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Path = str | os.PathLike[str]

_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS
_FLAGS = 0x100F8  # sync, immutable, append-only, no-dump, no-atime, directory-sync
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 64 << 10
_ZEROS = bytes(_CHUNK)
_ALL = 1 << 62
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}

FIELDS = (
    "kind",
    "mode",
    "uid",
    "gid",
    "size",
    "mtime",
    "device",
    "target",
    "links",
    "first",
    "xattrs",
    "flags",
    "holes",
    "digest",
)


class Item:
    """One entry of a tree, as a program there sees it.

    path     bytes; b"" for the root
    kind     "file", "directory", "symlink", "fifo", "socket", "character device", "block device"
    mode     permission bits with setuid, setgid and sticky
    uid, gid numbers
    size     bytes of a file, else 0
    mtime    nanoseconds since 1970
    device   (major, minor)
    target   a symlink's target
    links    hard links of anything but a directory
    first    the first path in the walk's order that is the same inode, if that is another one
    xattrs   name -> value
    flags    inode flags (FS_IOC_GETFLAGS) that a program can set
    holes    True if the file has a hole
    digest   of a file's content; a hole and zeros make the same one
    """

    __slots__ = ("path", *FIELDS)

    def __init__(self, path: bytes, found: os.stat_result) -> None:
        self.path = path
        self.kind = _KINDS[stat.S_IFMT(found.st_mode)]
        self.mode = found.st_mode & 0o7777
        self.uid = found.st_uid
        self.gid = found.st_gid
        self.size = found.st_size if self.kind == "file" else 0
        self.mtime = found.st_mtime_ns
        is_device = self.kind in ("character device", "block device")
        self.device = (os.major(found.st_rdev), os.minor(found.st_rdev)) if is_device else (0, 0)
        self.target = b""
        self.links = 1 if self.kind == "directory" else found.st_nlink
        self.first = b""
        self.xattrs: dict[bytes, bytes] = {}
        self.flags = 0
        self.holes = False
        self.digest = ""

    def as_dict(self) -> dict[str, object]:
        """For JSON: bytes as text that says every byte."""
        values: dict[str, object] = {"path": shown(self.path)}
        for field in FIELDS:
            value = getattr(self, field)
            if field == "xattrs":
                value = {shown(name): shown(data) if data else "" for name, data in sorted(value.items())}
            elif isinstance(value, bytes):
                value = shown(value) if value else ""
            values[field] = value
        return values

    def __repr__(self) -> str:
        return f"Item({self.as_dict()})"


def record(root: Path, *, contents: bool = True) -> Iterator[Item]:
    """Every entry of a tree, the root first and a directory before its children, in the order of names.

    Other file systems mounted below are recorded as the directory they are mounted on. Without `contents` no file is
    read and no digest made. Raises LayerError.
    """
    try:
        fd = open_directory(os.fspath(root))
    except OSError as failure:
        raise LayerError(f"{os.fspath(root)} cannot be read: {failure.strerror}") from failure
    path = b""
    try:
        descent = Descent(fd)
        first: dict[tuple[int, int], bytes] = {}
        top = os.fstat(fd)
        item = Item(b"", top)
        _fill(item, fd)
        yield item
        below = [(listing(fd, _ALL), b"")]
        while below:
            names, prefix = below[-1]
            for name, kind in names:
                path = prefix + os.fsencode(name)
                if kind == DIRECTORY:
                    inside = descent.enter(name)
                    found = os.fstat(inside)
                    item = Item(path, found)
                    _fill(item, inside)
                    yield item
                    if found.st_dev == top.st_dev:
                        below.append((listing(inside, _ALL), path + b"/"))
                        break
                    descent.leave()
                    continue
                found = os.stat(name, dir_fd=descent.fd, follow_symlinks=False)
                item = Item(path, found)
                if found.st_nlink > 1:
                    item.first = first.setdefault((found.st_dev, found.st_ino), path)
                    if item.first == path:
                        item.first = b""
                if kind == FILE:
                    _fill_file(item, descent.fd, name, contents)
                else:
                    if item.kind == "symlink":
                        item.target = os.fsencode(os.readlink(name, dir_fd=descent.fd))
                    item.xattrs = _xattrs(f"/proc/self/fd/{descent.fd}/{name}")
                yield item
            else:
                below.pop()
                if below:
                    descent.leave()
    except OSError as failure:
        raise LayerError(f"{os.fspath(root)}/{shown(path)}: {failure.strerror}") from failure
    finally:
        descent.close()
        os.close(fd)


def compare(one: Path | Iterable[Item], other: Path | Iterable[Item], *, ignore: tuple[str, ...] = ()) -> Iterator[str]:
    """How two trees differ, one line for each entry that does. Each is a directory or the items of a record().

    `ignore` names fields of an Item that are not looked at.
    """
    ours = iter(record(one) if isinstance(one, (str, os.PathLike)) else one)
    theirs = iter(record(other) if isinstance(other, (str, os.PathLike)) else other)
    fields = [field for field in FIELDS if field not in ignore]
    left, right = next(ours, None), next(theirs, None)
    while left is not None or right is not None:
        if right is None or (left is not None and _order(left) < _order(right)):
            assert left is not None
            yield f"only in the first: {shown(left.path)} ({left.kind})"
            left = next(ours, None)
        elif left is None or _order(right) < _order(left):
            yield f"only in the second: {shown(right.path)} ({right.kind})"
            right = next(theirs, None)
        else:
            changed = [field for field in fields if getattr(left, field) != getattr(right, field)]
            if changed:
                words = [f"{field} {getattr(left, field)!r} and {getattr(right, field)!r}" for field in changed]
                yield f"{shown(left.path)}: {', '.join(words)}"
            left, right = next(ours, None), next(theirs, None)


def _order(item: Item) -> list[str]:
    """The order of record(): a directory's children come right behind it, names sorted as Python sorts them."""
    return [os.fsdecode(part) for part in item.path.split(b"/")] if item.path else []


def _fill(item: Item, fd: int) -> None:
    item.xattrs = _xattrs(fd)
    buffer = bytearray(4)
    try:
        ioctl(fd, _GETFLAGS, buffer)
    except OSError:  # a file system without flags
        return
    item.flags = int.from_bytes(buffer, "little") & _FLAGS


def _fill_file(item: Item, directory: int, name: str, contents: bool) -> None:
    try:
        fd = os.open(name, _OPEN_FILE | os.O_NOATIME, dir_fd=directory)
    except PermissionError:  # O_NOATIME is for the owner and CAP_FOWNER
        fd = os.open(name, _OPEN_FILE, dir_fd=directory)
    try:
        _fill(item, fd)
        item.holes = bool(item.size) and extents(fd, item.size) != [(0, item.size)]
        if contents:
            item.digest = _digest(fd, item.size)
    finally:
        os.close(fd)


def _digest(fd: int, size: int) -> str:
    """The SHA-256 of a file's content, where runs of zeros count as their place: a hole and zeros are one content."""
    total = sha256(b"%d" % size)
    at = 0
    for offset, length in extents(fd, size):
        at, end = max(at, offset - offset % _CHUNK), offset + length
        while at < end:
            part = os.pread(fd, _CHUNK, at)
            if part != _ZEROS[: len(part)]:
                total.update(b"%d" % at)
                total.update(part)
            at += _CHUNK
    return total.hexdigest()


def _xattrs(target: int | str) -> dict[bytes, bytes]:
    follow = isinstance(target, int)
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError:  # a file system without attributes
        return {}
    return {os.fsencode(name): os.getxattr(target, name, follow_symlinks=follow) for name in names}
