"""nerdctl's `checkpoint create`, `start --checkpoint` and `commit`: the calls that it makes, in its order.

nerdctl is not in Debian; what it calls is public (pkg/cmd/checkpoint, pkg/taskutil and pkg/imgutil/commit, and
containerd's client/task.go below them). Two things of it matter to a shim: it knows no options but those of the runtime
`io.containerd.runc.v2`, and `start --checkpoint` restores into the same container, whose files are all there.
"""

from __future__ import annotations

import io
import json
import tarfile
import time

import pytest

from differ import content, messages
from node.containers import IMAGE, OURS, STOCK, pid, remove, status, wait_for
from node.node import SOCKET
from node.shims import OUR_NAME
from shim import containerd, task
from shim.ttrpc import AnyMessage
from shim.wire import Message

OURS_FIRST = "/usr/local/sbin/containerd-shim-runc-v2"
CHECKPOINT = "application/vnd.containerd.container.criu.checkpoint.criu.tar"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
WORK = """
import mmap, os, time
file = open("/mapped", "w+b")
file.truncate(4096)
held = mmap.mmap(file.fileno(), 4096)
os.unlink("/etc/issue")
n = 0
while True:
    n += 1
    held[:8] = n.to_bytes(8, "little")
    time.sleep(0.01)
"""


class CheckpointResponse(Message):
    FIELDS = {1: ("descriptors", [containerd.Descriptor])}


class CreateTask(Message):
    FIELDS = {1: ("id", str), 3: ("rootfs", [task.Mount]), 8: ("checkpoint", containerd.Descriptor)}


class ViewRequest(Message):
    FIELDS = {1: ("snapshotter", str), 2: ("key", str), 3: ("parent", str)}


class SnapshotInfo(Message):
    FIELDS = {1: ("name", str), 2: ("parent", str)}


class Stat(Message):
    FIELDS = {1: ("info", SnapshotInfo)}


class NewImage(Message):
    FIELDS = {1: ("name", str), 2: ("labels", [containerd.Label]), 3: ("target", containerd.Descriptor)}


class CreateImage(Message):
    FIELDS = {1: ("image", NewImage)}


class Nerdctl:
    """What the program does, for one container."""

    def __init__(self, node, container, runtime):
        self.container, self.runtime = container, runtime
        self.client = containerd.Client(str(node.path(SOCKET)), "default")
        self.channel = content.connect(str(node.path(SOCKET)))

    def call(self, service, method, request, answer=Message):
        return self.client.call(service, method, request, answer)

    def upload(self, ref, data, labels):
        upload = content.Upload(self.channel, ref, self.client._metadata())
        for at in range(0, len(data), 1 << 20):
            upload.write(memoryview(data)[at : at + (1 << 20)])
        try:
            digest = upload.digest()
            upload.commit(labels)
            return digest
        finally:
            upload.end()

    def lease(self):
        self.client.lease = f"nerdctl-{time.time_ns()}"
        self.call("Leases", "Create", containerd.LeaseRequest(id=self.client.lease))

    def release(self):
        self.call("Leases", "Delete", containerd.ById(name=self.client.lease))
        self.client.lease = ""

    def checkpoint_create(self, directory, *, leave_running):
        """`nerdctl checkpoint create --checkpoint-dir`: a directory with what was in the checkpoint's tar."""
        self.lease()
        found = self.client.container(self.container)
        options = None
        if self.runtime == STOCK:
            given = task.CheckpointOptions(exit=not leave_running)
            options = AnyMessage(type_url=task.CHECKPOINT_OPTIONS, value=given.encode())
        self.call("Tasks", "Pause", containerd.ById(name=self.container))
        try:
            request = containerd.CheckpointTaskRequest(container_id=self.container, options=options)
            described = self.call("Tasks", "Checkpoint", request, CheckpointResponse).descriptors
            self.diff(found)
            manifests = [{"mediaType": each.media_type, "digest": each.digest, "size": each.size} for each in described]
            index = json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()
            labels = {f"containerd.io/gc.ref.content.{at}": each.digest for at, each in enumerate(described)}
            target = containerd.Descriptor(
                media_type=INDEX, digest=self.upload("index", index, labels), size=len(index)
            )
            image = NewImage(name=f"containerd.io/checkpoint/{self.container}", target=target)
            self.call("Images", "Create", CreateImage(image=image))
        finally:
            try:
                self.call("Tasks", "Resume", containerd.ById(name=self.container))
            except containerd.ShimError:
                assert not leave_running  # it has ended
        self.release()
        packed = next(each.digest for each in described if each.media_type == CHECKPOINT)
        with tarfile.open(fileobj=io.BytesIO(self.blob(packed))) as tar:
            tar.extractall(directory, filter="fully_trusted")
        self.call("Images", "Delete", containerd.ById(name=image.name))

    def blob(self, digest):
        path = "/containerd.services.content.v1.Content/Read"
        pieces = self.channel.unary_stream(path)(
            containerd.ById(name=digest).encode(), metadata=self.client._metadata()
        )
        return b"".join(containerd.ReadContentResponse.decode(piece).data for piece in pieces)

    def diff(self, found):
        """The writable layer, as containerd's client makes it for a checkpoint and nerdctl for a commit."""
        about = containerd.SnapshotRequest(snapshotter=found.snapshotter, key=found.snapshot_key)
        stat = messages.MountsRequest(snapshotter=found.snapshotter, key=found.snapshot_key)
        parent = self.call("Snapshots", "Stat", stat, Stat).info.parent
        view = ViewRequest(snapshotter=found.snapshotter, key=f"{found.id}-view", parent=parent)
        left = self.call("Snapshots", "View", view, messages.MountsResponse).mounts
        try:
            right = self.call("Snapshots", "Mounts", about, messages.MountsResponse).mounts
            request = messages.DiffRequest(left=left, right=right, media_type=LAYER, ref=f"diff-{time.time_ns()}")
            return self.call("Diff", "Diff", request, messages.DiffResponse).diff
        finally:
            self.call("Snapshots", "Remove", messages.MountsRequest(snapshotter=found.snapshotter, key=view.key))

    def commit(self):
        """`nerdctl commit`, as far as a runtime sees it; the new layer's names."""
        self.lease()
        found = self.client.container(self.container)
        self.call("Tasks", "Pause", containerd.ById(name=self.container))
        try:
            layer = self.blob(self.diff(found).digest)
        finally:
            self.call("Tasks", "Resume", containerd.ById(name=self.container))
        self.release()
        with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
            return set(tar.getnames())

    def start(self, directory):
        """`nerdctl start --checkpoint`: the old task goes, and a new one is made from the directory."""
        try:
            self.call("Tasks", "Delete", containerd.ById(name=self.container))
        except containerd.ShimError:
            pass  # it had none
        found = self.client.container(self.container)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for file in sorted(directory.iterdir()):
                tar.add(file, file.name)
        digest = self.upload(str(directory), packed.getvalue(), {"containerd.io/gc.root": "2026-01-01T00:00:00Z"})
        checkpoint = containerd.Descriptor(media_type=CHECKPOINT, digest=digest, size=len(packed.getvalue()))
        request = CreateTask(id=self.container, rootfs=self.client.mounts(found), checkpoint=checkpoint)
        try:
            self.call("Tasks", "Create", request)
        finally:
            self.call("Content", "Delete", containerd.ById(name=digest))
        self.call("Tasks", "Start", containerd.ById(name=self.container))


@pytest.fixture(params=[OURS, STOCK])
def nerdctl(node, request):
    """A container that works, under our own name or with our shim found by the stock runtime's."""
    if request.param == STOCK:
        node.path(OURS_FIRST).symlink_to(f"/usr/local/bin/{OUR_NAME}")
        node.restart_containerd()  # it remembers where it found a shim
    try:
        node.ctr("run", "-d", "--runtime", request.param, IMAGE, "one", "python3", "-c", WORK)
        wait_for(lambda: count(node) > 3, "the program")
        yield Nerdctl(node, "one", request.param)
        remove(node, "one")
    finally:
        if request.param == STOCK:
            node.path(OURS_FIRST).unlink()
            node.restart_containerd()


def count(node):
    root = node.path("/") / f"proc/{pid(node, 'one')}/root"
    mapped = root / "mapped"
    return int.from_bytes(mapped.read_bytes()[:8], "little") if mapped.exists() else 0


def test_a_checkpoint_of_nerdctls_starts_again_in_its_container_and_is_committed(node, nerdctl, tmp_path):
    nerdctl.checkpoint_create(tmp_path, leave_running=True)
    taken = count(node)
    assert status(node, "one") == "RUNNING"
    wait_for(lambda: count(node) > taken + 20, "the container to go on")
    assert (tmp_path / "fermata.json").exists()
    node.ctr("tasks", "kill", "-s", "SIGKILL", "one")
    wait_for(lambda: status(node, "one") == "STOPPED", "its end")
    nerdctl.start(tmp_path)
    # Not only the memory is that of the checkpoint: the file that it maps was written on since.
    assert count(node) < taken + 20
    wait_for(lambda: count(node) > taken, "the restored program")
    names = nerdctl.commit()
    assert {"mapped", "etc/.wh.issue"} <= {name.removeprefix("./") for name in names}
    before = count(node)
    wait_for(lambda: count(node) > before, "the program to go on")


def test_a_checkpoint_may_end_the_container_under_the_stock_runtimes_name(node, nerdctl, tmp_path):
    nerdctl.checkpoint_create(tmp_path, leave_running=False)
    if nerdctl.runtime == OURS:
        assert status(node, "one") == "RUNNING"  # nerdctl says only to the runtime that it knows that it shall end
        return
    wait_for(lambda: status(node, "one") == "STOPPED", "its end")
    nerdctl.start(tmp_path)
    before = count(node)
    wait_for(lambda: count(node) > before, "the restored program")
