"""The process `fermata-differ`: a socket for root alone, and the diff service behind it.

gRPC for Python opens its own sockets and takes none that is open already. systemd opens ours long before containerd
starts and keeps it while we are replaced, so that no request is ever refused. So connections are accepted here and
passed through to gRPC's own socket, which stands in the same directory that only root can enter. What passes are
requests of some hundred bytes: layers go to containerd on another way.

containerd gives a new connection a second to its first bytes, and Python may need that for importing gRPC. So whoever
comes meanwhile is sent the first frame of HTTP/2 at once, and only waits for the answer to its request.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from differ import http2
from differ.http2 import HEAD, PREFACE, frame
from shim import grpcio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[socket.socket, bool], None]

SOCKET = "/run/fermata-differ/differ.sock"
CONTAINERD = "/run/containerd/containerd.sock"
SETTINGS = frame(http2.SETTINGS)
"""What a server of HTTP/2 begins with (RFC 9113, 3.4), here of no settings."""
GOAWAY = frame(http2.GOAWAY, content=(2**31 - 1).to_bytes(4, "big") + bytes(4))
"""The frame after which a client sends its next requests somewhere else, while those under way go on (6.8)."""
_FIRST_PASSED = 3  # SD_LISTEN_FDS_START
_ENDING = (signal.SIGTERM, signal.SIGINT)
_THREADS = 64
"""Requests that are answered at a time. More than the layers made at a time: an Apply must not wait for a Diff."""
_GRACE = 20
"""Seconds that running requests are given when the process is asked to end."""
_LEAVING = 1.0
"""Seconds that connections without requests are given to end by themselves, and answers to be passed on."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fermata-differ", description="Answers containerd's requests for the diff of a container's file system."
    )
    parser.add_argument("--socket", default=SOCKET, help=f"where containerd connects ({SOCKET}); systemd may pass it")
    parser.add_argument("--address", default=CONTAINERD, help=f"containerd's socket ({CONTAINERD})")
    parser.add_argument(
        "--gzip-level",
        type=int,
        choices=range(10),
        default=1,
        metavar="0-9",
        help="how small a gzip layer is to be, in exchange for time that a container stands still; 0 stores (1)",
    )
    options = parser.parse_args(argv)
    try:
        listener = _passed() or _opened(options.socket)
    except OSError as failure:
        print(f"fermata-differ: {options.socket} cannot be opened: {failure.strerror}", file=sys.stderr)
        return 1
    os.umask(0o077)
    asked = threading.Event()
    # Waited for, not handled: a handler that sets the event could interrupt this thread
    # while it holds the event's lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    _check_directory(os.path.dirname(listener.getsockname()))
    door = _Door(listener, asked)
    try:
        grpcio.load()
    except ImportError as missing:
        print(
            f"fermata-differ needs gRPC for Python and leaves everything to containerd's own differ until it is there: "
            f"install python3-grpcio, and systemctl restart fermata-differ ({missing})",
            file=sys.stderr,
            flush=True,
        )
        _decline(door, asked)
    else:
        _serve(door, os.path.dirname(listener.getsockname()), options.address, options.gzip_level, asked)
    return 0


def _decline(door: _Door, asked: threading.Event) -> None:
    from differ.decline import decline

    def answer(connection: socket.socket, greeted: bool) -> None:
        with contextlib.suppress(OSError):  # the other side is gone
            decline(connection)  # which says its settings again, and takes any number of answers to that

    door.open(answer)
    _notify("READY=1")
    signal.sigwait(_ENDING)
    asked.set()
    _notify("STOPPING=1")
    door.close()


def _serve(door: _Door, directory: str, containerd: str, gzip_level: int, asked: threading.Event) -> None:
    import grpc

    from differ import content
    from differ.service import Differ, to_stderr

    inner = f"{directory}/grpc-{os.getpid()}.sock"
    _remove_strays(directory)
    channel = content.connect(containerd)
    differ = Differ(channel, to_stderr, gzip_level)
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((differ.handler(),))
    server.add_insecure_port(f"unix:{inner}")
    server.start()
    passages = Passages(inner)
    door.open(passages.serve)
    _thread(differ.keep_clear)
    _notify("READY=1")
    signal.sigwait(_ENDING)
    asked.set()
    _notify("STOPPING=1")
    door.close()
    # gRPC's server cancels requests that reach it while it stops. So they are sent elsewhere first.
    passages.leave()
    server.stop(_GRACE).wait()
    passages.wait()
    channel.close()
    _remove_strays(directory)  # gRPC removes its socket too, if it comes to that before the process ends


class _Door:
    """Where connections come in, and wait until it is known who answers them."""

    def __init__(self, listener: socket.socket, ending: threading.Event) -> None:
        self._listener = listener
        self._opened = threading.Event()
        self._answer: Answer | None = None
        self._accepting = _thread(lambda: _accept(listener, self._enter, ending))

    def open(self, answer: Answer) -> None:
        """From now on, and for all who wait: `answer` is given the connection, and whether it was greeted."""
        self._answer = answer
        self._opened.set()

    def close(self) -> None:
        """Wait until nobody comes in any more, which is soon after the end is asked for."""
        self._accepting.join()
        self._listener.close()

    def _enter(self, connection: socket.socket) -> None:
        greeted = not self._opened.is_set()
        if greeted:
            try:
                connection.sendall(SETTINGS)
            except OSError:
                connection.close()
                return
        self._opened.wait()
        assert self._answer is not None
        self._answer(connection, greeted)


def _passed() -> socket.socket | None:
    """The socket that systemd opened for us (sd_listen_fds(3)), or None."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    return socket.socket(fileno=_FIRST_PASSED)


def _opened(path: str) -> socket.socket:
    """A socket of our own, in a directory that only root can enter from before it exists."""
    directory = os.path.dirname(path)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener


def _check_directory(path: str) -> None:
    """Whoever can enter the directory can connect to gRPC's own socket, which has no mode of its own choosing."""
    found = os.stat(path)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SystemExit(f"fermata-differ: {path} must belong to root and be closed to all others (mode 0700)")


def _remove_strays(directory: str) -> None:
    """gRPC's sockets, of this process and of those that were killed."""
    for name in os.listdir(directory):
        if name.startswith("grpc-") and name.endswith(".sock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{name}")


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None], ending: threading.Event) -> None:
    # A thread that is blocked in accept(2) would take one more connection after the end, and lose it. Whoever comes
    # meanwhile waits in systemd's socket for the next of us.
    listener.settimeout(0.5)
    while not ending.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            time.sleep(0.1)  # out of descriptors: some will be closed
            continue
        if _peer(connection) != 0:
            connection.close()
            continue
        _thread(partial(serve, connection))


def _peer(connection: socket.socket) -> int:
    """The user id of the process that connected (SO_PEERCRED in unix(7))."""
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


class Passages:
    """Connections that are passed through to gRPC's own socket."""

    def __init__(self, inner: str) -> None:
        self._inner = inner
        self._open: set[_Passage] = set()
        self._changed = threading.Condition()

    def serve(self, connection: socket.socket, greeted: bool) -> None:
        """Pass through until one of both sides ends."""
        passage = _Passage(connection, greeted)
        with self._changed:
            self._open.add(passage)
        try:
            passage.run(self._inner)
        finally:
            with self._changed:
                self._open.discard(passage)
                self._changed.notify_all()

    def leave(self) -> None:
        """Have clients send no more requests here, and wait a moment for connections that have none under way."""
        with self._changed:
            leaving = list(self._open)
        for passage in leaving:
            passage.leave()
        self.wait()

    def wait(self) -> None:
        """Wait a moment until all have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, _LEAVING)


class _Passage:
    def __init__(self, connection: socket.socket, greeted: bool) -> None:
        self._connection = connection
        self._greeted = greeted
        self._begun = greeted  # whether the client has had its first frame, before which there must be none of ours
        self._leaving = False
        self._sending = threading.Lock()

    def run(self, inner: str) -> None:
        with self._connection as connection, socket.socket(socket.AF_UNIX) as other:
            try:
                other.connect(inner)
            except OSError:
                return  # we are ending; the caller sees a closed connection and connects again
            back = _thread(lambda: self._pass_back(other))
            if not self._greeted or _pass_greeted(connection, other):
                _pump(connection, other)
            else:
                _shut(connection, other)
            back.join()

    def leave(self) -> None:
        """Send the client elsewhere with what it asks from now on."""
        if not self._sending.acquire(timeout=_LEAVING):
            return  # it reads nothing
        try:
            self._leaving = True
            if self._begun:
                self._connection.sendall(GOAWAY)
        except OSError:
            pass  # it has gone
        finally:
            self._sending.release()

    def _pass_back(self, other: socket.socket) -> None:
        """Pass gRPC's frames on, each whole, so that one of ours can stand between two."""
        try:
            while True:
                head = _exactly(other, HEAD)
                whole = head + _exactly(other, int.from_bytes(head[:3], "big"))
                with self._sending:
                    first, self._begun = not self._begun, True
                    self._connection.sendall(whole + GOAWAY if first and self._leaving else whole)
        except OSError:
            pass  # one side is gone, which the other is told now
        _shut(other, self._connection)


def _pass_greeted(source: socket.socket, target: socket.socket) -> bool:
    """Pass frames through up to the first answer to settings, which is the one to ours: gRPC's server must not take it
    for one to its own (RFC 9113, 6.5.3: they come in order). Whether the connection goes on."""
    try:
        target.sendall(_exactly(source, len(PREFACE)))
        while True:
            head = _exactly(source, HEAD)
            if head[3] == http2.SETTINGS and head[4] & http2.ACK:
                return True
            target.sendall(head + _exactly(source, int.from_bytes(head[:3], "big")))
    except OSError:
        return False


def _exactly(source: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ConnectionError if the other side ends before."""
    data = source.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) != size:
        raise ConnectionError("the connection ended within a frame")
    return data


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass  # one side is gone, which the other is told now
    _shut(source, target)


def _shut(source: socket.socket, target: socket.socket) -> None:
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        try:
            end.shutdown(how)
        except OSError:
            pass


def _thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _notify(state: str) -> None:
    """Tell systemd (sd_notify(3)), if it asked to be told."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        notifier.connect("\0" + path[1:] if path.startswith("@") else path)
        notifier.send(state.encode())
