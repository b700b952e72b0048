"""A container's own resolv.conf, hosts and hostname, in place of bind mounts that a restore could not make again.

Why CRIU fails on them. A bind mount whose source lies on a shared mount (on a node with systemd every mount is shared)
becomes a slave of that mount when runc makes it. CRIU writes this down, and its restore gives the new mount the same
master: it looks for the mount point which the source path stands on, and copies that one's sharing with
move_mount(MOVE_MOUNT_SET_GROUP). It resolves the path by its letters, so a source that is a symlink into another file
system (`/etc/resolv.conf` to `/run/systemd/resolve/...`) finds the wrong mount, and one on a mount that this node does
not have, or has but not shared, finds none. The kernel answers EINVAL and the restore is over.

So a source that is a symlink, or that lies on another file system than the node's root, is replaced by a copy in the
container's state directory, which every node has. All these mounts are made private: nothing can ever be mounted below
a file, so propagation means nothing for one, and without it CRIU has no master to look for.

A container that was restored sees its own new files: they come from what the client mounted into the new container,
not from the snapshot. What the node later changes in a file that was copied does not reach the container.
"""

from __future__ import annotations

import errno
import os
import stat

from shim.errors import INTERNAL, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DESTINATIONS = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
LIMIT = 1 << 20
"""Bytes. These files are a few lines; something larger under such a name is no configuration and is left alone."""

PROPAGATION = frozenset(
    ("private", "rprivate", "slave", "rslave", "shared", "rshared", "unbindable", "runbindable"),
)


class Edit:
    """One mount that was replaced: `destination` in the container, `source` before, `copy` now, and the `reason`."""

    __slots__ = ("copy", "destination", "reason", "source")

    def __init__(self, destination: str, source: str, copy: str, reason: str) -> None:
        self.destination = destination
        self.source = source
        self.copy = copy
        self.reason = reason

    def __repr__(self) -> str:
        return f"Edit({self.destination!r}, {self.source!r}, {self.copy!r}, {self.reason!r})"


def adopt(spec: dict[str, Any], state_dir: str, root: str = "/") -> list[Edit]:
    """Replace, in a container's config.json, the host files that a restore could not mount again.

    The copies are written into `state_dir`, which has to exist, with content, mode, owner, times and SELinux label of
    the file that the client named. Sources that are missing, no regular files or longer than LIMIT are left for runc to
    mount or to refuse. `root` is a path on the file system that every node has.

    Returns what was replaced. Raises ShimError if a copy cannot be written.
    """
    edits = []
    for mount in spec.get("mounts") or ():
        destination = os.path.normpath(mount.get("destination", ""))
        options = mount.get("options") or []
        if destination not in DESTINATIONS or not {"bind", "rbind"} & {mount.get("type"), *options}:
            continue
        mount["options"] = [word for word in options if word not in PROPAGATION] + ["rprivate"]
        source = mount.get("source", "")
        reason = _reason(source, root)
        if reason is None:
            continue
        copy = os.path.join(state_dir, os.path.basename(destination))
        if _copy(source, copy):
            mount["source"] = copy
            edits.append(Edit(destination, source, copy, reason))
    return edits


def _reason(source: str, root: str) -> str | None:
    if not os.path.isabs(source) or not os.path.exists(source):
        return None
    real = os.path.realpath(source)
    if real != os.path.normpath(source):
        return f"{source} leads to {real} by a symbolic link"
    if os.stat(source).st_dev != os.stat(root).st_dev:
        return f"{source} is not on the node's root file system"
    return None


def _copy(source: str, copy: str) -> bool:
    """Copy a small regular file under its new name at once; False if it is none."""
    draft = f"{copy}.new"
    try:
        # Without O_NONBLOCK a fifo under this name would hold up the container's create for ever.
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(reader)
            if not stat.S_ISREG(status.st_mode):
                return False
            content = _read(reader)
            if len(content) > LIMIT:
                return False
            label = _label(reader)
        finally:
            os.close(reader)
        writer = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            written = 0
            while written < len(content):
                written += os.write(writer, content[written:])
            os.fchown(writer, status.st_uid, status.st_gid)
            os.fchmod(writer, stat.S_IMODE(status.st_mode))  # after chown, which takes set-id bits away
            if label is not None:
                os.setxattr(writer, "security.selinux", label)
            os.utime(writer, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(writer)
        os.replace(draft, copy)
    except OSError as cause:
        raise ShimError(f"{source} could not be copied to {copy} for the container: {cause}", INTERNAL) from cause
    return True


def _read(reader: int) -> bytes:
    content = b""
    while len(content) <= LIMIT:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        content += piece
    return content


def _label(reader: int) -> bytes | None:
    try:
        return os.getxattr(reader, "security.selinux")
    except OSError as cause:
        if cause.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return None
        raise
