"""The control groups of a restore that failed: what is in them is ended, and they are removed.

A CRIU that is killed late leaves the new container's processes, which wait for it. runc 1.1 then forgets the container
and leaves both, so that no call can reach them any more.
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 5.0
"""Seconds for killed processes to end."""


class Attempt:
    """A restore into the control group that `path` names, as `linux.cgroupsPath` of config.json does."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._directories = directories(path) if path else []
        # What was there before is another's, and is never touched. That holds for the root of a hierarchy above all,
        # which is always there, and which `directories` never names.
        self._theirs = any(os.path.exists(directory) for directory in self._directories)
        # And whatever else goes wrong: a process that is older than the attempt is none of it.
        self._began = time.clock_gettime(time.CLOCK_BOOTTIME)

    @classmethod
    def of_the_dead(cls, record: str) -> Attempt:
        """The attempt of a shim that has died meanwhile, by its `record`."""
        began, _, path = record.partition(" ")
        found = cls(path)
        found._theirs = False
        found._began = float(began)
        return found

    @property
    def record(self) -> str:
        """What to keep of it for whoever cleans up after a crash; empty when there is nothing that may be touched."""
        return "" if self._theirs else f"{self._began!r} {self._path}"

    def undo(self) -> int:
        """Kill what is in the control groups, and remove them. Returns how many processes it killed.

        Whatever cannot be removed within PATIENCE stays, as the stock runtime would leave it.
        """
        if self._theirs:
            return 0
        killed = set()
        until = time.monotonic() + PATIENCE
        # By inode: one that is made again under the name meanwhile is that of the next container of this name.
        meant = {group: _inode(group) for directory in self._directories for group in _groups(directory)}
        while True:
            busy = False
            for group, inode in meant.items():
                if inode is not None and _inode(group) == inode:
                    killed |= _kill(group, self._began)
                    busy |= not _remove(group)
            if not busy or time.monotonic() > until:
                return len(killed)
            time.sleep(0.02)


def directories(path: str) -> list[str]:
    """Where a control group is, or would be, in each hierarchy that is mounted.

    `path` is absolute, or `SLICE:PREFIX:NAME` with systemd (config-linux.md of the runtime specification, and runc's
    docs/systemd.md).
    """
    if not path.startswith("/"):
        parent, _, scope = path.partition(":")
        prefix, _, name = scope.partition(":")
        path = f"{_slice(parent)}/{prefix}-{name}.scope" if prefix else f"{_slice(parent)}/{name}.scope"
    found = []
    with open("/proc/thread-self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if rest.startswith(("cgroup ", "cgroup2 ")):
                root = fields.split()[4]
                directory = os.path.normpath(f"{root}/{path}")
                if directory.startswith(f"{root}/"):  # below the root of the hierarchy, not it, and not outside
                    found.append(directory)
    return found


def _slice(name: str) -> str:
    """systemd's directory of a slice: `a-b.slice` is in `a.slice` (systemd.slice(5))."""
    words = (name or "system.slice").removesuffix(".slice").split("-")
    return "".join(f"/{'-'.join(words[: end + 1])}.slice" for end in range(len(words)) if any(words))


def _inode(group: str) -> int | None:
    try:
        return os.stat(group).st_ino
    except OSError:  # removed meanwhile
        return None


def _groups(directory: str) -> Iterator[str]:
    """A control group and all below it, the deepest first."""
    for path, _, _ in os.walk(directory, topdown=False):
        yield path


def _kill(group: str, began: float) -> set[int]:
    try:
        with open(f"{group}/cgroup.procs", encoding="ascii") as file:
            pids = {int(line) for line in file}
    except OSError:  # removed meanwhile
        return set()
    if pids & {0, 1, os.getpid(), os.getppid()}:  # nothing that a container can be in
        return set()
    pids = {pid for pid in pids if _started(pid) >= began}
    if pids:
        _thaw(group)
    for pid in pids:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            pass
    return pids


def _started(pid: int) -> float:
    """When a process was started, in seconds since boot (proc_pid_stat(5), field 22); 0.0 when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0.0
    # Counted in hundredths, rounded down: one that was started at once with the attempt may show as a tick before it.
    return (ticks + 1) / os.sysconf("SC_CLK_TCK")


def _thaw(group: str) -> None:
    """A frozen process of version 1 would not end. With version 2 it does."""
    try:
        with open(f"{group}/freezer.state", "w", encoding="ascii") as file:
            file.write("THAWED")
    except OSError:  # another hierarchy than the freezer's
        pass


def _remove(group: str) -> bool:
    try:
        os.rmdir(group)
    except FileNotFoundError:
        return True
    except OSError as cause:
        if cause.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True
