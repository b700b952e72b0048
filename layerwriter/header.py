"""Tar headers with pax records: bytes out, bytes in, no input or output.

The format is POSIX.1-2017 pax interchange over ustar blocks. `encode` gives the whole header of an entry, its extended
header included. `parse_block` and `parse_records` take apart what anybody wrote.
"""

from __future__ import annotations

import os
from zlib import adler32

from layerwriter.layer import LayerError, shown

BLOCK = 512
END = bytes(2 * BLOCK)
ALIGNMENT = 4096
"""File systems share extents in units of their block size, which is 4 KiB wherever reflinks are common."""

REGULAR, LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"

RECORDS_LIMIT = 8 << 20
"""Bytes of pax records of one entry that are written and read. Go's archive/tar stops at 1 MiB."""

_RECORDS_MOST = 50_000
"""Records of one entry: a kernel lets an inode have at most 64 KiB of names of attributes."""

PATH_LIMIT = 1 << 20
"""Bytes of a path. A kernel takes 4 KiB at a time, but trees can be deeper than that."""

_OCTAL_7 = 0o7777777
_OCTAL_11 = 0o77777777777
_TAIL = bytes(32 + 32) + b"0000000\0" * 2 + bytes(155 + 12)
_SECOND = 1_000_000_000


def record(key: bytes, value: bytes) -> bytes:
    """One pax record: its own length in decimal, a space, key=value, a newline."""
    rest = len(key) + len(value) + 3
    length = rest + len(b"%d" % rest)
    if len(b"%d" % length) + rest != length:
        length += 1
    return b"%d %b=%b\n" % (length, key, value)


def time_record(key: bytes, nanoseconds: int) -> bytes:
    """A pax time, `mtime` or `atime`: decimal seconds with nine digits of fraction, the sign on the whole number."""
    if _SECOND * _SECOND <= nanoseconds < 10 * _SECOND * _SECOND:  # 2001 to 2286: ten digits
        return b"30 %b=%d.%09d\n" % (key, *divmod(nanoseconds, _SECOND))
    sign = b"-" if nanoseconds < 0 else b""
    seconds, fraction = divmod(abs(nanoseconds), _SECOND)
    return record(key, b"%b%d.%09d" % (sign, seconds, fraction))


def xattr_record(name: bytes, value: bytes) -> bytes:
    """An extended attribute as star and GNU tar write it; `%` and `=` of its name are escaped as GNU tar does."""
    if b"=" in name or b"%" in name:
        name = name.replace(b"%", b"%25").replace(b"=", b"%3D")
    return record(b"SCHILY.xattr." + name, value)


_extended_headers: dict[int, bytes] = {}


def _extended_header(size: int) -> bytes:
    """The ustar block in front of `size` bytes of pax records. Few sizes occur, and they occur for every entry."""
    block = _extended_headers.get(size)
    if block is None:
        block = _block(b"PaxHeaders/x", (0o644, 0, 0, size, 0), b"x", b"", _TAIL)
        if len(_extended_headers) < 256:  # a bound, whatever the sizes
            _extended_headers[size] = block
    return block


def _block(name: bytes, numbers: tuple[int, int, int, int, int], kind: bytes, link: bytes, tail: bytes) -> bytes:
    """A ustar block; `numbers` are mode, owner, group, size and time."""
    start = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (name.ljust(100, b"\0"), *numbers)
    end = b"%b%bustar\x0000%b" % (kind, link.ljust(100, b"\0"), tail)
    # The checksum is the sum of all bytes. Adler-32's low half is that sum plus one, as long as it stays under 65521,
    # which these blocks cannot reach (at most 200 bytes of names); it is twelve times faster than sum().
    total = (adler32(end, adler32(start)) & 0xFFFF) - 1 + 8 * 0x20
    return b"%b%06o\0 %b" % (start, total, end)


def encode(
    path: bytes,
    kind: bytes,
    *,
    mode: int = 0,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime: int = 0,
    atime: int = 0,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
    records: bytes = b"",
    position: int = -1,
) -> bytes:
    """The header of one entry, a multiple of 512 bytes.

    `mtime` and `atime` are nanoseconds since 1970, of any sign. `records` are pax records of the caller's. With
    `position`, the offset of this header in the tar, the records are stretched by a `comment` so that what follows the
    header begins at a multiple of 4 KiB.
    """
    seconds, fraction = divmod(mtime, _SECOND)
    if fraction or not 0 <= seconds <= _OCTAL_11:
        records += time_record(b"mtime", mtime)
        seconds = min(max(seconds, 0), _OCTAL_11)
    if atime != mtime:
        records += time_record(b"atime", atime)
    if len(path) > 100 or not path.isascii():
        if len(path) > PATH_LIMIT:
            raise LayerError(f"{shown(path[:200])}...: a path of {len(path)} bytes is longer than a layer can have")
        records += record(b"path", path)
    if len(link) > 100 or not link.isascii():
        records += record(b"linkpath", link)
    if uid > _OCTAL_7:
        records += record(b"uid", b"%d" % uid)
        uid = 0
    if gid > _OCTAL_7:
        records += record(b"gid", b"%d" % gid)
        gid = 0
    if size > _OCTAL_11:
        records += record(b"size", b"%d" % size)
        size = 0
    tail = _TAIL
    if device != (0, 0):
        tail = bytes(64) + b"%07o\0%07o\0" % device + bytes(155 + 12)
    if position >= 0:
        records = _stretch(records, position)
    block = _block(path[:100], (mode, uid, gid, size, seconds), kind, link[:100], tail)
    if not records:
        return block
    if len(records) > RECORDS_LIMIT:
        raise LayerError(
            f"{shown(path)}: its extended attributes and names take {len(records)} bytes, "
            f"more than the {RECORDS_LIMIT} bytes that one entry of a layer can have"
        )
    return b"%b%b%b%b" % (_extended_header(len(records)), records, bytes(-len(records) % BLOCK), block)


def encode_plain(path: bytes, found: os.stat_result) -> bytes:
    """The header of a regular file with nothing unusual, at a third of the cost of encode(); b"" for something unusual.

    Nearly every entry of a layer is such a file.
    """
    mode, uid, gid = found.st_mode, found.st_uid, found.st_gid
    mtime, atime = found.st_mtime_ns, found.st_atime_ns
    if len(path) > 100 or not path.isascii() or not _USUAL <= mtime < _USUAL * 8 or not _USUAL <= atime < _USUAL * 8:
        return b""
    owner = _owner_texts.get((mode, uid, gid))
    if owner is None:
        if uid > _OCTAL_7 or gid > _OCTAL_7:
            return b""
        owner = b"%07o\0%07o\0%07o\0" % (mode & 0o7777, uid, gid)
        if len(_owner_texts) < 256:  # a bound, whatever a tree holds
            _owner_texts[mode, uid, gid] = owner
    # Nanoseconds of these years have 19 digits, ten of them seconds.
    start = b"%b%b%011o\0%011o\0" % (path.ljust(100, b"\0"), owner, found.st_size, int(found[8]))
    total = (adler32(start, _PLAIN_SUM) & 0xFFFF) - 1
    digits = b"%d" % mtime
    if atime == mtime:
        return b"%b30 mtime=%b.%b\n%b%b%06o\0 %b" % (
            _HEADER_30,
            digits[:10],
            digits[10:],
            _REST_30,
            start,
            total,
            _PLAIN_END,
        )
    others = b"%d" % atime
    return b"%b30 mtime=%b.%b\n30 atime=%b.%b\n%b%b%06o\0 %b" % (
        _HEADER_60,
        digits[:10],
        digits[10:],
        others[:10],
        others[10:],
        _REST_60,
        start,
        total,
        _PLAIN_END,
    )


_owner_texts: dict[tuple[int, int, int], bytes] = {}
_USUAL = _SECOND * _SECOND
_PLAIN_END = REGULAR + bytes(100) + b"ustar\x0000" + _TAIL
_PLAIN_SUM = adler32(_PLAIN_END, adler32(b" " * 8))
_HEADER_30, _REST_30 = _extended_header(30), bytes(BLOCK - 30)
_HEADER_60, _REST_60 = _extended_header(60), bytes(BLOCK - 60)


def _stretch(records: bytes, position: int) -> bytes:
    """Add a comment to pax records so that the data behind the header begins at a multiple of 4 KiB."""
    if not records and (position + BLOCK) % ALIGNMENT == 0:
        return records
    padded = len(records) + -len(records) % BLOCK
    gap = -(position + 2 * BLOCK + padded) % ALIGNMENT
    if not records and gap == 0:
        gap = ALIGNMENT  # an extended header without records is not allowed
    if gap == 0:
        return records
    length = padded + gap - len(records)
    digits = b"%d" % length
    return b"%b%b comment=%b\n" % (records, digits, b" " * (length - len(digits) - len(b" comment=\n")))


class Block:
    """What one ustar header block says, before extended headers change it."""

    __slots__ = ("device", "gid", "kind", "link", "mode", "path", "raw", "size", "uid")

    def __init__(self, raw: bytes) -> None:
        """Take a block apart. Raises LayerError for one that is not a header."""
        # The checksum counts its own field as spaces. What is written otherwise than here, or is a sum past Adler-32's
        # modulus, takes the slow way.
        if raw[148:156] != b"%06o\0 " % ((adler32(raw[156:], adler32(raw[:148])) & 0xFFFF) + 255):
            stored = raw[148:156]
            if number(stored, "checksum") != sum(raw) - sum(stored) + 256:
                raise LayerError("a header's checksum is wrong: the file is damaged, or is not a tar")
        self.raw = raw
        self.path = raw[: raw.find(b"\0")] if raw[99] == 0 else raw[:100].split(b"\0", 1)[0]
        owner = raw[100:124]
        known = _owners.get(owner)
        if known is None:
            known = number(owner[:8], "mode") & 0o7777, number(owner[8:16], "owner"), number(owner[16:], "group")
            if len(_owners) < 256:  # a bound, whatever a file holds
                _owners[owner] = known
        self.mode, self.uid, self.gid = known
        self.size = number(raw[124:136], "size")
        self.kind = raw[156:157]
        self.link = raw[157:257].rstrip(b"\0").split(b"\0", 1)[0] if raw[157] else b""
        self.device = (0, 0)
        if raw[257:262] == b"ustar":
            if self.kind in (CHARACTER, BLOCK_DEVICE):
                self.device = (number(raw[329:337], "device"), number(raw[337:345], "device"))
            if raw[345] and raw[257:265] == b"ustar\x0000":
                self.path = raw[345:500].split(b"\0", 1)[0] + b"/" + self.path

    def time(self) -> int:
        """The modification time in nanoseconds, which an extended header mostly says better."""
        return number(self.raw[136:148], "time") * _SECOND


_owners: dict[bytes, tuple[int, int, int]] = {}


def number(field: bytes, what: str) -> int:
    """An octal field, or GNU's base 256 for what octal cannot say."""
    digits = field[:-1]
    if not digits.isdigit() or field[-1] not in b" \0":
        digits = field.strip(b" \0")
        if not digits:
            return 0
    if digits.isdigit():
        try:
            return int(digits, 8)
        except ValueError:
            pass
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field, "big", signed=True)
    raise LayerError(f"a header's {what} is not a number: {field!r}")


def parse_records(data: bytes) -> dict[bytes, bytes]:
    """The pax records of an extended header; where a key is given twice, the last one counts, as POSIX says.

    GNU tar's old sparse formats repeat two keys; their values are joined by commas. Raises LayerError.
    """
    records: dict[bytes, bytes] = {}
    repeated: list[bytes] = []
    at, end = 0, len(data)
    while at < end:
        space = data.find(b" ", at, at + 10)
        digits = data[at:space] if space > 0 else b""
        if not digits.isdigit():
            raise LayerError("a pax record does not begin with its length")
        stop = at + int(digits)
        equals = data.find(b"=", space, stop)
        if stop > end or stop <= space or data[stop - 1 : stop] != b"\n" or equals < 0:
            raise LayerError("a pax record's length is wrong")
        key, value = data[space + 1 : equals], data[equals + 1 : stop - 1]
        if not key:
            raise LayerError("a pax record has no key")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            repeated.append(value)
        else:
            records[key] = value
        if len(records) + len(repeated) > _RECORDS_MOST:
            raise LayerError(f"an extended header has more than {_RECORDS_MOST} records")
        at = stop
    if repeated:
        records[b"GNU.sparse.map"] = b",".join(repeated)
    return records


def parse_plain_times(data: bytes) -> tuple[int, int] | None:
    """The mtime and the atime of pax records that hold nothing else, in the form that nearly every entry has."""
    if data[:9] != b"30 mtime=" or data[19:20] != b"." or data[29:30] != b"\n":
        return None
    digits = data[9:19] + data[20:29]
    if len(data) == 30:
        return (int(digits),) * 2 if digits.isdigit() else None
    if len(data) != 60 or data[30:39] != b"30 atime=" or data[49:50] != b"." or data[59:60] != b"\n":
        return None
    others = data[39:49] + data[50:59]
    return (int(digits), int(others)) if digits.isdigit() and others.isdigit() else None


def parse_time(text: bytes) -> int:
    """Nanoseconds of a pax time; digits after the ninth are dropped. Raises LayerError."""
    if len(text) == 20 and text[10] == 0x2E:  # ten digits, a point and nine: nearly every time there is
        digits = text[:10] + text[11:]
        if digits.isdigit():
            return int(digits)
    digits = text[1:] if text[:1] == b"-" else text
    seconds, _, fraction = digits.partition(b".")
    if len(text) > 40 or not seconds.isdigit() or not (fraction.isdigit() or not fraction):
        raise LayerError(f"a time is not a decimal number: {shown(text[:40])}")
    value = int(seconds) * _SECOND + int(fraction[:9].ljust(9, b"0"))
    return -value if text[:1] == b"-" else value


def parse_integer(text: bytes, what: str) -> int:
    """A decimal number of a pax record. Raises LayerError."""
    if len(text) > 20 or not text.isdigit():
        raise LayerError(f"{what} is not a decimal number: {shown(text[:40])}")
    return int(text)


def decode_xattr_name(name: bytes) -> bytes:
    """Undo GNU tar's escapes in an attribute's name, if they are what the name holds.

    Go writes names as they are. A `%` that is not part of one of GNU tar's two escapes tells that nothing was escaped.
    """
    if b"%" not in name or name.count(b"%") != name.count(b"%25") + name.count(b"%3D"):
        return name
    return name.replace(b"%3D", b"=").replace(b"%25", b"%")
