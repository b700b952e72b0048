"""A tar taken apart into entries, whoever wrote it.

Read are pax (ours, GNU tar's, Go's, libarchive's), GNU's own format with long names, numbers in base 256 and its four
kinds of sparse files, and plain ustar. Nothing of it is trusted: sizes are bounded before anything is allocated, and
what has no clear meaning is an error that names the entry.
"""

from __future__ import annotations

import os

from layerwriter.header import (
    BLOCK,
    BLOCK_DEVICE,
    CHARACTER,
    DIRECTORY,
    FIFO,
    LINK,
    PATH_LIMIT,
    RECORDS_LIMIT,
    REGULAR,
    SYMLINK,
    Block,
    decode_xattr_name,
    number,
    parse_integer,
    parse_plain_times,
    parse_records,
    parse_time,
)
from layerwriter.layer import LayerError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from layerwriter.source import Source

SOCKET, WHITEOUT, OPAQUE = b"s", b"w", b"o"
"""Kinds of entries that tar has no letter for, beside those of the header module."""

_NAME_LIMIT = 1 << 20
_PADDING_LIMIT = 1 << 20
"""Bytes of zeros behind the end of a tar; GNU tar fills up to 10 KiB."""

_MAP_LIMIT = 400_000
"""Numbers in the map of a sparse file."""

_ZEROS = bytes(BLOCK)

_KINDS = (REGULAR, LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO)

_REFUSED = (
    (b"SCHILY.acl.", "access control lists as text: write the layer with --xattrs and without --acls"),
    (b"SCHILY.realsize", "a sparse file in star's format"),
    (b"SCHILY.filetype", "a file type of star's own"),
    (b"GNU.volume", "a part of a tar of several volumes"),
    (b"GNU.dumpdir", "an incremental dump"),
    (b"LIBARCHIVE.symlinktype", "a symlink of another system"),
)


class Entry(Block):
    """One entry of a layer.

    path      b"" for the root; never absolute, no `.` and no `..` in it
    kind      REGULAR, LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO, SOCKET; WHITEOUT: `path` is deleted;
              OPAQUE: nothing of the layers below shows in the directory `path`
    mode      permission bits with setuid, setgid and sticky
    uid, gid  numbers
    size      bytes of a regular file
    mtime, atime   nanoseconds since 1970
    link      a symlink's target, or the path of a hard link's
    device    major, minor
    xattrs    (name, value), as a program in the container sees them
    flags     letters of inode flags, as chattr has them
    sparse    None, or the parts of the file that are not holes, as (offset, length)
    stored    bytes of the file in the tar: all of them, or the parts of a sparse one
    """

    __slots__ = ("atime", "flags", "mtime", "sparse", "stored", "xattrs")

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        self.atime = self.mtime = 0
        self.stored = self.size
        self.xattrs: list[tuple[bytes, bytes]] = []
        self.flags = b""
        self.sparse: list[tuple[int, int]] | None = None

    def __repr__(self) -> str:
        return f"Entry({self.kind!r}, {self.path!r}, {self.mode:o}, {self.uid}, {self.gid}, {self.size})"


class Reader:
    """The entries of a source, one after the other.

    After next() the source stands at the entry's data; what the caller leaves of it is skipped by the following next().
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.count = 0
        self._data_end = 0
        self._name = b""
        self._extended = b""
        self._extended_size = 0

    def next(self) -> Entry | None:
        """The next entry, or None at the end, which was then checked. Raises LayerError that names the entry."""
        self._name, previous = b"", self._name
        try:
            self.skip(self._data_end)
            return self._next()
        except LayerError as failure:
            if self._name:
                raise LayerError(f"entry {self.count}, {shown(self._name)}: {failure}") from failure
            if self.count:
                raise LayerError(f"after entry {self.count}, {shown(previous)}: {failure}") from failure
            raise LayerError(f"at the beginning of the layer: {failure}") from failure

    def skip(self, end: int) -> None:
        """Pass over data up to a position in the tar."""
        while self.source.position < end:
            if not self.source.some(end - self.source.position):
                raise LayerError("the file ends in the middle of an entry: it was cut off")

    def _next(self) -> Entry | None:
        records: dict[bytes, bytes] = {}
        long_name = long_link = None
        times = None
        while True:
            raw = bytes(self.source.take(BLOCK))
            if len(raw) < BLOCK:
                raise LayerError("the file ends without the two blocks of zeros that end a tar: it was cut off")
            kind = raw[156:157]
            if kind == b"x" and not records and times is None:
                if raw != self._extended:  # a writer's extended headers are often the same block again
                    self._extended_size = Block(raw).size
                    self._extended = raw
                body = self._body(self._extended_size, RECORDS_LIMIT)
                times = parse_plain_times(body)
                if times is None:
                    records = parse_records(body)
                    if not records:
                        raise LayerError("an extended header is empty")
            elif kind == b"g":
                if set(parse_records(self._body(Block(raw).size, RECORDS_LIMIT))) - {b"comment"}:
                    raise LayerError("a global header changes entries behind it; a layer has none")
            elif kind == b"L" and long_name is None:
                long_name = _text(self._body(Block(raw).size, _NAME_LIMIT))
            elif kind == b"K" and long_link is None:
                long_link = _text(self._body(Block(raw).size, _NAME_LIMIT))
            elif kind in (b"x", b"L", b"K"):
                raise LayerError("two extended headers of one kind in front of one entry")
            elif raw[0] == 0 and raw == _ZEROS:
                if records or times is not None or long_name is not None or long_link is not None:
                    raise LayerError("an extended header is not followed by an entry")
                self._end()
                return None
            else:
                break
        entry = Entry(raw)
        if long_name is not None:
            entry.path = long_name
        if long_link is not None:
            entry.link = long_link
        self.count += 1
        self._name = entry.path
        if records:
            for key in (b"FERMATA.path", b"GNU.sparse.name", b"path"):
                if key in records:
                    self._name = records[key]
                    break
        if times is None:
            entry.mtime = entry.atime = entry.time()
        else:
            entry.mtime, entry.atime = times
            if entry.kind == REGULAR and self._plain(entry):
                return entry
        self._apply(entry, records)
        return entry

    def _plain(self, entry: Entry) -> bool:
        """Complete a regular file with nothing unusual, as nearly every entry is. False: it has to be looked at."""
        path, size, position = entry.path, entry.size, self.source.position
        if (
            b"/." in path
            or b"//" in path
            or b".wh." in path
            or path[:1] in (b"", b"/", b".")
            or path[-1] == 0x2F
            or size < 0
            or position + size > self.source.limit
            or not 0 <= entry.uid < 0xFFFFFFFF
            or not 0 <= entry.gid < 0xFFFFFFFF
        ):
            return False
        entry.link = b""
        self._data_end = position + size + -size % BLOCK
        return True

    def _body(self, size: int, limit: int) -> bytes:
        if not 0 <= size <= limit:
            raise LayerError(f"an extended header of {size} bytes: more than {limit} are not taken")
        padded = size + -size % BLOCK
        data = bytes(self.source.take(padded))
        if len(data) < padded:
            raise LayerError("the file ends in the middle of an extended header: it was cut off")
        return data[:size]

    def _end(self) -> None:
        """The rest of the file has to be zeros, one more block at least and not without end."""
        rest = 0
        while part := self.source.some(1 << 16):
            rest += len(part)
            if bytes(part).count(0) != len(part):
                raise LayerError("a block of zeros is followed by more data, so this is no end of a tar")
            if rest > _PADDING_LIMIT:
                raise LayerError(f"more than {_PADDING_LIMIT} bytes of zeros behind the end of the tar")
        if rest < BLOCK:
            raise LayerError("the file ends after one of the two blocks of zeros that end a tar: it was cut off")

    def _apply(self, entry: Entry, records: dict[bytes, bytes]) -> None:
        """Complete an entry with its pax records, and check it."""
        sparse = None
        own_path = own_link = own_kind = None
        name = entry.path
        size = entry.size
        atime = None
        for key, value in records.items():
            if key == b"mtime":
                entry.mtime = parse_time(value)
                if atime is None:
                    entry.atime = entry.mtime
            elif key == b"atime":
                atime = entry.atime = parse_time(value)
            elif key == b"path":
                name = value
            elif key.startswith(b"SCHILY.xattr."):
                entry.xattrs.append((decode_xattr_name(key[13:]), value))
            elif key == b"linkpath":
                entry.link = value
            elif key == b"size":
                size = parse_integer(value, "its size")
            elif key == b"uid":
                entry.uid = parse_integer(value, "its owner")
            elif key == b"gid":
                entry.gid = parse_integer(value, "its group")
            elif key.startswith(b"GNU.sparse."):
                sparse = sparse or {}
                sparse[key[11:]] = value
            elif key == b"FERMATA.path":
                own_path = value
            elif key == b"FERMATA.linkpath":
                own_link = value
            elif key == b"FERMATA.kind":
                own_kind = value
            elif key == b"FERMATA.flags":
                entry.flags = value
            elif key.startswith(b"FERMATA."):
                raise LayerError(f"the record {shown(key)} is not known: a newer version of this project wrote it")
            elif key == b"RHT.security.selinux":
                entry.xattrs.append((b"security.selinux", value))
            else:
                for refused, meaning in _REFUSED:
                    if key.startswith(refused):
                        raise LayerError(f"it has {meaning} ({shown(key)}), which is not read here")
        self._data_end = self.source.position + size + -size % BLOCK
        if size < 0 or self.source.position + size > self.source.limit:
            raise LayerError(f"its {size} bytes take the layer past its limit of {self.source.limit} bytes")
        entry.size = entry.stored = size
        if entry.kind in (b"\0", b"7"):
            entry.kind = REGULAR
        elif entry.kind == b"S":
            entry.kind = REGULAR
            self._old_sparse(entry)
        elif sparse is not None:
            name = sparse.get(b"name", name)
            self._sparse(entry, sparse)
        if entry.kind == REGULAR and name.endswith(b"/") and size == 0:
            entry.kind = DIRECTORY
        if entry.kind not in _KINDS:
            raise LayerError(f"type {entry.kind!r} is not one that a layer has")
        if entry.kind != REGULAR and size:
            raise LayerError(f"type {entry.kind!r} with {size} bytes of data")
        for identity, what in ((entry.uid, "owner"), (entry.gid, "group")):
            if not 0 <= identity < 0xFFFFFFFF:
                raise LayerError(f"its {what} {identity} is out of range")
        self._place(entry, name, own_path, own_kind)
        if entry.kind == LINK:
            entry.link = _clean(entry.link if own_link is None else own_link, "its target")
            if own_link is None and b".wh." in entry.link and _marked(entry.link):
                raise LayerError(f"it is a link to {shown(entry.link)}, which is a mark of a deletion")
        elif entry.kind == SYMLINK:
            if not entry.link or b"\0" in entry.link:
                raise LayerError("a symlink's target is empty or has a zero byte in it")
        else:
            entry.link = b""

    def _place(self, entry: Entry, name: bytes, own_path: bytes | None, own_kind: bytes | None) -> None:
        """Set the entry's path, and its kind where that hangs on its name."""
        if own_path is not None:
            entry.path = _clean(own_path, "its path")
        else:
            entry.path = _clean(name, "its path")
            if b".wh." in entry.path and _marked(entry.path):
                self._deletion(entry)
        if own_kind is None:
            return
        if entry.kind != REGULAR or entry.size or own_kind not in (b"socket", b"whiteout"):
            raise LayerError(f"its kind {shown(own_kind)} does not fit what it is")
        entry.kind = SOCKET if own_kind == b"socket" else WHITEOUT

    def _deletion(self, entry: Entry) -> None:
        head, _, name = entry.path.rpartition(b"/")
        if entry.kind != REGULAR or entry.size:
            raise LayerError("a mark of a deletion that is not an empty file")
        if _marked(head):
            raise LayerError("it is inside a mark of a deletion")
        if name == b".wh..wh..opq":
            entry.kind, entry.path = OPAQUE, head
            return
        deleted = name[4:]
        if deleted in (b"", b".", b"..") or deleted.startswith(b".wh."):
            raise LayerError("a mark of a deletion that names nothing")
        entry.kind, entry.path = WHITEOUT, head + b"/" + deleted if head else deleted

    def _sparse(self, entry: Entry, fields: dict[bytes, bytes]) -> None:
        """GNU tar's formats in pax: 0.0 and 0.1 have the map in the header, 1.0 in front of the data."""
        real = fields.get(b"realsize", fields.get(b"size"))
        if real is None or entry.kind != REGULAR:
            raise LayerError("a sparse file without its size")
        if fields.get(b"major") == b"1" and fields.get(b"minor") == b"0":
            numbers, used = self._map()
        elif b"map" in fields and fields.get(b"major", b"0") == b"0":
            text = fields[b"map"]
            if text.count(b",") > _MAP_LIMIT:
                raise LayerError("its sparse map has too many parts")
            numbers, used = [parse_integer(part, "its sparse map") for part in text.split(b",")], 0
        else:
            raise LayerError("a sparse file in a format that is not known")
        _set_parts(entry, numbers, parse_integer(real, "its size"), entry.size - used)

    def _map(self) -> tuple[list[int], int]:
        """The map of format 1.0: decimal numbers, one a line, their count first, filled up to a block."""
        used = 0
        text = b""
        numbers: list[int] = []
        wanted = 1
        while len(numbers) < wanted:
            block = bytes(self.source.take(BLOCK))
            used += BLOCK
            if len(block) < BLOCK or self.source.position > self._data_end:
                raise LayerError("its sparse map is cut off")
            *lines, text = (text + block).split(b"\n")
            for line in lines:
                numbers.append(parse_integer(line, "its sparse map"))
                if len(numbers) == 1:
                    wanted += 2 * numbers[0]
                    if wanted > _MAP_LIMIT:
                        raise LayerError(f"its sparse map has {numbers[0]} parts, which is too many")
                if len(numbers) == wanted:
                    break
            if len(text) >= BLOCK:
                raise LayerError("its sparse map is not numbers")
        return numbers[1:], used

    def _old_sparse(self, entry: Entry) -> None:
        """GNU tar's format before pax: the map in the header block and in blocks behind it."""
        numbers: list[int] = []
        real = number(entry.raw[483:495], "size")
        chunk, more = entry.raw[386:482], entry.raw[482]
        while True:
            for at in range(0, len(chunk), 24):
                if chunk[at + 12 : at + 24].strip(b"\0 "):
                    numbers.append(number(chunk[at : at + 12], "sparse map"))
                    numbers.append(number(chunk[at + 12 : at + 24], "sparse map"))
            if not more:
                break
            extension = bytes(self.source.take(BLOCK))
            if len(extension) < BLOCK or len(numbers) > _MAP_LIMIT:
                raise LayerError("its sparse map is cut off or too long")
            self._data_end += BLOCK
            chunk, more = extension[:504], extension[504]
        _set_parts(entry, numbers, real, entry.size)


def _set_parts(entry: Entry, numbers: list[int], real: int, stored: int) -> None:
    if len(numbers) % 2:
        raise LayerError("its sparse map has an odd number of numbers")
    parts = [(numbers[i], numbers[i + 1]) for i in range(0, len(numbers), 2)]
    end = total = 0
    for offset, length in parts:
        if offset < end or length < 0:
            raise LayerError("the parts of its sparse map overlap")
        end = offset + length
        total += length
    if end > real or real >= 1 << 63 or total != stored:
        raise LayerError("its sparse map does not fit its size")
    entry.sparse = [part for part in parts if part[1]]
    entry.size, entry.stored = real, stored


def _text(body: bytes) -> bytes:
    return body.split(b"\0", 1)[0]


def _marked(path: bytes) -> bool:
    return path.startswith(b".wh.") or b"/.wh." in path


def _clean(path: bytes, what: str) -> bytes:
    """A path without `.` and without needless slashes; b"" is the root. Raises LayerError for one that may lead out."""
    if b"\0" in path:
        raise LayerError(f"{what} has a zero byte in it")
    if len(path) > PATH_LIMIT:
        raise LayerError(f"{what} has {len(path)} bytes")
    if b"/." not in path and b"//" not in path and path[:1] not in (b"/", b".", b""):
        return path[:-1] if path[-1] == 0x2F else path
    if path.startswith(b"/"):
        raise LayerError(f"{what} is absolute")
    if not path:
        raise LayerError(f"{what} is empty")
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise LayerError(f"{what} has `..` in it")
    return b"/".join(parts)


def read(layer: str | os.PathLike[str]) -> Iterator[Entry]:
    """Every entry of a layer file, uncompressed or compressed with gzip or zstd. Raises LayerError."""
    from layerwriter.source import Source

    try:
        fd = os.open(layer, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as failure:
        raise LayerError(f"{os.fspath(layer)} cannot be read: {failure.strerror}") from failure
    source = None
    try:
        source = Source(fd, limit=1 << 62)
        reader = Reader(source)
        while (entry := reader.next()) is not None:
            yield entry
    finally:
        if source is not None:
            source.close()
        os.close(fd)
