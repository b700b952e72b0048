"""A node's own cgroups, one in every hierarchy, version 1 and version 2 alike.

They do two things. With a cgroup namespace, two nodes may each have a container ``default/c1``. And every process
of a node, whatever became of its parents, is found again by its cgroup.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

PARENT = "fermata-node"
LEAF = "daemons"


class Hierarchy(NamedTuple):
    """A mounted cgroup hierarchy. ``options`` is what a mount of the same hierarchy needs as its data."""

    mountpoint: str
    kind: str
    options: str


def hierarchies(mountinfo: str | None = None) -> list[Hierarchy]:
    """The hierarchies mounted on or under /sys/fs/cgroup, read from proc_pid_mountinfo(5)."""
    found: dict[str, Hierarchy] = {}
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        before, _, after = line.partition(" - ")
        mountpoint = before.split()[4]
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2") or not f"{mountpoint}/".startswith("/sys/fs/cgroup/"):
            continue
        found[mountpoint] = Hierarchy(mountpoint, kind, _mount_data(options) if kind == "cgroup" else "")
    return list(found.values())


def _mount_data(options: str) -> str:
    """Of a version 1 hierarchy's options, those that say which hierarchy it is."""
    names = [o for o in options.split(",") if o not in ("rw", "ro", "xattr", "noprefix", "clone_children")]
    kept = [o for o in names if not o.startswith("release_agent=")]
    return ",".join(["none", *kept] if all(o.startswith("name=") for o in kept) else kept)


def directory(hierarchy: Hierarchy, name: str) -> Path:
    return Path(hierarchy.mountpoint, PARENT, name)


def create(name: str) -> None:
    """Make the node's cgroup, and its leaf for daemons, in every hierarchy."""
    for hierarchy in hierarchies():
        for left in reversed(range(10)):
            try:
                _create(hierarchy, name)
                break
            except FileNotFoundError:
                # Another node, the last one, may have taken the parent away just now: see remove.
                if not left:
                    raise


def _create(hierarchy: Hierarchy, name: str) -> None:
    base = Path(hierarchy.mountpoint)
    for part in (PARENT, name, LEAF):
        # The node's own cgroup takes a process first (see init.run), so it is delegated later.
        if part != LEAF:
            _delegate(base, hierarchy.kind)
        base = base / part
        base.mkdir(exist_ok=True)
        if hierarchy.kind == "cgroup":
            _fill_cpuset(base)


def _fill_cpuset(path: Path) -> None:
    """A new version 1 cpuset is empty and accepts no task until it has processors and memory nodes."""
    for key in ("cpuset.cpus", "cpuset.mems"):
        if (path / key).exists() and not (path / key).read_text().strip():
            (path / key).write_text((path.parent / key).read_text())


def _delegate(path: Path, kind: str) -> None:
    """Version 2 only: hand every controller to the cgroups below.

    A controller that cannot be handed down (processes of others sit in this very cgroup, or it is in use in a version
    1 hierarchy) is left out: containers without limits need none.
    """
    if kind != "cgroup2":
        return
    for controller in (path / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (path / "cgroup.subtree_control").write_text(f"+{controller}")


def enter(name: str, sub: str = "") -> None:
    """Move this process into the node's cgroup, or into ``sub`` below it, in every hierarchy."""
    for hierarchy in hierarchies():
        (directory(hierarchy, name) / sub / "cgroup.procs").write_text("0")


def delegate_node(name: str) -> None:
    for hierarchy in hierarchies():
        _delegate(directory(hierarchy, name), hierarchy.kind)


def entry_file(name: str) -> str:
    """Where a process that enters a node writes its pid: one hierarchy is enough to be found again.

    As seen outside: with the mount option nsdelegate nobody moves from without a cgroup namespace to within it.
    """
    known = hierarchies()
    chosen = next((h for h in known if h.kind == "cgroup2"), known[0])
    return f"{directory(chosen, name)}/{LEAF}/cgroup.procs"


def _all_directories(name: str) -> list[Path]:
    """Every cgroup of the node, children before their parents."""
    found: list[Path] = []
    for hierarchy in hierarchies():
        for path, _, _ in os.walk(directory(hierarchy, name), topdown=False):
            found.append(Path(path))
    return found


def processes(name: str) -> set[int]:
    """The ids of all processes in the node's cgroups."""
    found: set[int] = set()
    for path in _all_directories(name):
        # A cgroup that went away meanwhile holds nothing.
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (path / "cgroup.procs").read_text().split())
    return found - {0}


def thaw(name: str) -> None:
    """Version 1 delivers no signal, SIGKILL included, to a frozen task."""
    for path in _all_directories(name):
        for key, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            if (path / key).exists():
                with contextlib.suppress(OSError):
                    (path / key).write_text(value)


def remove(name: str, timeout: float = 10.0) -> list[Path]:
    """Remove the node's cgroups. Returns those that could not be removed within ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while True:
        # The kernel lets go of a dead task's cgroup a moment after the task is gone.
        for path in _all_directories(name):
            with contextlib.suppress(OSError):
                path.rmdir()
        left = _all_directories(name)
        if not left or time.monotonic() > until:
            break
        time.sleep(0.02)
    for hierarchy in hierarchies():
        # Other nodes may still be in there.
        with contextlib.suppress(OSError):
            Path(hierarchy.mountpoint, PARENT).rmdir()
    return left
