"""The relay between containerd and the stock shim: every frame goes on as it came, but for the calls that are ours.

One thread moves frames with epoll; a call of ours runs in a thread of its own and its answer comes back through the
same connection. Stream ids stay the client's: calls of ours leave gaps in what the stock shim sees, which ttrpc allows.
"""

from __future__ import annotations

import _socket
import _thread
import os
import select
import time

from shim import ttrpc
from shim.client import connect
from shim.errors import INTERNAL, RESOURCE_EXHAUSTED, ShimError
from shim.wire import WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.account import Account
    from shim.log import Log

    Handler = Callable[["Call"], ttrpc.Response]

_READ_SIZE = 1 << 18
_HIGH_WATER = 8 << 20  # unsent bytes from which on the other side is not read any more
_LINGER = 5.0  # seconds for answers to leave after the stock shim's end


class Call:
    """A call of ours: the request, when it came, and the take or restore that it has begun or goes on with."""

    def __init__(self, request: ttrpc.Request) -> None:
        self.request = request
        self.began = time.monotonic()
        self.account: Account | None = None

    @property
    def deadline(self) -> float | None:
        """When the client's time limit ends, by time.monotonic(); None when it set none."""
        limit = self.request.timeout_nano
        return self.began + limit / 1e9 if limit > 0 else None

    def remaining_nano(self) -> int:
        """What is left of the client's time limit in nanoseconds; 0 when it set none."""
        if self.request.timeout_nano <= 0:
            return 0
        return max(1, self.request.timeout_nano - int((time.monotonic() - self.began) * 1e9))


class _Side:
    """One socket of a pair: its frames in, its bytes out."""

    def __init__(self, sock: _socket.socket, *, from_client: bool) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fd = sock.fileno()
        self.from_client = from_client
        self.reader = ttrpc.FrameReader()
        self.out = bytearray()
        self.other: _Side | None = None
        self.last_stream = -1
        self.mask = 0
        self.open = True
        self.calls = 0  # calls of ours that are not answered yet
        self.finishing = False  # no more comes from the other side: close once all answers have left


class Relay:
    """Serves `listener`, passing frames to the stock shim at `stock_path`, until the stock shim ends.

    `handler(service, method)` returns the function that answers a call of ours, or None to pass it on. Whatever such a
    function raises becomes the call's error: a ShimError as its sentence, anything else as an internal error with a
    log line.
    """

    def __init__(
        self,
        listener: _socket.socket,
        stock_path: str,
        handler: Callable[[str, str], Handler | None],
        log: Log,
    ) -> None:
        self._listener = listener
        self._stock_path = stock_path
        self._handler = handler
        self._log = log
        # Kept open and silent: its end is the stock shim's end.
        self._keeper = connect(stock_path)
        self._epoll = select.epoll()
        self._sides: dict[int, _Side] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._answers: list[tuple[_Side, bytes]] = []
        self._lock = _thread.allocate_lock()
        self._running = 0

    def serve(self) -> None:
        """Relay until the stock shim has ended, every answer has left and every call of ours is finished."""
        listener, keeper, wake = self._listener.fileno(), self._keeper.fileno(), self._wake_read
        self._listener.setblocking(False)
        for fd in (listener, keeper, wake):
            self._epoll.register(fd, select.EPOLLIN)
        deadline = 0.0
        while True:
            for fd, events in self._epoll.poll(0.05 if deadline else None):
                if fd == wake:
                    self._deliver_answers()
                elif fd == listener:
                    self._accept()
                elif fd == keeper:
                    self._epoll.unregister(keeper)
                    self._epoll.unregister(listener)
                    self._listener.close()
                    deadline = time.monotonic() + _LINGER
                elif side := self._sides.get(fd):
                    if events & (select.EPOLLOUT | select.EPOLLERR) and side.open:
                        self._flush(side)
                    if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and side.open:
                        self._read(side)
            if deadline:
                self._deliver_answers()
                with self._lock:
                    running = self._running
                if running:
                    deadline = time.monotonic() + _LINGER
                elif time.monotonic() > deadline or not any(
                    side.out or not side.from_client for side in self._sides.values()
                ):
                    return

    def _accept(self) -> None:
        try:
            sock, _ = self._accept_socket()
        except OSError:
            return  # the client has gone again, or we are out of descriptors: the next event tries again
        client = _Side(sock, from_client=True)
        try:
            stock = _Side(connect(self._stock_path), from_client=False)
        except OSError as error:
            # The stock shim is on its way out; its end reaches us through the keeper.
            self._log("warning", "the stock shim refused a connection", error=error)
            sock.close()
            return
        client.other, stock.other = stock, client
        for side in (client, stock):
            self._sides[side.fd] = side
            side.mask = select.EPOLLIN
            self._epoll.register(side.fd, side.mask)

    def _accept_socket(self) -> tuple[_socket.socket, object]:
        # The C class has no accept() of its own, and the socket module costs 16 ms.
        fd, address = self._listener._accept()  # type: ignore[attr-defined]
        return _socket.socket(fileno=fd), address

    def _read(self, side: _Side) -> None:
        try:
            data = side.sock.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(side)
            return
        other = side.other
        for frame in side.reader.feed(data):
            if frame.oversize:
                message = f"message of {frame.oversize} bytes, the limit is {ttrpc.MAX_DATA}"
                answer = ttrpc.Response.failure(RESOURCE_EXHAUSTED, message).encode()
                target = side if side.from_client else other
                if target:
                    target.out += ttrpc.Frame(frame.stream, ttrpc.RESPONSE, 0, answer).encode()
            elif not (side.from_client and self._take(side, frame)) and other:
                other.out += frame.encode()
        for target in (side, other):
            if target and target.open:
                self._flush(target)

    def _take(self, side: _Side, frame: ttrpc.Frame) -> bool:
        """Run the call in a thread when it is one of ours; False means: pass it on."""
        if frame.kind != ttrpc.REQUEST:
            return False
        in_order = frame.stream % 2 == 1 and frame.stream > side.last_stream
        side.last_stream = max(side.last_stream, frame.stream)
        if not in_order:
            return False  # the stock shim refuses it with its own words
        try:
            request = ttrpc.Request.decode(frame.data)
        except WireError:
            return False  # likewise
        handler = self._handler(request.service, request.method)
        if handler is None:
            return False
        call = Call(request)
        side.calls += 1
        with self._lock:
            self._running += 1
        try:
            _thread.start_new_thread(self._run, (handler, call, side, frame.stream))
        except RuntimeError as error:  # no more threads to be had
            failure = ttrpc.Response.failure(RESOURCE_EXHAUSTED, f"{request.method}: {error}")
            self._answer(side, frame.stream, failure.encode())
        return True

    def _run(self, handler: Handler, call: Call, side: _Side, stream: int) -> None:
        method = call.request.method
        try:
            answer = handler(call).encode()
        except ShimError as error:
            self._log("error", f"{method} failed", error=error)
            answer = ttrpc.Response.failure(error.code, str(error)).encode()
        except WireError as error:
            answer = ttrpc.Response.failure(INTERNAL, f"{method}: the request cannot be read: {error}").encode()
        except OSError as error:
            # What the node lacks: room, descriptors, a right, a directory.
            about = f"{error.filename}: " if error.filename is not None else ""
            self._log("error", f"{method} failed", error=error)
            answer = ttrpc.Response.failure(INTERNAL, f"{method}: {about}{error.strerror or error}").encode()
        except BaseException as error:
            import traceback

            self._log("error", f"{method}: a fault in the shim itself", trace=traceback.format_exc()[-3000:])
            answer = ttrpc.Response.failure(
                INTERNAL, f"{method}: a fault in fermata itself: {error!r}; see containerd's log"
            ).encode()
        self._answer(side, stream, answer)

    def _answer(self, side: _Side, stream: int, answer: bytes) -> None:
        data = ttrpc.Frame(stream, ttrpc.RESPONSE, 0, answer).encode()
        with self._lock:
            self._answers.append((side, data))
            self._running -= 1
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    def _deliver_answers(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass
        with self._lock:
            answers, self._answers = self._answers, []
        for side, data in answers:
            side.calls -= 1
            if side.open:
                side.out += data
                self._flush(side)

    def _flush(self, side: _Side) -> None:
        while side.out:
            try:
                sent = side.sock.send(side.out)
            except BlockingIOError:
                break
            except OSError:
                self._end(side)
                return
            del side.out[:sent]
        if side.finishing and not side.out and not side.calls:
            self._close(side)
            return
        self._update(side)
        if side.other and side.other.open:
            self._update(side.other)

    def _update(self, side: _Side) -> None:
        other = side.other
        mask = select.EPOLLOUT if side.out else 0
        if not side.finishing and len(side.out) < _HIGH_WATER and not (other and len(other.out) >= _HIGH_WATER):
            mask |= select.EPOLLIN
        if mask != side.mask:
            side.mask = mask
            self._epoll.modify(side.fd, mask)

    def _end(self, side: _Side) -> None:
        """This side's peer has gone: what it sent still reaches the other side, which then ends as well."""
        other = side.other
        self._close(side)
        if other and other.open:
            other.finishing = True
            self._flush(other)

    def _close(self, side: _Side) -> None:
        if not side.open:
            return
        side.open = False
        side.out.clear()
        self._epoll.unregister(side.fd)
        self._sides.pop(side.fd, None)
        side.sock.close()
