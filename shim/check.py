"""Whether a snapshot can be restored: by this node, and into this container. All that does not fit, at once.

This runs at every restore before anything of it is touched, so it asks only what takes microseconds: stat(2) calls,
/proc, and versions that are kept. What would make CRIU or runc fail is a problem; what may do no harm is a warning.
"""

from __future__ import annotations

import os
import stat

from shim import host, rootfs, specedits
from shim import manifest as manifests
from shim.errors import FAILED_PRECONDITION, ShimError
from shim.host import listed, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

    from shim.config import Config
    from shim.manifest import Manifest
    from shim.rootfs import Rootfs

_NAMESPACES = ("ipc", "mount", "network", "pid", "user", "uts")
_AGAIN = "copy the snapshot again, whole"
_SHOWN = 50


class Finding:
    """One thing that does not fit: `level` is "problem" or "warning", `text` says what and how to mend it.

    `waivable`: who has the check only warn may try it all the same.
    """

    __slots__ = ("level", "text", "waivable")

    def __init__(self, level: str, text: str, *, waivable: bool = True) -> None:
        self.level = level
        self.text = text
        self.waivable = waivable

    def __repr__(self) -> str:
        return f"Finding({self.level!r}, {self.text!r})"


def _problem(text: str) -> Finding:
    return Finding("problem", text)


def _irregular(name: str) -> Finding:
    """A link would have root read another file, and a FIFO keeps CRIU waiting for ever."""
    return Finding("problem", f"{name} is no regular file: {_AGAIN}", waivable=False)


def _warning(text: str) -> Finding:
    return Finding("warning", text)


def findings(
    directory: str, manifest: Manifest, config: Config, spec: dict[str, Any] | None = None, root: Rootfs | None = None
) -> list[Finding]:
    """All that does not fit. Without `spec` only the directory and the node are looked at, without `root` no files of
    the image are."""
    requires = _object(manifest.data.get("requires"))
    found = [*_owned(directory), *_whole(directory, manifest), *_processor(requires), *_software(requires, config)]
    found += _weights(manifest, config)
    if spec is not None:
        found += _mounts(requires, spec)
        found += _devices(requires, spec)
        found += _namespaces(requires, spec)
        found += _users(manifest, spec)
        found += _terminal(requires, spec)
        found += _files(manifest, requires, spec, root)
        found += _gpu(manifest, spec, config)
    return [*found, *_memory(requires, spec), *_disk(manifest, root)]


def refuse(directory: str, found: list[Finding]) -> None:
    """Raise ShimError that names all problems among the findings, if there are any."""
    problems = [finding.text for finding in found if finding.level == "problem"]
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:  # an answer has to fit into a message
            shown.append(f"and {len(problems) - _SHOWN} more, which `fermata check` names")
        raise ShimError(f"snapshot {directory} cannot be restored here: {'; '.join(shown)}", FAILED_PRECONDITION)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# The directory ----------------------------------------------------------------------------------------------------


def _owned(directory: str) -> Iterator[Finding]:
    """Who can write CRIU's images decides what root restores: whoever is not root must not."""
    mend = f"make it root's alone, if you trust what is in it: chown -R 0:0 {directory}; chmod -R go-w {directory}"
    try:
        top = os.stat(directory)
        files = list(os.scandir(directory)) if top.st_mode & 0o011 else []  # else nobody gets at them
        theirs = [entry.name for entry in files if _others_write(entry.stat(follow_symlinks=False))]
    except OSError as error:
        yield _problem(f"the directory cannot be looked into: {error.strerror}")
        return
    if _others_write(top):
        yield _problem(f"the directory can be written to by others than root ({_owner(top)}): {mend}")
    elif theirs:
        yield _problem(f"{listed(sorted(theirs), 3)} can be written to by others than root: {mend}")


def _others_write(status: os.stat_result) -> bool:
    if stat.S_ISLNK(status.st_mode):
        return False  # no regular file, which is said elsewhere; its mode means nothing
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o002 or (status.st_mode & 0o020 and status.st_gid))


def _owner(status: os.stat_result) -> str:
    return f"owner {status.st_uid}, group {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"


def _whole(directory: str, manifest: Manifest) -> Iterator[Finding]:
    recorded = dict(_object(manifest.data.get("files")))
    recorded.setdefault("inventory.img", None)
    if manifest.layer:
        recorded.setdefault(str(manifest.layer["file"]), manifest.layer.get("size"))
    elif layers := [name for name in recorded if name.startswith("layer.tar")]:
        yield _problem(f"fermata.json names the file {layers[0]} and has no layer: {_AGAIN}")
    for name, bytes_ in recorded.items():
        if "/" in name:
            yield _problem(f"{name!r} is no name of a file of a snapshot: {_AGAIN}")
            continue
        try:
            status = os.lstat(f"{directory}/{name}")
        except OSError:
            yield _problem(f"{name} is not in the directory: {_AGAIN}")
            continue
        if not stat.S_ISREG(status.st_mode):
            yield _irregular(name)
        elif bytes_ is not None and status.st_size != bytes_:
            yield _problem(f"{name} has {status.st_size} bytes and was written with {bytes_}: {_AGAIN}")
    yield from _unvouched(directory, recorded, "files" in manifest.data)


def _unvouched(directory: str, recorded: dict[str, Any], complete: bool) -> Iterator[Finding]:
    """What fermata.json does not name: CRIU would read it all the same, and waits at a FIFO for ever.

    `complete`: it names every file, as it does since it names any.
    """
    added = []
    for entry in os.scandir(directory):
        if entry.name in recorded:
            continue
        if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
            yield _irregular(entry.name)
        elif complete and entry.name.endswith(".img"):
            added.append(entry.name)
    if added:
        yield _problem(f"fermata.json does not name {listed(sorted(added), 3)}, so the take did not write it: {_AGAIN}")


# The node ---------------------------------------------------------------------------------------------------------


def _processor(requires: dict[str, Any]) -> Iterator[Finding]:
    then, now = requires.get("architecture"), host.machine()
    if then and then != now:
        yield _problem(f"it was taken on {then}, this node is {now}: restore it on a node of its kind")
        return
    features = requires.get("cpu_features")
    if isinstance(features, list):
        lacking = sorted(set(map(str, features)) - set(host.cpu_features()))
        if lacking:
            yield _problem(
                f"this node's processor lacks {listed(lacking)}, which its programs may use: restore it on a "
                "node whose processor has them, or take it on the oldest kind of node"
            )


def _software(requires: dict[str, Any], config: Config) -> Iterator[Finding]:
    kernel = requires.get("kernel")
    if kernel and host.older(host.kernel(), str(kernel), 2):
        yield _warning(
            f"this node's kernel {host.kernel()} is older than {kernel}, under which it was taken: what only the newer "
            "one has cannot be restored; update the kernel if the restore fails"
        )
    try:
        ours = _criu_version(config)
    except ShimError as error:
        yield _problem(str(error))
    else:
        if host.older(ours, str(requires.get("criu") or "")):
            yield _problem(
                f"this node's CRIU {ours} is older than {requires['criu']}, which wrote the images: install CRIU "
                f"{requires['criu']} or newer"
            )
    runc = host.program_version("runc")
    if runc is None:
        yield _problem("this node has no runc on PATH: install it")
    elif host.older(runc, str(requires.get("runc") or "")):
        yield _warning(
            f"this node's runc {runc} is older than {requires['runc']} of the source node: update it if the "
            "restore fails"
        )
    cgroup = requires.get("cgroup")
    if cgroup and cgroup != host.cgroup_version():
        yield _problem(
            f"it was taken under cgroup v{cgroup}, this node has v{host.cgroup_version()}: boot this node with cgroup "
            f"v{cgroup} (systemd.unified_cgroup_hierarchy={int(cgroup == 2)}), or restore it on a node that has it"
        )


def _criu_version(config: Config) -> str:
    from shim import criu

    return ".".join(map(str, criu.installed(config).version))


def _memory(requires: dict[str, Any], spec: dict[str, Any] | None) -> Iterator[Finding]:
    needed = requires.get("memory")
    if not isinstance(needed, int):
        return
    free = host.memory_available()
    if needed > free:
        yield _problem(f"its memory is {size(needed)} and this node has {size(free)} available: free some")
    limits = _object(_object(_object((spec or {}).get("linux")).get("resources")).get("memory"))
    limit = limits.get("limit")
    if isinstance(limit, int) and 0 < limit < needed:
        yield _problem(
            f"its memory is {size(needed)} and this container's limit is {size(limit)}: raise the limit above it"
        )


def _disk(manifest: Manifest, root: Rootfs | None) -> Iterator[Finding]:
    if manifest.layer is None or root is None or root.upper is None:
        return
    needed, entries = manifest.layer.get("size"), manifest.layer.get("entries")
    try:
        free, inodes = host.room(root.upper)
    except OSError:
        return  # the snapshotter has not made it; unpacking says more
    if isinstance(needed, int) and needed > free:
        yield _problem(
            f"its layer has {size(needed)} and the disk of {root.upper} has {size(free)} free: make room there"
        )
    if isinstance(entries, int) and 0 <= inodes < entries:
        yield _problem(
            f"its layer has {entries} files and the disk of {root.upper} has room for {inodes} more: remove some there"
        )


# The container ----------------------------------------------------------------------------------------------------


def _origin(mount: dict[str, Any]) -> str:
    kind = str(mount.get("type"))
    return f"{kind}, from {mount['source']} on the source node" if mount.get("source") else kind


def _mounts(requires: dict[str, Any], spec: dict[str, Any]) -> Iterator[Finding]:
    present = {mount["destination"]: mount for mount in manifests.describe_mounts(spec)}
    for mount in _objects(requires.get("mounts")):
        destination = str(mount.get("destination"))
        if destination == specedits.CHANNEL:
            continue  # a restore adds it
        here = present.get(destination)
        if here is None:
            yield _problem(
                f"this container lacks the mount {destination} ({_origin(mount)}): add it to the container's mounts"
            )
        elif here["type"] != mount.get("type"):
            yield _problem(f"the mount {destination} is {here['type']} here and was {_origin(mount)}: make it the same")
        elif here["type"] == "bind":
            yield from _bind(destination, here, mount)


def _bind(destination: str, here: dict[str, Any], mount: dict[str, Any]) -> Iterator[Finding]:
    source = here["source"]
    if "file" not in here:
        yield _problem(
            f"the source {source} of the mount {destination} does not exist on this node: make it, or mount another"
        )
    elif "file" in mount and here["file"] != mount["file"]:
        kinds = ("a directory", "a file")
        yield _problem(
            f"the mount {destination} is {kinds[here['file']]} here ({source}) and was {kinds[mount['file']]} "
            f"({_origin(mount)}): mount {kinds[mount['file']]} there"
        )


def _devices(requires: dict[str, Any], spec: dict[str, Any]) -> Iterator[Finding]:
    present = {str(device.get("path")): device for device in _objects(_object(spec.get("linux")).get("devices"))}
    for device in _objects(requires.get("devices")):
        path = str(device.get("path"))
        if path.startswith("/dev/nvidia"):
            continue  # which of several GPUs it is may differ: compared as GPUs
        what = f"{device.get('type')} {device.get('major')}:{device.get('minor')}"
        here = present.get(path)
        if here is None:
            yield _problem(f"this container lacks the device {path} ({what}): add it to the container's devices")
            continue
        found = f"{here.get('type')} {here.get('major', 0)}:{here.get('minor', 0)}"
        if found != what:
            yield _problem(
                f"the device {path} is {found} here and was {what}: give the container the device that it had"
            )


def _namespaces(requires: dict[str, Any], spec: dict[str, Any]) -> Iterator[Finding]:
    recorded = requires.get("namespaces")
    if not isinstance(recorded, list):
        return
    present = {str(entry.get("type")) for entry in _objects(_object(spec.get("linux")).get("namespaces"))}
    for kind in _NAMESPACES:
        if kind in recorded and kind not in present:
            yield _problem(
                f"this container shares the node's {kind} namespace and the snapshot's had one of its own: give it one"
            )
        elif kind in present and kind not in recorded:
            yield _problem(
                f"this container has a {kind} namespace of its own and the snapshot's shared its node's: "
                "create the container without one"
            )


def _users(manifest: Manifest, spec: dict[str, Any]) -> Iterator[Finding]:
    """The mappings come back from the images, and the owners of the layer's files are the node's."""
    recorded = manifest.data.get("spec")
    if not isinstance(recorded, dict):
        return
    then, now = (_object(each.get("linux")) for each in (recorded, spec))
    for key, whose in (("uidMappings", "users"), ("gidMappings", "groups")):
        if then.get(key) and now.get(key) and then[key] != now[key]:
            yield _problem(
                f"this container maps its {whose} to {_ranges(now[key])} of the node, and the snapshot's mapped them "
                f"to {_ranges(then[key])}: create the container with the snapshot's mapping"
            )


def _ranges(mapped: object) -> str:
    return ", ".join(f"{each.get('hostID')}+{each.get('size')}" for each in _objects(mapped)) or "none"


def _terminal(requires: dict[str, Any], spec: dict[str, Any]) -> Iterator[Finding]:
    if "terminal" not in requires:
        return
    had, has = bool(requires["terminal"]), bool(_object(spec.get("process")).get("terminal"))
    if had != has:
        words = ("no terminal", "a terminal")
        yield _problem(
            f"this container has {words[has]} and the snapshot's had {words[had]}: create it with {words[had]}"
        )


def _gpu(manifest: Manifest, spec: dict[str, Any], config: Config) -> Iterator[Finding]:
    if manifest.data.get("gpu"):
        from shim import gpu

        for sentence in gpu.missing(manifest, spec, open_driver=lambda: gpu.Helper(config, initialise=False)):
            yield _problem(sentence)


def _weights(manifest: Manifest, config: Config) -> Iterator[Finding]:
    """Without them a program ends when it is restored, whoever would try it all the same."""
    if manifest.data.get("guest"):
        from shim import weights

        for sentence in weights.missing(manifest.data["guest"], config):
            yield Finding("problem", sentence, waivable=False)


# Files that processes had open or mapped ----------------------------------------------------------------------------


def _files(
    manifest: Manifest, requires: dict[str, Any], spec: dict[str, Any], root: Rootfs | None
) -> Iterator[Finding]:
    sources = {
        mount["destination"].rstrip("/"): mount["source"]
        for mount in manifests.describe_mounts(spec)
        if mount["type"] == "bind"
    }
    wrong: list[str] = []
    of_image = 0
    for file in _objects(requires.get("files")):
        path, mount = str(file.get("path")), str(file.get("mount"))
        if mount == "/":
            if root is None or not root.lower:
                continue
            of_image += 1
            difference = _difference(_in_layers(root.lower, path), file)
            if difference:
                wrong.append(f"{path} {difference}")
        elif mount in sources:
            difference = _difference(_status(f"{sources[mount]}{path[len(mount) :]}"), file)
            if difference:
                yield _problem(
                    f"{path} on the mount {mount} {difference}, and a process had it open or mapped: make "
                    f"{sources[mount]} hold what it held on the source node"
                )
    image = _object(manifest.data.get("container")).get("image")
    if wrong:
        yield _problem(
            f"the image is another one: {len(wrong)} of {of_image} of its files that processes had open or mapped do "
            f"not fit ({listed(wrong, 3)}): create the container from {image or 'the image that it was taken from'}"
        )
    elif root is not None and root.lower and of_image == 0:
        yield _warning("no process had a file of the image open, so it cannot be told whether the image is the same")


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _in_layers(lower: list[str], path: str) -> os.stat_result | None:
    """A file in the layers of an image, the topmost first; None when it is not there or deleted (a device 0:0)."""
    for layer in lower:
        status = _status(f"{layer}{path}")
        if status is not None:
            return None if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else status
    return None


def _difference(status: os.stat_result | None, file: dict[str, Any]) -> str | None:
    if status is None:
        return "is missing"
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if file.get("size") is not None and status.st_size != file["size"]:
        return f"has {status.st_size} bytes and had {file['size']}"
    mode = stat.S_IMODE(status.st_mode)
    if file.get("mode") is not None and mode != file["mode"]:
        return f"has mode {mode:04o} and had {file['mode']:04o}"
    return None


# The command ------------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Add the command `check` to argparse's subparsers."""
    from shim import containerd

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check",
        help="say whether a snapshot can be restored here, and what it lacks",
        description="Compare a snapshot with this node and, given a container, with it: everything that does not fit, "
        "each with its remedy. Exit status 0: nothing stands against it (there may be warnings); 1: something does.",
    )
    parser.add_argument("directory", metavar="DIR", help="the snapshot")
    parser.add_argument("--container", metavar="ID", help="a container that was created and is to be restored into")
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    containerd.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `check`."""
    from shim import config

    directory = os.path.abspath(args.directory)
    manifest = manifests.read(directory)
    spec = root = None
    if args.container:
        from shim import containerd

        with containerd.connect(args) as client:
            container = client.container(args.container)
            spec = client.spec(container)
            root = rootfs.Rootfs(client.mounts(container))
    found = findings(directory, manifest, config.load(), spec, root)
    problems = [finding for finding in found if finding.level == "problem"]
    if args.json:
        import json

        listing = [{"level": finding.level, "text": finding.text} for finding in found]
        print(json.dumps({"directory": directory, "restorable": not problems, "findings": listing}))
        return 1 if problems else 0
    for finding in found:
        print(f"{finding.level}: {finding.text}")
    where = f"into container {args.container}" if args.container else "on this node"
    if not problems:
        print(f"{directory} can be restored {where}." + ("" if args.container else " Its container was not checked."))
    return 1 if problems else 0
