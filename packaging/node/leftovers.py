"""What containers left in a node: after a test that cleaned up after itself there must be nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from node import cgroup
from node.node import Node
from node.records import Name, Records

# Directories in the node that hold something per container, with how deep below them that is.
PLACES = {
    "/run/fermata": 2,
    "/run/netns": 1,
    "/run/containerd/s": 1,
    "/run/containerd/runc": 2,
    "/run/containerd/io.containerd.runtime.v2.task": 2,
    "/var/lib/containerd/io.containerd.runtime.v2.task": 2,
    "/var/lib/containerd/tmpmounts": 1,
}
# Made once per machine by whoever first names a network namespace (ip-netns(8) does the same), and left.
SHARED_MOUNTS = {"/run/netns"}
# Where tests put their own files, with how deep below they are.
OF_TESTS = {"/srv": 1, "/tmp": 1, "/run": 1, "/etc/fermata": 1, "/etc/criu": 1}


def leftovers(node: Node, wait: float = 5.0, but: Collection[str] = ()) -> list[str]:
    """What is left of containers, one line each: processes, mounts, files, cgroups; but for the lines ``but``.

    A shim ends a moment after its container is deleted: something counts only if it is still there after ``wait``
    seconds. Snapshots, images and logs are meant to stay, and are not looked at.
    """
    until = time.monotonic() + wait
    while True:
        found = [line for line in _lines(node) if line not in but]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _lines(node: Node) -> Iterator[str]:
    return chain(_processes(node), _mounts(node), _files(node, PLACES), _cgroups(node))


def clear(node: Node) -> None:
    """Kill and delete every container of every namespace, the way a client would."""
    with Records(node) as records:
        for namespace, task, _ in records.tasks():
            # A paused task is killed only once it is resumed.
            node.ctr("tasks", "resume", task, namespace=namespace, check=False)
            node.ctr("tasks", "delete", "--force", task, namespace=namespace, check=False)
        for namespace, container, _ in records.containers():
            node.ctr("containers", "delete", container, namespace=namespace, check=False)


class Before(NamedTuple):
    """What a node has before a test; see ``go_back``."""

    left: set[str]
    files: set[str]
    snapshots: set[Name]
    images: set[Name]


def before(node: Node) -> Before:
    """What ``go_back`` goes back to. containerd must run."""
    with Records(node) as records:
        names = (set(records.snapshots()), set(records.images()))
    return Before(set(_lines(node)), set(_files(node, OF_TESTS)), *names)


def go_back(node: Node, to: Before) -> None:
    """Remove what came since: containers, snapshots, images, processes, mounts, and files where tests put them.

    For a test that failed, wherever it stood, so that the next one does not fail for it. What the test removed does not
    come back.
    """
    node.start_containerd()
    clear(node)
    # The last one mounted comes first, since it may be in another.
    for line in reversed(leftovers(node, but=to.left)):
        _remove(node, line)
    for line in _files(node, OF_TESTS):
        if line not in to.files:
            _remove(node, line)
    with Records(node) as records:
        for image in records.images():
            if image not in to.images:
                node.ctr("images", "remove", image.name, namespace=image.namespace, check=False)
        for one in records.snapshots():
            if one not in to.snapshots:
                words = ("snapshots", "--snapshotter", one.of, "remove", one.name)
                node.ctr(*words, namespace=one.namespace, check=False)


def _remove(node: Node, line: str) -> None:
    kind, what = line.split(" ", 2)[:2]
    if kind == "process":
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(what), signal.SIGKILL)
    elif kind == "mount":
        node.exec(["umount", "--lazy", what], check=False)
    elif kind == "file":
        node.exec(["umount", "--lazy", what], check=False)  # a network namespace is one
        node.exec(["rm", "-rf", "--one-file-system", what], check=False)
    else:
        with contextlib.suppress(OSError):
            os.rmdir(what)


def _processes(node: Node) -> Iterator[str]:
    for pid in sorted(node.processes() - {node.pid, node.containerd_pid(), node.differ_pid()}):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield f"process {pid} {command.strip() or Path(f'/proc/{pid}/comm').read_text().strip()}"


def _mounts(node: Node) -> Iterator[str]:
    for target in node.mounts():
        if target not in node.facts["mounts"] and target not in SHARED_MOUNTS:
            yield f"mount {target}"


def _files(node: Node, places: Mapping[str, int]) -> Iterator[str]:
    for place, depth in places.items():
        top = node.path(place)
        if not top.is_dir():
            continue
        for path in _below(top, depth):
            yield f"file {place}/{path.relative_to(top)}"


def _below(top: Path, depth: int) -> list[Path]:
    while True:
        try:
            return sorted(top.glob("/".join(["*"] * depth)))
        except FileNotFoundError:  # a directory that went meanwhile
            continue


def _cgroups(node: Node) -> Iterator[str]:
    for hierarchy in cgroup.hierarchies():
        top = cgroup.directory(hierarchy, node.facts["token"])
        for directory, _, _ in os.walk(top):
            # runc removes a container's cgroup, and leaves the one of the containerd namespace that held it.
            if len(Path(directory).relative_to(top).parts) > 1:
                yield f"cgroup {directory}"
