"""Mounts that a killed CRIU left below a directory.

During a restore CRIU mounts every control group hierarchy below its working directory (`.criu.cgyard.…`). Killed, it
leaves them there. They have to go before anybody removes that directory, or the removal would go on into the control
groups of the node.
"""

from __future__ import annotations

import os

from shim import netns
from shim.errors import INTERNAL, ShimError


def below(directory: str) -> list[str]:
    """The mount points below a directory, the deepest first."""
    found = []
    with open("/proc/thread-self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:  # proc_pid_mountinfo(5): field 5 is the mount point, octal for white space and backslash
            path = _plain(line.split()[4])
            if path.startswith(f"{directory}/"):
                found.append(path)
    return sorted(found, reverse=True)


def detach_below(directory: str) -> list[str]:
    """Detach every mount below a directory, and remove the empty mount points right in it. Returns what was there.

    Raises ShimError.
    """
    found = below(os.path.realpath(directory))
    for path in found:
        try:
            netns.detach(path)
        except OSError as cause:
            raise ShimError(
                f"{path}, which a killed CRIU left mounted, cannot be unmounted: {cause}", INTERNAL
            ) from cause
    for path in found:
        try:
            os.rmdir(path)  # those inside another one went with it
        except FileNotFoundError:
            pass
    return found


def _plain(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
