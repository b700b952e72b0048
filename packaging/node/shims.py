"""The shims of a node, seen from the host: which processes they are, and calls to one of them as containerd makes them.

What ``ctr`` cannot ask for is asked here: a checkpoint of a container that keeps it or ends it, whatever its runtime's
name is, and a task whose shim is named by path.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from node.errors import NodeError
from node.node import Node
from shim import task
from shim.client import Client
from shim.ttrpc import AnyMessage, Response
from shim.wire import Message

BUNDLES = "/run/containerd/io.containerd.runtime.v2.task"
STOCK_NAME = "containerd-shim-runc-v2"
OUR_NAME = "containerd-shim-fermata-v1"


class CallFailed(Exception):
    """A shim answered a call with an error; the text is what it said."""


class Process(NamedTuple):
    """A process of a node: the host's pid, and its command line."""

    pid: int
    words: tuple[str, ...]


def processes(node: Node) -> list[Process]:
    """Every process of the node."""
    found = []
    for pid in sorted(node.processes()):
        # It may end while we look.
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            found.append(Process(pid, tuple(words[:-1])))
    return found


def daemons(node: Node, name: str = OUR_NAME) -> list[int]:
    """The pids of the node's shims of one kind, by the name of their program."""
    return [found.pid for found in processes(node) if any(word.endswith(f"/{name}") for word in found.words[:4])]


def bundle(container: str, namespace: str = "default") -> str:
    """Where a container's bundle is in the node."""
    return f"{BUNDLES}/{namespace}/{container}"


def recorded_address(node: Node, container: str, namespace: str = "default") -> str:
    """The address that containerd keeps of a container's shim, to find it after its own restart."""
    folder = node.path(bundle(container, namespace))
    # 2.x, and 1.7.
    if (folder / "bootstrap.json").exists():
        return str(json.loads((folder / "bootstrap.json").read_text())["address"])
    return (folder / "address").read_text()


class Shim:
    """A container's shim, found in what it listens at; ours by default, else the stock one behind it."""

    def __init__(self, node: Node, container: str, namespace: str = "default", *, stock: bool = False) -> None:
        self.node = node
        self.container = container
        sockets = node.path("/run/containerd/s")
        ours = sorted(path for path in sockets.iterdir() if path.name.startswith("f-"))
        state = node.path(f"/run/fermata/{namespace}/{container}/daemon")
        if not state.exists():
            raise NodeError(f"container {container} has no shim of ours: {state} is not there")
        name = Path(state.read_text().splitlines()[0]).name
        self.path = sockets / name
        if stock:
            self.path = next(
                path
                for path in sockets.iterdir()
                if path not in ours and path.stat().st_ino == int(name.split("-")[1], 16)
            )

    @property
    def pid(self) -> int:
        """The process that serves the socket."""
        return serving(self.node, self.path.name)

    def call(self, method: str, message: Message, *, timeout: float = 60) -> bytes:
        """Make a call of the task service. Returns the answer's bytes; raises CallFailed with an error's text."""
        version = "v3" if self.node.containerd_version() >= (2,) else "v2"
        answer = self.raw(f"containerd.task.{version}.Task", method, message.encode(), timeout=timeout)
        if answer.status is not None and answer.status.code:
            raise CallFailed(answer.status.message)
        return answer.payload

    def raw(self, service: str, method: str, payload: bytes = b"", *, timeout: float = 60) -> Response:
        """Make any call. Returns the answer, error or not."""
        with self.connect() as client:
            return client.call(service, method, payload, timeout_nano=int(timeout * 1e9))

    def connect(self) -> Client:
        """A connection of one's own, for many calls."""
        # The path through the node's root is too long for a socket's address; one through the directory is not.
        folder = os.open(self.path.parent, os.O_PATH | os.O_CLOEXEC)
        try:
            return Client(f"/proc/self/fd/{folder}/{self.path.name}", "the shim")
        finally:
            os.close(folder)

    def state(self) -> task.StateResponse:
        """What the shim says of the container's first process."""
        return task.StateResponse.decode(self.call("State", task.ExecRequest(id=self.container)))

    def checkpoint(self, directory: str, *, leave_running: bool = True, timeout: float = 60) -> None:
        """Take a snapshot into a directory of the node's, as containerd asks for one."""
        options = task.CheckpointOptions(exit=not leave_running)
        carried = AnyMessage(type_url=task.CHECKPOINT_OPTIONS, value=options.encode())
        request = task.CheckpointTaskRequest(id=self.container, path=directory, options=carried)
        self.call("Checkpoint", request, timeout=timeout)


def serving(node: Node, socket_name: str) -> int:
    """The pid of the process that listens at the socket of that name in /run/containerd/s. Raises NodeError."""
    inodes = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        # Flags 00010000: it listens.
        if len(fields) == 8 and fields[3] == "00010000" and Path(fields[7]).name == socket_name:
            inodes.add(f"socket:[{fields[6]}]")
    for found in processes(node):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{found.pid}/fd").iterdir():
                if os.readlink(descriptor) in inodes:
                    return found.pid
    raise NodeError(f"nobody in {node.name} listens at {socket_name}")
