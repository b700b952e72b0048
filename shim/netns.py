"""Network namespaces with a name, one for each container and attempt.

Restores that share a network namespace fail on what another attempt left in it: an abstract unix name that is still
taken, a port, a lock rule. So a container whose network namespace is its own gets a fresh one here at every create,
and finds it as `path` in its bundle. A namespace with a path is external to CRIU: it is not dumped, and a restore
enters the one that runc names.

The names stand under /run/netns, in the way that iproute2 keeps them (ip-netns(8)), so that `ip netns` lists them and
`ip netns exec` enters them. A name is `fermata-NAMESPACE+ID+RANDOM`. Neither containerd's namespaces nor its ids may
hold a `+`, so a name belongs to one container only, however hyphens are spread over namespace and id.

This runs at every container's start. pyroute2 does the same, but its import alone takes 130 ms, and it forks a process
for the namespace; what is here takes 1 ms to import (shim/libc.py), and the namespace takes less.
"""

from __future__ import annotations

import _socket
import _thread
import errno
import fcntl
import os
import sys

from shim import libc
from shim.errors import FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

DIRECTORY = "/run/netns"
LOCKS = "/run/fermata/.netns-locks"
"""A file for each network namespace in which a dump or restore is under way, named after its inode (see lockrules).

No containerd namespace can be called that, so it does not meet the state directories beside it.
"""
PREFIX = "fermata-"
SEPARATOR = "+"
ANNOTATION = "fermata/netns"
PRIVATE, KEEP = "private", "keep"

# include/uapi/linux/sched.h, include/uapi/linux/mount.h, include/linux/fs.h
CLONE_NEWNET = 0x40000000
MS_BIND, MS_REC, MS_SHARED = 0x1000, 0x4000, 0x100000
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
# include/uapi/linux/sockios.h, include/uapi/linux/if.h: struct ifreq is 40 bytes, a name of 16 and then the flags
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 0x1
IFREQ_SIZE, IFNAMSIZ = 40, 16


class Choice:
    """What becomes of a container's network namespace: `kind` is "private" or "keep", `reason` says why."""

    __slots__ = ("kind", "reason")

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        self.reason = reason

    def __repr__(self) -> str:
        return f"Choice({self.kind!r}, {self.reason!r})"


def choose(spec: dict[str, Any], annotation: str | None = None) -> Choice:
    """Decide from a container's config.json and its annotation `fermata/netns`.

    Without the annotation, a container that asks for a network namespace of its own gets a fresh named one, and what
    the client brought (a namespace by path, the host's) stays, since it is the client's.

    A container with a user namespace keeps what runc makes. The kernel lets root of a user namespace mount sysfs and
    configure interfaces only in a network namespace which that user namespace owns, and runc makes the user namespace
    itself, later than this. Asked for `private` all the same, it is refused.

    Raises ShimError for a value other than `private` and `keep`, and for one that cannot be had.
    """
    if annotation not in (None, PRIVATE, KEEP):
        raise ShimError(
            f"The annotation {ANNOTATION} is {annotation!r}; it can be {PRIVATE!r} or {KEEP!r}", INVALID_ARGUMENT
        )
    namespaces = {entry.get("type"): entry for entry in (spec.get("linux") or {}).get("namespaces") or ()}
    if annotation == KEEP:
        return Choice(KEEP, f"{ANNOTATION} says so")
    if "user" in namespaces:
        if annotation == PRIVATE:
            raise ShimError(
                f"The annotation {ANNOTATION} is {PRIVATE!r}, but the container has a user namespace, and a network "
                "namespace which that does not own could not be used from inside; leave the annotation out",
                INVALID_ARGUMENT,
            )
        return Choice(KEEP, "a user namespace has to own its network namespace, so runc makes both")
    if annotation == PRIVATE:
        return Choice(PRIVATE, f"{ANNOTATION} says so")
    network = namespaces.get("network")
    if network is None:
        return Choice(KEEP, "the client gave it the host's network")
    if network.get("path"):
        return Choice(KEEP, f"the client brought {network['path']}")
    return Choice(PRIVATE, "its network namespace is its own")


def has_own(spec: dict[str, Any]) -> bool:
    """Whether a container has another network namespace than the host's."""
    return any(entry.get("type") == "network" for entry in (spec.get("linux") or {}).get("namespaces") or ())


def enter(spec: dict[str, Any], path: str) -> None:
    """Name the network namespace at `path` in a container's config.json, in place of what stood there."""
    linux = spec.setdefault("linux", {})
    others = [entry for entry in linux.get("namespaces") or () if entry.get("type") != "network"]
    linux["namespaces"] = [*others, {"type": "network", "path": path}]


def create(namespace: str, container_id: str) -> str:
    """Make a fresh network namespace with loopback up, and return its path under /run/netns.

    It is made in a thread of its own, which ends with this call: a thread that has changed its network namespace must
    never serve anything else. The new namespace's sysctls are what runc's own would have, since both are made by a
    thread in the network namespace of containerd (which matters with net.core.devconf_inherit_init_net=3).

    Raises ShimError; nothing is left behind then.
    """
    path = f"{DIRECTORY}/{_prefix(namespace, container_id)}{os.urandom(8).hex()}"
    try:
        _share_directory()
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))
    except OSError as cause:
        raise ShimError(f"No network namespace could be made: {cause}", INTERNAL) from cause
    failures: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()
    try:
        _thread.start_new_thread(_create_here, (path, failures, done))
        done.acquire()
    except RuntimeError as cause:  # no thread to be had
        failures.append(cause)
    if failures:
        remove(path)
        raise ShimError(f"No network namespace could be made at {path}: {failures[0]}", INTERNAL) from failures[0]
    return path


def remove(path: str) -> None:
    """Remove a namespace that `create` made. One that is gone already, or was made by half, is no error.

    The kernel keeps the namespace itself for as long as a process or a descriptor is in it.

    Raises ShimError for a path that is not one of ours, and when the kernel refuses.
    """
    name = path.removeprefix(f"{DIRECTORY}/")
    if name == path or not _is_ours(name):
        raise ShimError(f"{path} is not a network namespace of fermata's; it is left alone", FAILED_PRECONDITION)
    try:
        status = os.stat(path)
        _unmount(path)
        os.unlink(path)
        if status.st_dev == os.stat("/proc/thread-self/ns/net").st_dev:  # else it is a name without a namespace
            os.unlink(f"{LOCKS}/{status.st_ino}")  # left by a killed shim; another namespace may get the same inode
    except FileNotFoundError:
        return
    except OSError as cause:
        raise ShimError(f"The network namespace {path} could not be removed: {cause}", INTERNAL) from cause


def ours(namespace: str | None = None, container_id: str | None = None) -> list[str]:
    """The paths of fermata's namespaces, all of them or those of one container; half made ones are among them."""
    prefix = PREFIX if namespace is None or container_id is None else _prefix(namespace, container_id)
    try:
        names = os.listdir(DIRECTORY)
    except FileNotFoundError:
        return []
    return sorted(f"{DIRECTORY}/{name}" for name in names if name.startswith(prefix) and _is_ours(name))


def _prefix(namespace: str, container_id: str) -> str:
    for word in (namespace, container_id):
        # containerd's own rule (pkg/identifiers) is narrower; what matters here is that no name reaches out of the
        # directory, that none is two containers', and that it fits into the 255 bytes of a file name.
        if (
            not word.isascii()
            or not word.replace(".", "").replace("_", "").replace("-", "").isalnum()
            or len(word) > 76
        ):
            raise ShimError(f"{word!r} is not an identifier of containerd's", INVALID_ARGUMENT)
    return f"{PREFIX}{namespace}{SEPARATOR}{container_id}{SEPARATOR}"


def _is_ours(name: str) -> bool:
    parts = name.split(SEPARATOR)
    return (
        name.startswith(PREFIX)
        and "/" not in name
        and len(parts) == 3
        and len(parts[2]) == 16
        and not parts[2].strip("0123456789abcdef")
    )


def _create_here(path: str, failures: list[BaseException], done: _thread.LockType) -> None:
    try:
        libc.call("unshare", CLONE_NEWNET)
        raise_loopback()
        # thread-self: /proc/self is the main thread, which has stayed where it was
        libc.call("mount", b"/proc/thread-self/ns/net", os.fsencode(path), b"none", MS_BIND, None)
    except BaseException as failure:
        failures.append(failure)
    finally:
        done.release()


def raise_loopback() -> None:
    """Bring up `lo` in the calling thread's network namespace. Raises OSError."""
    control = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        name = b"lo".ljust(IFNAMSIZ, b"\0")
        answer = fcntl.ioctl(control.fileno(), SIOCGIFFLAGS, name.ljust(IFREQ_SIZE, b"\0"))
        flags = int.from_bytes(answer[IFNAMSIZ : IFNAMSIZ + 2], sys.byteorder) | IFF_UP
        fcntl.ioctl(control.fileno(), SIOCSIFFLAGS, (name + flags.to_bytes(2, sys.byteorder)).ljust(IFREQ_SIZE, b"\0"))
    finally:
        control.close()


def _share_directory() -> None:
    """Make /run/netns a shared mount of itself, as iproute2 does, so that an unmount reaches every mount namespace.

    Without it a service with a mount namespace of its own would keep a copy of each mount, and with it the namespace.
    """
    os.makedirs(DIRECTORY, 0o755, exist_ok=True)
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # iproute2 takes the same lock for the same purpose
        target = DIRECTORY.encode()
        try:
            libc.call("mount", b"none", target, b"none", MS_SHARED | MS_REC, None)
        except OSError as cause:
            if cause.errno != errno.EINVAL:  # EINVAL: not a mount point yet
                raise
            libc.call("mount", target, target, b"none", MS_BIND | MS_REC, None)
            libc.call("mount", b"none", target, b"none", MS_SHARED | MS_REC, None)
    finally:
        os.close(directory)


def detach(path: str) -> None:
    """Unmount what is mounted last at `path`, at once, whoever uses it. Raises OSError."""
    libc.call("umount2", os.fsencode(path), MNT_DETACH | UMOUNT_NOFOLLOW)


def _unmount(path: str) -> None:
    while True:  # a name mounted over twice has to be unmounted twice before it can be unlinked
        try:
            detach(path)
        except OSError as cause:
            if cause.errno == errno.EINVAL:  # not a mount point: half made, or done
                return
            raise


def inside(path: str, work: Callable[[], T]) -> T:
    """What `work` returns, run in a thread of its own in the network namespace at `path`.

    Processes that `work` starts are in it too. The thread ends with this call. Raises what `work` raises, and OSError
    if the namespace cannot be entered.
    """
    results: list[T] = []
    failures: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()

    def enter_and_work() -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc.call("setns", handle, CLONE_NEWNET)
            finally:
                os.close(handle)
            results.append(work())
        except BaseException as failure:
            failures.append(failure)
        finally:
            done.release()

    _thread.start_new_thread(enter_and_work, ())
    done.acquire()
    if failures:
        raise failures[0]
    return results[0]
