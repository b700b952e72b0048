"""Pods of a node: a client of containerd's CRI plugin over its gRPC socket, as the kubelet is one.

Field numbers: the Kubernetes container runtime interface, k8s.io/cri-api, pkg/apis/runtime/v1/api.proto.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from node import cgroup, pause, stack
from node.errors import NodeError
from node.image import TEST_IMAGE
from node.node import SOCKET, Node
from shim.wire import Message

NAMESPACE = "k8s.io"
CGROUP = "kubepods"
LOGS = "/var/log/pods"
NETWORK = "10.88.7.0/24"
BRIDGE = "fmt-{token}"  # a network interface has a name of 15 bytes at most
STATES = ("CREATED", "RUNNING", "EXITED", "UNKNOWN")
M = TypeVar("M", bound=Message)


class Pair(Message):
    """An entry of a map of strings."""

    FIELDS = {1: ("key", str), 2: ("value", str)}
    key: str
    value: str


class PodName(Message):
    """PodSandboxMetadata."""

    FIELDS = {1: ("name", str), 2: ("uid", str), 3: ("namespace", str), 4: ("attempt", int)}
    name: str
    uid: str


class PodLinux(Message):
    """LinuxPodSandboxConfig."""

    FIELDS = {1: ("cgroup_parent", str)}
    cgroup_parent: str


class PodConfig(Message):
    """PodSandboxConfig."""

    FIELDS = {
        1: ("metadata", PodName),
        2: ("hostname", str),
        3: ("log_directory", str),
        6: ("labels", [Pair]),
        7: ("annotations", [Pair]),
        8: ("linux", PodLinux),
    }
    metadata: PodName
    hostname: str
    linux: PodLinux


class RunPodRequest(Message):
    FIELDS = {1: ("config", PodConfig), 2: ("runtime_handler", str)}


class ById(Message):
    """Requests and answers whose first field is an id."""

    FIELDS = {1: ("id", str)}
    id: str


class PodNetwork(Message):
    FIELDS = {1: ("ip", str)}
    ip: str


class PodStatus(Message):
    FIELDS = {1: ("id", str), 3: ("state", int), 5: ("network", PodNetwork), 9: ("runtime_handler", str)}
    network: PodNetwork | None
    runtime_handler: str


class PodStatusResponse(Message):
    FIELDS = {1: ("status", PodStatus)}
    status: PodStatus | None


class PodList(Message):
    FIELDS = {1: ("items", [ById])}
    items: list[ById]


class ContainerName(Message):
    """ContainerMetadata."""

    FIELDS = {1: ("name", str), 2: ("attempt", int)}
    name: str


class ImageName(Message):
    FIELDS = {1: ("image", str)}


class Mount(Message):
    FIELDS = {1: ("container_path", str), 2: ("host_path", str), 3: ("readonly", bool)}


class ContainerConfig(Message):
    FIELDS = {
        1: ("metadata", ContainerName),
        2: ("image", ImageName),
        3: ("command", [str]),
        7: ("mounts", [Mount]),
        10: ("annotations", [Pair]),
        11: ("log_path", str),
        15: ("linux", bytes),
    }


class CreateContainerRequest(Message):
    FIELDS = {1: ("pod", str), 2: ("config", ContainerConfig), 3: ("pod_config", PodConfig)}


class StopContainerRequest(Message):
    FIELDS = {1: ("id", str), 2: ("timeout", int)}


class ExecRequest(Message):
    FIELDS = {1: ("id", str), 2: ("command", [str]), 3: ("timeout", int)}


class ExecResponse(Message):
    FIELDS = {1: ("stdout", bytes), 2: ("stderr", bytes), 3: ("exit_code", int)}
    stdout: bytes
    stderr: bytes
    exit_code: int


class ContainerStatus(Message):
    FIELDS = {1: ("id", str), 3: ("state", int), 7: ("exit_code", int), 10: ("reason", str), 11: ("message", str)}
    state: int
    exit_code: int
    reason: str
    message: str


class ContainerStatusResponse(Message):
    FIELDS = {1: ("status", ContainerStatus)}
    status: ContainerStatus | None


class CheckpointRequest(Message):
    FIELDS = {1: ("id", str), 2: ("location", str), 3: ("timeout", int)}


class VersionResponse(Message):
    FIELDS = {1: ("version", str), 2: ("runtime_name", str), 3: ("runtime_version", str)}
    runtime_name: str


class Failed(Exception):
    """The CRI plugin answered with an error; the text is what it said, after gRPC's name of the code."""


class Pod(NamedTuple):
    """A pod that runs, and the configuration that creating its containers needs again."""

    id: str
    config: PodConfig
    ip: str


class Pods:
    """A connection to a node's CRI plugin. Prepare the node first: ``Pods.prepare``."""

    def __init__(self, node: Node) -> None:
        import grpc

        self.node = node
        self._grpc = grpc
        self._channel = grpc.insecure_channel(f"unix://{node.path(SOCKET)}")

    @staticmethod
    def up(**options: Any) -> Node:
        """A node with the CRI plugin, a pod network, fermata's drop-in, and the images in the kubelet's namespace."""
        say = options.pop("say", None)
        node = Node.up(cri=True, say=say, **options)
        try:
            _prepare(node)
        except BaseException:
            node.down()
            raise
        return node

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def call(self, method: str, request: Message, answer: type[M], *, timeout: float = 60) -> M:
        """A call of the runtime service. Raises Failed."""
        path = f"/runtime.v1.RuntimeService/{method}"
        try:
            return answer.decode(self._channel.unary_unary(path)(request.encode(), timeout=timeout))
        except self._grpc.RpcError as error:
            raise Failed(f"{error.code().name}: {error.details()}") from error

    # -- pods ------------------------------------------------------------------------------------------------------

    def run(self, name: str, *, handler: str = "fermata", annotations: Mapping[str, str] | None = None) -> Pod:
        """Run a pod without containers yet. Raises Failed."""
        uid = str(uuid.uuid4())
        pairs = [Pair(key=key, value=value) for key, value in (annotations or {}).items()]
        config = PodConfig(
            metadata=PodName(name=name, uid=uid, namespace="test", attempt=0),
            hostname=name,
            log_directory=f"{LOGS}/{uid}",
            annotations=pairs,
            linux=PodLinux(cgroup_parent=f"/{CGROUP}/pod{uid}"),
        )
        answer = self.call("RunPodSandbox", RunPodRequest(config=config, runtime_handler=handler), ById)
        status = self.call("PodSandboxStatus", ById(id=answer.id), PodStatusResponse).status
        return Pod(answer.id, config, status.network.ip if status and status.network else "")

    def remove(self, pod: Pod) -> None:
        """Stop and remove a pod with all its containers."""
        self.call("StopPodSandbox", ById(id=pod.id), Message)
        self.call("RemovePodSandbox", ById(id=pod.id), Message)
        self._remove_cgroups()

    def remove_all(self) -> None:
        """Stop and remove every pod of the node."""
        for pod in self.call("ListPodSandbox", Message(), PodList).items:
            self.call("StopPodSandbox", ById(id=pod.id), Message)
            self.call("RemovePodSandbox", ById(id=pod.id), Message)
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """The control groups of pods that are gone; runc makes them, and the kubelet removes them."""
        for hierarchy in cgroup.hierarchies():
            for path in (cgroup.directory(hierarchy, self.node.facts["token"]) / CGROUP).glob("pod*"):
                with contextlib.suppress(OSError):  # a pod that lives is in it
                    path.rmdir()

    # -- containers ------------------------------------------------------------------------------------------------

    def create(
        self, pod: Pod, name: str, *command: str, mounts: Sequence[tuple[str, str]] = (), attempt: int = 0
    ) -> str:
        """Create a container of the test image in a pod; its id. Raises Failed.

        ``mounts``: (path in the node, path in the container).
        """
        config = ContainerConfig(
            metadata=ContainerName(name=name, attempt=attempt),
            image=ImageName(image=f"docker.io/library/{TEST_IMAGE}"),
            command=list(command) or ["sleep", "1000"],
            mounts=[Mount(host_path=host, container_path=inside) for host, inside in mounts],
            log_path=f"{name}_{attempt}.log",
        )
        request = CreateContainerRequest(pod=pod.id, config=config, pod_config=pod.config)
        return self.call("CreateContainer", request, ById).id

    def start(self, container: str) -> None:
        """Raises Failed."""
        self.call("StartContainer", ById(id=container), Message)

    def exec(self, container: str, *command: str) -> str:
        """What a command in a container wrote. Raises NodeError when it failed."""
        answer = self.call("ExecSync", ExecRequest(id=container, command=list(command), timeout=30), ExecResponse)
        if answer.exit_code:
            raise NodeError(f"{command} in {container} ended with {answer.exit_code}: {answer.stderr.decode()}")
        return answer.stdout.decode()

    def status(self, container: str) -> ContainerStatus:
        """A container's state as the CRI plugin knows it. Raises Failed."""
        found = self.call("ContainerStatus", ById(id=container), ContainerStatusResponse).status
        assert found is not None
        return found

    def state(self, container: str) -> str:
        """One of STATES."""
        return STATES[self.status(container).state]

    def log(self, pod: Pod, name: str, attempt: int = 0) -> list[str]:
        """The lines of a container's log, as ``kubectl logs`` shows them."""
        uid = pod.config.metadata.uid
        path = self.node.logs / "pods" / uid / f"{name}_{attempt}.log"
        # Each line: time, stream, F for a full line, text.
        return [line.split(" ", 3)[3] for line in path.read_text().splitlines()] if path.exists() else []

    def checkpoint(self, container: str, location: str, *, timeout: float = 60) -> None:
        """What the kubelet's checkpoint endpoint does: write an archive in the node. Raises Failed."""
        self.call("CheckpointContainer", CheckpointRequest(id=container, location=location), Message, timeout=timeout)


def bridge(node: Node) -> str:
    """The name of the node's pod bridge, which stands in the host's network namespace as the node itself does."""
    return BRIDGE.format(token=node.facts["token"][-10:])


def _prepare(node: Node) -> None:
    new = node.containerd_version() >= (2,)
    conf = node.path("/etc/containerd/conf.d")
    text = (stack.PROJECT / "packaging/containerd" / f"fermata-v{3 if new else 2}.toml").read_text()
    runtime = "io.containerd.cri.v1.runtime" if new else "io.containerd.grpc.v1.cri"
    # In the same file, since of containerd 1.7 the last file that has a plugin's section replaces that of all others.
    section, key = (
        ('"io.containerd.cri.v1.images".pinned_images', "sandbox") if new else (f'"{runtime}"', "sandbox_image")
    )
    text += f'\n[plugins.{section}]\n  {key} = "docker.io/library/{pause.IMAGE}"\n'
    if not _may_favour_processes():
        text += f'[plugins."{runtime}"]\n' if new else ""
        text += "  restrict_oom_score_adj = true\n"
    (conf / "fermata.toml").write_text(text)
    network = node.path("/etc/cni/net.d")
    network.mkdir(parents=True, exist_ok=True)
    (network / "10-pods.conflist").write_text(
        f"""{{"cniVersion": "1.0.0", "name": "pods", "plugins": [{{
  "type": "bridge", "bridge": "{bridge(node)}",
  "ipam": {{"type": "host-local", "ranges": [[{{"subnet": "{NETWORK}"}}]], "dataDir": "/run/cni"}}}}]}}
"""
    )
    node.owns_link(bridge(node))
    node.restart_containerd()
    archive = pause.write_image(node.directory / "pause.tar")
    node.import_image(archive, namespace=NAMESPACE)
    archive.unlink()
    node.import_image(namespace=NAMESPACE)


def _may_favour_processes() -> bool:
    """Whether a pod's first process may be kept from the kernel's OOM killer, which needs CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 24 & 1)
