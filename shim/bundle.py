"""A container's bundle: its config.json, and what the annotations in it ask of fermata."""

from __future__ import annotations

import os

from shim import fastjson, specedits
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
CRI_CONTAINER_NAME = "io.kubernetes.cri.container-name"
_OURS = "fermata/"

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
                self.spec: dict[str, Any] = fastjson.loads(file.read())
        except (OSError, ValueError) as error:
            raise ShimError(f"cannot read {self._file}: {error}", INVALID_ARGUMENT) from error
        self.original = fastjson.dumps(self.spec)
        self.named: set[str] = set()  # annotations that a pod has for this one of its containers: see `settle`

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

    def settle(self) -> None:
        """Reduce the `fermata/` annotations to those that are meant for this container.

        A pod's annotations reach all of its containers. `fermata/KEY.NAME` is meant for the container of that name and
        counts more than `fermata/KEY`, which is meant for every one. The pause container, which is nobody's snapshot
        and holds the pod's namespaces, is left alone by all of them.

        Raises ShimError that names every annotation or value that is unknown.
        """
        annotations = self.annotations
        pause = annotations.get(CRI_CONTAINER_TYPE) == "sandbox"
        name = annotations.get(CRI_CONTAINER_NAME)
        wrong: list[str] = []
        mine: dict[str, str] = {}
        for key in [key for key in annotations if key.startswith(_OURS)]:
            value = annotations.pop(key)
            general, dot, whose = key.partition(".")
            problem = _problem(key, general, value)
            if problem is None and dot and not pause and name is None:
                problem = f"annotation {key} names a container of a pod, and this one is in none: leave out .{whose}"
            if problem is not None:
                wrong.append(problem)
            elif dot and whose == name:
                self.named.add(general)
                mine[general] = value
            elif not dot and general not in self.named:
                mine[general] = value
        if (pause or name is not None) and mine.get(NETNS) == "private":
            wrong.append(
                f"annotation {NETNS} is 'private', and a container of a pod has the pod's network: leave it out"
            )
        if wrong:
            raise ShimError("; ".join(wrong), INVALID_ARGUMENT)
        if not pause:
            annotations.update(mine)

    def check_recorded_name(self, source: str, taken: dict[str, Any]) -> None:
        """Raise ShimError where a pod's annotation would restore one container's snapshot into another container.

        `taken` is the manifest of the snapshot in the directory `source`. An annotation that names this container may
        do that: it is meant.
        """
        name = self.annotations.get(CRI_CONTAINER_NAME)
        spec = taken.get("spec")
        recorded = ((spec.get("annotations") if isinstance(spec, dict) else None) or {}).get(CRI_CONTAINER_NAME)
        if name and recorded and name != recorded and RESTORE_FROM not in self.named:
            raise ShimError(
                f"annotation {RESTORE_FROM} is meant for every container of the pod, and {source} was taken of a "
                f"container {recorded!r}, while this one is {name!r}: annotate the pod with {RESTORE_FROM}.{recorded} "
                f"(or with {RESTORE_FROM}.{name}, if it is this one that shall be restored)",
                INVALID_ARGUMENT,
            )

    def leave_cgroup(self, taken: dict[str, Any], namespace: str, container_id: str) -> None:
        """Have the container that the spec came from keep its cgroup to itself.

        `ctr c restore` makes the new container from the old one's spec, the path of the cgroup included, and runc
        restores into an empty cgroup only: not beside the old container, and not twice. `taken` is the manifest. A path
        that does not end with a container's id is the operator's own and stays.
        """
        linux = self.spec.get("linux")
        if not isinstance(linux, dict) or not isinstance(path := linux.get("cgroupsPath"), str):
            return
        separator = ":" if ":" in path else "/"  # systemd's form is slice:prefix:name
        parent, found, name = path.rpartition(separator)
        former = taken.get("container")
        taken_id = former.get("id") if isinstance(former, dict) else None
        if found and (name == taken_id or parent == f"/{namespace}"):
            linux["cgroupsPath"] = f"{parent}{found}{container_id}"

    def write(self) -> None:
        """Write config.json back, by rename, when it was changed."""
        text = fastjson.dumps(self.spec)
        if text == self.original:
            return
        mode = os.stat(self._file).st_mode & 0o777
        fd = os.open(f"{self._file}.fermata", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(f"{self._file}.fermata", self._file)


def _problem(key: str, general: str, value: str) -> str | None:
    """What is wrong with an annotation, if anything; `general` is its key without a container's name."""
    if general not in _VALUES:
        return f"unknown annotation {key} (there are {', '.join(sorted(_VALUES))})"
    if key.endswith("."):
        return f"annotation {key} ends with a dot: the name of a container of the pod goes there"
    allowed = _VALUES[general]
    if allowed and value not in allowed:
        return f"annotation {key} is {value!r}, it can be {' or '.join(allowed)}"
    if general == RESTORE_FROM and not value.startswith("/"):
        return f"annotation {key} is {value!r}, it must be the absolute path of a snapshot directory"
    return None
