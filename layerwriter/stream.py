"""An upper directory as the layer of an image, sent where the caller wants it while it is made.

An image goes to other machines and other tools. So its layer holds what every OCI tool understands and what means the
same everywhere, and equal trees make equal layers:

- no access times, which change by reading;
- no sockets: a socket's path without its listener is nothing to take to another container, and tar cannot hold one;
- of attributes `user.`, POSIX ACLs and file capabilities: labels and signatures (SELinux, IMA, EVM) are this node's,
  and `trusted.` ones stop tools that unpack without privileges, while containerd leaves them out;
- no sparse files, of which the OCI specification says that tools do not agree: a hole is zeros;
- no name that begins with `.wh.`, which every tool takes for a deletion: NotPortable.
"""

from __future__ import annotations

import os
import stat

from layerwriter.entries import Entries, changed
from layerwriter.header import END, REGULAR
from layerwriter.layer import Layer, LayerError, NotPortable, shown
from layerwriter.overlay import Marks
from layerwriter.sink import Piece, Sink, ZstdSink
from layerwriter.upper import walk_upper
from layerwriter.walk import open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Send = Callable[[memoryview], None]
    Path = str | os.PathLike[str]

NO_LIMIT = 1 << 62
_PORTABLE = tuple(b"SCHILY.xattr." + name for name in (b"user.", b"system.posix_acl_", b"security.capability="))


def stream(
    upperdir: Path,
    send: Send,
    *,
    compression: str = "none",
    gzip_level: int = 1,
    xattr_prefix: str = "trusted.",
    base: bool = False,
    latest: int | None = None,
    limit: int = NO_LIMIT,
    hashed: bool = True,
) -> Layer:
    """Make an image's layer of an upper directory and hand it to `send`, piece by piece and in order.

    `send` is called with at most 1 MiB at a time, by one thread that is not the caller's, and may keep nothing of what
    it is given; what it raises comes out here. `compression` is "none", "gzip" or "zstd"; `gzip_level` is 0 to 9, and 0
    stores. `base`: the directory has nothing below it, so that a mark of a deletion in it makes no sense. `latest` is
    the newest modification time that is written, in nanoseconds since 1970; what is newer gets that time. Without
    `hashed`, whoever receives the layer hashes it: its digest is "", and so is its diff_id if it is uncompressed. The
    Layer's path is "".

    Raises HiddenChange, NotPortable, LayerError, and OSError only if `send` did.
    """
    try:
        root = open_directory(os.fspath(upperdir))
    except OSError as failure:
        raise LayerError(f"{os.fspath(upperdir)} cannot be read as an upper directory: {failure.strerror}") from failure
    try:
        sink: Sink
        if compression == "none":
            sink = _Stream(send, limit, hashed)
        elif compression == "gzip":
            from layerwriter.compression import gzip_compressor

            sink = _FrameStream(send, limit, hashed, lambda: gzip_compressor(gzip_level))
        elif compression == "zstd":
            sink = _FrameStream(send, limit, hashed)
        else:
            raise LayerError(f'compression {compression!r} is not known: it is "none", "gzip" or "zstd"')
        entries = _ImageEntries(sink, xattr_prefix.encode("ascii"), base, latest)
        try:
            walk_upper(root, entries)
            sink.put(END)
            digest, diff_id, size = sink.finish()
        except BaseException:
            sink.abandon()
            raise
    finally:
        os.close(root)
    return Layer(
        path="",
        digest=digest,
        diff_id=diff_id,
        size=size,
        entries=entries.count,
        made_by="upperdir",
        notes=entries.notes(),
    )


class _Stream(Sink):
    def __init__(self, send: Send, limit: int, hashed: bool) -> None:
        super().__init__(-1, limit)
        self._send = send
        self._hashed = hashed

    def _output(self, data: memoryview, offset: int) -> None:
        self._send(data)

    def _digest(self, piece: Piece) -> None:
        if self._hashed:
            super()._digest(piece)

    def _result(self) -> tuple[str, str, int]:
        digest, diff_id, size = super()._result()
        return (digest, diff_id, size) if self._hashed else ("", "", size)


class _FrameStream(ZstdSink):
    def __init__(
        self, send: Send, limit: int, hashed: bool, make: Callable[[], Callable[[memoryview], bytes]] | None = None
    ) -> None:
        super().__init__(-1, limit, make)
        self._send = send
        self._hashed = hashed

    def _output(self, data: memoryview, offset: int) -> None:
        self._send(data)

    def _digest_frame(self, frame: bytes) -> None:
        if self._hashed:
            super()._digest_frame(frame)

    def _result(self) -> tuple[str, str, int]:
        digest, diff_id, size = super()._result()
        return (digest if self._hashed else ""), diff_id, size


class _ImageEntries(Entries):
    quick = False

    def __init__(self, sink: Sink, prefix: bytes, base: bool, latest: int | None) -> None:
        super().__init__(sink, prefix)
        self._base = base
        self._latest = latest

    def special(self, directory: int, name: str, path: bytes) -> None:
        if not stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            super().special(directory, name, path)

    def whiteout(self, path: bytes) -> None:
        if self._base:
            raise NotPortable(f"{shown(path)}: the mark of a deletion, and there is nothing below to delete")
        if path.rpartition(b"/")[2].startswith(b".wh."):
            raise _name(path)
        super().whiteout(path)

    def _large(self, fd: int, path: bytes, found: os.stat_result, records: bytes) -> None:
        self._emit(path, REGULAR, found, records, found.st_size)
        if self.sink.copy(fd, 0, found.st_size) != found.st_size:
            raise changed(path)
        self.sink.pad()

    def _attributes(self, target: int | str, path: bytes) -> tuple[bytes, Marks]:
        records, marks = super()._attributes(target, path)
        return _portable(records) if records else records, marks

    def _emit(
        self,
        path: bytes,
        kind: bytes,
        found: os.stat_result,
        records: bytes,
        size: int = 0,
        *,
        link: bytes = b"",
        device: tuple[int, int] = (0, 0),
        aligned: int = -1,
        sparse: bool = False,
    ) -> None:
        if b".wh." in path and any(part.startswith(b".wh.") for part in path.split(b"/")):
            raise _name(path)
        time = found.st_mtime_ns
        if self._latest is not None and time > self._latest:
            time = self._latest
        if time != found.st_mtime_ns or time != found.st_atime_ns:
            found = os.stat_result(found[:10], {"st_mtime_ns": time, "st_atime_ns": time})
        super()._emit(path, kind, found, records, size, link=link, device=device, aligned=aligned, sparse=sparse)


def _name(path: bytes) -> NotPortable:
    return NotPortable(f"{shown(path)}: every tool takes a name that begins with .wh. for a deletion")


def _portable(records: bytes) -> bytes:
    """The pax records without the attributes that stay here."""
    kept = []
    at = 0
    while at < len(records):
        space = records.index(b" ", at)
        end = at + int(records[at:space])
        key = records[space + 1 : end]
        if not key.startswith(b"SCHILY.xattr.") or key.startswith(_PORTABLE):
            kept.append(records[at:end])
        at = end
    return b"".join(kept)
