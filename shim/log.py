"""Log lines in containerd's own form, into the FIFO that containerd reads from its side of the bundle."""

from __future__ import annotations

import os
import time

LEVELS = ("debug", "info", "warning", "error")


def _quote(value: object) -> str:
    text = str(value)
    if text and all(c.isalnum() or c in "-._/:@+,^" for c in text):
        return text
    escaped = "".join(
        c if c.isprintable() and c not in '"\\' else {"\n": "\\n", '"': '\\"', "\\": "\\\\"}.get(c, f"\\x{ord(c):02x}")
        for c in text
    )
    return f'"{escaped}"'


class Log:
    """Writes `time=… level=… msg=… key=value` lines, as logrus does, to a file descriptor.

    A line is one write of at most PIPE_BUF bytes, so that lines of several writers do not mix. A reader that is away
    or slow loses lines rather than stop a container's calls.
    """

    def __init__(self, fd: int, *, debug: bool = False, **fields: object) -> None:
        self._fd = fd
        self._debug = debug
        self._fields = fields

    def __call__(self, level: str, message: str, **fields: object) -> None:
        """Write one line at `level` (debug, info, warning, error)."""
        if level == "debug" and not self._debug:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e9):09d}Z"
        pairs = {**self._fields, **fields}
        line = f'time="{stamp}" level={level} msg={_quote(message)}' + "".join(
            f" {key}={_quote(value)}" for key, value in pairs.items()
        )
        data = line.encode("utf-8", "backslashreplace")[:4095] + b"\n"
        try:
            os.write(self._fd, data)
        except OSError:
            pass  # nobody reads: containerd is down or has gone; there is no better place to say so

    @classmethod
    def open_fifo(cls, bundle: str, *, debug: bool = False, **fields: object) -> Log:
        """The log of a bundle: containerd's FIFO `log`, or stderr where there is none.

        Opened for reading as well, so that opening does not wait for containerd and a containerd that restarts does
        not break it.
        """
        try:
            fd = os.open(f"{bundle}/log", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            fd = 2
        return cls(fd, debug=debug, **fields)

    @property
    def fd(self) -> int:
        """The descriptor that lines go to."""
        return self._fd
