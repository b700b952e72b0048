"""`fermata.json`: what a snapshot is, what it needs, and how it was taken.

It is written last, by rename, after everything else of the snapshot is on disk: a directory without it is no snapshot.
Unknown keys are kept when it is read and written again; an unknown major version is refused.
"""

from __future__ import annotations

import json
import os

from shim.errors import FAILED_PRECONDITION, INVALID_ARGUMENT, NOT_FOUND, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

NAME = "fermata.json"
MAJOR, MINOR = 1, 0
_LIMIT = 4 << 20  # bytes; one of ours has a few thousand


class Manifest:
    """The content of a snapshot's fermata.json; `data` is the JSON object."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @property
    def layer(self) -> dict[str, Any] | None:
        """The layer's entry: file, digest, size, entries, made_by; None when the snapshot carries none."""
        layer = self.data.get("layer")
        return layer if isinstance(layer, dict) and layer.get("file") else None

    def write(self, directory: str) -> None:
        """Make the snapshot complete: everything in the directory to disk, then fermata.json, by rename."""
        sync_files(directory)
        fd = os.open(f"{directory}/.{NAME}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(self.data, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(fd)
        os.rename(f"{directory}/.{NAME}.new", f"{directory}/{NAME}")
        _sync(directory)


def sync_files(directory: str) -> None:
    """Bring every file of the directory to disk, so that a fermata.json seen after a power loss vouches for them."""
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False):
            _sync(entry.path)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(directory: str) -> Manifest:
    """Read a snapshot's manifest and check that this version of fermata understands it.

    Raises ShimError when the directory is missing, empty, holds no finished snapshot, or one of another major version.
    """
    try:
        fd = os.open(f"{directory}/{NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(directory, error) from error
    with open(fd, "rb") as file:
        text = file.read(_LIMIT + 1)
    if len(text) > _LIMIT:
        raise ShimError(f"{directory}/{NAME} is larger than {_LIMIT} bytes: it is not fermata's", INVALID_ARGUMENT)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShimError(f"{directory}/{NAME} is damaged: {error}; take the snapshot again", INVALID_ARGUMENT) from error
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(version, dict) or not isinstance(version.get("major"), int):
        raise ShimError(f"{directory}/{NAME} has no version: it is not fermata's", INVALID_ARGUMENT)
    if version["major"] != MAJOR:
        raise ShimError(
            f"snapshot {directory} has format version {version['major']}.{version.get('minor', 0)}, this fermata reads "
            f"{MAJOR}.x: restore it with the version that took it, or take it again",
            FAILED_PRECONDITION,
        )
    return Manifest(data)


def _unreadable(directory: str, error: OSError) -> ShimError:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return ShimError(f"no snapshot at {directory}: the directory does not exist on this node", NOT_FOUND)
    except NotADirectoryError:
        return ShimError(f"no snapshot at {directory}: it is a file, a snapshot is a directory", INVALID_ARGUMENT)
    except OSError as other:
        return ShimError(f"cannot read the snapshot directory {directory}: {other.strerror}", FAILED_PRECONDITION)
    if not names:
        return ShimError(f"no snapshot at {directory}: the directory is empty", NOT_FOUND)
    if NAME in names:
        return ShimError(f"cannot read {directory}/{NAME}: {error.strerror}", FAILED_PRECONDITION)
    return ShimError(
        f"no snapshot at {directory}: it has no {NAME}, so the take did not finish, or it is not "
        "fermata's; take it again",
        FAILED_PRECONDITION,
    )


def describe_mounts(spec: dict[str, Any]) -> list[dict[str, str]]:
    """The mounts of a spec that a restore side must offer: destination, type, and source of a bind mount."""
    described = []
    for mount in spec.get("mounts") or []:
        options = mount.get("options") or []
        bind = "bind" in options or "rbind" in options
        entry = {"destination": str(mount.get("destination")), "type": "bind" if bind else str(mount.get("type") or "")}
        if bind:
            entry["source"] = str(mount.get("source"))
        described.append(entry)
    return described


def missing_mounts(recorded: Iterable[dict[str, str]], spec: dict[str, Any]) -> list[str]:
    """A sentence for each recorded mount that a spec lacks or has with another type."""
    present = {mount["destination"]: mount["type"] for mount in describe_mounts(spec)}
    sentences = []
    for mount in recorded:
        destination, kind = str(mount.get("destination")), str(mount.get("type"))
        origin = f"{kind}, from {mount['source']} on the source node" if mount.get("source") else kind
        if destination not in present:
            sentences.append(
                f"this container lacks the mount {destination} ({origin}): add it to the container's mounts"
            )
        elif present[destination] != kind:
            sentences.append(
                f"the mount {destination} is {present[destination]} here and was {origin}: make it the same"
            )
    return sentences
