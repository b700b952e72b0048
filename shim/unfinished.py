"""A dump or restore that has lost the one who waited for it: its processes are ended, and what runc began is removed.

When the shims die in the middle of a restore, runc and CRIU do not notice. They would go on and bring a container to
life that nobody knows of any more. And a runc that ends before it has written its `state.json`, which a restore does
late, leaves a directory that makes it refuse the container's name for ever, with a mount in it.
"""

from __future__ import annotations

import os

from shim import mounts
from shim.errors import FAILED_PRECONDITION, ShimError
from shim.state import remove_tree

RECORD = "restoring"
"""File of the state directory from a restore's beginning to its success: `record`'s text."""

ROOT = "/run/containerd/runc"
"""Where the stock shim has runc keep its containers, unless the runtime options name another place."""


def runc_directory(root: str, namespace: str, container_id: str) -> str:
    """What runc keeps of a container; `root` is that of the runtime options, or empty."""
    return f"{root or ROOT}/{namespace}/{container_id}"


def end(directory: str) -> set[int]:
    """Kill the runc and CRIU that work in a directory or below it, and what they have restored so far; which pids.

    A container whose restore was finished is not among them: its runc has ended.
    """
    import _signal

    if not directory.startswith("/") or not directory.strip("/"):
        raise ValueError(f"{directory!r} is no directory of an operation's")
    ended: set[int] = set()
    while True:
        processes: dict[int, int] = {}
        for pid in _processes(directory):
            try:
                processes[pid] = os.pidfd_open(pid)
            except OSError:  # it has ended
                continue
        # Looked for again with the descriptors open: a number that is still among them is no other process's.
        for pid in processes.keys() & _processes(directory):
            try:
                _signal.pidfd_send_signal(processes[pid], 9)
                ended.add(pid)
            except OSError:
                continue
        for descriptor in processes.values():
            os.close(descriptor)
        if not processes:
            return ended


def record(directory: str, *, upper: str = "", cgroup: str = "", replaced: str = "") -> str:
    """What a crash would leave of a restore: runc's own directory for the container; the upper directory, if it was
    empty before; the control group, if it was not there before; else what `replacing` says of the upper directory."""
    return f"{directory}\n{upper}\n{cgroup}\n{replaced}\n"


def replacing(upper: str | None) -> str:
    """An upper directory whose content is to be replaced: its inode, by which it is known wherever it is put aside."""
    try:
        return f"{os.stat(upper).st_ino} {upper}" if upper else ""
    except OSError:  # whoever needs it says what is wrong
        return ""


def detach(text: str) -> None:
    """Unmount what a restore left mounted, by its record, before the container is deleted. Raises ShimError.

    runc removes its directory with all that is in it, the mounted root file system of the container too: that takes
    longer than containerd waits for a clean-up, and the files are gone.
    """
    mounts.detach_below(text.partition("\n")[0])


def undo(text: str) -> None:
    """Remove what a restore left, by its record; the container itself is deleted before.

    Raises ShimError, OSError.
    """
    from shim.attempt import Attempt

    directory, upper, cgroup, replaced = text.split("\n")[:4]
    if cgroup:
        Attempt.of_the_dead(cgroup).undo()
    # Without its state.json it is of a container that runc never came to make.
    if os.path.isdir(directory) and not os.path.exists(f"{directory}/state.json"):
        mounts.detach_below(directory)
        remove_tree(directory)
    inode, _, former = replaced.partition(" ")
    files = upper or former
    if os.path.isdir(files):
        import layerwriter

        try:
            if upper:
                layerwriter.discard(upper)
            else:
                layerwriter.bring_back(former, int(inode))
        except layerwriter.LayerError as error:
            if os.path.isdir(files):  # else the client has deleted the container meanwhile, and its files with it
                raise ShimError(f"a restore that failed left its files: {error}", FAILED_PRECONDITION) from error


def _processes(directory: str) -> set[int]:
    children: dict[int, set[int]] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
            folder = os.readlink(f"/proc/{name}/cwd")
        except (OSError, IndexError):
            continue  # it has ended
        if state == b"Z":
            continue
        children.setdefault(int(parent), set()).add(int(name))
        program = os.path.basename(words[0])
        at_work = (program == "runc" and any(_within(word, directory) for word in words)) or (
            program.startswith("criu") and _within(folder, directory)
        )
        if at_work and _sees(name, directory):
            found.add(int(name))
    below = list(found)
    while below:
        for child in children.get(below.pop(), set()) - found:
            found.add(child)
            below.append(child)
    return found


def _sees(pid: str, directory: str) -> bool:
    """Whether a process means the same directory by that name as we do.

    Another containerd of this machine, in a mount namespace of its own, may have a container of the same name.
    """
    meant = directory if os.path.exists(directory) else "/"
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root{meant}"), os.stat(meant))
    except OSError:  # it has ended, or has no such directory
        return False


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
