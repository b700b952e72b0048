"""Tars of any content, made a block at a time: what an attacker, a broken disk or another tool would hand us."""

from __future__ import annotations

from layerwriter import header

MOMENT = 1_700_000_000_000_000_000


def entry(path: bytes, data: bytes = b"", kind: bytes = header.REGULAR, **fields) -> bytes:
    """One entry. A directory has a `/` at the end of its path."""
    if path.endswith(b"/") and kind == header.REGULAR:
        kind = header.DIRECTORY
    fields.setdefault("mode", 0o755 if kind == header.DIRECTORY else 0o644)
    fields.setdefault("mtime", MOMENT)
    fields.setdefault("atime", fields["mtime"])
    size = fields.pop("size", len(data))
    return header.encode(path, kind, size=size, **fields) + data + bytes(-len(data) % 512)


def tar(*parts: bytes) -> bytes:
    return b"".join(parts) + header.END


def block(**changes: bytes) -> bytes:
    """A ustar header of a file named `file`, with some fields replaced and its checksum right."""
    places = {
        "name": (0, 100),
        "mode": (100, 8),
        "uid": (108, 8),
        "gid": (116, 8),
        "size": (124, 12),
        "mtime": (136, 12),
        "kind": (156, 1),
        "link": (157, 100),
        "magic": (257, 8),
    }
    raw = bytearray(entry(b"file"))
    for field, value in changes.items():
        at, length = places[field]
        raw[at : at + length] = value.ljust(length, b"\0")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def extended(records: bytes, kind: bytes = b"x") -> bytes:
    """An extended header with any records."""
    return block(name=b"PaxHeaders/x", kind=kind, size=b"%011o" % len(records)) + records + bytes(-len(records) % 512)
