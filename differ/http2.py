"""HTTP/2's preface and frames (RFC 9113), as far as connections are looked at here without gRPC."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client begins with (3.4); a frame of settings follows, which is also what a server begins with."""
HEAD = 9
"""Bytes before a frame's content: its length, type, flags and stream (4.1)."""
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4


def frame(kind: int, flags: int = 0, number: int = 0, content: bytes = b"") -> bytes:
    """A frame of a stream, which is 0 for the connection."""
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, number) + content
