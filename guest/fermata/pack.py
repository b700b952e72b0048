"""A pack: the storages of one registration that are on one device, laid out as one file.

Each storage begins at a multiple of 4096; what lies between two is zeros. The file is hashed in chunks of 32 MiB.
"""

from __future__ import annotations

import bisect
import hashlib
from dataclasses import dataclass, field
from typing import Any, Iterator, NamedTuple, Sequence

from .memory import PAGE, round_up

CHUNK = 32 << 20
"""Bytes of a file that have a digest of their own."""


class HostPart(NamedTuple):
    """Bytes in the process's memory. `owner` keeps them where they are."""

    address: int
    bytes: int
    owner: Any
    what: str


class CudaPart(NamedTuple):
    """A torch.UntypedStorage on a GPU."""

    storage: Any
    bytes: int
    what: str


class Piece(NamedTuple):
    """Bytes `start` to `start + length` of a part, at `offset` of the file."""

    part: int
    start: int
    length: int
    offset: int


class Chunk(NamedTuple):
    """A stretch of the file, and the pieces of parts in it. Between and behind the pieces are zeros."""

    number: int
    offset: int
    length: int
    pieces: tuple[Piece, ...]


@dataclass
class Pack:
    """What goes into one file.

    Attributes:
        device: "cpu", or torch's name of a GPU.
        parts: HostPart for "cpu", CudaPart for a GPU.
        chunk: bytes in a chunk.
        chunks: SHA-256 of each chunk in hexadecimal, once they are known.
        sums: for a GPU, the check of each piece of each block (see `cuda`), once known.
    """

    name: str
    device: str
    parts: Sequence[Any]
    chunk: int = CHUNK
    chunks: list[str] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    offsets: list[int] = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = []
        end = 0
        for part in self.parts:
            self.offsets.append(end)
            end = round_up(end + part.bytes, PAGE)
        self.bytes = end

    def split(self, length: int) -> Iterator[Chunk]:
        """The file in stretches of `length`, the last one shorter."""
        for number, offset in enumerate(range(0, self.bytes, length)):
            yield self.stretch(number, offset, min(length, self.bytes - offset))

    def stretch(self, number: int, offset: int, length: int) -> Chunk:
        """The parts' pieces between two offsets of the file."""
        pieces = []
        end = offset + length
        for part in range(max(bisect.bisect_right(self.offsets, offset) - 1, 0), len(self.parts)):
            begin = self.offsets[part]
            if begin >= end:
                break
            start = max(offset - begin, 0)
            size = min(self.parts[part].bytes, end - begin) - start
            if size > 0:
                pieces.append(Piece(part, start, size, begin + start))
        return Chunk(number, offset, length, tuple(pieces))

    @property
    def digest(self) -> str:
        """What the file is found by: SHA-256 of its size, its chunks' size and their digests."""
        return digest(self.bytes, self.chunk, self.chunks)


def digest(size: int, chunk: int, chunks: Sequence[str]) -> str:
    """The digest of a file of weights, "sha256:…"."""
    text = f"fermata weights 1\n{size}\n{chunk}\n" + "".join(f"{one}\n" for one in chunks)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
