"""containerd's content store, from outside: one blob written piece by piece, and what keeps it from the collector."""

from __future__ import annotations

import os
import time
from queue import SimpleQueue

import grpc

from differ import messages
from differ.messages import CONTENT, LEASES, NAMESPACES, SNAPSHOTS
from shim.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeVar

    Answer = TypeVar("Answer", bound=Message)
    Metadata = Sequence[tuple[str, str]]

LEASE_SECONDS = 3600
LEASE_LABEL = "fermata/differ"
_ANSWER_SECONDS = 60
"""containerd answers these calls at once, or after its own restart."""
_LET_GO = 10
"""Seconds that containerd is given to let go of a reference, or to be there."""
_UNACKNOWLEDGED = 2
"""Pieces on their way that containerd has not said it wrote: so much memory an upload takes beside the layer's own."""


def connect(address: str) -> grpc.Channel:
    """A channel to containerd's socket. It connects when it is first used, and again after a restart."""
    return grpc.insecure_channel(
        f"unix://{address}",
        options=[
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.max_receive_message_length", 16 << 20),
        ],
    )


class Store:
    """The content store in one namespace, with one lease that every call is made under ("" for none)."""

    def __init__(self, channel: grpc.Channel, namespace: str, lease: str = "") -> None:
        self._channel = channel
        self.namespace = namespace
        self.lease = lease

    @property
    def metadata(self) -> Metadata:
        named = [("containerd-namespace", self.namespace)]
        return [*named, ("containerd-lease", self.lease)] if self.lease else named

    def call(self, service: str, method: str, request: Message, answer: type[Answer]) -> Answer:
        """One call. Raises grpc.RpcError."""
        invoke = self._channel.unary_unary(
            f"/{service}/{method}", request_serializer=Message.encode, response_deserializer=answer.decode
        )
        said: Answer
        try:
            said = invoke(request, timeout=_ANSWER_SECONDS, metadata=self.metadata, wait_for_ready=True)
        except grpc.RpcError as failure:
            if failure.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            # A connection that has been idle learns of containerd's restart from its next call.
            said = invoke(request, timeout=_ANSWER_SECONDS, metadata=self.metadata, wait_for_ready=True)
        return said

    def take_lease(self, identity: str) -> Store:
        """The same store under a lease that ends by itself after an hour.

        containerd passes a caller's namespace on to a differ, and not the lease (its server copies the namespace alone
        into outgoing calls). Without any, the collector could take the blob before the caller made an image of it.
        """
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + LEASE_SECONDS))
        labels = {"containerd.io/gc.expire": expires, LEASE_LABEL: "upload"}
        request = messages.CreateLeaseRequest(id=identity, labels=messages.entries(labels))
        self.call(LEASES, "Create", request, messages.Empty)
        return Store(self._channel, self.namespace, identity)

    def end_lease(self) -> None:
        """End the lease that the store is used under."""
        Store(self._channel, self.namespace).call(
            LEASES, "Delete", messages.DeleteLeaseRequest(id=self.lease), messages.Empty
        )

    def upload(self, ref: str) -> Upload:
        """Begin to write a blob under a reference, or go on with it. Upload.opened() says what came of it."""
        return Upload(self._channel, ref, self.metadata)

    def abort(self, ref: str) -> None:
        """Remove what was written under a reference and not committed. Raises grpc.RpcError."""
        until = time.monotonic() + _LET_GO
        while True:
            try:
                self.call(CONTENT, "Abort", messages.AbortRequest(ref=ref), messages.Empty)
            except grpc.RpcError as failure:
                if failure.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() < until:
                    time.sleep(0.02)
                    continue
                if failure.code() != grpc.StatusCode.NOT_FOUND:
                    raise
            return

    def info(self, digest: str) -> messages.Info:
        found = self.call(CONTENT, "Info", messages.InfoRequest(digest=digest), messages.InfoResponse).info
        assert found is not None
        return found

    def set_label(self, digest: str, key: str, value: str) -> None:
        request = messages.UpdateRequest(
            info=messages.Info(digest=digest, labels=messages.entries({key: value})),
            update_mask=messages.FieldMask(paths=[f"labels.{key}"]),
        )
        self.call(CONTENT, "Update", request, messages.InfoResponse)

    def unfinished(self) -> Iterator[tuple[str, str]]:
        """(lease, reference) of every upload that a differ began in this namespace and did not commit."""
        request = messages.ListLeasesRequest(filters=[f'labels."{LEASE_LABEL}"'])
        for lease in self.call(LEASES, "List", request, messages.ListLeasesResponse).leases:
            listed = messages.ListResourcesRequest(id=lease.id)
            for resource in self.call(LEASES, "ListResources", listed, messages.ListResourcesResponse).resources:
                if resource.type == "ingests":
                    yield lease.id, resource.id

    def snapshots(self, snapshotter: str) -> Iterator[list[messages.Mount]]:
        """The mounts of every snapshot of this namespace that can be mounted."""
        invoke = self._channel.unary_stream(
            f"/{SNAPSHOTS}/List",
            request_serializer=Message.encode,
            response_deserializer=messages.ListSnapshotsResponse.decode,
        )
        request = messages.ListSnapshotsRequest(snapshotter=snapshotter, filters=["kind==active", "kind==view"])
        names = []
        for part in invoke(request, timeout=_ANSWER_SECONDS, metadata=self.metadata, wait_for_ready=True):
            names.extend([info.name for info in part.info])
        for name in names:
            asked = messages.MountsRequest(snapshotter=snapshotter, key=name)
            try:
                yield self.call(SNAPSHOTS, "Mounts", asked, messages.MountsResponse).mounts
            except grpc.RpcError as failure:
                if failure.code() != grpc.StatusCode.NOT_FOUND:  # removed meanwhile
                    raise


class Upload:
    """A blob under construction, by one Write call. Made by Store.upload; not shared by threads. `offset` is how many
    bytes it has, from opened() on."""

    def __init__(self, channel: grpc.Channel, ref: str, metadata: Metadata) -> None:
        self.offset = 0
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._unacknowledged = 0
        self._ref = ref
        call = channel.stream_stream(
            f"/{CONTENT}/Write",
            request_serializer=bytes,
            response_deserializer=messages.WriteContentResponse.decode,
        )
        self._call = call(iter(self._requests.get, None), metadata=metadata, wait_for_ready=True)
        # What this answers is that nobody else holds the reference, and that the upload exists and can be aborted.
        self._put(messages.WriteContentRequest(action=messages.STAT, ref=ref))

    def opened(self) -> str:
        """Wait until the reference is ours. Returns the digest of what is there already, which containerd reads and
        hashes first. Raises grpc.RpcError, UNAVAILABLE if somebody else is writing it."""
        said = self._answer()
        self.offset = said.offset
        return said.digest

    def write(self, data: memoryview) -> None:
        """Append at most some MiB. Raises grpc.RpcError, about this piece or the ones before."""
        head = messages.WriteContentRequest(action=messages.WRITE, ref=self._ref, offset=self.offset)
        self._put_bytes(b"".join((head.encode(), messages.data_field(len(data)), data)))
        self.offset += len(data)
        while self._unacknowledged > _UNACKNOWLEDGED:
            self._answer()

    def digest(self) -> str:
        """The digest of all that was written, which containerd computes while it receives. Raises grpc.RpcError."""
        self._put(messages.WriteContentRequest(action=messages.STAT, ref=self._ref))
        while self._unacknowledged > 1:
            self._answer()
        return self._answer().digest

    def commit(self, labels: dict[str, str]) -> None:
        """End the blob. Raises grpc.RpcError, ALREADY_EXISTS if the store has it."""
        self.settle()
        # The digest that is expected is not said: containerd would answer that the blob exists before it has put the
        # existing one under our lease.
        self._put(
            messages.WriteContentRequest(
                action=messages.COMMIT,
                ref=self._ref,
                total=self.offset,
                offset=self.offset,
                labels=messages.entries(labels),
            )
        )
        self._answer()
        self._requests.put(None)

    def settle(self) -> None:
        """Wait until containerd has written all that it was sent. Raises grpc.RpcError."""
        while self._unacknowledged:
            self._answer()

    def end(self) -> None:
        """End the call and wait until containerd has let go of the reference. What was written stays, and another call
        can go on with it. Raises grpc.RpcError."""
        self._requests.put(None)
        for _ in self._call:
            pass

    def _put(self, request: messages.WriteContentRequest) -> None:
        self._put_bytes(request.encode())

    def _put_bytes(self, request: bytes) -> None:
        self._requests.put(request)
        self._unacknowledged += 1

    def _answer(self) -> messages.WriteContentResponse:
        try:
            said: messages.WriteContentResponse = next(self._call)
        except BaseException:
            self._requests.put(None)  # lets go of the thread that waits for requests
            raise
        self._unacknowledged -= 1
        return said


def namespaces(channel: grpc.Channel) -> list[str]:
    """The namespaces that containerd knows."""
    request = messages.ListNamespacesRequest()
    found = Store(channel, "default").call(NAMESPACES, "List", request, messages.ListNamespacesResponse)
    return [namespace.name for namespace in found.namespaces]


def namespace_of(channel: grpc.Channel, mounts: list[messages.Mount], snapshotter: str = "overlayfs") -> str:
    """The namespace whose snapshot has these mounts, "" if none has.

    A snapshot's directory belongs to one namespace alone.
    """
    wanted = [mount.encode() for mount in mounts]
    for namespace in namespaces(channel):
        for found in Store(channel, namespace).snapshots(snapshotter):
            if [mount.encode() for mount in found] == wanted:
                return namespace
    return ""


def unique(prefix: str) -> str:
    """A name that nobody else has."""
    return f"{prefix}-{time.time_ns()}-{os.urandom(4).hex()}"
