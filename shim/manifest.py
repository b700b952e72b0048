"""`fermata.json`: what a snapshot is, what it needs, and how it was taken.

It is written last, by rename, after everything else of the snapshot is on disk: a directory without it is no snapshot.
Unknown keys are kept when it is read and written again; an unknown major version is refused.
"""

from __future__ import annotations

import json
import os
import stat

from shim.errors import FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, NOT_FOUND, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from shim.rootfs import Rootfs

NAME = "fermata.json"
STAGED = f".{NAME}.staged"
MAJOR, MINOR = 1, 1
_LIMIT = 4 << 20  # bytes; one of ours has a few thousand


class Manifest:
    """The content of a snapshot's fermata.json; `data` is the JSON object."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @property
    def layer(self) -> dict[str, Any] | None:
        """The layer's entry: file, digest, size, entries, made_by; None when the snapshot carries none."""
        layer = self.data.get("layer")
        return layer if isinstance(layer, dict) else None

    @property
    def steps(self) -> dict[str, float]:
        """Seconds that each step of the take took, and `total`."""
        steps = self.data.get("steps")
        return {k: v for k, v in steps.items() if isinstance(v, (int, float))} if isinstance(steps, dict) else {}

    def stage(self, directory: str) -> None:
        """Bring everything of the snapshot to disk, and this description beside it under a temporary name.

        A description that was staged before stays until this one is whole. Raises OSError, and ShimError for a
        description that could not be read back: a take fails for it, before it is too late to take the dump back.
        """
        from shim.shape import misfit

        if wrong := misfit(self.data):
            raise ShimError(f"a fault in fermata itself: {NAME} would be unreadable: {wrong}", INTERNAL)
        sync_files(directory)
        draft = f"{directory}/.{NAME}.draft"
        with open(draft, "w", encoding="utf-8", opener=_private) as file:
            json.dump(self.data, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, f"{directory}/{STAGED}")

    def write(self, directory: str) -> None:
        """Stage and publish. Raises OSError."""
        self.stage(directory)
        publish(directory)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def publish(directory: str) -> None:
    """Make the directory a snapshot: what was staged last gets its name. Raises OSError."""
    try:
        os.unlink(f"{directory}/.{NAME}.draft")  # of a stage that failed
    except FileNotFoundError:
        pass
    os.rename(f"{directory}/{STAGED}", f"{directory}/{NAME}")
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

    Raises ShimError when the directory is missing, empty, holds no finished snapshot, or one of another major version,
    and when the file is not what fermata writes, whoever wrote it.
    """
    try:
        # Never another file than this directory's, and never one that keeps who opens it waiting.
        fd = os.open(f"{directory}/{NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            text = _read(fd) if regular else b""
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the directory's name
        raise _unreadable(directory, error) from error
    if not regular:
        raise ShimError(f"{directory}/{NAME} is no regular file: it is not fermata's", INVALID_ARGUMENT)
    if len(text) > _LIMIT:
        raise ShimError(f"{directory}/{NAME} is larger than {_LIMIT} bytes: it is not fermata's", INVALID_ARGUMENT)
    try:
        data = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ShimError(f"{directory}/{NAME} is damaged: {error}; take the snapshot again", INVALID_ARGUMENT) from error
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(version, dict) or type(version.get("major")) is not int:
        raise ShimError(f"{directory}/{NAME} has no version: it is not fermata's", INVALID_ARGUMENT)
    if version["major"] != MAJOR:
        raise ShimError(
            f"snapshot {directory} has format version {version['major']}.{version.get('minor', 0)}, this fermata reads "
            f"{MAJOR}.x: restore it with the version that took it, or take it again",
            FAILED_PRECONDITION,
        )
    from shim.shape import misfit

    if wrong := misfit(data):
        raise ShimError(f"{directory}/{NAME} is damaged: {wrong}; take the snapshot again", INVALID_ARGUMENT)
    return Manifest(data)


def _read(fd: int) -> bytes:
    parts = []
    size = 0
    while size <= _LIMIT and (part := os.read(fd, _LIMIT + 1)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that is there twice one reader takes the first value and another the last. Raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in found if names.count(name) > 1)!r} is in an object twice")
    return found


def _no_number(word: str) -> float:
    """JSON has no NaN and no Infinity, and comparisons with them have no sense; Python would read them."""
    raise ValueError(f"{word} is no number")


def _unreadable(directory: str, error: OSError | ValueError) -> ShimError:
    try:
        names = os.listdir(directory)
    except ValueError:
        return ShimError(f"no snapshot at {directory!r}: no directory can have that name", INVALID_ARGUMENT)
    except FileNotFoundError:
        return ShimError(f"no snapshot at {directory}: the directory does not exist on this node", NOT_FOUND)
    except NotADirectoryError:
        return ShimError(f"no snapshot at {directory}: it is a file, a snapshot is a directory", INVALID_ARGUMENT)
    except OSError as other:
        return ShimError(f"cannot read the snapshot directory {directory}: {other.strerror}", FAILED_PRECONDITION)
    if not names:
        return ShimError(f"no snapshot at {directory}: the directory is empty", NOT_FOUND)
    if NAME in names:
        reason = error.strerror if isinstance(error, OSError) else error
        return ShimError(f"cannot read {directory}/{NAME}: {reason}", FAILED_PRECONDITION)
    # The kubelet's archive has the snapshot one level down, and so has a directory of snapshots.
    inside = [name for name in sorted(names) if os.path.exists(f"{directory}/{name}/{NAME}")]
    if inside:
        return ShimError(
            f"no snapshot at {directory}: it has no {NAME}, but {directory}/{inside[0]} has: name that directory",
            FAILED_PRECONDITION,
        )
    return ShimError(
        f"no snapshot at {directory}: it has no {NAME}, so the take did not finish, or it is not "
        "fermata's; take it again",
        FAILED_PRECONDITION,
    )


def files(directory: str) -> dict[str, int]:
    """Name and bytes of each file of a snapshot, fermata.json aside, so that a copy can be seen to be whole."""
    found = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(directory)}
    return {name: found[name] for name in sorted(found) if not name.startswith(".") and name != NAME}


def amend(directory: str, changes: dict[str, Any]) -> None:
    """Add to a finished manifest what only a client knows; an object is merged into the one that is there.

    Raises ShimError when there is no manifest.
    """
    manifest = read(directory)
    for key, value in changes.items():
        found = manifest.data.get(key)
        manifest.data[key] = {**found, **value} if isinstance(found, dict) and isinstance(value, dict) else value
    manifest.write(directory)


def requirements(spec: dict[str, Any], rootfs: Rootfs, directory: str, criu: str) -> dict[str, Any]:
    """What the restore side must offer, from the container's specification, its image layers, the node and the dump.

    `directory` holds CRIU's images of the dump. Raises ShimError when these cannot be read.
    """
    from shim import host, images

    linux = spec.get("linux") or {}
    process = spec.get("process") or {}
    return {
        "architecture": host.machine(),
        "cpu_features": host.cpu_features(),
        "kernel": host.kernel(),
        "criu": criu,
        "runc": host.program_version("runc"),
        "cgroup": host.cgroup_version(),
        "memory": sum(entry.stat().st_size for entry in os.scandir(directory) if entry.name.startswith("pages-")),
        "terminal": bool(process.get("terminal")),
        "namespaces": sorted(str(namespace.get("type")) for namespace in linux.get("namespaces") or []),
        "mounts": describe_mounts(spec),
        "devices": [
            {
                "path": device.get("path"),
                "type": device.get("type"),
                "major": device.get("major", 0),
                "minor": device.get("minor", 0),
            }
            for device in linux.get("devices") or []
        ],
        "files": _files(images.needed_files(directory), spec, rootfs),
    }


def _files(needed: Iterable[tuple[str, str, int, int]], spec: dict[str, Any], rootfs: Rootfs) -> list[dict[str, Any]]:
    """Of the files that processes had open or mapped, those that a restore finds in the image or on a bind mount.

    What the writable layer held comes back with the layer, and what a tmpfs held with CRIU's images.
    """
    binds = {mount["destination"].rstrip("/"): mount for mount in describe_mounts(spec) if mount["type"] == "bind"}
    described = []
    for mount, path, size, mode in needed:
        if mount == "/":
            if not any(os.path.lexists(f"{lower}{path}") for lower in rootfs.lower):
                continue
            if rootfs.upper is not None and os.path.lexists(f"{rootfs.upper}{path}"):
                continue
        elif mount not in binds:
            continue
        described.append({"path": path, "mount": mount, "size": size or None, "mode": mode & 0o7777})
    return described


def describe_mounts(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The mounts of a spec that a restore side must offer: destination, type, and source of a bind mount.

    `file` says whether the source of a bind mount is something else than a directory, where it can be seen.
    """
    described = []
    for mount in spec.get("mounts") or []:
        options = mount.get("options") or []
        bind = "bind" in options or "rbind" in options
        entry: dict[str, Any] = {
            "destination": str(mount.get("destination")),
            "type": "bind" if bind else str(mount.get("type") or ""),
        }
        if bind:
            entry["source"] = str(mount.get("source"))
            if os.path.exists(entry["source"]):
                entry["file"] = not os.path.isdir(entry["source"])
        described.append(entry)
    return described
