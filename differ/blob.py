"""One layer on its way into containerd's content store.

It begins as a Write call, as every client's upload does. containerd takes some 300 to 400 MB/s of that, and much
processor time. So a layer that turns out to be large goes on in the file itself that containerd keeps the upload in:

    Write      STAT, the first MiBs, end of the call: the upload is containerd's, unfinished and unlocked
    file       the rest, at the disk's speed
    Write      STAT: containerd reads and hashes the file, and says its size and digest; COMMIT

That is how containerd goes on with an upload that was interrupted. Where the file cannot be written (ingest.py), and
when writing to it fails, Write calls take the rest: then every error is containerd's own.

Nobody else may open an upload whose file we write. So it has a reference of ours, and a reference that the caller gave
is only held meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

import grpc

from differ import content, ingest
from layerwriter.layer import WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_LARGE = 8 << 20
"""Bytes from which on a layer is written to the file: the second Write call takes a transaction of containerd's
database, some milliseconds."""
_MOST = 8 << 30
"""Bytes that are written to a file at most, and Write calls take the rest: containerd hashes what it finds within a
transaction of its database, in which all other clients wait, for 0.7 s a GiB on a processor with SHA extensions."""
_BEGUN_AT_ONCE = 16 << 20
"""Bytes for which the disk is told to begin, so that less is left for the fsync at the end."""
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None)


class Lost(Exception):
    """containerd has not got what was written. The text says so."""


class Failed(Exception):
    """The disk has not taken what was written. The text says why."""


class Blob:
    """A layer's blob under construction. Not shared by threads, but any thread may cancel(). After a failure, remove()
    has to be called for each of `refs`.

    `say` is told why a large blob could not be written to its file. `direct`: it was.
    """

    def __init__(self, store: content.Store, ref: str, places: ingest.Places, say: Callable[[str], None]) -> None:
        """Take the reference that the caller gave, if any. Raises grpc.RpcError, UNAVAILABLE if it is being written."""
        self.direct = False
        self._store = store
        self._places = places
        self._say = say
        self._gone = threading.Event()
        self._fd = -1
        self._size = 0
        self._begun = 0
        self._tried = False
        self._ref = content.unique("fermata-differ")
        self._callers = ref
        self._call = self._held = store.upload(ref or self._ref)
        self._call.opened()

    @property
    def refs(self) -> list[str]:
        """The references that are ours to remove, if this fails."""
        return [self._ref, self._callers] if self._callers else [self._ref]

    def begin(self) -> None:
        """Begin to write. Raises grpc.RpcError."""
        if self._callers:
            self._reopen()

    def write(self, data: memoryview) -> None:
        """Append at most some MiB. Raises grpc.RpcError and Failed, about this piece or ones before, and Lost."""
        self._go_on()
        if self._fd < 0 and not self._tried and self._size >= _LARGE:
            self._tried = True
            self._open_file()
        if self._fd >= 0 and self._size >= _MOST:
            self._back_to_calls()
        if self._fd < 0 or not self._write_file(data):
            self._call.write(data)
        self._size += len(data)

    def digest(self) -> str:
        """The digest of all that was written, by containerd. Raises grpc.RpcError, Lost and Failed."""
        self._go_on()
        if self._fd < 0:
            return self._call.digest()
        self._ask()
        try:
            # containerd syncs the file too, when it commits: 1.7 within a transaction, in which every other client of
            # its database waits. Done here, it goes on beside the hashing, and nobody waits.
            os.fsync(self._fd)
        except OSError as failure:
            raise Failed(f"sync of {self._ref}: {_reason(failure)}") from failure
        finally:
            self._close_file()  # fs-verity, which containerd 2 switches on for a blob, allows no writer
        return self._opened()

    def commit(self, labels: dict[str, str]) -> None:
        """End the blob. Raises grpc.RpcError, ALREADY_EXISTS if the store has it, and Lost."""
        self._go_on()
        self._call.commit(labels)

    def release(self) -> None:
        """Give the caller's reference back, with nothing left under it. Raises grpc.RpcError."""
        if self._callers:
            self.remove(self._callers)

    def remove(self, ref: str) -> None:
        """Remove what was written under one of the references, and let go of it. Raises grpc.RpcError."""
        self._close_file()
        call = self._held if ref == self._callers else self._call
        # A call that is not answered could begin the upload anew behind the abort. One that ends beside the abort could
        # leave a file of its own, and one that ended before, a moment for somebody else to take a reference that we are
        # going to abort. So the abort meets a call that waits for us.
        with contextlib.suppress(grpc.RpcError):  # it is over, and why has been told
            call.settle()
        self._store.abort(ref)
        with contextlib.suppress(grpc.RpcError):
            call.end()

    def cancel(self) -> None:
        """Have it break off, from any thread: what is done next raises Lost."""
        self._gone.set()

    def _open_file(self) -> None:
        self._call.settle()
        try:
            fd = self._places.open(self._store, self._ref, self._size)
        except ingest.Hidden as reason:
            self._say(str(reason))
            return
        except grpc.RpcError as failure:
            self._say(f"where it keeps its content, it says {failure.code()}: {failure.details()}")
            return
        try:
            self._call.end()
            ingest.check(fd, self._size)
        except ingest.Hidden as reason:
            os.close(fd)
            raise Lost(f"{self._ref}: {reason}") from reason
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.direct = True

    def _write_file(self, data: memoryview) -> bool:
        """Whether the file has taken it. If not, everything before has reached containerd again."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._fd, data[written : written + WRITE], self._size + written)
        except OSError as failure:
            self._say(f"the upload's file: {_reason(failure)}")
            self._back_to_calls()
            self.direct = False
            return False
        end = self._size + written
        if end - self._begun >= _BEGUN_AT_ONCE:
            begin, self._begun = self._begun, end
            # Only advice: what comes of the writing is told by the fsync. Unlike that of posix_fadvise(2), it leaves
            # the pages in memory, where containerd is going to read them.
            _libc.sync_file_range(
                self._fd, ctypes.c_int64(begin), ctypes.c_int64(end - begin), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
            )
        return True

    def _back_to_calls(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as failure:
            raise Failed(f"truncate {self._ref}: {_reason(failure)}") from failure
        self._close_file()
        self._reopen()

    def _reopen(self) -> None:
        self._ask()
        self._opened()

    def _ask(self) -> None:
        """Begin a call that goes on with the upload."""
        self._call = self._store.upload(self._ref)

    def _opened(self) -> str:
        """Wait for the call's answer: containerd reads and hashes what it has of the upload, and that must be all."""
        digest = self._call.opened()
        if self._call.offset != self._size:
            raise Lost(f"{self._size} bytes of {self._ref} were written, and containerd has {self._call.offset}")
        return digest

    def _go_on(self) -> None:
        if self._gone.is_set():
            raise Lost(f"{self._ref}: the upload was broken off")

    def _close_file(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _reason(failure: OSError) -> str:
    """As containerd says it."""
    return (failure.strerror or str(failure)).lower()
