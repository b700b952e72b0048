"""What fermata costs a container that is never snapshotted, and a small restore: ratios against the stock runtime.

Both runtimes do the same in the same node, in turn, so that what else the machine does meets both. Printed are the
median and the least of each, and their ratio. The figures are no verdict, and the exit status says nothing of them.

    python3 bench/shim.py [--stack sid] [--node NAME] [--rounds 30]

A restore is measured twice. By a client: `ctr run` with the annotation, and under the stock runtime the one way that
it has, `ctr c restore --live`. And at the shims, called as containerd calls them, for the very same images: `start`,
Create and Start, by the annotation under fermata and by the field `checkpoint` under the stock shim, which is given a
fresh network namespace as well, for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
INSTALLED = "/usr/local/lib/fermata"
INSIDE = "inside"  # this program's first argument when it runs in the node
# In the node it stands alone, beside the installed fermata.
sys.path[:0] = (
    [INSTALLED] if sys.argv[1:2] == [INSIDE] else [str(HERE.parent.parent), str(HERE.parent.parent / "packaging")]
)

from shim import task  # noqa: E402
from shim.client import Client, socket_path  # noqa: E402
from shim.errors import UNIMPLEMENTED  # noqa: E402
from shim.stock import Bootstrap  # noqa: E402

OURS, STOCK = "io.containerd.fermata.v1", "io.containerd.runc.v2"
SHIMS = {OURS: "/usr/local/bin/containerd-shim-fermata-v1", STOCK: "/usr/bin/containerd-shim-runc-v2"}
SOCKET = "/run/containerd/containerd.sock"
BUNDLES = "/run/containerd/io.containerd.runtime.v2.task/default"
IMAGE = "docker.io/library/fermata-test:latest"
SNAPSHOT = "/srv/bench-snapshot"


def ctr(*words: str) -> str:
    """Run ctr and return what it printed."""
    return subprocess.run(["ctr", *words], check=True, capture_output=True, text=True).stdout


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def show(
    what: str, ours: list[float], stock: list[float], unit: str, scale: float, *, difference: bool = False
) -> None:
    """One line: both medians, both least, and how they compare."""
    medians = statistics.median(ours), statistics.median(stock)
    leasts = min(ours), min(stock)

    def compared(pair: tuple[float, float]) -> str:
        return f"{(pair[0] - pair[1]) * scale:+.3f} {unit}" if difference else f"{pair[0] / pair[1]:.2f}"

    print(
        f"{what:40} median {medians[0] * scale:8.2f} : {medians[1] * scale:8.2f} {unit} = {compared(medians):10} "
        f"least {leasts[0] * scale:8.2f} : {leasts[1] * scale:8.2f} {unit} = {compared(leasts)}",
        flush=True,
    )


# A whole life -------------------------------------------------------------------------------------------------------


def whole_lives(rounds: int) -> None:
    """`ctr run --rm IMAGE true`."""
    took: dict[str, list[float]] = {OURS: [], STOCK: []}
    for number in range(rounds + 1):
        for runtime in (OURS, STOCK) if number % 2 else (STOCK, OURS):
            taken = seconds(lambda: ctr("run", "--rm", "--runtime", runtime, IMAGE, "bench", "true"))  # noqa: B023
            if number:  # the first fills the caches
                took[runtime].append(taken)
    show("ctr run --rm IMAGE true", took[OURS], took[STOCK], "ms", 1000)


# An idle container --------------------------------------------------------------------------------------------------


def recorded(name: str) -> tuple[str, str]:
    """The paths of our socket and of the stock shim's."""
    ours, stock = Path(f"/run/fermata/default/{name}/daemon").read_text().splitlines()[:2]
    return ours, stock


def calls(rounds: int) -> None:
    """`State` over a connection that stays, as containerd keeps one."""
    ctr("run", "-d", "--runtime", OURS, IMAGE, "bench", "sleep", "1000")
    took: dict[str, list[float]] = {OURS: [], STOCK: []}
    request = task.ExecRequest(id="bench").encode()
    ours, stock = recorded("bench")
    service = served(stock)
    with Client(ours) as through, Client(stock) as direct:
        for _ in range(rounds * 40):
            for runtime, client in ((OURS, through), (STOCK, direct)):
                taken = seconds(lambda: client.call(service, "State", request))  # noqa: B023
                took[runtime].append(taken)
    show("State", took[OURS], took[STOCK], "ms", 1000, difference=True)
    end("bench")


def served(path: str) -> str:
    """Which of its names the stock shim serves the task API under."""
    with Client(path) as client:
        for name in task.SERVICES:
            answer = client.call(name, "Connect", b"")
            if answer.status is None or answer.status.code != UNIMPLEMENTED:
                return name
    raise RuntimeError(f"{path} serves no task API")


def end(name: str) -> None:
    """Remove a container."""
    subprocess.run(["ctr", "tasks", "delete", "--force", name], capture_output=True, check=False)
    ctr("containers", "delete", name)


def memory(rounds: int) -> None:
    """The proportional set size of our daemon and of the stock shim, one idle container at a time on the node."""
    took: dict[str, list[float]] = {OURS: [], STOCK: []}
    for _ in range(rounds):
        for runtime in (OURS, STOCK):
            ctr("run", "-d", "--runtime", runtime, IMAGE, "bench", "sleep", "1000")
            time.sleep(1)  # what a start leaves to the collectors of both
            took[runtime].append(proportional_set_size(Path(SHIMS[runtime]).name))
            end("bench")
            time.sleep(0.3)
    show("memory (PSS) of the shim itself", took[OURS], took[STOCK], "MB", 1 / 1e6)


def proportional_set_size(program: str) -> float:
    """In bytes, of the one process in this mount namespace that runs the program."""
    here = os.readlink("/proc/self/ns/mnt")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if os.readlink(process / "ns/mnt") != here or not any(
                w.endswith(b"/" + program.encode()) for w in words[:4]
            ):
                continue
            line = next(line for line in (process / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except OSError:
            continue
        return int(line.split()[1]) * 1024.0
    raise RuntimeError(f"no {program} runs")


# A restore ----------------------------------------------------------------------------------------------------------


class Restore:
    """One restore of the snapshot by a shim, driven as containerd drives it."""

    def __init__(self, runtime: str, number: int, spec: dict[str, Any], rootfs: list[task.Mount], service: str) -> None:
        self.service = service
        self.id = f"bench-{number}-{runtime.split('.')[2]}"
        self.runtime = runtime
        self.bundle = f"{BUNDLES}/{self.id}"
        os.makedirs(f"{self.bundle}/rootfs")
        os.mkfifo(f"{self.bundle}/log")
        self.log = os.open(f"{self.bundle}/log", os.O_RDWR | os.O_NONBLOCK)
        self.netns = ""
        spec = json.loads(json.dumps(spec))
        spec["linux"]["cgroupsPath"] = f"/default/{self.id}"
        if runtime == OURS:
            spec["annotations"] = {"fermata/restore-from": SNAPSHOT}
        else:
            self.netns = self.id
            subprocess.run(["ip", "netns", "add", self.netns], check=True)
            network = next(space for space in spec["linux"]["namespaces"] if space["type"] == "network")
            network["path"] = f"/run/netns/{self.netns}"
        Path(f"{self.bundle}/config.json").write_text(json.dumps(spec))
        self.rootfs = rootfs
        self.phases: dict[str, float] = {}

    def run(self) -> float:
        """Start the shim and restore; the seconds until the process runs."""
        began = time.monotonic()
        flags = ["-namespace", "default", "-address", SOCKET, "-publish-binary", "/usr/bin/containerd", "-id", self.id]
        environment = {**os.environ, "TTRPC_ADDRESS": f"{SOCKET}.ttrpc", "GRPC_ADDRESS": SOCKET, "NAMESPACE": "default"}
        started = subprocess.run(
            [SHIMS[self.runtime], *flags, "-bundle", self.bundle, "start"],
            cwd=self.bundle,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
        )
        self.client = Client(socket_path(Bootstrap(started.stdout).address))
        at = time.monotonic()
        self.phases["start"] = at - began
        create = task.CreateTaskRequest(id=self.id, bundle=self.bundle, rootfs=self.rootfs)
        if self.runtime == STOCK:
            create.checkpoint = SNAPSHOT
        self.call("Create", create.encode())
        self.phases["Create"] = time.monotonic() - at
        at = time.monotonic()
        self.call("Start", task.ExecRequest(id=self.id).encode())
        self.phases["Start"] = time.monotonic() - at
        return time.monotonic() - began

    def call(self, method: str, payload: bytes) -> None:
        """A call of the task API that has to succeed."""
        answer = self.client.call(self.service, method, payload)
        if answer.status and answer.status.code:
            raise RuntimeError(f"{method} of {self.id}: {answer.status.message}")

    def end(self) -> None:
        """Leave nothing of it."""
        self.call("Kill", task.KillRequest(id=self.id, signal=9).encode())
        self.call("Wait", task.ExecRequest(id=self.id).encode())
        self.call("Delete", task.ExecRequest(id=self.id).encode())
        try:
            self.call("Shutdown", task.ShutdownRequest(id=self.id, now=True).encode())
        except Exception:
            pass  # it may be gone before it answers
        self.client.close()
        os.close(self.log)
        subprocess.run(["umount", f"{self.bundle}/rootfs"], capture_output=True, check=False)
        shutil.rmtree(self.bundle)
        if self.netns:
            subprocess.run(["ip", "netns", "delete", self.netns], check=True)


def restores_by_a_client(rounds: int) -> None:
    """A small container restored by a client, each runtime's own way."""
    reference = "example.org/bench:1"
    annotation = ("--annotation", f"fermata/restore-from={SNAPSHOT}")
    ways = {
        OURS: ("run", "-d", "--runtime", OURS, *annotation, IMAGE, "bench", "sleep", "1000"),
        STOCK: ("containers", "restore", "--live", "bench", reference),
    }
    ctr("run", "-d", "--runtime", STOCK, IMAGE, "bench", "sleep", "1000")
    ctr("containers", "checkpoint", "--task", "bench", reference)
    end("bench")
    took: dict[str, list[float]] = {OURS: [], STOCK: []}
    for number in range(rounds + 1):
        for runtime in (OURS, STOCK) if number % 2 else (STOCK, OURS):
            taken = seconds(lambda: ctr(*ways[runtime]))  # noqa: B023
            end("bench")
            if number:
                took[runtime].append(taken)
    ctr("images", "delete", reference)
    show("a client's restore of a small container", took[OURS], took[STOCK], "ms", 1000)


def restores(rounds: int) -> None:
    """A small container restored from the same images by either shim."""
    ctr("run", "-d", "--runtime", OURS, IMAGE, "bench", "sleep", "1000")
    spec = json.loads(Path(f"{BUNDLES}/bench/config.json").read_text())
    spec.pop("annotations", None)
    for space in spec["linux"]["namespaces"]:
        space.pop("path", None)
    ours, stock = recorded("bench")
    service = served(stock)
    with Client(ours) as client:
        request = task.CheckpointTaskRequest(id="bench", path=SNAPSHOT)
        answer = client.call(service, "Checkpoint", request.encode())
        if answer.status and answer.status.code:
            raise RuntimeError(answer.status.message)
    end("bench")
    restores_by_a_client(rounds)
    parent = next(line.split()[0] for line in ctr("snapshots", "list").splitlines() if line.startswith("sha256:"))
    took: dict[str, list[float]] = {OURS: [], STOCK: []}
    phases: dict[str, dict[str, list[float]]] = {OURS: {}, STOCK: {}}
    for number in range(rounds + 1):
        for runtime in (OURS, STOCK) if number % 2 else (STOCK, OURS):
            key = f"bench-{number}-{runtime}"
            ctr("snapshots", "prepare", key, parent)
            words = ctr("snapshots", "mounts", "/mnt", key).split()
            mount = task.Mount(type=words[2], source=words[3], options=words[words.index("-o") + 1].split(","))
            restore = Restore(runtime, number, spec, [mount], service)
            taken = restore.run()
            restore.end()
            ctr("snapshots", "remove", key)
            if number:
                took[runtime].append(taken)
                for name, part in restore.phases.items():
                    phases[runtime].setdefault(name, []).append(part)
    show("the shims' restore of the same images", took[OURS], took[STOCK], "ms", 1000)
    for name in phases[OURS]:
        show(f"  of it, {name}", phases[OURS][name], phases[STOCK][name], "ms", 1000)
    shutil.rmtree(SNAPSHOT)


# ---------------------------------------------------------------------------------------------------------------------


def inside(rounds: int) -> None:
    """Everything, in the node."""
    print(f"{'fermata : stock runtime':40} {rounds} rounds, in turn")
    whole_lives(rounds)
    calls(rounds)
    memory(max(3, rounds // 10))
    restores(max(5, rounds // 2))


def main() -> None:
    """Bring up a node, or take one that is up, and run in it."""
    from node import Node
    from node.stack import RECIPES

    parser = argparse.ArgumentParser(description="fermata against the stock runtime")
    parser.add_argument("--stack", choices=list(RECIPES), default="sid")
    parser.add_argument("--node", help="the name of a node that is up, used and left up")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    node = Node.open(options.node) if options.node else Node.up(stack_name=options.stack)
    try:
        if options.node:
            node.install()
        else:
            node.import_image()
        script = node.path("/srv/bench-shim.py")
        shutil.copyfile(HERE, script)
        print(f"stack {node.stack}", flush=True)
        node.popen(["python3", "-I", "/srv/bench-shim.py", INSIDE, str(options.rounds)]).wait()
        script.unlink()
    finally:
        if not options.node:
            node.down()


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        inside(int(sys.argv[2]))
    else:
        main()
