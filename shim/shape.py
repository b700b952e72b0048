"""The shape of a fermata.json: which of its values are what, as far as anything here uses them.

Checked once when it is read, so that nothing behind that meets a list where it expects an object. Keys that are not
named here are of no concern; docs/fermata.schema.json describes all of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ANY = ""
"""Key of a shape whose object may have any keys, all with values of one shape."""

_NUMBER = (int, float)
_MOUNT = {"destination": str, "type": str, "source": str, "file": bool, "options": [str]}
_DEVICE = {"path": str, "type": str, "major": int, "minor": int}
_SPEC = {
    "annotations": {ANY: str},
    "process": {"terminal": bool, "env": [str]},
    "mounts": [_MOUNT],
    "linux": {"cgroupsPath": str, "namespaces": [{"type": str, "path": str}], "devices": [_DEVICE]},
}
_GPU = {"uuid": str, "model": str, "memory": int}
_OUTCOMES = ("out", "inside", "none")
SHAPE = {
    "version": {"major": int, "minor": int},
    "taken": str,
    "container": {
        "id": str,
        "namespace": str,
        "image": str,
        "image_digest": str,
        "runtime": str,
        "snapshotter": str,
        "left_running": bool,
    },
    "node": {"name": str, "containerd": str},
    "requires": {
        "architecture": str,
        "cpu_features": [str],
        "kernel": str,
        "criu": str,
        "runc": str,
        "cgroup": int,
        "memory": int,
        "terminal": bool,
        "namespaces": [str],
        "mounts": [_MOUNT],
        "devices": [_DEVICE],
        "files": [{"path": str, "mount": str, "size": int, "mode": int}],
    },
    "files": {ANY: int},
    "layer": {"file": str, "digest": str, "size": int, "entries": int, "made_by": str, "reason": str},
    "gpu": {
        "driver": str,
        "gpus": [_GPU],
        "processes": [{"pid": int, "command": str, "bytes": int, "by_gpu": {ANY: int}}],
    },
    "guest": {
        "outcome": _OUTCOMES,
        "reason": str,
        "token": str,
        "processes": [{"pid": int, "packs": [{"name": str, "digest": str, "bytes": int}]}],
        "seconds": {ANY: _NUMBER},
    },
    "steps": {ANY: _NUMBER},
    "frozen": _NUMBER,
    "spec": _SPEC,
}
_WORDS = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    _NUMBER: "a number",
    _OUTCOMES: "one of out, inside and none",
}
_END = 1 << 63  # no size, number of a process or time that anybody has is as large; 1e999 is read as infinity


def misfit(value: object) -> str | None:
    """What is wrong with a fermata.json, as `requires.mounts[0] is not an object`; None when nothing is.

    null stands for what is not there, but in the runtime specification, which never has one.
    """
    return _bad_text(value, "it") or _misfit(value, SHAPE, "it", False)


def _misfit(value: object, shape: Any, where: str, strict: bool) -> str | None:
    if value is None and not strict:
        return None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is not a list"
        found = (
            # An item that is left out of a list has no meaning; a value that is left out of the item has.
            f"{where}[{at}] is null" if item is None else _misfit(item, shape[0], f"{where}[{at}]", strict)
            for at, item in enumerate(value)
        )
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is not an object"
        found = (
            _misfit(item, shape.get(key, shape.get(ANY)), _below(where, key), strict or shape is _SPEC)
            for key, item in value.items()
            if key in shape or ANY in shape
        )
        if shape is _GPU and (lacking := [key for key in ("uuid", "model") if value.get(key) is None]):
            return f"{where} has no {lacking[0]}"
        if shape is SHAPE["layer"] and not _is_name(value.get("file")):
            return f"{where}.file is no name of a file"
    elif shape is _OUTCOMES:
        return None if value in _OUTCOMES else f"{where} is not {_WORDS[shape]}"
    else:
        fits = isinstance(value, shape) and isinstance(value, bool) == (shape is bool)
        if fits and not strict and isinstance(value, _NUMBER) and not (0 if shape is int else -_END) <= value < _END:
            return f"{where} is out of range"
        return None if fits else f"{where} is not {_WORDS[shape]}"
    return next((text for text in found if text is not None), None)


def _bad_text(value: object, where: str) -> str | None:
    """JSON can write what no file's name and no message can hold: a zero byte, half of a surrogate pair."""
    if isinstance(value, str):
        return f"{where} holds a character that no text has" if "\0" in value or not _is_text(value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            found = _bad_text(key, f"a name in {where}") or _bad_text(item, _below(where, key))
            if found:
                return found
    elif isinstance(value, list):
        for at, item in enumerate(value):
            if found := _bad_text(item, f"{where}[{at}]"):
                return found
    return None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and "/" not in value and value not in ("", ".", "..")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _below(where: str, key: str) -> str:
    return key if where == "it" else f"{where}.{key}"
