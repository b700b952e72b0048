"""What `delete` does when a container's daemon is gone, from what stands on the disk and in /proc alone."""

from __future__ import annotations

import _signal
import os
import time

from shim.client import connect
from shim.state import State

_DYING = 2.0
"""Seconds that a killed process may take to let go of its sockets."""

DAEMON = "daemon"
"""File of the state directory: the paths of our socket and of the stock shim's."""

HOOK_RECORD = "hook"
"""File of the state directory: the path of the socket that a take waits at for CRIU's action script."""


def record(socket: str, stock: str) -> str:
    """The content of the file DAEMON."""
    return f"{socket}\n{stock}\n"


def listener(path: str) -> int | None:
    """The pid of the process that listens at a unix socket's path; None when there is none.

    The peer's credentials would be those of the stock shim's `start`, which made the socket and is gone. So the
    socket's inode is looked up (proc_net(5)) and then searched for among the descriptors of the processes. That takes
    a while, and only a crash asks for it.

    The kernel's list has the path as its owner named it, and there may be other mount namespaces with other files of
    that name: who sees another file there, or none, is not meant.
    """
    try:
        meant = os.stat(path)
    except OSError:
        return None
    inodes = set()
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split()
            # Flags 00010000 (SO_ACCEPTCON): it listens.
            if len(fields) == 8 and fields[3] == "00010000" and fields[7] == path:
                inodes.add(f"socket:[{fields[6]}]")
    for name in os.listdir("/proc") if inodes else ():
        if not name.isdigit():
            continue
        try:
            seen = os.stat(f"/proc/{name}/root{path}")
            descriptors = os.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        if not os.path.samestat(seen, meant):
            continue
        for descriptor in descriptors:
            try:
                if os.readlink(f"/proc/{name}/fd/{descriptor}") in inodes:
                    return int(name)
            except OSError:
                continue
    return None


def end_orphaned_stock_shim(namespace: str, container_id: str, containerd: str) -> None:
    """Kill the stock shim when our daemon, the only one who could reach it, has died.

    From then on all is as if the stock shim itself had died, which containerd and the stock shim's `delete` know how
    to clean up. In a pod the daemon's death takes the reach to all its containers; containerd calls `delete` for each
    of them. `containerd` is the path of containerd's socket.
    """
    recorded = State(namespace, container_id).read(DAEMON)
    if recorded is None:
        return
    socket, stock = recorded.split("\n")[:2]
    if not _served(socket):
        _unlink(socket)
        # One that is being killed already shows no descriptors any more, and its socket answers for a moment longer.
        until = time.monotonic() + _DYING
        while _served(stock) and time.monotonic() < until:
            pid = listener(stock)
            if pid is not None:
                _kill(pid, stock)
            else:
                time.sleep(0.02)
    # Else the daemon lives, and its end takes the socket along; but the stock shim may have died in a call of its.
    if not _served(stock):
        _unlink(stock)
        # Whether somebody listens says nothing here: runc and CRIU inherit this one, and may live on for a moment.
        _unlink(_debug_socket(stock, containerd, namespace, container_id))


def _debug_socket(stock: str, containerd: str, namespace: str, container_id: str) -> str:
    """Where a stock shim of containerd 2.x that logs in detail listens as well, for profiling; removed by nobody if it
    is killed."""
    import hashlib

    name = hashlib.sha256(f"{containerd}/{namespace}/{container_id}/debug".encode()).hexdigest()
    return f"{os.path.dirname(stock)}/{name}"


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or its directory is


def _served(path: str) -> bool:
    try:
        connect(path).close()
        return True
    except OSError:
        return False


def _kill(pid: int, stock: str) -> None:
    import select

    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if listener(stock) == pid:  # asked again with the descriptor open, so it cannot be another's by now
            _signal.pidfd_send_signal(descriptor, _signal.SIGKILL)
            select.select([descriptor], [], [], 5)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def forget(namespace: str, container_id: str, *, keep: str = "") -> None:
    """Remove all that is kept outside the bundle for a container, whoever made it, but for the file `keep` of the state
    directory. Idempotent. Raises ShimError."""
    from shim import mounts, netns, unfinished

    for path in netns.ours(namespace, container_id):
        netns.remove(path)
    state = State(namespace, container_id)
    mounts.detach_below(state.log_path)
    if hook := state.read(HOOK_RECORD):
        _unlink(hook)  # there only if the daemon was killed in a take
    if restoring := state.read(unfinished.RECORD):
        unfinished.undo(restoring)
    state.remove(keep)
