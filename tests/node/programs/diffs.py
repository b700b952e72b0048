"""Runs in a node: snapshots without images, their diffs by either differ, and what comes of applying them.

One JSON object per line on stdin, {"do": NAME, ...}; the answer to each is one line on stdout.
"""

import ctypes
import json
import os
import shutil
import sys

sys.path.insert(0, "/usr/local/lib/fermata")

from differ import content, messages
from layerwriter import compare, record
from shim.wire import Message

LIBC = ctypes.CDLL(None, use_errno=True)
MS_BIND = 4096
CHANNEL = content.connect("/run/containerd/containerd.sock")
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
# Asked for with this option, every mount is as before, and fermata-differ does not know it.
UNKNOWN = "nodiratime"


# Not to be collected, though no container and no image names them.
KEPT = {"containerd.io/gc.root": "2026-01-01T00:00:00Z"}


class CommitRequest(Message):
    FIELDS = {1: ("snapshotter", str), 2: ("name", str), 3: ("key", str), 4: ("labels", [messages.Entry])}


class PrepareRequest(Message):
    FIELDS = {1: ("snapshotter", str), 2: ("key", str), 3: ("parent", str), 4: ("labels", [messages.Entry])}


class ApplyRequest(Message):
    FIELDS = {1: ("diff", messages.Descriptor), 2: ("mounts", [messages.Mount])}


class Statuses(Message):
    FIELDS = {1: ("statuses", [type("Status", (Message,), {"FIELDS": {3: ("ref", str)}})])}


def snapshots(method, request, answer=messages.MountsResponse, namespace="default"):
    return content.Store(CHANNEL, namespace).call(messages.SNAPSHOTS, method, request, answer)


def prepare(key, parent="", snapshotter="overlayfs", namespace="default", method="Prepare"):
    request = PrepareRequest(snapshotter=snapshotter, key=key, parent=parent, labels=messages.entries(KEPT))
    return snapshots(method, request, namespace=namespace).mounts


def remove(key, snapshotter="overlayfs", namespace="default"):
    snapshots("Remove", messages.MountsRequest(snapshotter=snapshotter, key=key), messages.Empty, namespace)


class Mounted:
    def __init__(self, mounts):
        (self.mount,) = mounts

    def __enter__(self):
        self.point = f"/run/mounted-{os.urandom(4).hex()}"
        os.mkdir(self.point)
        bind = self.mount.type == "bind"
        # By mount(2): mount(8) hands each option over by itself, and a list of twenty layers is too long for that.
        options = b"" if bind else ",".join(self.mount.options).encode()
        kind, flags = self.mount.type.encode(), MS_BIND if bind else 0
        if LIBC.mount(self.mount.source.encode(), self.point.encode(), kind, flags, options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.mount.source)
        return self.point

    def __exit__(self, *_):
        LIBC.umount2(self.point.encode(), 0)
        os.rmdir(self.point)


def layer(key, program, parent="", *, snapshotter="overlayfs", namespace="default", commit=None):
    """Prepare a snapshot, run a program in it, and commit it if it is to have a name."""
    with Mounted(prepare(key, parent, snapshotter, namespace)) as root:
        here = os.getcwd()
        os.chdir(root)
        try:
            exec(program, {"os": os, "shutil": shutil})
        finally:
            os.chdir(here)
    if commit:
        request = CommitRequest(snapshotter=snapshotter, name=commit, key=key, labels=messages.entries(KEPT))
        snapshots("Commit", request, messages.Empty, namespace)


def mounts(key, snapshotter="overlayfs", namespace="default"):
    request = messages.MountsRequest(snapshotter=snapshotter, key=key)
    return snapshots("Mounts", request, namespace=namespace).mounts


def diff(key, parent, *, walking=False, media_type=GZIP, ref="", labels=None, epoch=None, snapshotter="overlayfs"):
    left = prepare(f"{key}-left", parent, snapshotter, method="View")
    try:
        right = mounts(key, snapshotter)
        if walking:
            left[0].options.append(UNKNOWN)
        request = messages.DiffRequest(
            left=left, right=right, media_type=media_type, ref=ref, labels=messages.entries({**KEPT, **(labels or {})})
        )
        if epoch is not None:
            request.source_date_epoch = messages.Timestamp(seconds=epoch)
        found = content.Store(CHANNEL, "default").call(messages.DIFF, "Diff", request, messages.DiffResponse).diff
        return {"media_type": found.media_type, "digest": found.digest, "size": found.size}
    finally:
        remove(f"{key}-left", snapshotter)


def apply(key, parent, media_type, digest, size):
    """Have containerd apply a layer to a new snapshot over `parent`."""
    descriptor = messages.Descriptor(media_type=media_type, digest=digest, size=size)
    request = ApplyRequest(diff=descriptor, mounts=prepare(key, parent))
    content.Store(CHANNEL, "default").call(messages.DIFF, "Apply", request, messages.Empty)


def tree(key, seconds):
    """What a program would see in a snapshot. `seconds`: without what the walking differ drops."""
    with Mounted(mounts(key)) as root:
        # containerd's apply leaves out the root directory and `trusted.` attributes, whoever made the layer.
        items = [item for item in record(root) if item.path and item.kind != "socket"]
    for item in items:
        item.holes = False
        item.flags = 0
        item.xattrs = {name: value for name, value in item.xattrs.items() if not name.startswith(b"trusted.")}
        if seconds:
            item.mtime = 0 if item.kind == "directory" else item.mtime // 10**9
            item.xattrs = {name: value for name, value in item.xattrs.items() if name == b"security.capability"}
    return items


def upper(key, namespace="default"):
    options = mounts(key, namespace=namespace)[0].options
    return next(option[9:] for option in options if option.startswith("upperdir="))


def differences(one, other, seconds=False):
    return list(compare(tree(one, seconds), tree(other, seconds)))


def active():
    empty = messages.ListSnapshotsRequest()
    found = content.Store(CHANNEL, "default").call(messages.CONTENT, "ListStatuses", empty, Statuses)
    return [status.ref for status in found.statuses]


def labels(digest):
    return messages.mapping(content.Store(CHANNEL, "default").info(digest).labels)


DO = {
    "layer": layer,
    "diff": diff,
    "apply": apply,
    "differences": differences,
    "remove": remove,
    "upper": upper,
    "active": active,
    "labels": labels,
}

for line in sys.stdin:
    asked = json.loads(line)
    try:
        answer = {"is": DO[asked.pop("do")](**asked)}
    except content.grpc.RpcError as failure:
        answer = {"code": failure.code().name, "details": failure.details()}
    print(json.dumps(answer), flush=True)
