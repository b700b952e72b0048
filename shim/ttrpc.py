"""ttrpc's frames and messages, without I/O: bytes go in, frames come out. The same code serves client and server.

A frame is a ten-byte header and data. Header: data length u32, stream id u32, type u8, flags u8, big-endian. A client's
streams are odd and increase. Source: https://github.com/containerd/ttrpc/blob/main/PROTOCOL.md
"""

from __future__ import annotations

from shim.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER_SIZE = 10
MAX_DATA = 4 << 20
"""Largest data of one frame, in bytes; a larger frame is answered with a status and the connection goes on."""

REQUEST, RESPONSE, DATA = 1, 2, 3
REMOTE_CLOSED, REMOTE_OPEN, NO_DATA = 1, 2, 4


class Frame:
    """One frame. `oversize` is the announced length of data that was too large and was skipped, else 0."""

    __slots__ = ("data", "flags", "kind", "oversize", "stream")

    def __init__(self, stream: int, kind: int, flags: int = 0, data: bytes = b"", oversize: int = 0) -> None:
        self.stream = stream
        self.kind = kind
        self.flags = flags
        self.data = data
        self.oversize = oversize

    def encode(self) -> bytes:
        """The frame's bytes."""
        return (
            len(self.data).to_bytes(4, "big")
            + self.stream.to_bytes(4, "big")
            + bytes((self.kind, self.flags))
            + self.data
        )

    def __repr__(self) -> str:
        return f"Frame(stream={self.stream}, kind={self.kind}, flags={self.flags}, {len(self.data)} bytes)"


class FrameReader:
    """Turns a byte stream into frames. Holds at most one frame's bytes, whatever a peer announces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skip = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes as they came, return the frames that are complete now.

        A frame with more than MAX_DATA bytes of data is returned at its header, with `oversize` set and no data; its
        data is dropped as it comes.
        """
        if self._skip:
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            data = data[dropped:]
        buffer = self._buffer
        buffer += data
        frames = []
        at = 0
        while len(buffer) - at >= HEADER_SIZE:
            length = int.from_bytes(buffer[at : at + 4], "big")
            stream = int.from_bytes(buffer[at + 4 : at + 8], "big")
            kind, flags = buffer[at + 8], buffer[at + 9]
            at += HEADER_SIZE
            if length > MAX_DATA:
                frames.append(Frame(stream, kind, flags, oversize=length))
                dropped = min(length, len(buffer) - at)
                at += dropped
                self._skip = length - dropped
                if self._skip:
                    break
            elif len(buffer) - at < length:
                at -= HEADER_SIZE
                break
            else:
                frames.append(Frame(stream, kind, flags, bytes(buffer[at : at + length])))
                at += length
        del buffer[:at]
        return frames

    @property
    def partial(self) -> bool:
        """Whether the stream stands inside a frame, so that its end now would be a broken connection."""
        return bool(self._buffer) or self._skip > 0


class KeyValue(Message):
    """One pair of a request's metadata."""

    FIELDS = {1: ("key", str), 2: ("value", str)}
    key: str
    value: str


class Request(Message):
    """A call: service, method, the request message's bytes, a timeout in nanoseconds (0: none), metadata."""

    FIELDS = {
        1: ("service", str),
        2: ("method", str),
        3: ("payload", bytes),
        4: ("timeout_nano", int),
        5: ("metadata", [KeyValue]),
    }
    service: str
    method: str
    payload: bytes
    timeout_nano: int
    metadata: list[KeyValue]


class AnyMessage(Message):
    """google.protobuf.Any as containerd writes it: the type url is the bare message name."""

    FIELDS = {1: ("type_url", str), 2: ("value", bytes)}
    type_url: str
    value: bytes


class Status(Message):
    """google.rpc.Status."""

    FIELDS = {1: ("code", int), 2: ("message", str), 3: ("details", [AnyMessage])}
    code: int
    message: str
    details: list[AnyMessage]


class Response(Message):
    """An answer: a status that is absent or of code 0 on success, and the response message's bytes."""

    FIELDS = {1: ("status", Status), 2: ("payload", bytes)}
    status: Status | None
    payload: bytes

    @classmethod
    def failure(cls, code: int, message: str, **fields: Any) -> Response:
        """An answer that carries an error."""
        return cls(status=Status(code=code, message=message, **fields))

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.status is None or self.status.code == 0
