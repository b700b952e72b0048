"""A ttrpc client: one connection, one call at a time, blocking."""

from __future__ import annotations

import _socket

from shim import ttrpc
from shim.errors import UNAVAILABLE, ShimError
from shim.wire import WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


def socket_path(address: str) -> str:
    """The file system path of an address such as `unix:///run/containerd/s/…`.

    Raises ShimError for any other kind of address.
    """
    path = address.removeprefix("unix://")
    if not path.startswith("/"):
        raise ShimError(f"address {address!r} is not a unix socket's path, the only kind that a shim on Linux serves")
    return path


def connect(path: str) -> _socket.socket:
    """Connect to a unix stream socket. Raises OSError."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, path) from None
    return sock


class Client:
    """A connection to a ttrpc server at the socket `path`.

    `name` is what errors call the server.
    """

    def __init__(self, path: str, name: str = "the stock shim") -> None:
        self._name = name
        self._stream = -1
        self._reader = ttrpc.FrameReader()
        try:
            self._sock = connect(path)
        except OSError as error:
            raise ShimError(f"{name} does not answer at {path}: {error.strerror}", UNAVAILABLE) from error

    def call(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        timeout_nano: int = 0,
        metadata: Sequence[ttrpc.KeyValue] = (),
    ) -> ttrpc.Response:
        """Call and wait for the answer, which may carry an error status.

        `timeout_nano` goes to the server, which enforces it; here it bounds the wait too, 5 s later. Raises ShimError
        when the server goes away or answers with something else than a response.
        """
        self._stream += 2
        request = ttrpc.Request(
            service=service, method=method, payload=payload, timeout_nano=timeout_nano, metadata=list(metadata)
        )
        self._sock.settimeout(timeout_nano / 1e9 + 5 if timeout_nano > 0 else None)
        try:
            self._sock.sendall(ttrpc.Frame(self._stream, ttrpc.REQUEST, ttrpc.REMOTE_CLOSED, request.encode()).encode())
            while True:
                data = self._sock.recv(65536)
                if not data:
                    raise ShimError(f"{self._name} went away during {method}", UNAVAILABLE)
                for frame in self._reader.feed(data):
                    if frame.stream == self._stream and frame.kind == ttrpc.RESPONSE:
                        return self._response(frame, method)
        except OSError as error:
            raise ShimError(f"{self._name} did not answer {method}: {error}", UNAVAILABLE) from error

    def _response(self, frame: ttrpc.Frame, method: str) -> ttrpc.Response:
        if frame.oversize:
            raise ShimError(f"{self._name} answered {method} with {frame.oversize} bytes, more than a frame may have")
        try:
            return ttrpc.Response.decode(frame.data)
        except WireError as error:
            raise ShimError(f"{self._name} answered {method} with something that is no response: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
