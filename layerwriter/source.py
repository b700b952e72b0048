"""Where a tar comes from: a layer file, read, hashed and decompressed beside the one who takes its entries apart."""

from __future__ import annotations

import os
import struct
from _queue import SimpleQueue
from fcntl import ioctl

from layerwriter.layer import LayerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from threading import Thread

PIECE = 1 << 20
_PIECES = 4

_FICLONERANGE = 0x4020940D  # ioctl_ficlonerange(2)
_SHARING_UNIT = 4096
_SHARED_LEAST = 64 << 10
"""Bytes below which sharing extents costs more than copying."""


def _version(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Source:
    """The bytes of a layer's tar, in order, from an open file.

    `digest`, if given, is checked against the whole file by finish(). `limit` is the number of bytes of tar that the
    layer may have. A file of more than one piece is read, hashed and decompressed in a thread of its own.
    """

    def __init__(self, fd: int, *, digest: str | None = None, limit: int) -> None:
        self.limit = limit
        self.position = 0
        self._digest = digest
        self._hash = None
        if digest is not None:
            if not digest.startswith("sha256:") or len(digest) != 71:
                raise LayerError(f"the digest {digest!r} is not of the form sha256:<64 hexadecimal digits>")
            from hashlib import sha256

            self._hash = sha256()
        self._fd = fd
        self._at = 0
        self._view = memoryview(b"")
        self._failure: BaseException | None = None
        self._thread: Thread | None = None
        self._compressed = False
        self._shares = True
        self._version = _version(fd)
        self._begin(0)

    def _begin(self, offset: int) -> None:
        """Start to read at an offset of the file."""
        self._stopped = False
        self._at = 0
        self._view = memoryview(b"")
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._pieces = self._tar() if offset == 0 else self._file(offset)
        if os.fstat(self._fd).st_size > offset + PIECE:
            from threading import Thread

            for _ in range(_PIECES):
                self._room.put(None)
            self._thread = Thread(target=self._produce, daemon=True)
            self._thread.start()

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, valid until the next call. Shorter at the end of the tar.

        For sizes that the caller has bounded: what spans two pieces is copied together.
        """
        end = self._at + size
        if end <= len(self._view):
            taken = self._view[self._at : end]
            self._at = end
            self.position += size
            return taken
        parts = []
        while size:
            part = self.some(size)
            if not part:
                break
            parts.append(bytes(part))
            size -= len(part)
        return memoryview(b"".join(parts))

    def some(self, most: int) -> memoryview:
        """At least one and at most `most` of the next bytes; none at the end of the tar. Valid until the next call."""
        if self._at == len(self._view):
            self._next()
        taken = self._view[self._at : self._at + most]
        self._at += len(taken)
        self.position += len(taken)
        return taken

    def share(self, fd: int, offset: int, size: int) -> int:
        """Give a file up to `size` of the next bytes, at `offset`, by sharing the layer's extents.

        Returns how many, a multiple of 4 KiB; 0 where the layer does not allow it, or the file system.
        """
        whole = size - size % _SHARING_UNIT
        if not self._shares or self._compressed or whole < _SHARED_LEAST:
            return 0
        if self.position % _SHARING_UNIT or offset % _SHARING_UNIT:
            return 0
        try:
            ioctl(fd, _FICLONERANGE, struct.pack("qQQQ", self._fd, self.position, whole, offset))
        except OSError:
            self._shares = False  # another file system, or one that cannot share
            return 0
        end = self.position + whole
        if self._hash is None and whole > _PIECES * PIECE:
            self.close()
            self.position = end
            self._begin(end)
        while self.position < end:
            if not self.some(end - self.position):
                raise LayerError("the file ends in the middle of an entry: it was cut off")
        return whole

    def finish(self) -> None:
        """Check the digest, at the end of the tar."""
        if self.some(1):
            raise LayerError("the layer has not been read to its end")
        self.close()
        if _version(self._fd) != self._version:
            # Files that share extents with the layer must hold what was hashed.
            raise LayerError("the layer file was written to while it was applied")
        if self._hash is not None and f"sha256:{self._hash.hexdigest()}" != self._digest:
            raise LayerError(
                f"the layer's digest is sha256:{self._hash.hexdigest()}, but {self._digest} was expected: "
                "the file is not the one that was written"
            )

    def close(self) -> None:
        """Stop reading."""
        self._stopped = True
        self._view = memoryview(b"")
        self._at = 0
        if self._thread is not None:
            for _ in range(2):
                self._room.put(None)
            self._thread.join()
            self._thread = None
        self._pieces.close()

    def _next(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            piece = next(self._pieces, None)
        else:
            if len(self._view):
                self._room.put(None)
            piece = self._full.get()
            if piece is None:
                self._full.put(None)  # the end stays the end
                if self._failure is not None:
                    raise self._failure
        self._view = memoryview(b"") if piece is None else piece
        self._at = 0
        if self.position + len(self._view) > self.limit:
            raise LayerError(f"the layer has more than its limit of {self.limit} bytes of tar")

    def _produce(self) -> None:
        try:
            while True:
                self._room.get()
                if self._stopped:
                    break
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._full.put(piece)
        except BaseException as failure:
            self._failure = failure
        finally:
            self._full.put(None)

    def _tar(self) -> Generator[memoryview, None, None]:
        start = os.pread(self._fd, 4, 0)
        self._compressed = True
        if start[:2] == b"\x1f\x8b":
            from layerwriter.compression import gunzip

            return gunzip(self._file())
        if start == b"\x28\xb5\x2f\xfd" or (start[1:] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F):
            from layerwriter.compression import unzstd

            return unzstd(self._file())
        self._compressed = False
        return self._file()

    def _file(self, offset: int = 0) -> Generator[memoryview, None, None]:
        """The file's bytes, each piece hashed. Pieces are not used again: whoever has a view of one keeps it alive."""
        while True:
            piece = memoryview(bytearray(PIECE))
            got = os.preadv(self._fd, (piece,), offset)
            if got == 0:
                return
            offset += got
            if self._hash is not None:
                self._hash.update(piece[:got])
            yield piece[:got]
