"""The process `fermata-differ`: a socket for root alone, and the diff service behind it.

gRPC for Python opens its own sockets and takes none that is open already. systemd opens ours long before containerd
starts and keeps it while we are replaced, so that no request is ever refused. So connections are accepted here and
passed through to gRPC's own socket, which stands in the same directory that only root can enter. What passes are
requests of some hundred bytes: layers go to containerd on another way.
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

from shim import grpcio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET = "/run/fermata-differ/differ.sock"
CONTAINERD = "/run/containerd/containerd.sock"
_FIRST_PASSED = 3  # SD_LISTEN_FDS_START
_THREADS = 64
"""Requests that are answered at a time. More than the layers made at a time: an Apply must not wait for a Diff."""
_GRACE = 20
"""Seconds that running requests are given when the process is asked to end."""


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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    _check_directory(os.path.dirname(listener.getsockname()))
    try:
        grpcio.load()
    except ImportError as missing:
        print(
            f"fermata-differ needs gRPC for Python and leaves everything to containerd's own differ until it is there: "
            f"install python3-grpcio, and systemctl restart fermata-differ ({missing})",
            file=sys.stderr,
            flush=True,
        )
        return _decline(listener, asked)
    return _serve(listener, options.address, options.gzip_level, asked)


def _decline(listener: socket.socket, asked: threading.Event) -> int:
    from differ.decline import decline

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other side is gone
            decline(connection)

    _notify("READY=1")
    _accept(listener, answer, asked)
    _notify("STOPPING=1")
    listener.close()
    return 0


def _serve(listener: socket.socket, containerd: str, gzip_level: int, asked: threading.Event) -> int:
    import grpc

    from differ import content
    from differ.service import Differ, to_stderr

    directory = os.path.dirname(listener.getsockname())
    inner = f"{directory}/grpc-{os.getpid()}.sock"
    _remove_strays(directory)
    channel = content.connect(containerd)
    differ = Differ(channel, to_stderr, gzip_level)
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((differ.handler(),))
    server.add_insecure_port(f"unix:{inner}")
    server.start()
    accepting = _thread(lambda: _accept(listener, lambda connection: _pass_through(connection, inner), asked))
    _thread(differ.keep_clear)
    _notify("READY=1")
    asked.wait()
    _notify("STOPPING=1")
    accepting.join()
    listener.close()
    server.stop(_GRACE).wait()
    channel.close()
    _remove_strays(directory)  # gRPC removes its socket too, if it comes to that before the process ends
    return 0


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


def _pass_through(connection: socket.socket, inner: str) -> None:
    with connection, socket.socket(socket.AF_UNIX) as other:
        try:
            other.connect(inner)
        except OSError:
            return  # we are ending; the caller sees a closed connection and connects again
        back = _thread(lambda: _pump(other, connection))
        _pump(connection, other)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass  # one side is gone, which the other is told now
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
