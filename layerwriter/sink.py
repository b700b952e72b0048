"""Where a tar goes while it is made: buffers that are written, hashed and compressed beside the walk.

The walk fills a buffer with headers and file data, side by side. A full buffer goes through stages, each a thread of
its own that leaves Python's lock while the kernel writes or OpenSSL hashes, and comes back to be filled again. So the
memory is the buffers', whatever the size of the layer.

    Sink:      fill -> write -> hash -> fill
    ZstdSink:  fill -> hash of the tar -> compress (one thread per core) -> write and hash of the file, in order -> fill
"""

from __future__ import annotations

import os
import struct
from _queue import SimpleQueue
from fcntl import ioctl
from hashlib import sha256

from layerwriter.layer import WRITE, LayerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread

    Queue = SimpleQueue["Piece | None"]

_BUFFER = 1 << 20
"""Bytes of tar that go through the stages together, and that make one zstd frame: frames are what can be compressed
and decompressed side by side."""
_WORKERS = 8
"""Compressing threads at most. The one SHA-256 of the tar keeps up with no more, and memory stays bounded."""

_SOURCES = 32
"""Files that are kept open at a time to be hashed: a process may have few files, and a tree many."""

_BEGUN_AT_ONCE = 16 << 20
_LARGE = 256 << 20
"""Bytes for which the disk is told to begin, and those of a layer from which on it is: it takes time of the writing."""

_ZEROS = bytes(1 << 16)

FICLONERANGE = 0x4020940D
"""The ioctl by which a file gets extents of another one (ioctl_ficlonerange(2)): xfs, btrfs and others have it."""
_SHARING_UNIT = 4096
_SHARED_LEAST = 64 << 10
"""Bytes below which sharing extents costs more than copying."""


class Piece:
    """A part of the tar on its way through the stages: `used` bytes of `view`, at `offset` of the tar.

    `stored`: the bytes are in the file already, and the view is empty. They can be read from `source` too, if there is
    one, at `source_offset`, while that is `unchanged`.
    """

    __slots__ = ("frame", "offset", "ready", "source", "source_offset", "stored", "unchanged", "used", "view")

    def __init__(self, size: int, *, offset: int = 0, stored: int = 0) -> None:
        self.view = memoryview(bytearray(size))
        self.used = stored
        self.offset = offset
        self.stored = stored > 0
        self.source = -1
        self.source_offset = 0
        self.unchanged = (0, 0, 0)
        self.frame = b""
        self.ready: SimpleQueue[None] = SimpleQueue()


class Sink:
    """An uncompressed tar under construction, over a file opened for reading and writing.

    `view` and `used` are for the walk: it may place up to `capacity - used` bytes in the view itself and add them to
    `used`. `limit` is the largest tar allowed, in bytes; `room` is what it allows `used` to be.
    """

    capacity = _BUFFER
    spare = 3

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit
        self.used = 0
        self._start = 0
        self._begun = 0
        self.room = limit
        self._hash = sha256()
        self._piece = Piece(self.capacity)
        self.view = self._piece.view
        self._first: Queue = SimpleQueue()
        self._free: Queue = SimpleQueue()
        self._threads: list[Thread] = []
        self.failure: BaseException | None = None
        self._shares = fd >= 0
        self._sources = 0
        self._late = False

    @property
    def position(self) -> int:
        """Offset in the tar of the next byte."""
        return self._start + self.used

    def refuse(self, size: int, what: str) -> None:
        """Raise the error of an entry that does not fit the limit."""
        raise LayerError(
            f"{what} takes the layer past its limit of {self.limit} bytes "
            f"({self.position} before it, {size} more): raise the limit, or remove files and try again"
        )

    def put(self, data: bytes) -> None:
        """Append bytes of any length."""
        rest = memoryview(data)
        while rest:
            if self.used == self.capacity:
                self.flush()
            part = rest[: self.capacity - self.used]
            self.view[self.used : self.used + len(part)] = part
            self.used += len(part)
            rest = rest[len(part) :]

    def pad(self) -> None:
        """Fill up to a multiple of 512 with zeros."""
        self.put(_ZEROS[: -self.used % 512])

    def copy(self, fd: int, offset: int, size: int) -> int:
        """Append `size` bytes of a file from `offset`. Returns how many the file had."""
        left = size
        while left:
            if self.used == self.capacity:
                self.flush()
            got = os.preadv(fd, (self.view[self.used : self.used + left],), offset)
            if got == 0:
                break
            self.used += got
            offset += got
            left -= got
        return size - left

    def share(self, fd: int, offset: int, size: int) -> int:
        """Append up to `size` bytes of a file from `offset` by sharing its extents, which copies nothing.

        Returns how many, a multiple of 4 KiB; 0 where the position does not allow it, or the file system. What is
        shared stays as it is now, whatever happens to the file.
        """
        whole = size - size % _SHARING_UNIT
        if not self._shares or whole < _SHARED_LEAST or self.position % _SHARING_UNIT or offset % _SHARING_UNIT:
            return 0
        try:
            ioctl(self.fd, FICLONERANGE, struct.pack("qQQQ", fd, offset, whole, self.position))
        except OSError:
            # Another file system, or one that cannot share. A full disk speaks up when the bytes are copied.
            self._shares = False
            return 0
        if self.used:
            self.flush()
        # Hashing what is shared takes long, and what comes behind it must not wait for that with its buffers.
        self._late = True
        piece = Piece(0, offset=self._start, stored=whole)
        if self._sources < _SOURCES:
            self._sources += 1
            piece.source, piece.source_offset, piece.unchanged = os.dup(fd), offset, _version(fd)
        self._start += whole
        self.room -= whole
        self._hand_on(piece)
        return whole

    def flush(self) -> None:
        """Hand the filled piece on and take an empty one."""
        piece = self._piece
        piece.used, piece.offset = self.used, self._start
        self._start += self.used
        self.room -= self.used
        self.used = 0
        self._hand_on(piece)
        if self.spare:
            self.spare -= 1
            self._piece = Piece(self.capacity)
        else:
            returned = self._free.get()
            assert returned is not None
            self._piece = returned
        self.view = self._piece.view
        if self.failure is not None:
            raise self.failure

    def _hand_on(self, piece: Piece) -> None:
        if not self._threads:
            self._start_stages()
        self._first.put(piece)

    def finish(self) -> tuple[str, str, int]:
        """Let everything reach the file. Returns the file's digest, the tar's digest and the file's size."""
        piece = self._piece
        piece.used, piece.offset = self.used, self._start
        self._start += self.used
        if self._threads:
            self._first.put(piece)
            self._stop_stages()
        else:
            self._whole(piece)  # what fits one piece needs no thread
        if self.failure is not None:
            raise self.failure
        return self._result()

    def abandon(self) -> None:
        """Stop the stages after a failure of the walk."""
        if self.failure is None:
            self.failure = LayerError("the layer was abandoned")
        self._stop_stages()

    def _whole(self, piece: Piece) -> None:
        self._write(piece)
        self._digest(piece)

    def _result(self) -> tuple[str, str, int]:
        digest = f"sha256:{self._hash.hexdigest()}"
        return digest, digest, self._start

    def _start_stages(self) -> None:
        written: Queue = SimpleQueue()

        def pass_on(piece: Piece | None) -> None:
            if piece is not None and self._late and piece.view:
                written.put(Piece(0, offset=piece.offset, stored=piece.used))
                self._free.put(piece)
            else:
                written.put(piece)

        self._stage(self._first, self._write, pass_on)
        self._stage(written, self._digest, self._recycle)

    def _recycle(self, piece: Piece | None) -> None:
        """Take back a piece that is done."""
        if piece is None or piece.view:
            self._free.put(piece)
        elif piece.source >= 0:
            os.close(piece.source)
            self._sources -= 1

    def _stage(self, source: Queue, step: Callable[[Piece], None], pass_on: Callable[[Piece | None], None]) -> None:
        """Start a thread that takes pieces through one step. After a failure it only passes them on, so that no stage
        waits for ever."""

        def run() -> None:
            while (piece := source.get()) is not None:
                if self.failure is None:
                    try:
                        step(piece)
                    except BaseException as failure:
                        self.failure = failure
                pass_on(piece)
            pass_on(None)

        self._start_thread(run)

    def _start_thread(self, run: Callable[[], None]) -> None:
        from threading import Thread

        thread = Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _stop_stages(self) -> None:
        if self._threads:
            self._first.put(None)
            for thread in self._threads:
                thread.join()
            self._threads.clear()

    def _output(self, data: memoryview, offset: int) -> None:
        """Let a part of the file go where it belongs. Called in the order of the offsets, by one thread."""
        _write_at(self.fd, data, offset)

    def _write(self, piece: Piece) -> None:
        if piece.stored:
            return
        self._output(piece.view[: piece.used], piece.offset)
        written = piece.offset + piece.used
        if self.fd >= 0 and written > _LARGE and written - self._begun >= _BEGUN_AT_ONCE:
            # The disk begins now, beside the hashing, and not with the fsync at the end: for dirty pages, this advice
            # says to write them.
            os.posix_fadvise(self.fd, self._begun, written - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = written

    def _digest(self, piece: Piece) -> None:
        if piece.stored:
            self._digest_stored(piece)
            return
        self._hash.update(piece.view[: piece.used])

    def _digest_stored(self, piece: Piece) -> None:
        """Hash what is shared, where it comes from: there it is in the page cache, and in the layer it is not.

        If the file changed since, which a running container may do, it is the layer that counts.
        """
        before = self._hash.copy()
        if (
            piece.source < 0
            or not self._digest_range(piece.source, piece.source_offset, piece.used)
            or _version(piece.source) != piece.unchanged
        ):
            self._hash = before
            if not self._digest_range(self.fd, piece.offset, piece.used):
                raise LayerError("the layer file was cut off while it was written")

    def _digest_range(self, fd: int, offset: int, size: int) -> bool:
        buffer = memoryview(bytearray(_BUFFER))
        while size and self.failure is None:
            got = os.preadv(fd, (buffer[:size],), offset)
            if got == 0:
                return False
            self._hash.update(buffer[:got])
            offset += got
            size -= got
        return True


class ZstdSink(Sink):
    """A tar under construction that reaches the file as zstd frames of at most 1 MiB of tar.

    `make` makes what compresses one piece into one frame, for one thread; other formats whose files are a row of
    frames pass their own.
    """

    def __init__(self, fd: int, limit: int, make: Callable[[], Callable[[memoryview], bytes]] | None = None) -> None:
        from layerwriter.compression import compressor, cores

        super().__init__(fd, limit)
        self._shares = False
        # Made here and not in the threads: a missing package has to stop the caller.
        self._compressors = [(make or compressor)() for _ in range(min(cores(), _WORKERS))]
        self.spare = len(self._compressors) + 1
        self._written = 0
        self._file_hash = sha256()

    def _whole(self, piece: Piece) -> None:
        self._digest(piece)
        piece.frame = self._compressors[0](piece.view[: piece.used])
        self._write_frame(piece)

    def _result(self) -> tuple[str, str, int]:
        return f"sha256:{self._file_hash.hexdigest()}", f"sha256:{self._hash.hexdigest()}", self._written

    def _start_stages(self) -> None:
        hashed: Queue = SimpleQueue()
        work: Queue = SimpleQueue()
        in_order: Queue = SimpleQueue()
        self._stage(self._first, self._digest, hashed.put)
        self._start_thread(lambda: self._distribute(hashed, work, in_order))
        for compress in self._compressors:
            self._start_compressing(compress, work)
        self._stage(in_order, self._write_ready, self._recycle)

    def _distribute(self, source: Queue, work: Queue, in_order: Queue) -> None:
        while (piece := source.get()) is not None:
            work.put(piece)
            in_order.put(piece)
        for _ in self._compressors:
            work.put(None)
        in_order.put(None)

    def _start_compressing(self, compress: Callable[[memoryview], bytes], work: Queue) -> None:
        def run() -> None:
            while (piece := work.get()) is not None:
                if self.failure is None:
                    try:
                        piece.frame = compress(piece.view[: piece.used])
                    except BaseException as failure:
                        self.failure = failure
                piece.ready.put(None)

        self._start_thread(run)

    def _write_ready(self, piece: Piece) -> None:
        piece.ready.get()
        if self.failure is None:
            self._write_frame(piece)

    def _write_frame(self, piece: Piece) -> None:
        self._output(memoryview(piece.frame), self._written)
        self._digest_frame(piece.frame)
        self._written += len(piece.frame)
        piece.frame = b""

    def _digest_frame(self, frame: bytes) -> None:
        self._file_hash.update(frame)


def _version(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data[:WRITE], offset)
        data = data[done:]
        offset += done
