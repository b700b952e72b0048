"""The first process of a node: makes its namespaces and mounts, then starts containerd and reaps what is orphaned.

Its life is the node's: the mount namespace, and with it every mount of the node, ends with the last process in it.
SIGUSR1 starts containerd if it does not run. After the change of root this module must import nothing more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from node import cgroup, kernel

PID_FILE = "/run/node/containerd.pid"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What of the host's /run a node on the host's own root still needs.
HOST_RUN = ("systemd/resolve", "resolvconf", "udev", "nvidia-persistenced", "nvidia-fabricmanager")


def run(plan_file: str) -> None:
    """Carry out the plan that ``Node.up`` wrote, say ``ready`` on stdout, and stay."""
    plan = json.loads(Path(plan_file).read_text())
    name = plan["cgroup"]
    # The namespace's root is the cgroup that we are in at this moment; the daemons live one level lower, because
    # version 2 allows no processes in a cgroup that has controlled cgroups below it.
    cgroup.enter(name)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP)
    hierarchies = cgroup.hierarchies()
    cgroup.enter(name, cgroup.LEAF)
    cgroup.delegate_node(name)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root = _mount_root(plan)
    _mount_cgroups(root, hierarchies)
    kernel.change_root(root)
    Path("/run/node").mkdir(parents=True)
    kernel.become_subreaper()
    kernel.set_name("fermata-node")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    _supervise(plan["containerd"])


def _mount_root(plan: dict[str, Any]) -> str:
    base = plan["dir"]
    root = f"{base}/root"
    storage = f"{base}/private"
    if plan["storage_in_memory"]:
        kernel.mount("tmpfs", storage, "tmpfs", data="mode=755")
    for part in ("upper", "work", "containerd", "tmp", "srv"):
        Path(storage, part).mkdir(exist_ok=True)
    if plan["lower"] == "/":
        kernel.rbind("/", root)
        # An overlay whose lower directory holds its upper one is refused, so only what we change is overlaid.
        for part in ("etc", "usr/local"):
            upper, work = f"{storage}/upper/{part}", f"{storage}/work/{part}"
            Path(upper).mkdir(parents=True)
            Path(work).mkdir(parents=True)
            _overlay(f"/{part}", upper, work, f"{root}/{part}")
    else:
        _overlay(plan["lower"], f"{storage}/upper", f"{storage}/work", root)
        for part in ("proc", "sys", "dev"):
            kernel.rbind(f"/{part}", f"{root}/{part}")
    # The source's name is how processes of this node are told from all others: see Node.down.
    kernel.mount(plan["token"], f"{root}/run", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    if plan["lower"] == "/":
        for part in HOST_RUN:
            if Path("/run", part).is_dir():
                Path(root, "run", part).mkdir(parents=True)
                kernel.rbind(f"/run/{part}", f"{root}/run/{part}")
    # Plain directories, not overlays: containerd's own overlay snapshots need an upper directory on a real file system.
    for source, target in (
        (f"{storage}/containerd", "var/lib/containerd"),
        (f"{storage}/tmp", "tmp"),
        (f"{storage}/srv", "srv"),
        (f"{base}/log", "var/log"),
    ):
        Path(root, target).mkdir(parents=True, exist_ok=True)
        kernel.bind(source, f"{root}/{target}")
    Path(root, "tmp").chmod(0o1777)
    return root


def _overlay(lower: str, upper: str, work: str, target: str) -> None:
    kernel.mount("overlay", target, "overlay", data=f"lowerdir={lower},upperdir={upper},workdir={work}")


def _mount_cgroups(root: str, hierarchies: list[cgroup.Hierarchy]) -> None:
    """Replace the host's cgroup mounts by ones whose root is the node's cgroup.

    The host's are taken away, not covered: runc and CRIU look for cgroup mounts in mountinfo, where covered ones show.
    """
    kernel.detach(f"{root}/sys/fs/cgroup")
    if len(hierarchies) != 1 or hierarchies[0].mountpoint != "/sys/fs/cgroup":
        kernel.mount("tmpfs", f"{root}/sys/fs/cgroup", "tmpfs", data="mode=755")
    for hierarchy in hierarchies:
        Path(root + hierarchy.mountpoint).mkdir(exist_ok=True)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount(hierarchy.kind, root + hierarchy.mountpoint, hierarchy.kind, flags, hierarchy.options)


def _supervise(containerd: list[str]) -> None:
    daemon = 0
    while True:
        number = signal.sigwait({signal.SIGCHLD, signal.SIGUSR1})
        if number == signal.SIGUSR1 and daemon == 0:
            daemon = _start(containerd)
            _write_pid(daemon)
        # Signals of one number merge while pending: reap all there is.
        for pid in _reaped():
            if pid == daemon:
                daemon = 0
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(PID_FILE)


def _start(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open("/var/log/containerd.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    try:
        os.execvpe(argv[0], argv, {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"})
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    os._exit(127)


def _write_pid(pid: int) -> None:
    with open(PID_FILE + ".new", "w") as file:
        file.write(str(pid))
    os.rename(PID_FILE + ".new", PID_FILE)


def _reaped() -> list[int]:
    found: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append(pid)
