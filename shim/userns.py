"""Images that the root of a container with a user namespace can read while CRIU restores it.

CRIU opens most images after it has joined the container's user namespace, as its root, who on the node is an ordinary
user; a snapshot is the node's root's alone. So CRIU gets the directory through a mount that shows the group root as the
container's (mount_setattr(2), Linux 5.12, on file systems that can), and the files are made readable for that group.
The owner stays who it is: some images CRIU opens a moment before, as the node's root, whom the kernel takes for nobody
special by then. The mount is nowhere in the file system tree, only a descriptor stands for it, so that nobody else gets
at it and nothing is left of it.
"""

from __future__ import annotations

import os
import stat
import time

from shim import weights
from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# linux/mount.h
_MOUNT_ATTR_IDMAP = 0x00100000
_SAME = [(0, 0, 0xFFFFFFFF)]
_LIMIT = 10.0  # seconds for a process to be in its namespace


class Images:
    """A snapshot's directory for the root of a container of this specification. `path` leads there until `close`.

    Raises ShimError where the file system of the directory cannot map groups.
    """

    def __init__(self, directory: str, spec: dict[str, Any]) -> None:
        groups = [
            (each["containerID"], each["hostID"], each["size"]) for each in spec["linux"].get("gidMappings") or []
        ]
        try:
            for path in (directory, *(entry.path for entry in os.scandir(directory))):
                _let_group_read(path)
            self._mount = weights.Mount(directory, read_only=True)
            try:
                _map(self._mount.fd, groups)
            except BaseException:
                self._mount.close()
                raise
        except OSError as error:
            raise ShimError(
                f"snapshot {directory} cannot be restored here: the container has a user namespace, whose root has to "
                f"read the images, and they cannot be shown to it ({error.strerror}): put the snapshot on a file "
                "system that root can write to and that maps owners (ext4, xfs, btrfs; tmpfs from Linux 6.3)",
                FAILED_PRECONDITION,
            ) from error
        self.path = f"/proc/{os.getpid()}/fd/{self._mount.fd}"
        self._open = True

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._open:
            self._open = False
            self._mount.close()


def _let_group_read(path: str) -> None:
    """Root's group, which is root's. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        wanted = stat.S_IMODE(status.st_mode) | (0o050 if stat.S_ISDIR(status.st_mode) else 0o040)
        if status.st_gid:
            os.fchown(fd, -1, 0)
        if wanted != stat.S_IMODE(status.st_mode):
            os.fchmod(fd, wanted)
    finally:
        os.close(fd)


def _map(mount: int, groups: list[tuple[int, int, int]]) -> None:
    """Have a mount show the groups of its files as a container with these mappings would. Raises OSError."""
    import ctypes
    import subprocess

    # The kernel takes the mappings of a namespace only, and that of the container is yet to be made.
    process = subprocess.Popen(["unshare", "--user", "sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        ours, theirs = os.stat("/proc/self/ns/user"), f"/proc/{process.pid}/ns/user"
        until = time.monotonic() + _LIMIT
        while os.path.samestat(ours, os.stat(theirs)):
            if process.poll() is not None or time.monotonic() > until:
                raise OSError(0, "the node makes no user namespaces")
            time.sleep(0.001)
        for name, ids in (("uid_map", _SAME), ("gid_map", groups)):
            with open(f"/proc/{process.pid}/{name}", "w", encoding="ascii") as file:
                file.write("".join(f"{inside} {outside} {count}\n" for inside, outside, count in ids))
        namespace = os.open(theirs, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        process.kill()
        process.wait()
    try:
        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_IDMAP, 0, 0, namespace)
        flags = weights.EMPTY_PATH
        weights.system_call(weights.MOUNT_SETATTR, mount, ctypes.c_char_p(b""), flags, attributes, 32)
    finally:
        os.close(namespace)
