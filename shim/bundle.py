"""A container's bundle: its config.json, and what the annotations in it ask of fermata."""

from __future__ import annotations

import json
import os

from shim import specedits
from shim.errors import INVALID_ARGUMENT, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESTORE_FROM = "fermata/restore-from"
NETNS = "fermata/netns"
LAYER = "fermata/layer"
CHECK = "fermata/check"

CRIU_CONFIG = "org.criu.config"
CRI_CONTAINER_TYPE = "io.kubernetes.cri.container-type"

# The values that an annotation may have; None: any value.
_VALUES: dict[str, tuple[str, ...] | None] = {
    RESTORE_FROM: None,
    NETNS: ("private", "keep"),
    LAYER: ("carry", "none"),
    CHECK: ("refuse", "warn"),
    **specedits.VALUES,
}


class Bundle:
    """config.json of a bundle, to be changed and written back.

    Raises ShimError when it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = f"{path}/config.json"
        try:
            with open(self._file, "rb") as file:
                self.spec: dict[str, Any] = json.load(file)
        except (OSError, ValueError) as error:
            raise ShimError(f"cannot read {self._file}: {error}", INVALID_ARGUMENT) from error
        self.original = json.dumps(self.spec)

    @property
    def annotations(self) -> dict[str, str]:
        """The container's annotations; never None."""
        found = self.spec.get("annotations")
        return found if isinstance(found, dict) else {}

    @property
    def root(self) -> str:
        """Absolute path of the root file system."""
        root = self.spec.get("root") or {}
        path = str(root.get("path", "rootfs"))
        return path if path.startswith("/") else f"{self.path}/{path}"

    def annotate(self, key: str, value: str) -> None:
        """Set an annotation."""
        self.spec.setdefault("annotations", {})[key] = value

    def check_annotations(self) -> None:
        """Raise ShimError that names every `fermata/` annotation or value that is unknown."""
        wrong = []
        for key, value in self.annotations.items():
            if not key.startswith("fermata/"):
                continue
            if key not in _VALUES:
                wrong.append(f"unknown annotation {key} (there are {', '.join(sorted(_VALUES))})")
            elif (allowed := _VALUES[key]) and value not in allowed:
                wrong.append(f"annotation {key} is {value!r}, it can be {' or '.join(allowed)}")
        source = self.annotations.get(RESTORE_FROM)
        if source is not None and not source.startswith("/"):
            wrong.append(
                f"annotation {RESTORE_FROM} is {source!r}, it must be the absolute path of a snapshot directory"
            )
        if wrong:
            raise ShimError("; ".join(wrong), INVALID_ARGUMENT)

    def leave_cgroup(self, taken: dict[str, Any], namespace: str, container_id: str) -> None:
        """Have the container that the spec came from keep its cgroup to itself.

        `ctr c restore` makes the new container from the old one's spec, the path of the cgroup included, and runc
        restores into an empty cgroup only: not beside the old container, and not twice. `taken` is the manifest. A path
        that does not end with a container's id is the operator's own and stays.
        """
        linux = self.spec.get("linux")
        path = linux.get("cgroupsPath") if isinstance(linux, dict) else None
        if not isinstance(path, str):
            return
        separator = ":" if ":" in path else "/"  # systemd's form is slice:prefix:name
        parent, found, name = path.rpartition(separator)
        former = taken.get("container")
        taken_id = former.get("id") if isinstance(former, dict) else None
        if found and (name == taken_id or parent == f"/{namespace}"):
            linux["cgroupsPath"] = f"{parent}{found}{container_id}"

    def write(self) -> None:
        """Write config.json back, by rename, when it was changed."""
        if json.dumps(self.spec) == self.original:
            return
        mode = os.stat(self._file).st_mode & 0o777
        fd = os.open(f"{self._file}.fermata", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(self.spec, file)
        os.rename(f"{self._file}.fermata", self._file)
