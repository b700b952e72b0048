"""Functions of the C library that Python's os module does not have, for what runs at every container's start.

ctypes calls them, and its import takes 6 ms (Python 3.14: it brings sysconfig and threading along), half as long as the
interpreter's own start. Nearly all of that is ctypes' Python side, for structures, callbacks and libraries by name; a
call with numbers and bytes needs the C side alone, `_ctypes`, which takes 1 ms. Where that should change, ctypes itself
is used.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Argument = int | bytes | None
    Call = Callable[[str, tuple[Argument, ...]], tuple[int, int]]


def call(function: str, *arguments: int | bytes | None) -> None:
    """Call a function of the C library that returns 0 or sets errno.

    A number is passed as an unsigned long, bytes and None as a pointer. Raises OSError, whose file name is the last
    path among the arguments.
    """
    status, number = _caller()(function, arguments)
    if status != 0:
        paths = [os.fsdecode(word) for word in arguments if isinstance(word, bytes) and word != b"none"]
        raise OSError(number, f"{function}: {os.strerror(number)}", *paths[-1:])


_calls: list[Call] = []


def _caller() -> Call:
    if not _calls:
        try:
            _calls.append(_lean())
        except (ImportError, AttributeError, TypeError, ValueError):
            _calls.append(_usual())
    return _calls[0]


def _lean() -> Call:
    """By ctypes' C side."""
    import _ctypes

    side: Any = _ctypes
    simple = side._SimpleCData
    number = type(simple)("number", (simple,), {"_type_": "L"})
    text = type(simple)("text", (simple,), {"_type_": "z"})
    result = type(simple)("result", (simple,), {"_type_": "i"})
    pointer = side.CFuncPtr
    flags = side.FUNCFLAG_CDECL | side.FUNCFLAG_USE_ERRNO
    kind = type(pointer)("function", (pointer,), {"_flags_": flags, "_restype_": result})
    library = side.dlopen(None, 0)

    def by_address(function: str, arguments: tuple[Argument, ...]) -> tuple[int, int]:
        words = [number(word) if isinstance(word, int) else text(word) for word in arguments]
        status = kind(side.dlsym(library, function))(*words)
        return status, side.get_errno()

    return by_address


def _usual() -> Call:
    """By ctypes."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)

    def by_name(function: str, arguments: tuple[Argument, ...]) -> tuple[int, int]:
        words = (ctypes.c_ulong(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments)
        status = getattr(library, function)(*words)
        return status, ctypes.get_errno()

    return by_name
