"""What answers where Python has no gRPC: every request is declined, so that containerd's own differ does it.

Without any answer containerd would ask nobody else, and a node whose python3-grpcio went with an upgrade would pull no
image. Of HTTP/2 (RFC 9113) this needs frames alone: whatever is asked for, there is one answer.
"""

from __future__ import annotations

import struct

from differ.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_LARGEST = 1 << 14
"""Bytes of a frame's content: what a peer has to keep to that was not told of more (RFC 9113, 4.2)."""
_UNIMPLEMENTED = "12"
_WHY = "fermata-differ has no gRPC for Python: not implemented"


def decline(connection: socket.socket) -> None:
    """Answer UNIMPLEMENTED to every request of a connection, until the other side ends it. Raises OSError."""
    with connection, connection.makefile("rb") as stream:
        if stream.read(len(PREFACE)) != PREFACE:
            return
        connection.sendall(frame(SETTINGS))
        while len(head := stream.read(HEAD)) == HEAD:
            size, kind, flags, number = int.from_bytes(head[:3], "big"), *struct.unpack(">BBI", head[3:])
            if size > _LARGEST or len(content := stream.read(size)) != size:
                return
            connection.sendall(_answer(kind, flags, number, content))


def _answer(kind: int, flags: int, number: int, content: bytes) -> bytes:
    if kind in (SETTINGS, PING):
        return b"" if flags & ACK else frame(kind, ACK, 0, content if kind == PING else b"")
    said = b""
    if kind == DATA and content:
        # What all requests of a connection may hold together is given back as it comes.
        said = frame(WINDOW_UPDATE, content=struct.pack(">I", len(content)))
    if kind in (DATA, HEADERS) and flags & END_STREAM:
        said += frame(HEADERS, END_STREAM | END_HEADERS, number, _trailers())
    return said


def _trailers() -> bytes:
    """An answer without a message, in HPACK (RFC 7541): entry 8 of its table is `:status: 200`."""
    fields = (("content-type", "application/grpc"), ("grpc-status", _UNIMPLEMENTED), ("grpc-message", _WHY))
    return b"\x88" + b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode("ascii")
