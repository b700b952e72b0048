"""A client of containerd's own API, as much of it as taking and restoring snapshots by hand needs.

The services are called over gRPC with the library grpcio, an optional dependency that only the command `fermata`
imports; requests and answers are encoded by shim/wire.py. Field numbers: containerd's api/services/*/v1/*.proto.
"""

from __future__ import annotations

import os

from shim import grpcio
from shim.errors import (
    ALREADY_EXISTS,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    UNAVAILABLE,
    UNKNOWN,
    ShimError,
)
from shim.task import Mount
from shim.ttrpc import AnyMessage
from shim.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from types import TracebackType
    from typing import Any, TypeVar

    M = TypeVar("M", bound=Message)

ADDRESS = "/run/containerd/containerd.sock"
SPEC = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_GOARCH = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOB_LIMIT = 8 << 20  # bytes; manifests and configurations have a few KB


class Label(Message):
    """An entry of a map of strings."""

    FIELDS = {1: ("key", str), 2: ("value", str)}
    key: str
    value: str


class Descriptor(Message):
    """A blob of the content store."""

    FIELDS = {1: ("media_type", str), 2: ("digest", str), 3: ("size", int)}
    media_type: str
    digest: str
    size: int


class Runtime(Message):
    """A container's runtime and its options."""

    FIELDS = {1: ("name", str), 2: ("options", AnyMessage)}
    name: str
    options: AnyMessage | None


class Container(Message):
    """A container's record, which outlives its task; `spec` holds the runtime specification as JSON."""

    FIELDS = {
        1: ("id", str),
        2: ("labels", [Label]),
        3: ("image", str),
        4: ("runtime", Runtime),
        5: ("spec", AnyMessage),
        6: ("snapshotter", str),
        7: ("snapshot_key", str),
    }
    id: str
    labels: list[Label]
    image: str
    runtime: Runtime | None
    spec: AnyMessage | None
    snapshotter: str
    snapshot_key: str


class ById(Message):
    """Requests that name one thing, and leases' and versions' answers, by their first field."""

    FIELDS = {1: ("name", str)}
    name: str


class OneContainer(Message):
    """Requests and answers that hold one container."""

    FIELDS = {1: ("container", Container)}
    container: Container | None


class Image(Message):
    """An image by name; `target` is its manifest or index."""

    FIELDS = {1: ("name", str), 3: ("target", Descriptor)}
    name: str
    target: Descriptor | None


class OneImage(Message):
    """The answer to Images.Get."""

    FIELDS = {1: ("image", Image)}
    image: Image | None


class SnapshotRequest(Message):
    """Snapshots.Prepare, Mounts and Remove."""

    FIELDS = {1: ("snapshotter", str), 2: ("key", str), 3: ("parent", str)}
    snapshotter: str
    key: str
    parent: str


class MountsResponse(Message):
    """The answer to Snapshots.Prepare and Mounts."""

    FIELDS = {1: ("mounts", [Mount])}
    mounts: list[Mount]


class ReadContentResponse(Message):
    """A piece of a blob."""

    FIELDS = {1: ("offset", int), 2: ("data", bytes)}
    data: bytes


class LeaseRequest(Message):
    """Leases.Create; `labels` may hold the time at which it ends by itself."""

    FIELDS = {1: ("id", str), 3: ("labels", [Label])}
    id: str
    labels: list[Label]


class LeaseDeletion(Message):
    """Leases.Delete; with `sync` the answer comes when what the lease alone kept is gone."""

    FIELDS = {1: ("id", str), 2: ("sync", bool)}
    id: str
    sync: bool


class CheckpointTaskRequest(Message):
    """Tasks.Checkpoint."""

    FIELDS = {1: ("container_id", str), 3: ("options", AnyMessage)}
    container_id: str
    options: AnyMessage | None


class CreateTaskRequest(Message):
    """Tasks.Create."""

    FIELDS = {
        1: ("container_id", str),
        3: ("rootfs", [Mount]),
        4: ("stdin", str),
        5: ("stdout", str),
        6: ("stderr", str),
        7: ("terminal", bool),
        9: ("options", AnyMessage),
    }
    container_id: str
    rootfs: list[Mount]
    stdout: str
    stderr: str


class StartResponse(Message):
    """The answer to Tasks.Start."""

    FIELDS = {1: ("pid", int)}
    pid: int


class _Empty(Message):
    FIELDS = {}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which containerd and which of its namespaces."""
    parser.add_argument(
        "--address",
        metavar="SOCKET",
        default=os.environ.get("CONTAINERD_ADDRESS") or ADDRESS,
        help="containerd's socket (default: $CONTAINERD_ADDRESS, else %(default)s)",
    )
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NS",
        default=os.environ.get("CONTAINERD_NAMESPACE") or "default",
        help="containerd's namespace (default: $CONTAINERD_NAMESPACE, else default)",
    )


def connect(args: argparse.Namespace) -> Client:
    """The containerd that the options of `add_options` name. Raises ShimError when the library for it is missing."""
    return Client(args.address, args.namespace)


class Client:
    """A connection to containerd at the socket `address`, in one of its namespaces."""

    def __init__(self, address: str, namespace: str) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log lines would stand among the command's own words
        try:
            grpc = grpcio.load()
        except ImportError as error:
            raise ShimError(
                "this command speaks to containerd with the Python library grpcio, which is not installed: install the "
                "package python3-grpcio, or `pip install fermata[cli]`; `ctr` and nerdctl work without it"
                if isinstance(error, ModuleNotFoundError)
                else f"this command cannot speak to containerd: {error}",
                FAILED_PRECONDITION,
            ) from error
        self.namespace = namespace
        self.lease = ""
        self._address = address.removeprefix("unix://")
        self._grpc = grpc
        # An image's configuration and a container's record may be larger than gRPC's limit of 4 MiB.
        self._channel = grpc.insecure_channel(
            f"unix://{self._address}", options=[("grpc.max_receive_message_length", 64 << 20)]
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def _metadata(self) -> list[tuple[str, str]]:
        found = [("containerd-namespace", self.namespace)]
        return [*found, ("containerd-lease", self.lease)] if self.lease else found

    def begin(self, service: str, method: str, request: Message) -> Any:
        """Start a call and return gRPC's future for it; `finish` has its answer."""
        path = f"/containerd.services.{service.lower()}.v1.{service}/{method}"
        return self._channel.unary_unary(path).future(request.encode(), metadata=self._metadata())

    def finish(self, future: Any, answer: type[M]) -> M:
        """Wait for a call's answer. Raises ShimError with containerd's own words."""
        try:
            return answer.decode(future.result())
        except self._grpc.RpcError as error:
            raise self._error(error) from error

    def call(self, service: str, method: str, request: Message, answer: type[M]) -> M:
        """Call and wait. Raises ShimError with containerd's own words."""
        return self.finish(self.begin(service, method, request), answer)

    def _error(self, error: Any) -> ShimError:
        code = error.code().value[0]
        if code == UNAVAILABLE:
            return ShimError(
                f"containerd does not answer at {self._address}: start it, or name its socket with --address",
                UNAVAILABLE,
            )
        return ShimError(_own_words(str(error.details()), code), code)

    def version(self) -> str:
        """containerd's version, such as v2.1.9."""
        return self.call("Version", "Version", _Empty(), ById).name

    def container(self, container_id: str) -> Container:
        """A container's record. Raises ShimError when there is none of that id."""
        try:
            found = self.call("Containers", "Get", ById(name=container_id), OneContainer).container
        except ShimError as error:
            if error.code == NOT_FOUND:
                raise ShimError(
                    f"no container {container_id} in containerd's namespace {self.namespace}: "
                    f"`ctr -n {self.namespace} containers ls` lists them, -n names another namespace",
                    NOT_FOUND,
                ) from error
            raise
        assert found is not None
        return found

    def spec(self, container: Container) -> dict[str, Any]:
        """A container's runtime specification."""
        import json

        spec: dict[str, Any] = json.loads(container.spec.value if container.spec else b"{}")
        return spec

    def mounts(self, container: Container) -> list[Mount]:
        """The mounts of a container's root file system, as its snapshotter describes them."""
        if not container.snapshotter:
            return []
        request = SnapshotRequest(snapshotter=container.snapshotter, key=container.snapshot_key)
        return self.call("Snapshots", "Mounts", request, MountsResponse).mounts

    def image_digest(self, name: str) -> str:
        """The digest of an image's target. Raises ShimError when there is no such image."""
        found = self.call("Images", "Get", ById(name=name), OneImage).image
        return found.target.digest if found and found.target else ""

    def blob(self, digest: str) -> bytes:
        """A small blob of the content store. Raises ShimError."""
        path = "/containerd.services.content.v1.Content/Read"
        data = bytearray()
        try:
            for piece in self._channel.unary_stream(path)(ById(name=digest).encode(), metadata=self._metadata()):
                data += ReadContentResponse.decode(piece).data
                if len(data) > _BLOB_LIMIT:
                    raise ShimError(f"the blob {digest} is larger than an image's description is", FAILED_PRECONDITION)
        except self._grpc.RpcError as error:
            raise self._error(error) from error
        return bytes(data)

    def chain(self, digest: str) -> str:
        """The name that the snapshotter gives to all layers of an image together (the OCI chain id).

        Raises ShimError when the image is not for this machine, or not wholly here.
        """
        import json

        manifest = json.loads(self.blob(digest))
        if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
            return self.chain(_for_this_machine(manifest, digest))
        layers = json.loads(self.blob(manifest["config"]["digest"]))["rootfs"]["diff_ids"]
        return chain_id(layers)


# What containerd puts around an error that passes through it (its pkg/errdefs).
_CODE_NAMES = {
    INVALID_ARGUMENT: "invalid argument",
    NOT_FOUND: "not found",
    ALREADY_EXISTS: "already exists",
    FAILED_PRECONDITION: "failed precondition",
    UNKNOWN: "unknown",
}


def _own_words(text: str, code: int) -> str:
    """A sentence of the shim's without what containerd put around it."""
    return text.removeprefix("failed to create shim task: ").removesuffix(f": {_CODE_NAMES.get(code)}")


def _for_this_machine(index: dict[str, Any], digest: str) -> str:
    from shim.host import machine

    wanted = _GOARCH.get(machine(), machine())
    for entry in index["manifests"]:
        platform = entry.get("platform") or {}
        if platform.get("os", "linux") == "linux" and platform.get("architecture", wanted) == wanted:
            return str(entry["digest"])
    raise ShimError(f"the image {digest} has nothing for linux/{wanted}", FAILED_PRECONDITION)


def chain_id(diff_ids: list[str]) -> str:
    """The OCI image specification's ChainID of a list of layers' DiffIDs."""
    import hashlib

    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
    return chain
