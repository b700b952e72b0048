"""Messages between the shim and a guest: one JSON object a line, descriptors beside its first byte.

No message is longer than 16 MiB. One that says "fds": N is accompanied by N descriptors (SCM_RIGHTS).
"""

from __future__ import annotations

import array
import json
import os
import socket
import time
from typing import Any

from .errors import GuestError

LIMIT = 16 << 20
MOST_DESCRIPTORS = 250


class Connection:
    """One end of a connection. Every wait ends at a deadline (time.monotonic())."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""
        self._descriptors: list[int] = []

    def receive(self, deadline: float) -> tuple[dict[str, Any], list[int]] | None:
        """The next message with its descriptors, which are the caller's to close; None at the end of the connection.

        Raises:
            GuestError: the deadline passed, or what came is no message of this protocol.
        """
        received = bytearray(self._rest)
        searched = 0
        while (end := received.find(b"\n", searched)) < 0:
            searched = len(received)
            if searched > LIMIT:
                raise GuestError(f"a message is longer than {LIMIT} bytes")
            data = self._read(deadline)
            if not data:
                if received:
                    raise GuestError("the connection ended inside a message")
                return None
            received += data
        self._rest = bytes(received[end + 1 :])
        try:
            message = json.loads(received[:end])
        except ValueError as error:
            raise GuestError(f"a message is no JSON: {error}") from error
        if not isinstance(message, dict):
            raise GuestError("a message is no JSON object")
        wanted = message.get("fds", 0)
        if not isinstance(wanted, int) or wanted != len(self._descriptors):
            raise GuestError(f"a message speaks of {wanted!r} descriptors, and {len(self._descriptors)} came")
        descriptors, self._descriptors = self._descriptors, []
        return message, descriptors

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """Send a message without descriptors.

        Raises:
            GuestError: the deadline passed, or the other end is gone.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(data)
        except OSError as error:
            raise GuestError(f"an answer could not be sent: {error}") from error

    def linger(self, deadline: float) -> None:
        """Send nothing more, and wait until the other end has closed: by then it has read what was sent.

        Raises:
            GuestError: it did not before the deadline.
        """
        self._socket.shutdown(socket.SHUT_WR)
        while self._read(deadline):
            pass

    def close(self) -> None:
        """Close the connection and every descriptor that nobody took."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self._socket.close()

    def _read(self, deadline: float) -> bytes:
        numbers = array.array("i")
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * numbers.itemsize)
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise socket.timeout("timed out")
            self._socket.settimeout(left)
            data, ancillary, flags, _ = self._socket.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
        except socket.timeout as error:
            raise GuestError("nothing came before the limit") from error
        except OSError as error:
            raise GuestError(f"the connection broke: {error}") from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
        self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise GuestError("descriptors were lost on the way: too many at once, or too many open files")
        return data
