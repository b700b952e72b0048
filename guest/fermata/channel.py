"""The socket through which the shim reaches this process, and the thread that answers there.

Between two steps nothing is open but the listening socket, which CRIU brings back with the process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from . import guest as process
from .errors import GuestError
from .file import File
from .guest import Guest
from .wire import Connection

PROTOCOL = 1
LIBRARY = "0.1.0"
WITHOUT_WEIGHTS = 70
"""The exit status of a process that cannot have its weights back."""

_FIRST = 10.0  # seconds that a connection may be silent before its first message


class Channel:
    """The listening socket of one process, and its thread."""

    def __init__(self, guest: Guest, folder: str) -> None:
        """Listen, and start to answer.

        Raises:
            OSError: the socket cannot be made.
        """
        self._guest = guest
        self._silence = 0.0
        self._ticks = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._socket.fileno(), 0o600)
            _bind(self._socket, folder, f"{os.getpid()}.sock")
            self._socket.listen(8)
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._serve, name="fermata", daemon=True).start()

    def forget(self) -> None:
        """After a fork, in the child, which has no such thread: close the parent's socket."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            # Counted in ticks, so that time in which the process was a snapshot is no silence.
            self._socket.settimeout(1.0 if self._guest.out else None)
            try:
                sock, _ = self._socket.accept()
            except socket.timeout:
                self._ticks += 1
                if self._ticks >= self._silence:
                    names = ", ".join(pack.name for pack in self._guest.packs)
                    _end(
                        f"the weights of this process ({names}) are not in its snapshot, and nobody has brought them"
                        f" back for {self._silence:g} s: restore it with fermata"
                    )
                continue
            except OSError:
                traceback.print_exc()
                time.sleep(1)  # too many open files, for one: this may pass
                continue
            connection = Connection(sock)
            try:
                self._answer(connection)
            except GuestError:
                pass  # the shim says what it saw of it
            except Exception:
                traceback.print_exc()
            finally:
                connection.close()

    def _answer(self, connection: Connection) -> None:
        while True:
            received = connection.receive(time.monotonic() + _FIRST)
            if received is None:
                return
            message, descriptors = received
            step = message.get("step")
            deadline = time.monotonic() + _seconds(message.get("seconds"), _FIRST)
            if step == "restored" and self._guest.out and message.get("protocol") == PROTOCOL:
                self._restored(connection, message, descriptors, deadline)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if message.get("protocol") != PROTOCOL:
                said = {"error": f"this library speaks protocol {PROTOCOL}, not {message.get('protocol')!r}"}
                connection.send(said, deadline)
            elif step == "status":
                connection.send({**self._guest.status(), "library": LIBRARY}, deadline)
            elif step == "prepare" and not self._guest.out:
                self._prepare(connection, message, deadline)
                return
            elif step == "prepare":
                connection.send({"error": "the weights are out already"}, deadline)
            elif step == "restored":
                connection.send({"error": "this process has its weights", "whole": True}, deadline)
            else:
                connection.send({"error": f"this library knows no step {step!r}"}, deadline)

    def _prepare(self, connection: Connection, message: dict[str, Any], deadline: float) -> None:
        """Until the shim says `release`, everything that goes wrong leaves the program with its weights."""
        guest = self._guest
        try:
            packs = guest.prepare(deadline)
        except GuestError as error:
            connection.send({"error": str(error)}, time.monotonic() + 1)
            return
        sentence = None
        try:
            said = [
                {
                    "name": pack.name,
                    "bytes": pack.bytes,
                    "chunk": pack.chunk,
                    "chunks": pack.chunks,
                    "digest": pack.digest,
                }
                for pack in packs
            ]
            connection.send({"packs": said}, deadline)
            received = connection.receive(deadline)
            if received is None:
                raise GuestError("the shim gave the snapshot up")
            wanted, descriptors = received
            files = _files_to_write(wanted.get("packs"), descriptors, len(packs))
            guest.write(files, deadline)
            connection.send({"written": True}, deadline)
            _expect(connection, "release", deadline)
        except Exception as error:
            sentence = process.words(error)
        if sentence is not None:
            guest.undo()
            connection.send({"error": sentence}, time.monotonic() + 1)
            return
        self._silence = _seconds(message.get("silence"), 60.0)
        self._ticks = 0
        released, notes = guest.release()
        connection.send({"released": released, "notes": notes}, time.monotonic() + _FIRST)

    def _restored(
        self, connection: Connection, message: dict[str, Any], descriptors: list[int], deadline: float
    ) -> None:
        """Everything that goes wrong here ends the process: it never goes on without its weights."""
        guest = self._guest
        began = time.monotonic()
        try:
            files = _files_to_read(message.get("packs"), descriptors)
            coming = guest.arm(files, deadline)
            try:
                connection.send({"armed": True}, deadline)
                coming.host()
                waited = time.monotonic()
                _expect(connection, "go", deadline)
                coming.seconds["wait"] = time.monotonic() - waited
                coming.gpu()
            finally:
                coming.close()
            seconds = dict(coming.seconds)
            size = guest.back(seconds)
        except BaseException as error:
            sentence = process.words(error)
            try:
                connection.send({"error": sentence}, time.monotonic() + 1)
                # The shim may be about to say `go`, and would learn no more than that nobody is there.
                connection.linger(time.monotonic() + 2)
            except (GuestError, OSError):
                pass  # it is said on standard error too
            _end(f"the weights of this process could not be brought back: {sentence}")
        seconds["total"] = time.monotonic() - began
        rounded = {key: round(value, 4) for key, value in seconds.items()}
        connection.send({"back": size, "seconds": rounded}, time.monotonic() + _FIRST)


def _bind(sock: socket.socket, folder: str, name: str) -> None:
    """Bind to a path of any length, in place of what an earlier process with this number left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            os.unlink(name, dir_fd=descriptor)
        except FileNotFoundError:
            pass
        _remove_dead(descriptor)
        # The path that is bound is the one that CRIU binds again: the plain one wherever it fits.
        path = f"{folder}/{name}"
        sock.bind(path if len(path) < 108 else f"/proc/self/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


def _remove_dead(folder: int) -> None:
    """Remove the sockets of processes that have ended, which nobody else does: the tmpfs has 1024 inodes."""
    if not os.path.exists("/proc/self/fd"):
        return
    for name in os.listdir(folder):
        pid, _, suffix = name.partition(".")
        # One that has been bound and does not listen yet refuses as well, but its process is there.
        if suffix != "sock" or not pid.isdigit() or os.path.exists(f"/proc/{pid}"):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
            attempt.setblocking(False)
            try:
                attempt.connect(f"/proc/self/fd/{folder}/{name}")
            except ConnectionRefusedError:
                try:
                    os.unlink(name, dir_fd=folder)
                except OSError:
                    pass  # another user's, or gone
            except OSError:
                pass  # no socket, or of a process that is busy


def _files_to_write(packs: Any, descriptors: list[int], count: int) -> list[File | None]:
    files: list[File | None] = []
    left = list(descriptors)
    try:
        if not isinstance(packs, list) or len(packs) != count:
            raise GuestError(f"the shim answered for other packs than the {count} that there are")
        for pack in packs:
            if not pack.get("write"):
                files.append(None)
                continue
            if not left:
                raise GuestError("the shim handed over too few files")
            files.append(File(left.pop(0), by=str(pack.get("by")), writable=True))
        return files
    except BaseException:
        for file in files:
            if file is not None:
                file.close()
        raise
    finally:
        for descriptor in left:
            os.close(descriptor)


def _files_to_read(packs: Any, descriptors: list[int]) -> dict[str, File]:
    if not isinstance(packs, list) or len(packs) != len(descriptors):
        raise GuestError("the shim handed over another number of files than it speaks of")
    files: dict[str, File] = {}
    for pack, descriptor in zip(packs, descriptors):
        file = File(descriptor, by=str(pack.get("by")), direct=bool(pack.get("direct")))
        if str(pack.get("digest")) in files:
            file.close()
        else:
            files[str(pack.get("digest"))] = file
    return files


def _expect(connection: Connection, word: str, deadline: float) -> None:
    """Wait for the message that has this word."""
    received = connection.receive(deadline)
    if received is None:
        raise GuestError(f"the shim gave up before its word to go on ({word})")
    for descriptor in received[1]:
        os.close(descriptor)
    if received[0].get(word) is not True:
        raise GuestError(f"the shim said something else than its word to go on ({word})")


def _seconds(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) and value > 0 else otherwise


def _end(sentence: str) -> NoReturn:
    """Say why on standard error and end the process, whatever its other threads do."""
    try:
        sys.stderr.flush()
    except Exception:
        pass  # it may be closed; what follows is written past it
    os.write(2, f"fermata: {sentence}\n".encode(errors="replace"))
    os._exit(WITHOUT_WEIGHTS)


class _Own:
    """This process's channel."""

    channel: Channel | None = None
    failed = False
    lock = threading.Lock()


def start(folder: str) -> bool:
    """Listen in this directory, if this process does not yet; whether it does."""
    if _Own.channel is not None:
        return True
    with _Own.lock:
        if _Own.channel is None and not _Own.failed:
            try:
                _Own.channel = Channel(process.current(), folder)
            except OSError as error:
                _Own.failed = True
                print(f"fermata: {folder}: {error}: weights will be inside of snapshots", file=sys.stderr)
        return _Own.channel is not None


def _in_child() -> None:
    _Own.lock = threading.Lock()  # another thread may have held it at the fork
    _Own.failed = False
    process.forget()
    if _Own.channel is not None:
        _Own.channel.forget()
        _Own.channel = None


os.register_at_fork(after_in_child=_in_child)
