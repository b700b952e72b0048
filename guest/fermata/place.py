"""Where this process is: in a container that the shim prepared for this library, or anywhere else."""

from __future__ import annotations

import functools
import os
import stat

DIRECTORY = "/run/fermata"


@functools.lru_cache(maxsize=None)
def directory() -> str | None:
    """Where the shim looks for sockets; None outside a fermata container.

    The shim mounts an empty memory file system there, sticky like /tmp, so its device is not its parent's. On a node
    that directory holds the shim's own state and is neither. FERMATA_GUEST_DIRECTORY names another one, for tests.
    """
    other = os.environ.get("FERMATA_GUEST_DIRECTORY")
    if other:
        return other
    try:
        found, parent = os.lstat(DIRECTORY), os.stat(os.path.dirname(DIRECTORY))
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode) and found.st_dev != parent.st_dev and found.st_mode & stat.S_ISVTX:
        return DIRECTORY
    return None
