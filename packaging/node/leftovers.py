"""What containers left in a node: after a test that cleaned up after itself there must be nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from node import cgroup
from node.node import Node

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


def leftovers(node: Node, wait: float = 5.0) -> list[str]:
    """What is left of containers, one line each: processes, mounts, files, cgroups.

    A shim ends a moment after its container is deleted: something counts only if it is still there after ``wait``
    seconds. Snapshots, images and logs are meant to stay, and are not looked at.
    """
    until = time.monotonic() + wait
    while True:
        found = [*_processes(node), *_mounts(node), *_files(node), *_cgroups(node)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def clear(node: Node) -> None:
    """Kill and delete every container of every namespace, the way a client would."""
    for namespace in node.ctr("namespaces", "list", "-q").stdout.split():
        for task in node.ctr("tasks", "list", "-q", namespace=namespace, check=False).stdout.split():
            # A paused task is killed only once it is resumed.
            node.ctr("tasks", "resume", task, namespace=namespace, check=False)
            node.ctr("tasks", "delete", "--force", task, namespace=namespace, check=False)
        for container in node.ctr("containers", "list", "-q", namespace=namespace).stdout.split():
            node.ctr("containers", "delete", container, namespace=namespace, check=False)


def _processes(node: Node) -> Iterator[str]:
    for pid in sorted(node.processes() - {node.pid, node.containerd_pid(), node.differ_pid()}):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield f"process {pid} {command.strip() or Path(f'/proc/{pid}/comm').read_text().strip()}"


def _mounts(node: Node) -> Iterator[str]:
    for target in node.mounts():
        if target not in node.facts["mounts"] and target not in SHARED_MOUNTS:
            yield f"mount {target}"


def _files(node: Node) -> Iterator[str]:
    for place, depth in PLACES.items():
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
