"""A restore whose CRIU was killed, ended: the processes that it left would keep everybody waiting for ever.

CRIU restores with several processes, which wait for the first one's word, the new container's among them. When that is
killed they wait on, and since they have inherited the socket over which runc awaits CRIU's answer, runc waits too, and
with it everybody up to the client. So while a restore runs, somebody looks now and then whether its CRIU lives.
"""

from __future__ import annotations

import _thread
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

INTERVAL = 1.0
"""Seconds between two looks. A restore that is shorter costs none."""


class Watch:
    """A context manager around one restore, whose CRIU works in the directory `work`, which no other has.

    `log` gets a sentence when orphans were killed.
    """

    def __init__(self, work: str, log: Callable[[str], None], interval: float = INTERVAL) -> None:
        self._work = os.path.realpath(work)
        self._log = log
        self._interval = interval
        self._end = _thread.allocate_lock()
        self._ended = _thread.allocate_lock()

    def __enter__(self) -> Watch:
        self._end.acquire()
        self._ended.acquire()
        _thread.start_new_thread(self._look, ())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.release()
        self._ended.acquire()

    def _look(self) -> None:
        try:
            while not self._end.acquire(True, self._interval):
                for pid in sorted(orphans(self._work)):
                    self._log(f"CRIU was killed during the restore; killing process {pid}, which waits for it")
                    _kill(pid, self._work)
        finally:
            self._ended.release()


def orphans(work: str) -> set[int]:
    """The processes of a CRIU with the working directory `work` that a signal has ended, and that runc has not reaped.

    They are runc's other children, the first process of the new container among them, and CRIU's own, which work in
    that directory. One that has ended by itself has done its work, and its children are the container.
    """
    killed_children_of, runc = set(), set()
    children: dict[int, set[int]] = {}
    found = set()
    for pid in _pids():
        state, parent, status = _state(pid)
        is_criu = _name(pid).startswith("criu")
        if state == "Z":
            if is_criu and status & 0x7F:  # wait(2): the signal that ended it
                killed_children_of.add(parent)
            continue
        children.setdefault(parent, set()).add(pid)
        if is_criu and _works_in(pid, work):
            found.add(pid)
        elif work.encode() in _arguments(pid):
            runc.add(pid)
    bereft = runc & killed_children_of
    return found.union(*(children.get(pid, ()) for pid in bereft)) if bereft else set()


def _kill(pid: int, work: str) -> None:
    import _signal

    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in orphans(work):  # else the number has become another process's
            _signal.pidfd_send_signal(process, 9)
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _name(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").decode("utf-8", "replace").rstrip("\n")


def _arguments(pid: int) -> list[bytes]:
    return _read(f"/proc/{pid}/cmdline").split(b"\0")


def _state(pid: int) -> tuple[str, int, int]:
    """proc_pid_stat(5): after the name in brackets, the state and the parent's pid; last, the exit status."""
    words = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (words[0].decode(), int(words[1]), int(words[-1])) if words else ("", 0, 0)


def _works_in(pid: int, work: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == work
    except OSError:  # it has ended
        return False


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""
