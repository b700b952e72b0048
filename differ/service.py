"""containerd.services.diff.v1.Diff: the layer of a writable snapshot, from its upper directory into the content store.

Whatever cannot be done exactly is answered UNIMPLEMENTED, for which containerd asks its next differ. What its content
store says is passed on as it is: the walking differ would meet the same.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from functools import partial

import grpc

from differ import content, ingest, messages
from differ.blob import Blob, Failed, Lost
from differ.mounts import Unsuited, upper
from layerwriter import LayerError, stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from layerwriter import Layer

    Say = Callable[[str], None]

UNCOMPRESSED = "containerd.io/uncompressed"
COMPRESSIONS = {
    "application/vnd.oci.image.layer.v1.tar": "none",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
}
DEFAULT_MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"

AT_ONCE = 8
"""Layers that are made at a time; further requests wait. Each takes some 20 MiB of memory, whatever its size."""


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class _Order:
    """What a request asks for, in our terms. Raises Unsuited."""

    def __init__(self, request: messages.DiffRequest) -> None:
        self.media_type = request.media_type or DEFAULT_MEDIA_TYPE
        compression = COMPRESSIONS.get(self.media_type)
        if compression is None:
            raise Unsuited(f"media type {self.media_type}")
        if request.unknown:
            raise Unsuited("the request has fields that are not known here")
        self.compression = compression
        self.upper = upper(request.left, request.right)
        self.ref = request.ref
        self.labels = messages.mapping(request.labels)
        epoch = request.source_date_epoch
        self.latest = None if epoch is None else epoch.seconds * 1_000_000_000 + epoch.nanos


class Differ:
    """The service. `say` takes one line for the log; `gzip_level` is 0 (store) to 9."""

    def __init__(self, channel: grpc.Channel, say: Say, gzip_level: int = 1) -> None:
        self._channel = channel
        self._say = say
        self._gzip_level = gzip_level
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._places = ingest.Places()
        self._hidden = ""
        self._live: set[str] = set()
        self._unclean = threading.Event()
        self._unclean.set()  # whoever was here before us may have been killed

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "Diff": grpc.unary_unary_rpc_method_handler(
                self.diff,
                request_deserializer=messages.DiffRequest.decode,
                response_serializer=messages.DiffResponse.encode,
            ),
            "Apply": grpc.unary_unary_rpc_method_handler(self.apply),
        }
        return grpc.method_handlers_generic_handler(messages.DIFF, methods)

    def apply(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Unpacking a layer is containerd's own. It asks here first, for every layer of every image."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "fermata-differ makes layers and applies none")
        raise AssertionError  # abort() raises

    def diff(self, request: messages.DiffRequest, context: grpc.ServicerContext) -> messages.DiffResponse:
        began = time.monotonic()
        metadata = dict(context.invocation_metadata())
        namespace = metadata.get("containerd-namespace", "")
        try:
            order = _Order(request)
            # Not every build of containerd 1.7 passes the caller's namespace on to its plugins. Debian's does not.
            namespace = namespace or content.namespace_of(self._channel, request.right)
            if not namespace:
                raise Unsuited("the caller's namespace is not known")
            store = content.Store(self._channel, namespace, metadata.get("containerd-lease", ""))
            with self._turns:
                made, way = self._make(order, store, context)
        except (Unsuited, LayerError, Lost) as reason:
            self._say(f"{namespace}: left to the next differ: {reason}")
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"fermata-differ: {reason}: not implemented")
        except grpc.RpcError as failure:
            self._say(f"{namespace}: containerd says {failure.code()}: {failure.details()}")
            context.abort(failure.code(), failure.details() or "containerd gave no reason")
        except Failed as failure:
            self._say(f"{namespace}: {failure}")
            context.abort(grpc.StatusCode.UNKNOWN, str(failure))  # what containerd makes of its own such errors
        except Cancelled:
            self._say(f"{namespace}: the caller gave up")
            context.abort(grpc.StatusCode.CANCELLED, "the caller gave up")
        except Exception as failure:
            # A mistake of ours must not keep anybody from an image: the walking differ has another go.
            self._say(f"{namespace}: left to the next differ, and this is a bug: {traceback.format_exc()}")
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"fermata-differ failed ({failure!r}): not implemented")
        took = time.monotonic() - began
        self._say(f"{namespace}: {order.upper.path}: {made.digest}, {made.size} bytes {way}, {took:.3f} s")
        return messages.DiffResponse(diff=made)

    def _make(
        self, order: _Order, store: content.Store, context: grpc.ServicerContext
    ) -> tuple[messages.Descriptor, str]:
        """The layer, and how it came into the store."""
        if store.lease:
            return self._write(order, store, context)
        lease = content.unique("fermata-differ")
        self._live.add(lease)
        try:
            leased = store.take_lease(lease)
            try:
                return self._write(order, leased, context)
            except BaseException:
                self._attempt("end a lease", leased.end_lease)
                raise
        finally:
            self._live.discard(lease)

    def _write(
        self, order: _Order, store: content.Store, context: grpc.ServicerContext
    ) -> tuple[messages.Descriptor, str]:
        blob = Blob(store, order.ref, self._places, self._say_hidden)
        gone = threading.Event()

        def give_up() -> None:
            gone.set()
            blob.cancel()

        try:
            if not context.add_callback(give_up):
                raise Cancelled
            blob.begin()
            layer: Layer = stream(
                order.upper.path,
                blob.write,
                compression=order.compression,
                gzip_level=self._gzip_level,
                xattr_prefix=order.upper.xattr_prefix,
                base=order.upper.base,
                latest=order.latest,
                hashed=False,
            )
            digest = blob.digest()
            size = self._commit(store, blob, digest, order.labels, layer.diff_id or digest)
        except BaseException as failure:
            for ref in blob.refs:
                self._attempt(f"remove what was written of {ref}", partial(blob.remove, ref))
            if gone.is_set():
                raise Cancelled from failure
            raise
        self._attempt(f"give {order.ref} back", blob.release)
        way = "by file" if blob.direct else "by gRPC"
        return messages.Descriptor(media_type=order.media_type, digest=digest, size=size), way

    def _say_hidden(self, reason: str) -> None:
        """Once for each reason, which does not change from one layer to the next."""
        if reason != self._hidden:
            self._hidden = reason
            self._say(f"containerd is sent large layers by gRPC, which takes longer: {reason}")

    def _commit(self, store: content.Store, blob: Blob, digest: str, labels: dict[str, str], diff_id: str) -> int:
        try:
            blob.commit({**labels, UNCOMPRESSED: diff_id})
        except grpc.RpcError as failure:
            if failure.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise
        known = store.info(digest)
        if not messages.mapping(known.labels).get(UNCOMPRESSED):
            store.set_label(digest, UNCOMPRESSED, diff_id)
        return known.size

    def keep_clear(self) -> None:
        """Remove, now and whenever it is needed, what was written and neither committed nor aborted. Does not return.

        A differ that was killed leaves such uploads, and so does a containerd that was.
        """
        while True:
            self._unclean.wait()
            self._unclean.clear()
            try:
                self._clear()
            except grpc.RpcError as failure:
                self._unclean.set()
                if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._say(f"could not look for unfinished uploads: {failure.code()}: {failure.details()}")
                    time.sleep(60)
                time.sleep(1)

    def _clear(self) -> None:
        for namespace in content.namespaces(self._channel):
            store = content.Store(self._channel, namespace)
            for lease, ref in list(store.unfinished()):
                if lease not in self._live:
                    self._say(f"{namespace}: removing the unfinished upload {ref}")
                    store.abort(ref)
                    content.Store(self._channel, namespace, lease).end_lease()

    def _attempt(self, what: str, do: Callable[[], None]) -> None:
        """Clean up after a failure, which is to be reported, whatever becomes of this."""
        try:
            do()
        except grpc.RpcError as failure:
            self._say(f"could not {what}, and will try again: {failure.code()}: {failure.details()}")
            self._unclean.set()


def to_stderr(line: str) -> None:
    """For systemd's journal, which puts the time in front."""
    print(line, file=sys.stderr, flush=True)
