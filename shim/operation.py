"""`fermata checkpoint` and `fermata restore`: snapshots as plain directories, through containerd's own API.

Nothing is packed into a content store and no writable layer is compared with its image: the shim writes the directory,
and the shim reads it.
"""

from __future__ import annotations

import os
import sys
import time

from shim import RUNTIME, containerd
from shim import manifest as manifests
from shim.errors import ALREADY_EXISTS, FAILED_PRECONDITION, INVALID_ARGUMENT, NOT_FOUND, ShimError
from shim.host import older, size
from shim.state import State, check_identifier
from shim.task import CHECKPOINT_OPTIONS, CheckpointOptions
from shim.ttrpc import AnyMessage
from shim.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from shim.manifest import Manifest

_LEASE_SECONDS = 3600


def add_parser(subparsers: Any) -> None:
    """Add the commands `checkpoint` and `restore` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "checkpoint",
        help="take a snapshot of a running container into a directory",
        description="Take a snapshot of a running container into a new directory.",
    )
    parser.add_argument("container", metavar="CONTAINER", help="the container's id")
    parser.add_argument("directory", metavar="DIR", help="the snapshot's directory, new or empty")
    after = parser.add_mutually_exclusive_group()
    after.add_argument(
        "--leave-running", dest="exit", action="store_false", help="the container goes on afterwards (the default)"
    )
    after.add_argument("--exit", action="store_true", help="the container ends when its snapshot is complete")
    parser.add_argument(
        "--when-ready", action="store_true", help="wait until a program in the container has called snapshot_ready()"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0, help="for --when-ready: how long (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    containerd.add_options(parser)
    parser.set_defaults(run=checkpoint, exit=False)

    parser = subparsers.add_parser(
        "restore",
        help="make a new container from a snapshot directory and start it",
        description="Make a container from what a snapshot recorded (image, specification, runtime) and start it from "
        "the snapshot.",
    )
    parser.add_argument("directory", metavar="DIR", help="the snapshot")
    parser.add_argument("id", metavar="NEWID", help="the new container's id")
    parser.add_argument(
        "--image", metavar="NAME", help="another image than the recorded one, or where none is recorded"
    )
    parser.add_argument(
        "--mount",
        metavar="type=bind,src=…,dst=…,options=rbind:ro",
        action="append",
        default=[],
        help="a mount, in place of the recorded one with that destination or beside the others",
    )
    parser.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="for processes that are started in the container later; the restored ones keep their environment",
    )
    parser.add_argument("--label", metavar="NAME=VALUE", action="append", default=[], help="a label of the container")
    parser.add_argument(
        "--log-uri", metavar="URI", default="", help="where the output goes on, as for ctr: file:///path, binary://…"
    )
    parser.add_argument("--force", action="store_true", help="try it although the check finds that it cannot work")
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    containerd.add_options(parser)
    parser.set_defaults(run=restore)


# checkpoint -------------------------------------------------------------------------------------------------------


def checkpoint(args: argparse.Namespace) -> int:
    """Carry out `checkpoint`."""
    directory = os.path.abspath(args.directory)
    began = time.monotonic()
    with containerd.connect(args) as client:
        container = client.container(args.container)
        _refuse_others(container, args.namespace)
        if args.when_ready:
            _wait_until_ready(args, container.id)
            began = time.monotonic()
        options = CheckpointOptions(exit=args.exit, image_path=directory)
        request = containerd.CheckpointTaskRequest(
            container_id=container.id, options=AnyMessage(type_url=CHECKPOINT_OPTIONS, value=options.encode())
        )
        before = os.path.exists(f"{directory}/{manifests.NAME}")
        version = client.version().lstrip("v")
        packs = older(version, "2.0", 2)
        if packs:
            _lease(client)
        try:
            future = client.begin("Tasks", "Checkpoint", request)
            if sys.stderr.isatty() and not args.json:
                _show_progress(future, directory, began)
            client.finish(future, Message)
        except ShimError as error:
            # containerd 1.7 packs an empty directory of its own and the specification into its content store, although
            # the images went elsewhere, and fails when a blob like one of them is there already.
            # The lease takes away what it packed.
            done = not before and os.path.exists(f"{directory}/{manifests.NAME}")
            if not (packs and done and error.code == ALREADY_EXISTS):
                raise
        finally:
            if packs:
                client.call("Leases", "Delete", containerd.LeaseDeletion(id=client.lease, sync=True), Message)
        manifests.amend(directory, _what_containerd_knows(client, container, version))
    manifest = manifests.read(directory)
    seconds = time.monotonic() - began
    total = _total(directory)
    if args.json:
        _print_json({"directory": directory, "bytes": total, "seconds": round(seconds, 3), **_brief(manifest)})
    else:
        steps = ", ".join(f"{name} {took:.2f} s" for name, took in manifest.steps.items() if name != "total")
        print(f"{directory}: {size(total)} in {seconds:.2f} s ({steps})")
        if manifest.data.get("guest"):
            from shim.inspect import weights_of

            print(f"weights: {weights_of(manifest.data['guest'])}")
    return 0


def _refuse_others(container: containerd.Container, namespace: str) -> None:
    """Raise ShimError for a container that another shim serves: it would do who knows what, and with --exit end it."""
    if not os.path.isdir(State(namespace, container.id).path):
        runtime = container.runtime.name if container.runtime else "another runtime"
        if runtime == RUNTIME:
            raise ShimError(
                f"the container {container.id} does not run, so there is nothing to take: `ctr -n {namespace} tasks "
                f"start {container.id}` starts it",
                FAILED_PRECONDITION,
            )
        raise ShimError(
            f"no shim of fermata's serves the container {container.id}, whose runtime is {runtime}: start it, under "
            f"{RUNTIME}",
            FAILED_PRECONDITION,
        )


def _what_containerd_knows(client: containerd.Client, container: containerd.Container, version: str) -> dict[str, Any]:
    known: dict[str, Any] = {"runtime": container.runtime.name if container.runtime else RUNTIME}
    if container.snapshotter:
        known["snapshotter"] = container.snapshotter
    if container.image:
        known["image"] = container.image
        try:
            known["image_digest"] = client.image_digest(container.image)
        except ShimError as error:
            if error.code != NOT_FOUND:
                raise
            # The image was removed under the container: its name is all that is known.
    return {"container": known, "node": {"containerd": version}}


def _wait_until_ready(args: argparse.Namespace, container_id: str) -> None:
    from shim import guest

    if not sys.stderr.isatty() or args.json:
        guest.wait_until_ready(args.namespace, container_id, args.timeout)
        return
    text = f"waiting until {container_id} says that it is ready, at most {args.timeout:g} s"
    print(text, end="", file=sys.stderr, flush=True)
    try:
        guest.wait_until_ready(args.namespace, container_id, args.timeout)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show_progress(future: Any, directory: str, began: float) -> None:
    """One line that is written over until the call has ended: the step, the bytes and the seconds so far."""
    import threading

    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    while not done.wait(0.1):
        text = f"{_step(directory)}  {size(_total(directory))}  {time.monotonic() - began:.1f} s"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _step(directory: str) -> str:
    """What the shim does at this moment, seen from the files that are there."""
    try:
        names = os.listdir(directory)
    except OSError:
        return "preparing"
    if any(name.startswith("layer.tar") for name in names):
        return "writing the layer"
    return "dumping the processes" if any(name.endswith(".img") for name in names) else "preparing"


def _total(directory: str) -> int:
    total = 0
    try:
        for entry in os.scandir(directory):
            try:
                total += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # a temporary file that has its name by now
    except OSError:
        return 0
    return total


def _brief(manifest: Manifest) -> dict[str, Any]:
    return {name: manifest.data.get(name) for name in ("taken", "container", "layer", "guest", "steps", "frozen")}


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value))


# restore ----------------------------------------------------------------------------------------------------------


def restore(args: argparse.Namespace) -> int:
    """Carry out `restore`."""
    directory = os.path.abspath(args.directory)
    check_identifier("container id", args.id)
    manifest = manifests.read(directory)
    recorded = manifest.data.get("container") or {}
    spec = _spec(manifest, directory, args)
    began = time.monotonic()
    with containerd.connect(args) as client:
        image, digest = _image(client, manifest, args, directory)
        _lease(client)
        try:
            pid = _create(client, args, recorded, spec, image=image, digest=digest)
        finally:
            client.call("Leases", "Delete", containerd.LeaseDeletion(id=client.lease), Message)
    seconds = time.monotonic() - began
    if args.json:
        _print_json({"container": args.id, "namespace": args.namespace, "pid": pid, "seconds": round(seconds, 3)})
    else:
        print(f"{args.id}: restored from {directory} in {seconds:.2f} s, process {pid}")
    return 0


def _image(client: containerd.Client, manifest: Manifest, args: argparse.Namespace, directory: str) -> tuple[str, str]:
    """(name, digest) of the image to create the container from. Raises ShimError when it is not the recorded one."""
    recorded = manifest.data.get("container") or {}
    name = args.image or recorded.get("image")
    if not name:
        # The container's id may be another one's by now, so what containerd says of it is told, and not relied on.
        known = _image_of(client, str(recorded.get("id") or ""))
        example = f"; a container {recorded.get('id')} is here, of the image {known}" if known else ""
        raise ShimError(
            f"snapshot {directory} does not say which image it was taken from (`fermata checkpoint` and the "
            f"kubelet tell, others do not): name it with --image{example}",
            INVALID_ARGUMENT,
        )
    digest = recorded.get("image_digest")
    pull = f"{name}@{digest}" if digest and "@" not in name and not args.image else name
    try:
        present = client.image_digest(name)
    except ShimError as error:
        if error.code != NOT_FOUND:
            raise
        raise ShimError(
            f"the image {name} is not on this node: `ctr -n {client.namespace} images pull {pull}`", NOT_FOUND
        ) from error
    if digest and present != digest and not args.force:
        raise ShimError(
            f"the image {name} is another one on this node, {present}, and was {digest}: pull that one, name it with "
            "--image, or try this one with --force",
            FAILED_PRECONDITION,
        )
    return str(name), present


def _image_of(client: containerd.Client, container_id: str) -> str:
    """The image of a container of this namespace; empty when there is no such container, or none is known."""
    try:
        return client.container(container_id).image if container_id else ""
    except ShimError as error:
        if error.code != NOT_FOUND:
            raise
        return ""


def _spec(manifest: Manifest, directory: str, args: argparse.Namespace) -> dict[str, Any]:
    """The new container's runtime specification, from the recorded one."""
    recorded = manifest.data.get("spec")
    if not isinstance(recorded, dict):
        raise ShimError(
            f"snapshot {directory} holds no specification of its container: create one yourself, with the annotation "
            f"fermata/restore-from={directory}",
            FAILED_PRECONDITION,
        )
    return adapt(recorded, manifest, directory, args)


def adapt(spec: dict[str, Any], manifest: Manifest, directory: str, args: argparse.Namespace) -> dict[str, Any]:
    """A recorded specification for a new container of another name: its own control group, the changes asked for."""
    container = manifest.data.get("container") or {}
    process = spec.setdefault("process", {})
    if process.get("terminal"):
        raise ShimError(
            f"the container of snapshot {directory} had a terminal, which this command cannot give: "
            f"`ctr run --tty --annotation fermata/restore-from={directory} …`",
            FAILED_PRECONDITION,
        )
    # Neither the snapshot that the recorded container was restored from, nor one that its pod names for it.
    recorded = (spec.get("annotations") or {}).items()
    annotations = {key: value for key, value in recorded if not key.startswith("fermata/restore-from")}
    annotations["fermata/restore-from"] = directory
    annotations.pop("fermata/check", None)
    if args.force:
        annotations["fermata/check"] = "warn"
    spec["annotations"] = annotations
    linux = spec.setdefault("linux", {})
    linux["cgroupsPath"] = _cgroup(str(linux.get("cgroupsPath") or ""), str(container.get("id")), args)
    for namespace in linux.get("namespaces") or []:
        path = namespace.get("path")
        if path and not os.path.exists(path):
            del namespace["path"]  # of the source node; a namespace of its own takes its place
    for text in args.mount:
        mount = parse_mount(text)
        mounts = spec.setdefault("mounts", [])
        same = [at for at, other in enumerate(mounts) if other.get("destination") == mount["destination"]]
        if same:
            mounts[same[0]] = mount
        else:
            mounts.append(mount)
    for text in args.env:
        name, _ = _pair("--env", text)
        kept = [entry for entry in process.get("env") or [] if not entry.startswith(f"{name}=")]
        process["env"] = [*kept, text]
    return spec


def _cgroup(path: str, source: str, args: argparse.Namespace) -> str:
    """A control group for the new container beside the source's: `/namespace/id`, or systemd's `slice:prefix:id`."""
    if ":" in path:
        return f"{path.rpartition(':')[0]}:{args.id}"
    parent = path.rpartition("/")[0] if path.endswith(f"/{source}") else f"/{args.namespace}"
    return f"{parent}/{args.id}"


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ShimError(f"{option} {text!r} is not NAME=VALUE", INVALID_ARGUMENT)
    return name, value


def parse_mount(text: str) -> dict[str, Any]:
    """A mount as ctr takes it: `type=bind,src=/a,dst=/b,options=rbind:ro`. Raises ShimError."""
    mount: dict[str, Any] = {"type": "bind", "options": ["rbind"]}
    names = {"type": "type", "src": "source", "source": "source", "dst": "destination", "destination": "destination"}
    for part in text.split(","):
        name, value = _pair("--mount", part)
        if name == "options":
            mount["options"] = value.split(":")
        elif name in names:
            mount[names[name]] = value
        else:
            raise ShimError(
                f"--mount {text!r}: unknown {name}; there are {', '.join(names)}, options", INVALID_ARGUMENT
            )
    if "source" not in mount or not str(mount.get("destination")).startswith("/"):
        raise ShimError(f"--mount {text!r} needs src=… and dst=/…", INVALID_ARGUMENT)
    return mount


def _lease(client: containerd.Client) -> None:
    """Keep what is made here from being collected before the container's record refers to it."""
    lease = f"fermata-{os.getpid()}-{time.time_ns():x}"
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _LEASE_SECONDS))
    label = containerd.Label(key="containerd.io/gc.expire", value=end)
    client.call("Leases", "Create", containerd.LeaseRequest(id=lease, labels=[label]), Message)
    client.lease = lease


def _create(
    client: containerd.Client,
    args: argparse.Namespace,
    recorded: dict[str, Any],
    spec: dict[str, Any],
    *,
    image: str,
    digest: str,
) -> int:
    """Make snapshot, container and task, and start it; its pid. What was made goes again when a step fails."""
    import json

    snapshotter = str(recorded.get("snapshotter") or "overlayfs")
    snapshot = containerd.SnapshotRequest(snapshotter=snapshotter, key=args.id, parent=client.chain(digest))
    try:
        mounts = client.call("Snapshots", "Prepare", snapshot, containerd.MountsResponse).mounts
    except ShimError as error:
        if error.code == NOT_FOUND:
            raise ShimError(
                f"the image {image} is here but not unpacked for the snapshotter {snapshotter}: run any container "
                "from it once, or pull it again",
                FAILED_PRECONDITION,
            ) from error
        if error.code == ALREADY_EXISTS:
            raise ShimError(
                f"there is a container or a file system snapshot {args.id} in the namespace {client.namespace} "
                "already: choose another id, or remove it",
                ALREADY_EXISTS,
            ) from error
        raise
    undo: list[tuple[str, str, Message]] = [("Snapshots", "Remove", snapshot)]
    by_id = containerd.ById(name=args.id)
    try:
        container = containerd.Container(
            id=args.id,
            labels=[
                containerd.Label(key=key, value=value) for key, value in (_pair("--label", it) for it in args.label)
            ],
            image=image,
            runtime=containerd.Runtime(name=str(recorded.get("runtime") or RUNTIME)),
            spec=AnyMessage(type_url=containerd.SPEC, value=json.dumps(spec).encode()),
            snapshotter=snapshotter,
            snapshot_key=args.id,
        )
        request = containerd.OneContainer(container=container)
        client.call("Containers", "Create", request, containerd.OneContainer)
        undo.append(("Containers", "Delete", by_id))
        task = containerd.CreateTaskRequest(
            container_id=args.id, rootfs=mounts, stdout=args.log_uri, stderr=args.log_uri
        )
        client.call("Tasks", "Create", task, Message)
        undo.append(("Tasks", "Delete", by_id))
        return client.call("Tasks", "Start", by_id, containerd.StartResponse).pid
    except BaseException:
        for service, method, what in reversed(undo):
            try:
                client.call(service, method, what, Message)
            except ShimError as error:
                if error.code != NOT_FOUND:
                    print(f"fermata: {service}.{method} of {args.id} failed: {error}", file=sys.stderr)
        raise
