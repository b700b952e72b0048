"""JSON for what runs at every container's start: json's own C parts, without its Python ones.

The json module imports re, and re imports enum, functools and collections: 7 ms for every container, and for one
configuration that is read and written. Its scanner and its encoder are in C and need none of that. Whatever they cannot
do, and every error, is left to json itself, so that results and messages are its own.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WHITESPACE = " \t\n\r"


class _Defaults:
    """What json.JSONDecoder() tells the scanner."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = {"-Infinity": float("-inf"), "Infinity": float("inf"), "NaN": float("nan")}.__getitem__


def loads(data: bytes) -> Any:
    """As json.loads. Raises ValueError for what is no JSON."""
    try:
        from _json import make_scanner

        decoder: Any = _Defaults
        text = data.decode()
        value, end = make_scanner(decoder)(text, 0)
        if not text[end:].strip(_WHITESPACE):
            return value
    except Exception:  # its own errors, StopIteration for nothing at all, or another Python's other C side
        pass
    import json

    return json.loads(data)


def dumps(value: Any) -> str:
    """As json.dumps. Raises TypeError or ValueError for what JSON cannot hold."""
    try:
        from _json import encode_basestring_ascii, make_encoder

        # Reference cycles, default, string encoder, indent, separators, sort_keys, skipkeys, allow_nan
        encode = make_encoder({}, _refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)
        return "".join(encode(value, 0))
    except Exception:
        pass
    import json

    return json.dumps(value)


def _refuse(value: object) -> Any:
    raise TypeError
