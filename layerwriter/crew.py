"""The small files of a layer, made by the thread that reads the entries and by another one beside it.

Making a file is a handful of system calls, and Python's lock is free during each. More threads than this wait for the
lock, and for the file system's own locks on a directory, more than they do. What a directory has to get after its
children (its times) waits for the last of them, whichever thread makes it.
"""

from __future__ import annotations

import os
from _queue import SimpleQueue
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread

    from layerwriter.reader import Entry

    Job = tuple[int, Entry, bytes, memoryview]
    """The entry's number in the layer, the entry, its name in its directory, its data."""

_BATCHES = 2
"""Batches that are out at a time. While they are, the reading thread makes files itself."""
_BATCH_FILES, _BATCH_BYTES = 16, 512 << 10


class Directory:
    """A directory of the new tree that is not complete: `fd` is open, and `finish` waits for its children.

    `gid` is its group, -1 while that is not known.
    """

    __slots__ = ("batches", "fd", "finish", "gid", "left")

    def __init__(self, fd: int, finish: Callable[[], None]) -> None:
        self.fd = fd
        self.finish = finish
        self.gid = -1
        self.batches = 0
        self.left = False


class Crew:
    """Makes files by calling `make` with a job and its directory, in any order.

    `failed` makes an exception of a job into one that names the entry. It is kept as `failure`, and raised by a later
    call.
    """

    def __init__(
        self, make: Callable[[Job, Directory], None], failed: Callable[[Job | None, BaseException], BaseException]
    ) -> None:
        self._make = make
        self._failed = failed
        self._lock = allocate_lock()
        self._thread: Thread | None = None
        self._work: SimpleQueue[tuple[Directory, list[Job]] | None] = SimpleQueue()
        self._made: SimpleQueue[None] = SimpleQueue()
        self._out = 0
        self._batch: list[Job] = []
        self._bytes = 0
        self.failure: BaseException | None = None

    def put(self, directory: Directory, job: Job) -> None:
        """Have a file made in the current directory, which stays the current one until send() or leave()."""
        self._batch.append(job)
        self._bytes += len(job[3])
        if len(self._batch) >= _BATCH_FILES or self._bytes >= _BATCH_BYTES:
            self.send(directory)

    def send(self, directory: Directory) -> None:
        """Let the collected jobs of a directory go to work."""
        if self.failure is not None:
            raise self.failure
        batch = self._batch
        if not batch:
            return
        self._batch = []
        self._bytes = 0
        while self._out and not self._made.empty():
            self._made.get()
            self._out -= 1
        if self._out == _BATCHES:
            self._make_all(directory, batch)
            return
        if self._thread is None:
            from threading import Thread

            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
        with self._lock:
            directory.batches += 1
        self._out += 1
        self._work.put((directory, batch))

    def leave(self, directory: Directory) -> bool:
        """Leave a directory for good. True: jobs in it are out, and the last of them will finish and close it."""
        self.send(directory)
        with self._lock:
            directory.left = directory.batches > 0
        return directory.left

    def drain(self, directory: Directory) -> None:
        """Wait until every file is made."""
        self.send(directory)
        while self._out:
            self._made.get()
            self._out -= 1
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stop the thread. Directories that were left are closed."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _make_all(self, directory: Directory, batch: list[Job]) -> None:
        job: Job | None = None
        try:
            for job in batch:
                self._make(job, directory)
        except BaseException as failure:
            self.failure = self._failed(job, failure)
            raise self.failure  # noqa: B904 - it has its cause

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            directory, batch = work
            if self.failure is None:
                try:
                    self._make_all(directory, batch)
                except BaseException:  # kept, and raised where the entries are read
                    pass
            with self._lock:
                directory.batches -= 1
                last = directory.left and directory.batches == 0
            if last:
                self._finish(directory)
            self._made.put(None)

    def _finish(self, directory: Directory) -> None:
        try:
            if self.failure is None:
                directory.finish()
        except BaseException as failure:
            self.failure = self._failed(None, failure)
        finally:
            os.close(directory.fd)
