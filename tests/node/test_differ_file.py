"""Large layers, which fermata-differ writes into the file that containerd keeps an unfinished upload in.

A node of its own for each stack: here containerd and the differ are killed, and the disk fills up.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import threading
from contextlib import contextmanager

import pytest

from node import Node
from node.containers import wait_for
from tests.node.diffs import Diffs, Failed

TAR = "application/vnd.oci.image.layer.v1.tar"
CONTENT = "/var/lib/containerd/io.containerd.content.v1.content"
BLOB = "/usr/local/lib/fermata/differ/blob.py"
PROGRAM = "/usr/local/bin/fermata-differ"

# Text that gets smaller, noise that does not, and enough small files that pieces of all lengths are written.
LARGE = """
import random
words = [os.urandom(3).hex() for _ in range(500)]
block = " ".join(random.choices(words, k=150_000)).encode()
with open("text", "wb") as file:
    for _ in range(12): file.write(block)
for number in range(300):
    open(f"file{number}", "wb").write(os.urandom(number * 50))
with open("noise", "wb") as file:
    for _ in range(MIB): file.write(os.urandom(1 << 20))
"""


@pytest.fixture(scope="module")
def differ_node(request, stack_name):
    with Node.up(stack_name=stack_name, differ=True) as node:
        yield node
        if request.session.testsfailed:
            print(log(node)[-4000:])


@pytest.fixture(scope="module")
def talking(differ_node):
    program = Diffs(differ_node)
    program.layer("making", "open('below', 'w').write('x')", commit="base")
    program.layer("large", LARGE.replace("MIB", "24"), "base")
    program.layer("larger", LARGE.replace("MIB", "60"), "base")
    program.layer("small", "open('small', 'wb').write(os.urandom(3 << 20))", "base")
    yield program
    program.end()


@pytest.fixture
def node(differ_node):
    yield differ_node
    differ_node.start_containerd()


@pytest.fixture
def diffs(node, talking):
    held = leases(node)
    yield talking
    wait_for(lambda: nothing_left(node, talking), "the end of all uploads")
    for lease in leases(node) - held:
        node.ctr("leases", "delete", "--sync", lease)


def log(node):
    return (node.logs / "differ.log").read_text()


def leases(node):
    return {line.split()[0] for line in node.ctr("leases", "list").stdout.splitlines() if "fermata/differ" in line}


def nothing_left(node, diffs):
    return not diffs.active() and not any(node.path(f"{CONTENT}/ingest").glob("*"))


def blob(node, made):
    """A blob's bytes, which are what its digest says."""
    data = node.path(f"{CONTENT}/blobs/sha256/{made['digest'].removeprefix('sha256:')}").read_bytes()
    assert hashlib.sha256(data).hexdigest() == made["digest"].removeprefix("sha256:")
    assert len(data) == made["size"]
    return data


def remove(node, made):
    """Let the next diff write its blob again."""
    node.ctr("content", "delete", made["digest"])


def start_again(node):
    node.stop_differ()
    node.start_differ()


def write_module(file, text):
    file.write_text(text)
    # One of the same length that was compiled in the same second would be taken for this one's.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


@contextmanager
def changed(node, *changes):
    """A differ whose library is another in some places."""
    file = node.path(BLOB)
    whole = text = file.read_text()
    for line, other in changes:
        assert text.count(line) == 1, line
        text = text.replace(line, other)
    write_module(file, text)
    start_again(node)
    try:
        yield
    finally:
        write_module(file, whole)
        if node.differ_pid() is not None:
            node.stop_differ()
        node.start_differ()


@contextmanager
def behind(node, mounting):
    """A differ with a mount namespace of its own, in which something is mounted first."""
    real, place = node.path(f"{PROGRAM}.real"), node.path(PROGRAM)
    place.rename(real)
    place.write_text(f'#!/bin/sh\nexec unshare --mount sh -ec \'{mounting}\nexec {PROGRAM}.real "$@"\' sh "$@"\n')
    place.chmod(0o755)
    try:
        start_again(node)
        yield
    finally:
        real.rename(place)
        start_again(node)


@pytest.mark.parametrize("kind", ["", "+gzip"])
def test_a_large_layer_is_written_to_containerds_file_and_is_the_same_as_by_grpc(node, diffs, kind):
    before = len(log(node))
    by_file = diffs.diff("large", "base", media_type=TAR + kind, labels={"of": "mine"})
    assert re.findall(r"bytes (by \w+)", log(node)[before:]) == ["by file"]
    data = blob(node, by_file)
    found = diffs.labels(by_file["digest"])
    remove(node, by_file)
    before = len(log(node))
    with changed(node, ("_LARGE = 8 << 20", "_LARGE = 8 << 40")):
        by_grpc = diffs.diff("large", "base", media_type=TAR + kind, labels={"of": "mine"})
    assert re.findall(r"bytes (by \w+)", log(node)[before:]) == ["by gRPC"]
    assert by_grpc == by_file
    assert blob(node, by_grpc) == data
    assert diffs.labels(by_grpc["digest"]) == found
    assert found["containerd.io/uncompressed"] == diffs.diff("large", "base", media_type=TAR)["digest"]
    diffs.apply(f"applied{kind.strip('+')}", "base", **by_grpc)
    assert diffs.differences(f"applied{kind.strip('+')}", "large", seconds=True) == []


def test_a_small_layer_goes_by_grpc(node, diffs):
    before = len(log(node))
    diffs.diff("small", "base")
    assert "bytes by gRPC" in log(node)[before:]
    assert "takes longer" not in log(node)[before:]


@pytest.mark.parametrize(
    ("mounting", "reason"),
    [
        (f"mount -t tmpfs none {CONTENT}", "ingest: No such file or directory"),
        (f"mount -t tmpfs none {CONTENT}/ingest", "the upload.s directory: No such file or directory"),
        (f"mount --bind {CONTENT} {CONTENT}; mount -o remount,bind,ro {CONTENT}", "data: Read-only file system"),
        ("mount -t tmpfs none /var/lib", "No such file or directory"),
    ],
    ids=["another-content", "another-ingest", "read-only", "nothing"],
)
def test_where_the_file_cannot_be_written_layers_go_by_grpc_and_the_reason_is_said_once(node, diffs, mounting, reason):
    made = diffs.diff("large", "base")
    if "/var/lib;" in f"{mounting};":
        # The snapshots are there all the same.
        snapshots = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"
        mounting = f"mkdir /run/kept; mount --bind {snapshots} /run/kept; {mounting}; mkdir -p {snapshots}; "
        mounting += f"mount --move /run/kept {snapshots} || mount --bind /run/kept {snapshots}; rmdir /run/kept || true"
    with behind(node, mounting):
        before = len(log(node))
        for _ in range(2):
            remove(node, made)
            assert diffs.diff("large", "base") == made
    said = log(node)[before:]
    assert said.count("bytes by gRPC") == 2
    assert len(re.findall(f"takes longer: .*{reason}", said)) == 1


def test_what_is_too_large_for_the_file_goes_on_by_grpc(node, diffs):
    made = diffs.diff("large", "base")
    remove(node, made)
    with changed(node, ("_MOST = 8 << 30", "_MOST = 13 << 20"), ("self._call.write(data)", MARKED)):
        before = len(log(node))
        assert diffs.diff("large", "base") == made
    said = [int(size) for size in re.findall(r"by call at (\d+)", log(node)[before:])]
    assert said[0] == 0
    assert said[-1] > 20 << 20
    assert all(not 9 << 20 < size < 13 << 20 for size in said), "between these it was the file"


MARKED = "self._call.write(data); self._say(f'by call at {self._size}')"
POINTS = {
    "the-call-has-ended": ("            ingest.check(fd, self._size)\n", "            {do}\n{line}"),
    "half-is-written": ("        written = 0\n", "        if self._size > 12 << 20: {do}\n{line}"),
    "all-is-written": ("        self._ask()\n        try:", "        {do}\n{line}"),
    "before-the-sync": ("            os.fsync(self._fd)\n", "            {do}\n{line}"),
    "before-the-hash-is-known": ("        return self._opened()\n", "        {do}\n{line}"),
    "before-the-commit": ("        self._call.commit(labels)\n", "        {do}\n{line}"),
}


def at(point, do):
    line, form = POINTS[point]
    return line, form.format(do=do, line=line)


def fails(client):
    error = client.communicate(timeout=60)[1].decode()
    assert client.returncode == 1
    assert error.startswith("ctr: ")


def ctr_diff(node, *arguments):
    return node.popen(["ctr", "snapshots", "diff", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.parametrize("point", POINTS)
def test_a_differ_killed_on_the_way_leaves_nothing(node, diffs, point):
    made = diffs.diff("large", "base")
    remove(node, made)
    held = leases(node)
    with changed(node, at(point, "os.kill(os.getpid(), 9)")):
        fails(ctr_diff(node, "--ref", "mine", "large"))
        assert len(list(node.path(f"{CONTENT}/ingest").iterdir())) == 2, "its own upload and the caller's reference"
    wait_for(lambda: nothing_left(node, diffs), "the next differ to have cleared up")
    wait_for(lambda: leases(node) == held, "the end of its lease")
    assert diffs.diff("large", "base", ref="mine") == made


@pytest.mark.parametrize("point", POINTS)
def test_a_containerd_killed_on_the_way_gets_nothing_left(node, diffs, point):
    made = diffs.diff("large", "base")
    remove(node, made)
    held = leases(node)
    reached = node.path("/run/node/reached")
    with changed(node, at(point, "open('/run/node/reached', 'w').close(), __import__('time').sleep(2)")):
        client = ctr_diff(node, "large")
        wait_for(reached.exists, "the differ to be there")
        node.stop_containerd(kill=True)
        reached.unlink()
        fails(client)
        node.start_containerd()
        wait_for(lambda: nothing_left(node, diffs), "the upload to be gone", timeout=60)
        wait_for(lambda: leases(node) == held, "the end of its lease")
    assert wait_for(lambda: _unless_failed(lambda: diffs.diff("large", "base")), "the differ") == made


def _unless_failed(do):
    try:
        return do()
    except Failed:
        return None


def test_a_client_that_goes_gets_nothing_left(node, diffs):
    held = leases(node)
    with changed(node, at("half-is-written", "__import__('time').sleep(0.2)")):
        client = ctr_diff(node, "larger")
        ingest = node.path(f"{CONTENT}/ingest")
        wait_for(lambda: any(path.stat().st_size > 13 << 20 for path in ingest.glob("*/data")), "a file that grows")
        client.kill()
        client.communicate()
        wait_for(lambda: nothing_left(node, diffs), "the upload to be gone")
        wait_for(lambda: leases(node) == held, "the end of its lease")


def full(node, size, diffs):
    """What a client is told when the disk is full after so many bytes."""
    diffs.diff("small", "base")  # containerd makes the directory when it first needs it
    node.exec(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", f"{CONTENT}/ingest"])
    try:
        held = leases(node)
        told = []
        for _ in range(2):  # the second time, if the first one left nothing
            with pytest.raises(Failed, match="no space left on device") as failed:
                diffs.diff("large", "base", media_type=TAR)
            told.append(re.sub(r"[0-9a-f]{64}", "KEY", str(failed.value)))
            assert nothing_left(node, diffs)
            assert leases(node) == held
        return set(told)
    finally:
        node.exec(["umount", f"{CONTENT}/ingest"])


def test_a_disk_that_is_full_when_the_file_is_written_is_told_as_containerd_does(node, diffs):
    before = len(log(node))
    told = full(node, "20m", diffs)
    assert "data: no space left" in log(node)[before:].lower()
    with changed(node, ("_LARGE = 8 << 20", "_LARGE = 8 << 40")):
        assert full(node, "20m", diffs) == told


def test_a_disk_that_fails_at_the_sync_is_an_error_and_leaves_nothing(node, diffs):
    remove(node, diffs.diff("large", "base"))
    held = leases(node)
    with changed(node, at("before-the-sync", "raise OSError(5, 'Input/output error')")):
        with pytest.raises(Failed, match=r"UNKNOWN: sync of fermata-differ-.*: input/output error"):
            diffs.diff("large", "base")
        assert nothing_left(node, diffs)
        assert leases(node) == held


def test_an_upload_that_somebody_removed_is_left_to_the_walking_differ(node, diffs):
    remove(node, diffs.diff("large", "base"))
    before = len(log(node))
    with changed(node, at("all-is-written", "self._store.abort(self._ref)")):
        made = diffs.diff("large", "base")
        assert blob(node, made)
    assert "left to the next differ: " in log(node)[before:]
    assert "this is a bug" not in log(node)[before:]


def test_the_callers_reference_is_held_while_the_file_is_written_and_nothing_is_left_under_it(node, diffs):
    with changed(node, at("before-the-sync", "__import__('time').sleep(3)")):
        first = Diffs(node)
        made = []
        writing = threading.Thread(target=lambda: made.append(first.diff("large", "base", ref="mine")))
        writing.start()
        try:
            wait_for(lambda: len(diffs.active()) == 2, "both references")
            assert "mine" in diffs.active()
            for walking in (False, True):
                with pytest.raises(Failed, match=r"UNAVAILABLE: .*locked"):
                    diffs.diff("small", "base", ref="mine", walking=walking)
        finally:
            writing.join()
            first.end()
    assert nothing_left(node, diffs)
    assert blob(node, made[0])
    assert diffs.diff("small", "base", ref="mine") == diffs.diff("small", "base")


def test_one_container_twice_at_once_is_one_blob(node, diffs):
    made = diffs.diff("larger", "base")
    remove(node, made)
    before = len(log(node))
    clients = [ctr_diff(node, "larger") for _ in range(4)]
    for client in clients:
        assert client.communicate(timeout=60)[1] == b""
        assert client.returncode == 0
    said = log(node)[before:]
    assert said.count("bytes by file") == said.count(made["digest"]) == 4
    assert nothing_left(node, diffs)
    assert blob(node, made)


def test_a_containerd_with_another_root_is_asked_for_it_again(node, diffs):
    diffs.diff("large", "base")
    file = node.path("/etc/containerd/config.toml")
    whole = file.read_text()
    file.write_text(whole.replace('root = "/var/lib/containerd"', 'root = "/srv/other"'))
    try:
        node.restart_containerd()
        other = Diffs(node)
        other.layer("making", "open('below', 'w').write('x')", commit="base")
        other.layer("large", LARGE.replace("MIB", "24"), "base")
        before = len(log(node))
        assert wait_for(lambda: _unless_failed(lambda: other.diff("large", "base")), "the differ")
        assert "bytes by file" in log(node)[before:]
        other.end()
    finally:
        file.write_text(whole)
        node.restart_containerd()
    before = len(log(node))
    assert wait_for(lambda: _unless_failed(lambda: diffs.diff("larger", "base")), "the differ")
    assert "bytes by file" in log(node)[before:]
