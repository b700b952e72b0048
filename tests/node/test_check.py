"""Everything that can keep a snapshot from being restored, made to happen: each with its exact sentence.

One container is dumped once; each case then changes the snapshot, or the container that it is to be restored into.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from itertools import chain
from pathlib import Path

import pytest

from node.containers import OURS, remove, start, wait_for
from node.image import from_directory
from node.leftovers import clear, leftovers

IMAGE = "docker.io/library/fermata-test:latest"
TOP = "/srv/check"
NAMESPACE = "default"
AGAIN = "copy the snapshot again, whole"
WAIT = """
import mmap, time
weights = open("/models/weights", "rb")
mapped = mmap.mmap(weights.fileno(), 0, prot=mmap.PROT_READ)
weights.close()
open("/root/written", "w").write("x" * 1000)
open("/srv-up", "w").close()
time.sleep(1000)
"""


def bind(destination: str, source: str, options: str = "rbind:ro") -> list[str]:
    return ["--mount", f"type=bind,src={source},dst={destination},options={options}"]


MODELS = bind("/models", f"{TOP}/models")
MOTD = bind("/etc/motd", f"{TOP}/motd")
FUSE = ["--device", "/dev/fuse"]
FITS = [*MODELS, *MOTD, *FUSE]


@pytest.fixture(scope="module")
def source(running_node):
    """The snapshot of a container with mounts and a device, which is gone by then. The host's path of its parent."""
    node = running_node
    top = node.path(TOP)
    (top / "models").mkdir(parents=True)
    (top / "models/weights").write_bytes(b"w" * 5000)
    (top / "models/weights").chmod(0o644)
    (top / "motd").write_text("hello\n")
    options = ["--namespace", NAMESPACE, "run", "--detach", "--runtime", OURS, *FITS]
    node.ctr(*options[2:], IMAGE, "source", "python3", "-c", WAIT, namespace=NAMESPACE)
    rootfs = f"/run/containerd/io.containerd.runtime.v2.task/{NAMESPACE}/source/rootfs/srv-up"
    wait_for(lambda: node.path(rootfs).exists(), "the program")
    node.exec(["fermata", "checkpoint", "-n", NAMESPACE, "--exit", "source", f"{TOP}/snapshot"])
    wait_for(lambda: "STOPPED" in node.ctr("tasks", "list", namespace=NAMESPACE).stdout, "its end")
    node.ctr("tasks", "delete", "source", namespace=NAMESPACE, check=False)
    node.ctr("containers", "delete", "source", namespace=NAMESPACE)
    yield top
    shutil.rmtree(top)
    clear(node)
    assert leftovers(node) == []


@pytest.fixture
def node(running_node):
    """Most cases here make no container at all: what was left is looked for once, after all of them."""
    return running_node


@pytest.fixture
def snapshot(source):
    """A copy that a case may spoil."""
    copy = source / "copy"
    copy.mkdir(mode=0o700)
    for path in (source / "snapshot").iterdir():
        # Links, but for what a case writes to.
        (shutil.copy if path.name in ("fermata.json", "pages-1.img") else os.link)(path, copy / path.name)
    yield copy
    shutil.rmtree(copy, ignore_errors=True)


def change(snapshot: Path, **changes: object) -> dict:
    """Change the manifest's `requires`, or other keys of it by `_key`; the manifest as it was."""
    path = snapshot / "fermata.json"
    data = json.loads(path.read_text())
    was = json.loads(path.read_text())
    for key, value in changes.items():
        if key.startswith("_"):
            data[key[1:]] = value
        else:
            data["requires"][key] = value
    path.write_text(json.dumps(data))
    return was


def restore(node, options=FITS, image=IMAGE, directory=f"{TOP}/copy"):
    """The words of a restore into a container with these options; it is not started twice."""
    words = ["run", "--rm", "--runtime", OURS, "--annotation", f"fermata/restore-from={directory}", *options]
    return node.ctr(*words, image, "target", "true", namespace=NAMESPACE, check=False, timeout=30).stderr


def refused(said: str, *sentences: str, directory: str = f"{TOP}/copy") -> None:
    expected = f"snapshot {directory} cannot be restored here: {'; '.join(sentences)}"
    assert said.strip().removeprefix("ctr: failed to create shim task: ").partition(": unknown")[0] in (
        expected,
        f"{expected}: failed precondition",
    )


# The directory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        ("nothing", f"no snapshot at {TOP}/bad: the directory does not exist on this node"),
        ("file", f"no snapshot at {TOP}/bad: it is a file, a snapshot is a directory"),
        ("empty", f"no snapshot at {TOP}/bad: the directory is empty"),
        (
            "unfinished",
            f"no snapshot at {TOP}/bad: it has no fermata.json, so the take did not finish, or it is not fermata's; "
            "take it again",
        ),
        ("damaged", f"{TOP}/bad/fermata.json is damaged: Expecting property name enclosed in double quotes"),
        ("foreign", f"{TOP}/bad/fermata.json has no version: it is not fermata's"),
        (
            "newer",
            f"snapshot {TOP}/bad has format version 2.0, this fermata reads 1.x: restore it with the version that "
            "took it, or take it again",
        ),
    ],
)
def test_what_is_no_snapshot_is_said(node, source, make, sentence):
    bad = source / "bad"
    if make == "file":
        bad.touch()
    elif make != "nothing":
        bad.mkdir()
    if make == "unfinished":
        (bad / "inventory.img").touch()
    texts = {"damaged": "{", "foreign": "{}", "newer": '{"version": {"major": 2, "minor": 0}}'}
    if make in texts:
        (bad / "fermata.json").write_text(texts[make])
    try:
        assert sentence in restore(node, directory=f"{TOP}/bad")
    finally:
        bad.unlink() if make == "file" else shutil.rmtree(bad, ignore_errors=True)


def test_a_missing_image_file(node, snapshot):
    (snapshot / "core-1.img").unlink()
    refused(restore(node), f"core-1.img is not in the directory: {AGAIN}")


def test_memory_pages_that_were_cut_short(node, snapshot):
    size = (snapshot / "pages-1.img").stat().st_size
    os.truncate(snapshot / "pages-1.img", 4096)
    refused(restore(node), f"pages-1.img has 4096 bytes and was written with {size}: {AGAIN}")


def test_a_missing_layer(node, snapshot):
    (snapshot / "layer.tar").unlink()
    refused(restore(node), f"layer.tar is not in the directory: {AGAIN}")


def test_a_link_in_place_of_an_image_file(node, snapshot, source):
    (snapshot / "pages-1.img").unlink()
    (snapshot / "pages-1.img").symlink_to("../snapshot/pages-1.img")
    refused(restore(node), f"pages-1.img is no regular file: {AGAIN}")


# The node ---------------------------------------------------------------------------------------------------------


def test_another_architecture(node, snapshot):
    change(snapshot, architecture="aarch64")
    refused(restore(node), "it was taken on aarch64, this node is x86_64: restore it on a node of its kind")


def test_a_processor_that_lacks_instructions(node, snapshot):
    change(snapshot, cpu_features=["sse2", "avx1024", "amx_tile9"])
    refused(
        restore(node),
        "this node's processor lacks amx_tile9, avx1024, which its programs may use: restore it on a node whose "
        "processor has them, or take it on the oldest kind of node",
    )


def test_an_older_criu(node, snapshot):
    was = change(snapshot, criu="77.1")
    ours = was["requires"]["criu"]
    refused(
        restore(node), f"this node's CRIU {ours} is older than 77.1, which wrote the images: install CRIU 77.1 or newer"
    )


def test_another_version_of_control_groups(node, snapshot):
    here = change(snapshot)["requires"]["cgroup"]
    there = 3 - here
    change(snapshot, cgroup=there)
    refused(
        restore(node),
        f"it was taken under cgroup v{there}, this node has v{here}: boot this node with cgroup v{there} "
        f"(systemd.unified_cgroup_hierarchy={there - 1}), or restore it on a node that has it",
    )


def test_an_older_kernel_and_an_older_runc_are_warnings_in_the_log(node, snapshot):
    was = change(snapshot, kernel="77.1.0", runc="77.2.0", criu="77.3")["requires"]
    refused(
        restore(node),
        f"this node's CRIU {was['criu']} is older than 77.3, which wrote the images: install CRIU 77.3 or newer",
    )
    change(snapshot, criu=was["criu"], terminal=True)
    restore(node, [*FITS, "--annotation", "fermata/check=warn", "--memory-limit", "1"])
    log = node.log.read_text(errors="replace")
    assert (
        f"this node's kernel {platform.release()} is older than 77.1.0, under which it was taken: what only the "
        "newer one has cannot be restored; update the kernel if the restore fails"
    ) in log
    assert (
        f"this node's runc {was['runc']} is older than 77.2.0 of the source node: update it if the restore fails" in log
    )


def test_more_memory_than_the_node_has(node, snapshot):
    change(snapshot, memory=1 << 50)
    said = restore(node)
    assert "cannot be restored here: its memory is 1048576.0 GiB and this node has " in said
    assert "GiB available: free some" in said


def test_no_room_for_the_layer(node, snapshot):
    layer = change(snapshot)["layer"]
    change(snapshot, _layer={**layer, "size": 1 << 50})
    said = restore(node)
    assert "cannot be restored here: its layer has 1048576.0 GiB and the disk of /var/lib/containerd/" in said
    assert said.rstrip().removesuffix(": failed precondition").endswith(" free: make room there")


def test_no_inodes_for_the_layer(node, snapshot):
    layer = change(snapshot)["layer"]
    change(snapshot, _layer={**layer, "entries": 1 << 40})
    assert "cannot be restored here: its layer has 1099511627776 files and the disk of /var/lib/" in restore(node)


def test_gpu_state_on_a_node_without_a_driver(node, snapshot):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this node has a driver")
    gpus = [{"uuid": "GPU-1", "model": "NVIDIA H200"}]
    change(snapshot, _gpu={"driver": "580", "gpus": gpus, "processes": [{"pid": 1, "bytes": 1 << 30}]})
    refused(
        restore(node),
        "it was taken with 1 × NVIDIA H200, and this node has no NVIDIA driver: restore it on one that has",
    )


# The container ----------------------------------------------------------------------------------------------------


def test_a_missing_mount(node, snapshot):
    refused(
        restore(node, [*MOTD, *FUSE]),
        f"this container lacks the mount /models (bind, from {TOP}/models on the source node): add it to the "
        "container's mounts",
    )


def test_a_mount_of_another_type(node, snapshot):
    refused(
        restore(node, ["--mount", "type=tmpfs,src=tmpfs,dst=/models,options=rw", *MOTD, *FUSE]),
        f"the mount /models is tmpfs here and was bind, from {TOP}/models on the source node: make it the same",
    )


def test_a_directory_in_place_of_a_file(node, snapshot):
    refused(
        restore(node, [*MODELS, *bind("/etc/motd", f"{TOP}/models"), *FUSE]),
        f"the mount /etc/motd is a directory here ({TOP}/models) and was a file (bind, from {TOP}/motd on the source "
        "node): mount a file there",
    )


def test_a_mount_whose_source_is_not_there(node, snapshot):
    refused(
        restore(node, [*MODELS, *bind("/etc/motd", f"{TOP}/nothing"), *FUSE]),
        f"the source {TOP}/nothing of the mount /etc/motd does not exist on this node: make it, or mount another",
    )


def test_a_missing_device(node, snapshot):
    refused(
        restore(node, [*MODELS, *MOTD]),
        "this container lacks the device /dev/fuse (c 10:229): add it to the container's devices",
    )


def test_a_device_that_is_another_one(node, snapshot):
    change(snapshot, devices=[{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 1}])
    refused(
        restore(node),
        "the device /dev/fuse is c 10:229 here and was c 10:1: give the container the device that it had",
    )


def test_a_namespace_that_is_shared_with_the_node(node, snapshot):
    refused(
        restore(node, [*FITS, "--net-host"]),
        "this container shares the node's network namespace and the snapshot's had one of its own: give it one",
    )


def test_a_namespace_of_its_own_where_there_was_none(node, snapshot):
    change(snapshot, namespaces=["mount", "network", "pid", "uts"])
    refused(
        restore(node),
        "this container has a ipc namespace of its own and the snapshot's shared its node's: create the container "
        "without one",
    )


def test_a_terminal(node, snapshot):
    change(snapshot, terminal=True)
    refused(
        restore(node),
        "this container has no terminal and the snapshot's had a terminal: create it with a terminal",
    )


def test_a_memory_limit_below_its_memory(node, snapshot):
    change(snapshot, memory=3 << 30)
    refused(
        restore(node, [*FITS, "--memory-limit", str(1 << 30)]),
        "its memory is 3.0 GiB and this container's limit is 1.0 GiB: raise the limit above it",
    )


# Files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def other_models(source):
    """A directory to be mounted in place of the one that the snapshot was taken with."""
    path = source / "other"
    shutil.copytree(source / "models", path)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("difference", ["is missing", "has 4999 bytes and had 5000", "has mode 0600 and had 0644"])
def test_a_mapped_file_of_a_mount_that_is_not_as_it_was(node, snapshot, other_models, difference):
    if "missing" in difference:
        (other_models / "weights").unlink()
    elif "bytes" in difference:
        os.truncate(other_models / "weights", 4999)
    else:
        (other_models / "weights").chmod(0o600)
    refused(
        restore(node, [*bind("/models", f"{TOP}/other"), *MOTD, *FUSE]),
        f"/models/weights on the mount /models {difference}, and a process had it open or mapped: make {TOP}/other "
        "hold what it held on the source node",
    )


def test_another_image(node, snapshot, tmp_path):
    (tmp_path / "root/usr/bin").mkdir(parents=True)
    (tmp_path / "root/etc").mkdir()
    name = node.import_image(
        from_directory(tmp_path / "root", tmp_path / "other.tar", "other:latest"), namespace=NAMESPACE
    )
    files = [file for file in change(snapshot)["requires"]["files"] if file["mount"] == "/"]
    first = ", ".join(f"{file['path']} is missing" for file in files[:3])
    assert len(files) > 3
    refused(
        restore(node, image=name),
        f"the image is another one: {len(files)} of {len(files)} of its files that processes had open or mapped do "
        f"not fit ({first} and {len(files) - 3} more): create the container from {IMAGE}",
    )


# All at once, none, and by hand -------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_named_at_once(node, snapshot):
    change(snapshot, architecture="aarch64")
    refused(
        restore(node, []),
        "it was taken on aarch64, this node is x86_64: restore it on a node of its kind",
        f"this container lacks the mount /models (bind, from {TOP}/models on the source node): add it to the "
        "container's mounts",
        f"this container lacks the mount /etc/motd (bind, from {TOP}/motd on the source node): add it to the "
        "container's mounts",
        "this container lacks the device /dev/fuse (c 10:229): add it to the container's devices",
    )


def test_nothing_is_left_of_a_refused_restore(node, snapshot):
    restore(node, [])
    assert node.ctr("containers", "list", "-q", namespace=NAMESPACE).stdout == ""
    assert not node.path(f"/run/fermata/{NAMESPACE}/target").exists()


def test_those_who_know_better_turn_refusals_into_warnings(node, snapshot):
    change(snapshot, architecture="aarch64", cpu_features=["avx1024"], terminal=True)
    words = ["--annotation", f"fermata/restore-from={TOP}/copy", "--annotation", "fermata/check=warn", *FITS]
    node.ctr("run", "--detach", "--runtime", OURS, *words, IMAGE, "forced", "true", namespace=NAMESPACE)
    assert "RUNNING" in node.ctr("tasks", "list", namespace=NAMESPACE).stdout
    log = node.log.read_text(errors="replace")
    assert "it was taken on aarch64, this node is x86_64" in log
    clear(node)


def test_a_container_is_checked_by_hand_before_it_is_started(node, snapshot):
    node.ctr("containers", "create", "--runtime", OURS, *MODELS, *FUSE, IMAGE, "created", "true", namespace=NAMESPACE)
    words = ["fermata", "check", "-n", NAMESPACE, f"{TOP}/copy"]
    done = node.exec([*words, "--container", "created"], check=False)
    sentence = (
        f"this container lacks the mount /etc/motd (bind, from {TOP}/motd on the source node): add it to the "
        "container's mounts"
    )
    assert (done.returncode, done.stdout) == (1, f"problem: {sentence}\n")
    done = node.exec([*words, "--container", "created", "--json"], check=False)
    assert json.loads(done.stdout) == {
        "directory": f"{TOP}/copy",
        "restorable": False,
        "findings": [{"level": "problem", "text": sentence}],
    }
    done = node.exec(words, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        f"{TOP}/copy can be restored on this node. Its container was not checked.\n",
    )
    done = node.exec([*words, "--container", "nobody"], check=False)
    assert done.stderr == (
        f"fermata: no container nobody in containerd's namespace {NAMESPACE}: `ctr -n {NAMESPACE} containers ls` lists "
        "them, -n names another namespace\n"
    )
    clear(node)


def test_the_one_of_ten_mounts_that_is_missing_is_named_alone(node, source):
    folders = [f"{TOP}/ten/{at}" for at in range(10)]
    for folder in folders:
        node.path(folder).mkdir(parents=True)
    mounts = [bind(f"/mnt/{at}", folder) for at, folder in enumerate(folders)]
    start(node, "ten", options=[*chain.from_iterable(mounts)])
    node.exec(["fermata", "checkpoint", "ten", f"{TOP}/of-ten"])
    remove(node, "ten")

    def again(*options: str) -> str:
        words = ["--runtime", OURS, "--annotation", f"fermata/restore-from={TOP}/of-ten", *options]
        return node.ctr("run", "--detach", *words, IMAGE, "ten", "true", check=False).stderr

    refused(
        again(*chain.from_iterable(mounts[:6] + mounts[7:])),
        f"this container lacks the mount /mnt/6 (bind, from {TOP}/ten/6 on the source node): add it to the container's "
        "mounts",
        directory=f"{TOP}/of-ten",
    )
    node.ctr("containers", "delete", "ten", check=False)
    assert again(*chain.from_iterable(mounts)) == ""
    remove(node, "ten")
