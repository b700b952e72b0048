"""What containerd has on record, asked over its socket: in a few milliseconds, where each start of `ctr` takes fifty.

Needs the Python library grpcio. Field numbers: containerd, api/services, api/types.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from node.errors import NodeError
from node.node import SOCKET, Node
from shim.wire import fields

SNAPSHOTTERS = ("overlayfs", "native")
STATUSES = ("UNKNOWN", "CREATED", "RUNNING", "STOPPED", "PAUSED", "PAUSING")
# Has containerd a task, it has this directory: asking for tasks would have it ask every shim, and one may hang.
TASKS = "/run/containerd/io.containerd.runtime.v2.task"


class Name(NamedTuple):
    """Something of a containerd namespace; ``of`` is a snapshot's snapshotter."""

    namespace: str
    name: str
    of: str = ""


class Task(NamedTuple):
    """``pid`` is the host's, of the first process; ``status`` is one of STATUSES."""

    pid: int
    status: str


class Records:
    """Lists of names, as they are at the call. Each raises NodeError when containerd does not answer."""

    def __init__(self, node: Node) -> None:
        import grpc

        self.node = node
        self._grpc = grpc
        self._channel = grpc.insecure_channel(f"unix://{node.path(SOCKET)}")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def namespaces(self) -> list[str]:
        return self._list("namespaces", "")

    def containers(self) -> list[Name]:
        return [Name(space, name) for space in self.namespaces() for name in self._list("containers", space)]

    def images(self) -> list[Name]:
        return [Name(space, name) for space in self.namespaces() for name in self._list("images", space)]

    def snapshots(self) -> list[Name]:
        """The youngest first as far as one is made from another: in an order in which they can be removed."""
        found = []
        for space in self.namespaces():
            for snapshotter in SNAPSHOTTERS:
                found += [Name(space, name, snapshotter) for name in self._snapshots(space, snapshotter)]
        return found

    def tasks(self) -> list[Name]:
        return [Name(path.parent.name, path.name) for path in self.node.path(TASKS).glob("*/*")]

    def running(self, namespace: str = "default") -> dict[str, Task]:
        """The tasks of a namespace by their containers' names, in the states that their shims say."""
        found = {}
        for item in self._items("tasks", namespace):
            pid, status = (sum(_all(item, number)) for number in (3, 4))
            found[_text(item, 2)] = Task(pid, STATUSES[status])
        return found

    def _list(self, what: str, namespace: str) -> list[str]:
        return [_text(item, 1) for item in self._items(what, namespace)]

    def _items(self, what: str, namespace: str) -> list[bytes]:
        call = self._channel.unary_unary(f"/containerd.services.{what}.v1.{what.capitalize()}/List")
        try:
            return _all(call(b"", metadata=_metadata(namespace), timeout=60, wait_for_ready=True), 1)
        except self._grpc.RpcError as error:
            raise NodeError(f"containerd does not list its {what}: {error.details()}") from error

    def _snapshots(self, namespace: str, snapshotter: str) -> list[str]:
        call = self._channel.unary_stream("/containerd.services.snapshots.v1.Snapshots/List")
        request = bytes((10, len(snapshotter))) + snapshotter.encode()
        parents = {}
        try:
            for answer in call(request, metadata=_metadata(namespace), timeout=60, wait_for_ready=True):
                parents.update({_text(item, 1): _text(item, 2) for item in _all(answer, 1)})
        except self._grpc.RpcError as error:
            if error.code() is not self._grpc.StatusCode.INVALID_ARGUMENT:  # this containerd has no such snapshotter
                raise
        return sorted(parents, key=lambda name: -_depth(name, parents))


def _depth(name: str, parents: dict[str, str]) -> int:
    depth = 0
    while name := parents.get(name, ""):
        depth += 1
    return depth


def _metadata(namespace: str) -> list[tuple[str, str]]:
    return [("containerd-namespace", namespace)] if namespace else []


def _all(message: bytes, number: int) -> list[Any]:
    return [value for found, _, value, _ in fields(message) if found == number]


def _text(message: bytes, number: int) -> str:
    return "".join(value.decode() for value in _all(message, number)[-1:])
