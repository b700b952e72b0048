"""A container's root file system as containerd describes it to a shim, and where its writable layer stands."""

from __future__ import annotations

import os

from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from shim.task import Mount


class Rootfs:
    """The mounts of a Create request.

    `kind` is "overlay", "directory" (no mounts: the client gave a directory of its own, which has no writable layer
    apart) or the type of a file system whose writable layer cannot be told apart here.
    """

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self.kind = "directory" if not mounts else mounts[-1].type
        self.options: list[str] = list(mounts[-1].options) if mounts else []
        self.upper = self._value("upperdir")
        self.lower: list[str] = [path for path in (self._value("lowerdir") or "").split(":") if path]
        if self.kind == "overlay" and self.upper is None:
            self.kind = "read-only overlay"

    def _value(self, key: str) -> str | None:
        for option in self.options:
            name, equals, value = option.partition("=")
            if equals and name == key:
                return value
        return None

    @property
    def xattr_prefix(self) -> str:
        """Where this overlay keeps its own xattrs: `trusted.`, or `user.` for a mount with userxattr."""
        return "user." if "userxattr" in self.options else "trusted."

    def empty_upper(self) -> str:
        """The upper directory if there is one and nothing is in it, else an empty string."""
        try:
            return self.upper if self.upper and not os.listdir(self.upper) else ""
        except OSError:  # whoever needs it says what is wrong
            return ""

    def require_overlay(self, purpose: str) -> str:
        """The upper directory. Raises ShimError that says why there is none and what to do."""
        if self.upper is not None and self.kind == "overlay":
            return self.upper
        raise ShimError(
            f"cannot {purpose}: its root file system is {self.kind!r}, and only an overlay's writable layer can be "
            "told apart; use the overlayfs snapshotter, or, if its files are kept elsewhere, set the annotation "
            "fermata/layer=none",
            FAILED_PRECONDITION,
        )
