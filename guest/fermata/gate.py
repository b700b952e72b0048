"""The gate between the program's use of its weights and the moments in which they are away."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class Gate:
    """Many threads may be inside; closing it waits until all have left, and keeps new ones waiting.

    A thread that is inside may enter again at any time, also while somebody waits for the gate to be empty: a forward
    that calls itself can never wait for its own end. So may the thread that closed the gate (callbacks use the model).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._closer: int | None = None
        self._users = 0
        self._broken: str | None = None
        self._own = threading.local()

    def enter(self) -> None:
        """Wait until the gate is open, and go in.

        Raises:
            RuntimeError: the weights will never be there (`break_for_good`).
        """
        depth: int = getattr(self._own, "depth", 0)
        if not depth:
            with self._changed:
                while self._closer is not None and self._closer != threading.get_ident() and self._broken is None:
                    self._changed.wait()
                if self._broken is not None:
                    raise RuntimeError(self._broken)
                self._users += 1
        self._own.depth = depth + 1

    def leave(self) -> None:
        """Undo one `enter` of this thread; without one it does nothing (a hook may run for a call that never began)."""
        depth: int = getattr(self._own, "depth", 0)
        if not depth:
            return
        self._own.depth = depth - 1
        if depth == 1:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def close(self, deadline: float) -> int:
        """Keep new threads out and wait until those inside have left; `deadline` is of time.monotonic().

        Returns how many are still inside at the deadline; the gate is open again then, and closed when it is 0.
        """
        with self._changed:
            self._closer = threading.get_ident()
            while self._users and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._users:
                self._closer = None
                self._changed.notify_all()
            return self._users

    def open(self) -> None:
        """Let everybody in again."""
        with self._changed:
            self._closer = None
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether somebody closed it, or is about to."""
        return self._closer is not None

    def break_for_good(self, sentence: str) -> None:
        """Answer every `enter` with RuntimeError(sentence)."""
        with self._changed:
            self._broken = sentence
            self._changed.notify_all()
