"""What answers where Python has no gRPC: every request is declined, so that containerd's own differ does it.

Without any answer containerd would ask nobody else, and a node whose python3-grpcio went with an upgrade would pull no
image. Of HTTP/2 (RFC 9113) this needs frames alone: whatever is asked for, there is one answer.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_LARGEST = 1 << 14
"""Bytes of a frame's content: what a peer has to keep to that was not told of more (RFC 9113, 4.2)."""
_UNIMPLEMENTED = "12"
_WHY = "fermata-differ has no gRPC for Python: not implemented"


def decline(connection: socket.socket) -> None:
    """Answer UNIMPLEMENTED to every request of a connection, until the other side ends it. Raises OSError."""
    with connection, connection.makefile("rb") as stream:
        if stream.read(len(_PREFACE)) != _PREFACE:
            return
        connection.sendall(_frame(_SETTINGS))
        while len(head := stream.read(9)) == 9:
            size, kind, flags, number = int.from_bytes(head[:3], "big"), *struct.unpack(">BBI", head[3:])
            if size > _LARGEST or len(content := stream.read(size)) != size:
                return
            connection.sendall(_answer(kind, flags, number, content))


def _answer(kind: int, flags: int, number: int, content: bytes) -> bytes:
    if kind in (_SETTINGS, _PING):
        return b"" if flags & _ACK else _frame(kind, _ACK, 0, content if kind == _PING else b"")
    said = b""
    if kind == _DATA and content:
        # What all requests of a connection may hold together is given back as it comes.
        said = _frame(_WINDOW_UPDATE, content=struct.pack(">I", len(content)))
    if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
        said += _frame(_HEADERS, _END_STREAM | _END_HEADERS, number, _trailers())
    return said


def _trailers() -> bytes:
    """An answer without a message, in HPACK (RFC 7541): entry 8 of its table is `:status: 200`."""
    fields = (("content-type", "application/grpc"), ("grpc-status", _UNIMPLEMENTED), ("grpc-message", _WHY))
    return b"\x88" + b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode("ascii")


def _frame(kind: int, flags: int = 0, number: int = 0, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, number) + content
