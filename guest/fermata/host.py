"""Weights in the process's own memory. They keep their addresses: pages are dropped, and filled again in place."""

from __future__ import annotations

import bisect
import hashlib
from typing import Iterator

from . import crew
from .errors import GuestError
from .file import File
from .memory import MADV_DONTNEED, MADV_REMOVE, PAGE, Map, Mapping, advise, copy, mappings, view
from .pack import Chunk, HostPart, Pack

_ZEROS = memoryview(bytes(PAGE))
_ANONYMOUS_SHARED = "/dev/zero (deleted)"


def check(parts: list[HostPart]) -> None:
    """Look whether every part's pages may be dropped and filled again.

    Raises:
        GuestError: names the part and what is in the way.
    """
    found = mappings()
    starts = [one.start for one in found]
    for part in parts:
        for one in _overlapping(found, starts, part):
            what = f"{part.what} is in memory that "
            if one.permissions[1] != "w":
                raise GuestError(f"{what}cannot be written to, so it could not be filled again")
            if one.locked:
                raise GuestError(f"{what}is locked (mlock), so it cannot be dropped")
            if one.shared and one.path != _ANONYMOUS_SHARED:
                raise GuestError(f"{what}is shared with the file {one.path}, whose content would be lost")


def _overlapping(found: list[Mapping], starts: list[int], part: HostPart) -> Iterator[Mapping]:
    at = bisect.bisect_right(starts, part.address) - 1
    end = part.address + part.bytes
    while at < len(found) and (at < 0 or found[at].start < end):
        if at >= 0 and found[at].end > part.address:
            yield found[at]
        at += 1


def take_digests(pack: Pack, *, threads: int, deadline: float) -> None:
    """Set the pack's `chunks`.

    Raises:
        GuestError: the deadline passed.
    """
    pack.chunks = [""] * -(-pack.bytes // pack.chunk)

    def work(chunks: Iterator[Chunk]) -> None:
        for chunk in chunks:
            pack.chunks[chunk.number] = _digest(pack, chunk)

    crew.run(pack.split(pack.chunk), work, threads=threads, deadline=deadline)


def write(pack: Pack, file: File, *, threads: int, deadline: float) -> None:
    """Write the pack into its file.

    Raises:
        OSError: the write failed.
        GuestError: the deadline passed.
    """

    def work(chunks: Iterator[Chunk]) -> None:
        for chunk in chunks:
            if file.map is None:
                file.write(list(_views(pack, chunk)), chunk.offset)
                continue
            # What lies between the pieces is zero already: the file is new.
            for piece in chunk.pieces:
                copy(file.map.address + piece.offset, pack.parts[piece.part].address + piece.start, piece.length)

    crew.run(pack.split(pack.chunk), work, threads=threads, deadline=deadline)


def release(pack: Pack, notes: list[str]) -> int:
    """Drop the whole pages of every part; returns their bytes. What cannot be dropped is noted, and stays."""
    shared = {one.start: one for one in mappings() if one.shared}
    released = 0
    for part in pack.parts:
        first = -(-part.address // PAGE) * PAGE
        length = (part.address + part.bytes) // PAGE * PAGE - first
        if length <= 0:
            continue
        remove = any(one.start <= first < one.end for one in shared.values())
        try:
            advise(first, length, MADV_REMOVE if remove else MADV_DONTNEED)
        except OSError as error:
            notes.append(f"{length} bytes of {part.what} stay in the snapshot: {error}")
        else:
            released += length
    return released


def load(pack: Pack, file: File, *, threads: int, deadline: float) -> None:
    """Fill every part from the file, and check that it is what was taken.

    Raises:
        OSError: a read failed.
        GuestError: the file is damaged, or the deadline passed.
    """

    def work(chunks: Iterator[Chunk]) -> None:
        buffer = Map(pack.chunk) if file.direct else None
        try:
            for chunk in chunks:
                if _fill(pack, chunk, file, buffer) != pack.chunks[chunk.number]:
                    raise damaged(pack, chunk.number)
        finally:
            if buffer is not None:
                buffer.close()

    crew.run(pack.split(pack.chunk), work, threads=threads, deadline=deadline)


def damaged(pack: Pack, chunk: int) -> GuestError:
    """The sentence for a chunk whose digest is another one."""
    return GuestError(
        f"weights {pack.name}: the file is damaged: chunk {chunk} (of {pack.chunk} bytes) is not as taken"
    )


def _fill(pack: Pack, chunk: Chunk, file: File, buffer: Map | None) -> str:
    """Put a chunk into its parts; returns its SHA-256 as it arrived."""
    if buffer is not None:  # O_DIRECT: parts begin anywhere in a page, the buffer does not
        whole = view(buffer.address, chunk.length)
        file.read([whole], chunk.offset)
        for piece in chunk.pieces:
            at = buffer.address + piece.offset - chunk.offset
            copy(pack.parts[piece.part].address + piece.start, at, piece.length)
        return hashlib.sha256(whole).hexdigest()
    if file.map is not None:
        for piece in chunk.pieces:
            copy(pack.parts[piece.part].address + piece.start, file.map.address + piece.offset, piece.length)
    else:
        # Zeros between the parts go nowhere.
        file.read(list(_views(pack, chunk, bytearray(PAGE))), chunk.offset)
    return _digest(pack, chunk)


def _digest(pack: Pack, chunk: Chunk) -> str:
    sha = hashlib.sha256()
    for one in _views(pack, chunk):
        sha.update(one)
    return sha.hexdigest()


def _views(pack: Pack, chunk: Chunk, padding: bytearray | None = None) -> Iterator[memoryview]:
    """The chunk's bytes in the file's order."""
    zeros = _ZEROS if padding is None else memoryview(padding)
    at = chunk.offset
    for piece in chunk.pieces:
        if piece.offset > at:
            yield zeros[: piece.offset - at]
        yield view(pack.parts[piece.part].address + piece.start, piece.length)
        at = piece.offset + piece.length
    if chunk.offset + chunk.length > at:
        yield zeros[: chunk.offset + chunk.length - at]
