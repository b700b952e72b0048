"""A file of weights by its open descriptor: reads and writes that are whole, or a mapping of it."""

from __future__ import annotations

import os
from typing import Callable, Iterator, Sequence

from .errors import GuestError
from .memory import Map
from .pack import Pack

_MOST_VECTORS = 1024  # IOV_MAX


class File:
    """The file of one pack. `close` closes the descriptor and undoes the mapping.

    Args:
        by: "read" or "write" for system calls, "mmap" where the file system has no write(2) or is memory.
        direct: the descriptor is open with O_DIRECT: offsets, lengths and addresses must be multiples of 4096.
    """

    def __init__(self, descriptor: int, *, by: str, direct: bool = False, writable: bool = False) -> None:
        self.descriptor = descriptor
        self.direct = direct
        self.map: Map | None = None
        self._by = by
        self._writable = writable

    def open(self, pack: Pack) -> None:
        """Look whether the file is as long as the pack, and map it if it is to be mapped.

        Raises:
            GuestError: it is shorter, or cannot be mapped, or `by` is unknown.
        """
        size = os.fstat(self.descriptor).st_size
        if size < pack.bytes:
            raise GuestError(f"weights {pack.name}: the file has {size} bytes instead of {pack.bytes}")
        if self._by == "mmap":
            try:
                self.map = Map(size, self.descriptor, writable=self._writable)
            except OSError as error:
                raise GuestError(f"weights {pack.name}: the file cannot be mapped: {error}") from error
        elif self._by != ("write" if self._writable else "read"):
            raise GuestError(f"weights {pack.name}: this library cannot move them by {self._by!r}")

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill the views from the file, one behind the other.

        Raises:
            OSError: the read failed.
            GuestError: the file ends before.
        """
        for start, batch in _batches(views):
            _all(
                lambda rest, at: os.preadv(self.descriptor, rest, at), batch, offset + start, "the file of weights ends"
            )

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write the views to the file, one behind the other.

        Raises:
            OSError: the write failed (no space, for one).
        """
        for start, batch in _batches(views):
            _all(lambda rest, at: os.pwritev(self.descriptor, rest, at), batch, offset + start, "nothing is written")

    def close(self) -> None:
        """Close it; a second time does nothing."""
        if self.map is not None:
            self.map.close()
            self.map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _batches(views: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    start = 0
    for first in range(0, len(views), _MOST_VECTORS):
        batch = list(views[first : first + _MOST_VECTORS])
        yield start, batch
        start += sum(len(view) for view in batch)


def _all(call: Callable[[list[memoryview], int], int], views: list[memoryview], offset: int, nothing: str) -> None:
    """Repeat a vector call until all is moved: one call moves 2 GiB at most, and less when it is interrupted."""
    while views:
        moved = call(views, offset)
        if moved <= 0:
            raise GuestError(f"{nothing} at byte {offset}")
        offset += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]
