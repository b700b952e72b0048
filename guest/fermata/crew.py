"""Several threads that work off one list."""

from __future__ import annotations

import os
import threading
import time
from typing import Callable, Generic, Iterable, Iterator, TypeVar

from .errors import GuestError

T = TypeVar("T")
MOST = 16


def default_size() -> int:
    """As many threads as this process may use processors, 16 at most."""
    return max(1, min(MOST, len(os.sched_getaffinity(0))))


class Crew(Generic[T]):
    """Threads that take items until there are none, one has failed, or the deadline has passed."""

    def __init__(
        self, items: Iterable[T], work: Callable[[Iterator[T]], None], *, threads: int, deadline: float
    ) -> None:
        """Start them. `work` is called once in each thread, with an iterator over the items that fall to it."""
        self._items = iter(items)
        self._work = work
        self._deadline = deadline
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self._began = time.monotonic()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def fail(self, error: BaseException) -> None:
        """Let every thread stop at its next item."""
        with self._lock:
            if self.failure is None:
                self.failure = error

    def join(self) -> None:
        """Wait for all of them.

        Raises:
            GuestError, or what the first thread that failed raised.
        """
        for thread in self._threads:
            thread.join()
        self.seconds = time.monotonic() - self._began
        if self.failure is not None:
            raise self.failure

    def _mine(self) -> Iterator[T]:
        while True:
            with self._lock:
                if self.failure is not None:
                    return
                if time.monotonic() > self._deadline:
                    self.failure = GuestError("the limit of this step passed while weights were moved")
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item

    def _run(self) -> None:
        try:
            self._work(self._mine())
        except BaseException as error:
            self.fail(error)


def run(items: Iterable[T], work: Callable[[Iterator[T]], None], *, threads: int, deadline: float) -> None:
    """Work off all items in this thread and others; see `Crew`."""
    Crew(items, work, threads=threads, deadline=deadline).join()
