"""The process's memory by address: views, mappings of our own, advice to the kernel (madvise(2), mmap(2))."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from dataclasses import dataclass

PAGE = 4096
"""Alignment of what is kept in a file; O_DIRECT needs offsets and lengths that are multiples of it."""

MADV_DONTNEED = 4
MADV_REMOVE = 9
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

copy = ctypes.memmove
"""copy(to, from, length): a foreign call, so other threads run meanwhile."""


def round_up(number: int, step: int = PAGE) -> int:
    """The next multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def view(address: int, length: int) -> memoryview:
    """Writable bytes at an address. Nothing keeps the memory alive or mapped but the caller."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def advise(address: int, length: int, advice: int) -> None:
    """madvise(2).

    Raises:
        OSError: as the kernel answered.
    """
    if _libc.madvise(address, length, advice):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise({advice}): {os.strerror(number)}")


def trim_heap() -> None:
    """Give the C library's free memory back to the kernel, where that library can (glibc)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


class Map:
    """A mapping of our own, gone with `close`: of a file (shared), or anonymous memory (private, in huge pages).

    Python's own mmap cannot be closed while a view of it is alive somewhere; this one goes when it is told to.
    """

    def __init__(self, length: int, descriptor: int = -1, *, writable: bool = True) -> None:
        flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, length, protection, flags, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")
        self.address: int = address
        self.length = length
        if descriptor < 0:
            self.advise(MADV_HUGEPAGE)

    def advise(self, advice: int, offset: int = 0, length: int | None = None) -> bool:
        """Advise the kernel of a part; False where it does not know this advice, which changes nothing but speed."""
        try:
            advise(self.address + offset, self.length - offset if length is None else length, advice)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Unmap; a second time does nothing."""
        if self.length:
            _libc.munmap(self.address, self.length)
            self.length = 0


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/self/maps, with its flags from smaps when they were asked for."""

    start: int
    end: int
    permissions: str
    path: str
    locked: bool = False

    @property
    def shared(self) -> bool:
        return self.permissions[3] == "s"


_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")


def mappings() -> list[Mapping]:
    """This process's mappings by address.

    What is locked stands in smaps alone, which is slow in large processes: it is read only when something is locked.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        locked = any(line.startswith("VmLck:") and line.split()[1] != "0" for line in status)
    found: list[Mapping] = []
    with open("/proc/self/smaps" if locked else "/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _LINE.match(line)
            if match:
                start, end, permissions, path = match.groups()
                found.append(Mapping(int(start, 16), int(end, 16), permissions, path.strip()))
            elif line.startswith("VmFlags:") and "lo" in line.split():
                last = found[-1]
                found[-1] = Mapping(last.start, last.end, last.permissions, last.path, True)
    return found
