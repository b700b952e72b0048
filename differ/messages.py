"""The messages of containerd's services that the differ speaks, as far as it needs them.

Field numbers: containerd's api/services/{diff,content,introspection,leases,namespaces,snapshots}/v1 and api/types.
"""

from __future__ import annotations

from shim.wire import LENGTH, Message, varint

DIFF = "containerd.services.diff.v1.Diff"
CONTENT = "containerd.services.content.v1.Content"
INTROSPECTION = "containerd.services.introspection.v1.Introspection"
LEASES = "containerd.services.leases.v1.Leases"
NAMESPACES = "containerd.services.namespaces.v1.Namespaces"
SNAPSHOTS = "containerd.services.snapshots.v1.Snapshots"

STAT, WRITE, COMMIT = 0, 1, 2
"""Actions of a WriteContentRequest."""


class Entry(Message):
    """One entry of a map from string to string."""

    key: str
    value: str
    FIELDS = {1: ("key", str), 2: ("value", str)}


def entries(values: dict[str, str]) -> list[Entry]:
    return [Entry(key=key, value=value) for key, value in values.items()]


def mapping(entries: list[Entry]) -> dict[str, str]:
    return {entry.key: entry.value for entry in entries}


class Empty(Message):
    FIELDS = {}


class Timestamp(Message):
    """Seconds since 1970, and nanoseconds in addition."""

    seconds: int
    nanos: int
    FIELDS = {1: ("seconds", int), 2: ("nanos", int)}


class Mount(Message):
    type: str
    source: str
    target: str
    options: list[str]
    FIELDS = {1: ("type", str), 2: ("source", str), 3: ("target", str), 4: ("options", [str])}


class Descriptor(Message):
    media_type: str
    digest: str
    size: int
    FIELDS = {1: ("media_type", str), 2: ("digest", str), 3: ("size", int)}


class DiffRequest(Message):
    left: list[Mount]
    right: list[Mount]
    media_type: str
    ref: str
    labels: list[Entry]
    source_date_epoch: Timestamp | None
    FIELDS = {
        1: ("left", [Mount]),
        2: ("right", [Mount]),
        3: ("media_type", str),
        4: ("ref", str),
        5: ("labels", [Entry]),
        6: ("source_date_epoch", Timestamp),
    }


class DiffResponse(Message):
    diff: Descriptor | None
    FIELDS = {3: ("diff", Descriptor)}


class WriteContentRequest(Message):
    """`offset` 0 of a write empties what a former writer left under the same reference."""

    action: int
    ref: str
    total: int
    expected: str
    offset: int
    data: bytes
    labels: list[Entry]
    FIELDS = {
        1: ("action", int),
        2: ("ref", str),
        3: ("total", int),
        4: ("expected", str),
        5: ("offset", int),
        6: ("data", bytes),
        7: ("labels", [Entry]),
    }


class WriteContentResponse(Message):
    action: int
    offset: int
    total: int
    digest: str
    FIELDS = {1: ("action", int), 4: ("offset", int), 5: ("total", int), 6: ("digest", str)}


class AbortRequest(Message):
    ref: str
    FIELDS = {1: ("ref", str)}


class Info(Message):
    digest: str
    size: int
    labels: list[Entry]
    FIELDS = {1: ("digest", str), 2: ("size", int), 5: ("labels", [Entry])}


class InfoRequest(Message):
    digest: str
    FIELDS = {1: ("digest", str)}


class InfoResponse(Message):
    info: Info | None
    FIELDS = {1: ("info", Info)}


class FieldMask(Message):
    paths: list[str]
    FIELDS = {1: ("paths", [str])}


class UpdateRequest(Message):
    info: Info | None
    update_mask: FieldMask | None
    FIELDS = {1: ("info", Info), 2: ("update_mask", FieldMask)}


class Lease(Message):
    id: str
    labels: list[Entry]
    FIELDS = {1: ("id", str), 3: ("labels", [Entry])}


class CreateLeaseRequest(Message):
    id: str
    labels: list[Entry]
    FIELDS = {1: ("id", str), 3: ("labels", [Entry])}


class DeleteLeaseRequest(Message):
    id: str
    FIELDS = {1: ("id", str)}


class ListLeasesRequest(Message):
    filters: list[str]
    FIELDS = {1: ("filters", [str])}


class ListLeasesResponse(Message):
    leases: list[Lease]
    FIELDS = {1: ("leases", [Lease])}


class Resource(Message):
    """`type` is "content", "ingests" or "snapshots/NAME"."""

    id: str
    type: str
    FIELDS = {1: ("id", str), 2: ("type", str)}


class ListResourcesRequest(Message):
    id: str
    FIELDS = {1: ("id", str)}


class ListResourcesResponse(Message):
    resources: list[Resource]
    FIELDS = {1: ("resources", [Resource])}


class Namespace(Message):
    name: str
    FIELDS = {1: ("name", str)}


class ListNamespacesRequest(Message):
    FIELDS = {}


class ListNamespacesResponse(Message):
    namespaces: list[Namespace]
    FIELDS = {1: ("namespaces", [Namespace])}


class SnapshotInfo(Message):
    name: str
    FIELDS = {1: ("name", str)}


class ListSnapshotsRequest(Message):
    snapshotter: str
    filters: list[str]
    FIELDS = {1: ("snapshotter", str), 2: ("filters", [str])}


class ListSnapshotsResponse(Message):
    info: list[SnapshotInfo]
    FIELDS = {1: ("info", [SnapshotInfo])}


class MountsRequest(Message):
    snapshotter: str
    key: str
    FIELDS = {1: ("snapshotter", str), 2: ("key", str)}


class MountsResponse(Message):
    mounts: list[Mount]
    FIELDS = {1: ("mounts", [Mount])}


class Plugin(Message):
    type: str
    id: str
    exports: list[Entry]
    FIELDS = {1: ("type", str), 2: ("id", str), 5: ("exports", [Entry])}


class PluginsRequest(Message):
    filters: list[str]
    FIELDS = {1: ("filters", [str])}


class PluginsResponse(Message):
    plugins: list[Plugin]
    FIELDS = {1: ("plugins", [Plugin])}


def data_field(size: int) -> bytes:
    """What stands in front of `size` bytes of a WriteContentRequest's data: a piece is joined to it without a copy."""
    return varint(6 << 3 | LENGTH) + varint(size)
