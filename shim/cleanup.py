"""What `delete` does when a container's daemon is gone, from what stands on the disk and in /proc alone."""

from __future__ import annotations

import _signal
import os

from shim.client import connect
from shim.state import State

DAEMON = "daemon"
"""File of the state directory: our socket's path, the stock shim's pid and that process's start time."""


def record(socket: str, pid: int) -> str:
    """The content of the file DAEMON."""
    return f"{socket}\n{pid}\n{start_time(pid)}\n"


def start_time(pid: int) -> str:
    """A process's start time in clock ticks since boot, which with its pid names it for ever (proc(5)); "" if gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def end_orphaned_stock_shim(namespace: str, container_id: str) -> None:
    """Kill the stock shim when our daemon, the only one who could reach it, has died.

    From then on all is as if the stock shim itself had died, which containerd and the stock shim's `delete` know how
    to clean up. In a pod the daemon's death takes the reach to all its containers; containerd calls `delete` for each
    of them.
    """
    recorded = State(namespace, container_id).read(DAEMON)
    if recorded is None:
        return
    socket, pid_text, started = recorded.split("\n")[:3]
    try:
        connect(socket).close()
        return  # the daemon lives
    except OSError:
        pass
    pid = int(pid_text)
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if started and start_time(pid) == started:  # checked with the descriptor open, so it cannot be another's by now
            _signal.pidfd_send_signal(descriptor, _signal.SIGKILL)
            import select

            select.select([descriptor], [], [], 5)
    except OSError:
        pass
    finally:
        os.close(descriptor)
    try:
        os.unlink(socket)
    except OSError:
        pass


def forget(namespace: str, container_id: str) -> None:
    """Remove all that is kept outside the bundle for a container, whoever made it. Idempotent. Raises ShimError."""
    from shim import netns

    for path in netns.ours(namespace, container_id):
        netns.remove(path)
    State(namespace, container_id).remove()
