"""zstd and gzip, from the standard library where it has them.

zstd is `compression.zstd` of Python 3.14, else the package `zstandard`. Neither is imported before zstd is met. The
frame format is RFC 8878's.
"""

from __future__ import annotations

import os
import sys
from _queue import SimpleQueue

from layerwriter.layer import LayerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import Any

LEVEL = 3
_SAMPLE = 16 << 10
_PIECE = 1 << 20
_WINDOW = 8 << 20
"""Bytes of memory that a frame may ask for while it is decompressed. zstd's levels up to 19 ask for no more."""
_BLOCK = 128 << 10
"""Bytes that one block of a frame may hold."""
_ISAL = "libisal.so.2"
_ISAL_LEVEL = 2
_ISAL_TOKENS = 160 << 10
"""ISA-L's level, and the bytes of memory it is given: the fewer, the shorter are the blocks that are stored or
compressed as a whole. Against zlib's level 1 it makes programs and libraries 0.97 to 1.01 times as large, in a quarter
of the time, and what is half noise 1.2 times. Level 3 would make that as small too, and takes half as long again for
the rest."""
_WORKERS = 4
"""Decompressing threads at most: a restore is bound by making files long before."""


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


def compressor() -> Callable[[memoryview], bytes]:
    """A function that makes one zstd frame with its content's size and a checksum. For one thread."""
    standard = _standard()
    if standard is not None:
        parameter = standard.CompressionParameter
        options = {parameter.compression_level: LEVEL, parameter.checksum_flag: 1}
        return lambda data: bytes(standard.compress(data, options=options))
    frames = _package().ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    return lambda data: bytes(frames.compress(data))


def gzip_compressor(level: int = 1) -> Callable[[memoryview], bytes]:
    """A function that makes one gzip member without a time (RFC 1952). For one thread.

    A file may hold many members in a row, and every reader takes them for one stream. Level 1 by default: someone waits
    for the layer while a container stands still. It is ISA-L's where that is installed, at four to five times the speed
    of zlib's and about the same size. What does not get smaller is stored; with zlib a sample of the piece tells,
    because trying takes ten times as long. `level` 0 stores all.
    """
    import zlib

    if level == 1 and (quick := isal()) is not None:
        return quick

    def member(data: memoryview) -> bytes:
        sample = data[len(data) // 2 :][:_SAMPLE]
        shrinks = len(data) < 4 * _SAMPLE or (level and len(zlib.compress(sample, 1)) < 0.95 * len(sample))
        stream = zlib.compressobj(level if shrinks else 0, zlib.DEFLATED, 31)
        return stream.compress(data) + stream.flush()

    return member


def isal() -> Callable[[memoryview], bytes] | None:
    """A function that makes one gzip member with ISA-L (libisal2 in Debian, isa-l elsewhere); None without it.

    For one thread, and for data that can be written to, which is not copied then.
    """
    import ctypes
    import zlib

    try:
        library = ctypes.CDLL(_ISAL)
        prepare, deflate = library.isal_deflate_stateless_init, library.isal_deflate_stateless
    except (OSError, AttributeError):
        return None
    state = _isal_stream()()
    tokens = ctypes.create_string_buffer(_ISAL_TOKENS)
    out = ctypes.create_string_buffer(0)

    def member(data: memoryview) -> bytes:
        nonlocal out
        bound = len(data) + len(data) // 1024 + 4096
        if len(out) < bound:
            out = ctypes.create_string_buffer(bound)
        prepare(ctypes.byref(state))
        # Its address is kept as a number: the name holds on to what is there while the library reads it.
        given = (ctypes.c_char * len(data)).from_buffer(data)
        state.next_in, state.avail_in = ctypes.addressof(given), len(data)
        state.next_out, state.avail_out = ctypes.addressof(out), len(out)
        state.level, state.level_buf, state.level_buf_size = _ISAL_LEVEL, ctypes.addressof(tokens), _ISAL_TOKENS
        state.gzip_flag, state.end_of_stream = 1, 1
        failed = deflate(ctypes.byref(state))
        if failed:
            raise LayerError(f"{_ISAL} could not compress a piece (error {failed}): without the library, zlib does it")
        return bytes(memoryview(out)[: state.total_out])

    # That a library of this name has another form is no reason to write layers that nobody can read.
    probe = bytearray(b"fermata " * 1024)
    try:
        return member if zlib.decompress(member(memoryview(probe)), 31) == probe else None
    except (LayerError, zlib.error):
        return None


def _isal_stream() -> Any:
    """struct isal_zstream of igzip_lib.h, the same in all versions of libisal.so.2. Its own state behind it is some
    80 KiB."""
    from ctypes import Structure, c_char, c_uint16, c_uint32, c_void_p

    class Stream(Structure):
        _fields_ = (
            ("next_in", c_void_p),
            ("avail_in", c_uint32),
            ("total_in", c_uint32),
            ("next_out", c_void_p),
            ("avail_out", c_uint32),
            ("total_out", c_uint32),
            ("hufftables", c_void_p),
            ("level", c_uint32),
            ("level_buf_size", c_uint32),
            ("level_buf", c_void_p),
            ("end_of_stream", c_uint16),
            ("flush", c_uint16),
            ("gzip_flag", c_uint16),
            ("hist_bits", c_uint16),
            ("state", c_char * (256 << 10)),
        )

    return Stream


def decompressor() -> Any:
    """An object with decompress(data) and eof, for one frame."""
    standard = _standard()
    if standard is not None:
        return standard.ZstdDecompressor(options={standard.DecompressionParameter.window_log_max: 23})
    return _package().ZstdDecompressor(max_window_size=_WINDOW).decompressobj()


def _standard() -> Any:
    try:
        from compression import zstd
    except ImportError:
        return None
    return zstd


def _package() -> Any:
    path = sys.path[:]
    if sys.flags.no_site:
        # The shim runs with -S, which leaves out the directories that packages are installed in.
        import site

        sys.path += site.getsitepackages()
    try:
        import zstandard
    except ImportError as missing:
        raise LayerError(
            "zstd needs Python 3.14 or the Python package zstandard, and neither is here: "
            "install python3-zstandard, or use an uncompressed layer"
        ) from missing
    finally:
        sys.path[:] = path
    return zstandard


def gunzip(pieces: Iterator[memoryview]) -> Generator[memoryview, None, None]:
    """The content of a gzip file of one or more members, in pieces of at most 1 MiB. Raises LayerError."""
    import zlib

    member = None
    try:
        for piece in pieces:
            data = bytes(piece)
            while data:
                if member is None:
                    member = zlib.decompressobj(31)
                plain = member.decompress(data, _PIECE)
                if plain:
                    yield memoryview(plain)
                if member.eof:
                    data, member = member.unused_data, None
                else:
                    data = member.unconsumed_tail
            while member is not None and not member.eof and (plain := member.decompress(b"", _PIECE)):
                yield memoryview(plain)  # a full piece can leave more inside than its input shows
    except zlib.error as failure:
        raise LayerError(f"the layer's gzip data is damaged: {failure}") from failure
    if member is not None:
        raise LayerError("the layer's gzip data ends too early: the file was cut off")


def unzstd(pieces: Iterator[memoryview]) -> Generator[memoryview, None, None]:
    """The content of a zstd file of one or more frames, in pieces of at most 1 MiB. Raises LayerError.

    Frames that say their size, up to 1 MiB, are decompressed side by side: the ones that are written here do. Others
    are decompressed a few blocks at a time, so that no claim of the file decides how much memory is used.
    """
    feed = _Feed(pieces)
    pool = _Pool()
    try:
        while feed.peek(1):
            magic = int.from_bytes(feed.peek(4), "little")
            if magic & 0xFFFFFFF0 == 0x184D2A50:
                feed.skip(8 + int.from_bytes(feed.peek(8)[4:], "little"))
                continue
            if magic != 0xFD2FB528:
                raise _damaged("something that is not a frame follows a frame")
            content, head, checksum = _frame_header(feed.peek(18))
            blocks = _blocks(feed, head, checksum)
            if 0 < content <= _PIECE:
                # A frame of this size has few blocks; compressed data is no longer than its content by more than a bit.
                frame = _join(blocks, content + 4096)
                plain = pool.exchange(frame, content)
                if plain:
                    yield memoryview(plain)
                continue
            yield from pool.drain()
            stream = decompressor()
            for part in blocks:
                plain = stream.decompress(part)
                for at in range(0, len(plain), _PIECE):
                    yield memoryview(plain)[at : at + _PIECE]
            if not stream.eof:
                raise _damaged("a frame does not end with its last block")
        yield from pool.drain()
    except LayerError:
        raise
    except Exception as failure:  # the two implementations have error types of their own
        raise _damaged(str(failure)) from failure
    finally:
        pool.close()


class _Feed:
    """Compressed bytes with a look ahead."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._data = b""
        self._at = 0

    def peek(self, size: int) -> bytes:
        """The next bytes, which stay; fewer at the end of the file."""
        while len(self._data) - self._at < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._data = self._data[self._at :] + bytes(piece)
            self._at = 0
        return self._data[self._at : self._at + size]

    def take(self, size: int) -> bytes:
        data = self.peek(size)
        if len(data) < size:
            raise LayerError("the layer's zstd data ends too early: the file was cut off")
        self._at += size
        return data

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.take(min(size, _PIECE)))


def _frame_header(head: bytes) -> tuple[int, int, int]:
    """A frame's content size (-1: it does not say), the length of its header, and that of its checksum."""
    if len(head) < 6:
        raise LayerError("the layer's zstd data ends too early: the file was cut off")
    descriptor = head[4]
    single = descriptor >> 5 & 1
    at = 5
    window = 0
    if not single:
        window = (8 + (head[5] & 7)) << (7 + (head[5] >> 3))
        at += 1
    at += (0, 1, 2, 4)[descriptor & 3]
    length = (single, 2, 4, 8)[descriptor >> 6]
    content = -1
    if length:
        content = int.from_bytes(head[at : at + length], "little") + (256 if length == 2 else 0)
    if single:
        window = content
    if window > _WINDOW:
        raise LayerError(
            f"the layer's zstd data needs {window} bytes of memory, and {_WINDOW} are allowed: "
            "compress it again with level 19 or lower, without --long"
        )
    return content, at + length, 4 * (descriptor >> 2 & 1)


def _blocks(feed: _Feed, head: int, checksum: int) -> Iterator[bytes]:
    """A frame's bytes: its header, then a few blocks at a time, then its checksum."""
    parts = [feed.take(head)]
    last = 0
    while not last:
        start = int.from_bytes(feed.peek(3), "little")
        last, kind, size = start & 1, start >> 1 & 3, start >> 3
        if size > _BLOCK or kind == 3:
            raise _damaged("a block is too large")
        parts.append(feed.take(3 + (1 if kind == 1 else size)))
        if len(parts) == 8:
            yield b"".join(parts)
            parts.clear()
    parts.append(feed.take(checksum))
    if rest := b"".join(parts):  # a decompressor that is at the end of its frame takes nothing more
        yield rest


def _join(blocks: Iterator[bytes], most: int) -> bytes:
    parts = []
    for part in blocks:
        parts.append(part)
        most -= len(part)
        if most < 0:
            raise _damaged("a frame is larger than its content")
    return b"".join(parts)


class _Pool:
    """Threads that decompress whole frames; results come back in order."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._waiting: list[SimpleQueue[Any]] = []
        self._threads: list[Any] = []
        self._most = min(cores(), _WORKERS)

    def exchange(self, frame: bytes, content: int) -> bytes:
        """Hand in a frame; get back an earlier one's content once every thread is busy, b"" before."""
        if len(self._threads) < self._most:
            from threading import Thread

            thread = Thread(target=self._run, daemon=True)
            thread.start()
            self._threads.append(thread)
        result: SimpleQueue[Any] = SimpleQueue()
        self._waiting.append(result)
        self._work.put((frame, content, result))
        return self._first() if len(self._waiting) > self._most else b""

    def drain(self) -> Iterator[memoryview]:
        """The contents that are still out."""
        while self._waiting:
            yield memoryview(self._first())

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _first(self) -> bytes:
        result = self._waiting.pop(0).get()
        if isinstance(result, BaseException):
            raise result
        return bytes(result)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            frame, content, result = job
            try:
                plain = _whole(frame, content)
                if len(plain) != content:
                    raise _damaged("a frame has another size than it says")
                result.put(plain)
            except BaseException as failure:
                result.put(failure)


def _whole(frame: bytes, content: int) -> bytes:
    stream = decompressor()
    plain = stream.decompress(frame)
    if not stream.eof:
        raise _damaged("a frame does not end with its last block")
    return bytes(plain)


def _damaged(what: str) -> LayerError:
    return LayerError(f"the layer's zstd data is damaged: {what}")
