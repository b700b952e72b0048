"""containerd's diffs by fermata-differ: what they hold, and what comes of every failure.

A node of its own for each stack: here containerd and the differ are killed, and the disk fills up.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node import Node
from node.containers import wait_for
from tests.node.diffs import Diffs, Failed

UNCOMPRESSED = "containerd.io/uncompressed"
TAR = "application/vnd.oci.image.layer.v1.tar"
CONTENT = "/var/lib/containerd/io.containerd.content.v1.content"

BASE = """
for number in range(40):
    os.makedirs(f"d{number % 8}/sub{number}")
    open(f"d{number % 8}/sub{number}/file", "w").write(f"{number}")
    os.utime(f"d{number % 8}/sub{number}/file", (1.5e9, 1.5e9))
open("old", "w").write("old"); os.link("old", "old-too"); os.symlink("old", "link")
os.makedirs("replaced/deep"); open("replaced/deep/gone", "w").write("x"); open("replaced/gone", "w").write("x")
"""

# What may happen to an image's files in a container.
CHANGES = r"""
import os, shutil, socket, struct, time
os.makedirs("new/empty"); open("new/text", "w").write("text" * 1000)
open("new/noise", "wb").write(os.urandom(3 << 20))
open("d0/sub0/file", "a").write("more"); os.unlink("d0/sub8/file"); shutil.rmtree("d1")
shutil.rmtree("replaced"); os.mkdir("replaced"); open("replaced/file", "w").write("instead")
os.unlink("d2/sub2/file"); os.mkdir("d2/sub2/file"); open("d2/sub2/file/inner", "w").write("x")
shutil.rmtree("d3/sub3"); open("d3/sub3", "w").write("a file now")
os.unlink("link"); os.symlink("new/text", "link"); os.lchown("link", 7, 8)
open("old", "w").write("changed by one name"); os.link("new/text", "new/text-too"); os.link("d4/sub4/file", "linked")
os.chmod("d4/sub12/file", 0o4711); os.chown("d4/sub20/file", 3000000, 12); os.chmod("d4/sub28", 0o1777)
os.chown("d5/sub5", 33, 33)  # a directory whose only change this is
os.rename("d6/sub6", "d6/renamed") if False else (shutil.copytree("d6/sub6", "d6/renamed"), shutil.rmtree("d6/sub6"))
os.mkfifo("fifo", 0o640); os.mknod("null", 0o020666, os.makedev(1, 3))
with open("sparse", "wb") as file: file.truncate(9 << 20); file.seek(5 << 20); file.write(b"middle")
os.makedirs("long/" + "n" * 200 + "/" + "m" * 200); open("long/" + "n" * 200 + "/" + "m" * 200 + "/f", "w").write("x")
open(b"not-utf8-\xff\xfe", "w").write("x"); os.symlink("t" * 300, "long-target")
os.setxattr("new/text", "user.note", b"\0bytes"); os.setxattr("d7", "trusted.note", b"of a directory")
capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
open("capable", "w").write("x"); os.setxattr("capable", "security.capability", capability)
acl = struct.pack("<I" + "HHI" * 5, 2, 1, 6, 2**32 - 1, 2, 4, 1000, 4, 4, 2**32 - 1, 16, 6, 2**32 - 1, 32, 4, 2**32 - 1)
open("listed", "w").write("x"); os.setxattr("listed", "system.posix_acl_access", acl)
os.unlink("d7/sub7/file"); open("d7/sub7/file", "w").write("again")
os.utime("d7/sub15/file", ns=(5, 1_600_000_000_123_456_789)); os.utime("d7", ns=(5, 1_600_000_000_987_654_321))
os.utime("fifo", ns=(5, 4_294_967_296_000_000_005))
bound = socket.socket(socket.AF_UNIX); bound.bind("socket"); bound.close()
"""

# A layer that is not made at once: level 1 takes seconds for it.
SLOW = """
import random
words = [os.urandom(3).hex() for _ in range(500)]
block = " ".join(random.choices(words, k=150_000)).encode()
with open("slow", "wb") as file:
    for _ in range(LENGTH): file.write(block)
"""


@pytest.fixture(scope="module")
def differ_node(request, stack_name):
    with Node.up(stack_name=stack_name, differ=True) as node:
        yield node
        if request.session.testsfailed:
            print((node.logs / "differ.log").read_text()[-4000:])


@pytest.fixture
def node(differ_node):
    yield differ_node
    differ_node.start_containerd()


@pytest.fixture(scope="module")
def talking(differ_node):
    program = Diffs(differ_node)
    yield program
    program.end()


@pytest.fixture(scope="module")
def base(talking):
    """The names of two committed chains of snapshots, of one layer and of twenty."""
    talking.layer("making", BASE, commit="base1")
    for number in range(2, 21):
        program = f"os.mkdir('l{number}'); open('l{number}/f', 'w').write('x'); shutil.rmtree('l{number - 2}', True)"
        program += f"\nopen('d{number % 8}/sub{number}/file', 'w').write('{number} of {number}')"
        program += "\nshutil.rmtree('replaced'); os.makedirs('replaced/deep'); open('replaced/gone', 'w').write('y')"
        talking.layer("making", program, f"base{number - 1}", commit=f"base{number}")
    return {1: "base1", 20: "base20"}


@pytest.fixture
def diffs(node, talking):
    yield talking
    assert wait_for(lambda: not talking.active(), "the end of all uploads")


@pytest.fixture
def key(request):
    return re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")


def log(node):
    return (node.logs / "differ.log").read_text()


def left_to_walking(node, before):
    return log(node)[before:].count("left to the next differ")


def ctr_diff(node, *arguments, **options):
    """`ctr snapshots diff`, and what it wrote."""
    with (node.directory / "private/srv/diff").open("wb") as out:
        process = node.popen(["ctr", "snapshots", "diff", *arguments], stdout=out, stderr=subprocess.PIPE, **options)
        error = process.communicate(timeout=60)[1].decode()
    return process.returncode, error, (node.directory / "private/srv/diff").read_bytes()


def members(packed):
    plain = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        return {member.name: member for member in tar}


@pytest.mark.parametrize("layers", [1, 20])
def test_our_layer_makes_the_tree_that_the_container_had(node, diffs, base, key, layers):
    before = len(log(node))
    diffs.layer(key, CHANGES, base[layers])
    ours, walked = diffs.diff(key, base[layers]), diffs.diff(key, base[layers], walking=True)
    assert left_to_walking(node, before) == 1
    assert ours["media_type"] == walked["media_type"]
    diffs.apply(f"{key}-ours", base[layers], **ours)
    diffs.apply(f"{key}-walked", base[layers], **walked)
    assert diffs.differences(f"{key}-ours", key) == []
    assert diffs.differences(f"{key}-ours", f"{key}-walked", seconds=True) == []
    assert diffs.differences(f"{key}-walked", key), "the comparison sees what the walking differ drops"


def test_a_committed_layer_and_one_over_nothing_are_ours_too(node, diffs, base, key):
    before = len(log(node))
    for name, parent in (("base20", "base19"), ("base2", "base1"), ("base1", "")):
        status, error, packed = ctr_diff(node, name)
        assert (status, error) == (0, "")
        assert len(members(packed)) > 5
        described = log(node)[before:].splitlines()[-1].split()
        digest, size = next(word.strip(",") for word in described if word.startswith("sha256:")), len(packed)
        diffs.apply(f"{key}-{name}", parent, media_type=f"{TAR}+gzip", digest=digest, size=size)
        diffs.layer(f"{key}-{name}-as-it-is", "", name)
        assert diffs.differences(f"{key}-{name}", f"{key}-{name}-as-it-is", seconds=True) == []
    assert left_to_walking(node, before) == 0


@pytest.mark.parametrize("kind", ["", "+gzip", "+zstd"])
def test_every_media_type_has_its_form_and_its_label(node, diffs, base, key, kind):
    diffs.layer(key, CHANGES, base[1])
    try:
        made = diffs.diff(key, base[1], media_type=TAR + kind, labels={"of": "mine"})
    except Failed as failure:
        # Python 3.13 without its package zstandard, and containerd 1.7 whose walking differ has no zstd either.
        assert (kind, failure.code) == ("+zstd", "UNIMPLEMENTED")
        assert "python3-zstandard" in log(node)
        assert node.containerd_version() < (2,)
        return
    assert made["media_type"] == TAR + kind
    found = diffs.labels(made["digest"])
    assert found["of"] == "mine"
    assert found[UNCOMPRESSED] == diffs.diff(key, base[1], media_type=TAR)["digest"]
    diffs.apply(f"{key}-applied", base[1], **made)
    assert diffs.differences(f"{key}-applied", key, seconds=True) == []


def test_what_containerd_would_take_by_default_is_gzip(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    assert diffs.diff(key, base[1], media_type="")["digest"] == diffs.diff(key, base[1])["digest"]
    with pytest.raises(Failed, match="UNIMPLEMENTED: unsupported diff media type"):
        diffs.diff(key, base[1], media_type="application/vnd.docker.image.rootfs.diff.tar.gzip")


def test_the_source_date_epoch_bounds_every_time(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    status, _, packed = ctr_diff(node, key, env={"SOURCE_DATE_EPOCH": "1700000000"})
    assert status == 0
    times = {name: member.mtime for name, member in members(packed).items()}
    assert max(times.values()) == times["new/text"] == 1700000000
    assert times["d7/sub15/file"] == pytest.approx(1600000000.123456789)
    assert diffs.diff(key, base[1], epoch=1700000000)["digest"] == diffs.diff(key, base[1], epoch=1700000000)["digest"]


def test_a_reference_that_is_being_written_is_refused_as_containerd_does(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    writer = node.popen(["ctr", "content", "ingest", "taken"], stdin=subprocess.PIPE)
    try:
        writer.stdin.write(b"x" * (2 << 20))
        writer.stdin.flush()
        wait_for(lambda: "taken" in diffs.active(), "the other writer's upload")
        for walking in (False, True):
            with pytest.raises(Failed, match=r"UNAVAILABLE: .*locked"):
                diffs.diff(key, base[1], ref="taken", walking=walking)
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
    # What the other one left under the reference does not become part of ours.
    made = wait_for(lambda: _unless(Failed, lambda: diffs.diff(key, base[1], ref="taken")), "the reference")
    assert made["digest"] == diffs.diff(key, base[1])["digest"]


def _unless(error, do):
    try:
        return do()
    except error:
        return None


def test_a_blob_that_exists_is_no_error_and_gets_its_label(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    packed = ctr_diff(node, key)[2]
    made = diffs.diff(key, base[1])
    assert diffs.diff(key, base[1]) == made
    node.ctr("content", "delete", made["digest"])
    with (node.directory / "private/srv/diff").open("rb") as file:
        assert file.read() == packed
        file.seek(0)
        writer = node.popen(["ctr", "content", "ingest", "by-hand", "--expected-digest", made["digest"]], stdin=file)
        assert writer.wait(30) == 0
    assert UNCOMPRESSED not in diffs.labels(made["digest"])
    again = diffs.diff(key, base[1])
    assert again == made
    assert diffs.labels(made["digest"])[UNCOMPRESSED]
    # Unnamed by any image, it outlives a collection: it stands under a lease, which ends by itself.
    node.ctr("leases", "create", "--id", "another")
    node.ctr("leases", "delete", "--sync", "another")
    assert diffs.labels(made["digest"])
    assert "containerd.io/gc.expire=" in node.ctr("leases", "list").stdout


def test_the_layer_is_in_the_callers_namespace_and_in_no_other(node, diffs, key):
    before = len(log(node))
    diffs.layer(key, BASE, namespace="other", commit=f"{key}-base")
    diffs.layer(key, CHANGES, f"{key}-base", namespace="other")
    status, error, packed = ctr_diff(node, key, env={"CONTAINERD_NAMESPACE": "other"})
    assert (status, error) == (0, "")
    digest = f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert f"other: {diffs.upper(key, namespace='other')}: {digest}" in log(node)[before:]
    assert digest in node.ctr("content", "list", "-q", namespace="other").stdout
    assert digest not in node.ctr("content", "list", "-q").stdout


def test_what_cannot_be_exact_is_left_to_the_walking_differ(node, diffs, base, key):
    before = len(log(node))
    diffs.layer(f"{key}-native", BASE, snapshotter="native", commit="native-base")
    diffs.layer(f"{key}-native", CHANGES, "native-base", snapshotter="native")
    diffs.diff(f"{key}-native", "native-base", snapshotter="native")
    assert left_to_walking(node, before) == 1

    diffs.layer(key, CHANGES, base[20])
    status, error, _ = ctr_diff(node, "base1", key)
    assert (status, error) == (0, "")
    assert left_to_walking(node, before) == 2, "two snapshots that do not follow one another"

    marked = node.path(diffs.upper(key)) / "new"
    os.setxattr(marked, "trusted.overlay.redirect", b"/d0")
    diffs.diff(key, base[20])
    assert "redirect_dir" in log(node)[before:]
    os.removexattr(marked, "trusted.overlay.redirect")

    diffs.layer(f"{key}-name", "open('.wh.name', 'w')", base[20])
    diffs.diff(f"{key}-name", base[20])
    assert ".wh.name" in log(node)[before:]
    assert left_to_walking(node, before) == 4


@pytest.fixture
def slow(diffs, base, key):
    """A snapshot whose diff takes a while."""
    diffs.layer(key, SLOW.replace("LENGTH", "40"), base[1])
    return key


def leases(node):
    """The differ's leases, which keep blobs and uploads from the collector. (A killed client leaves its own.)"""
    return {line.split()[0] for line in node.ctr("leases", "list").stdout.splitlines() if "fermata/differ" in line}


def begin(node, diffs, name):
    """Start a client's diff, and return once its upload grows."""
    client = node.popen(["ctr", "snapshots", "diff", name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ingest = node.path(f"{CONTENT}/ingest")
    wait_for(lambda: any(path.stat().st_size for path in ingest.glob("*/data")), "an upload that grows")
    return client


def fails(client):
    error = client.communicate(timeout=60)[1].decode()
    assert client.returncode == 1
    assert error.startswith("ctr: ")


def test_a_killed_differ_leaves_an_error_and_no_partial_content(node, diffs, slow):
    before = leases(node)
    client = begin(node, diffs, slow)
    node.stop_differ(kill=True)
    fails(client)
    assert diffs.active(), "what it had written"
    node.start_differ()
    wait_for(lambda: not diffs.active(), "the next differ to have cleared up")
    wait_for(lambda: leases(node) == before, "the end of its lease")
    assert wait_for(lambda: _unless(Failed, lambda: diffs.diff(slow, "base1")), "an answer again")


def test_a_differ_that_is_asked_to_end_finishes_what_it_has_begun(node, diffs, slow):
    client = begin(node, diffs, slow)
    node.stop_differ()
    client.communicate(timeout=60)
    assert client.returncode == 0
    node.start_differ()


def test_a_client_that_goes_leaves_no_partial_content(node, diffs, slow):
    before = leases(node)
    client = begin(node, diffs, slow)
    client.kill()
    client.communicate()
    wait_for(lambda: not diffs.active(), "the upload to be gone")
    wait_for(lambda: "the caller gave up" in log(node), "the differ to say so")
    wait_for(lambda: leases(node) == before, "the end of its lease")


def test_a_killed_containerd_leaves_no_partial_content(node, diffs, slow):
    before = leases(node)
    client = begin(node, diffs, slow)
    node.stop_containerd(kill=True)
    fails(client)
    node.start_containerd()
    wait_for(lambda: not diffs.active(), "the upload to be gone", timeout=60)
    wait_for(lambda: leases(node) == before, "the end of its lease")
    # No upload is left, and the differ has its connection again.
    assert diffs.diff(slow, "base1")


def test_a_full_disk_is_an_error_and_leaves_no_partial_content(node, diffs, slow):
    before = leases(node)
    node.exec(["mount", "-t", "tmpfs", "-o", "size=4m", "none", f"{CONTENT}/ingest"])
    try:
        for _ in range(2):  # the second time, if the first one left nothing
            status, error, _ = ctr_diff(node, slow)
            assert status == 1
            assert "no space left on device" in error
            assert diffs.active() == []
            assert list(node.path(f"{CONTENT}/ingest").iterdir()) == []
            assert leases(node) == before
    finally:
        node.exec(["umount", f"{CONTENT}/ingest"])
    assert diffs.diff(slow, "base1")


def test_many_requests_at_once_are_answered_in_bounded_memory(node, diffs, base, key):
    names = [f"{key}-{number}" for number in range(20)]
    for name in names:
        diffs.layer(name, f"open('{name}', 'wb').write(os.urandom(3 << 20))", base[20])
    diffs.layer(f"{key}-large", "open('zeros', 'wb').truncate(600 << 20)", base[20])
    large = node.popen(["ctr", "snapshots", "diff", f"{key}-large"], stdout=subprocess.DEVNULL)
    with ThreadPoolExecutor(len(names)) as pool:

        def one(name):
            return node.exec(["sh", "-c", f"ctr snapshots diff {name} | tar -tzf -"]).stdout.split()

        for name, listed in zip(names, pool.map(one, names), strict=True):
            assert listed == ["./", name]
    assert large.wait(60) == 0
    status = Path(f"/proc/{node.differ_pid()}/status").read_text()
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
    print(f"{len(names)} at once: {peak} KiB at most")
    assert peak < 400 << 10


def test_an_order_that_names_no_plugin_is_told_by_containerd_and_by_the_doctor(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    made = diffs.diff(key, base[1])
    file = node.path("/etc/containerd/conf.d/fermata-differ.toml")
    both = file.read_text()
    file.write_text(re.sub(r"\[proxy_plugins.*?\n\n", "", both, flags=re.S))
    try:
        node.restart_containerd()
        with pytest.raises(Failed, match=r"UNIMPLEMENTED: unknown service containerd\.services\.diff"):
            wait_for(lambda: _unless_unavailable(lambda: diffs.diff(key, base[1])), "containerd's answer")
        assert doctor(node) == "problem"
    finally:
        file.write_text(both)
        node.restart_containerd()
    assert wait_for(lambda: _unless(Failed, lambda: diffs.diff(key, base[1])), "the differ") == made
    assert doctor(node) == "ok"


def _unless_unavailable(do):
    try:
        return do()
    except Failed as failure:
        if failure.code != "UNAVAILABLE":
            raise
        return None


CONNECT = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    try:
        connection.connect("/run/fermata-differ/differ.sock")
    except PermissionError:
        sys.exit(7)
    sys.exit(8 if connection.recv(1) == b"" else 9)
"""


def test_root_alone_can_connect(node):
    connect = ["python3", "-I", "-c", CONNECT]
    assert node.exec(connect, check=False).returncode == 7
    # With the doors opened by somebody's mistake, the differ still looks who comes in.
    node.exec(["chmod", "777", "/run/fermata-differ", "/run/fermata-differ/differ.sock"])
    try:
        assert node.exec(connect, check=False).returncode == 8
    finally:
        node.exec(["chmod", "600", "/run/fermata-differ/differ.sock"])
        node.exec(["chmod", "700", "/run/fermata-differ"])


def test_containerd_starts_without_the_differ_and_finds_it_later(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    made = diffs.diff(key, base[1])
    node.stop_containerd()
    node.stop_differ()
    node.start_containerd()
    with pytest.raises(Failed, match="UNAVAILABLE"):
        diffs.diff(key, base[1])
    with pytest.raises(Failed, match="UNAVAILABLE"):
        diffs.apply(f"{key}-applied", base[1], **made)
    assert doctor(node) == "problem"
    # containerd 2's transfer service does not take it for what unpacks images.
    assert "multiple differs match" not in node.log.read_text()
    node.start_differ()
    assert wait_for(lambda: _unless(Failed, lambda: diffs.diff(key, base[1])), "the differ to be found") == made
    assert doctor(node) == "ok"


def doctor(node):
    said = json.loads(node.exec(["fermata", "doctor", "--json"], check=False).stdout)
    return next(line["level"] for line in said["lines"] if line["name"] == "diffs")


SYSTEMD = """
import os, socket
listener = socket.socket(socket.AF_UNIX)
os.unlink("/run/fermata-differ/differ.sock")
listener.bind("/run/fermata-differ/differ.sock"); os.chmod("/run/fermata-differ/differ.sock", 0o600); listener.listen()
notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); notified.bind("/run/notify"); notified.settimeout(30)
print("open", flush=True); input()
child = os.fork()
if child == 0:
    # Else whoever reads what this program says would wait for the child's end too, were this one killed.
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    os.dup2(listener.fileno(), 3); os.set_inheritable(3, True)
    os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), NOTIFY_SOCKET="/run/notify")
    os.execv("/usr/local/bin/fermata-differ", ["fermata-differ"])
print(notified.recv(100).decode(), child, flush=True); print(notified.recv(100).decode(), flush=True); os.wait()
"""


def test_with_a_socket_of_systemd_requests_wait_for_the_service(node, diffs, base, key):
    diffs.layer(key, CHANGES, base[1])
    node.stop_differ()
    manager = node.popen(["python3", "-I", "-c", SYSTEMD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert manager.stdout.readline() == "open\n"
        waiting = node.popen(["ctr", "snapshots", "diff", key], stdout=subprocess.DEVNULL)
        time.sleep(0.2)
        assert waiting.poll() is None
        manager.stdin.write("\n")
        manager.stdin.flush()
        ready, pid = manager.stdout.readline().split()
        assert ready == "READY=1"
        # containerd gives a connection one second to its first bytes: on a busy machine a start takes longer.
        assert waiting.wait(30) == 0 or node.ctr("snapshots", "diff", key)
        os.kill(int(pid), signal.SIGTERM)
        assert manager.stdout.readline() == "STOPPING=1\n"
        assert manager.wait(30) == 0
    finally:
        manager.kill()
        manager.communicate()
        node.start_differ()


def test_a_checkpoint_with_the_writable_layer_is_made_and_restored_by_ctr(node):
    image = node.import_image()
    before = len(log(node))
    program = "import time; open('/kept', 'w').write('kept'); open('/ready', 'w')\nwhile True: time.sleep(0.1)"
    node.ctr("run", "-d", image, "whole", "python3", "-c", program)
    pid = int(node.ctr("tasks", "list").stdout.splitlines()[1].split()[1])
    wait_for(lambda: Path(f"/proc/{pid}/root/ready").exists(), "the program")
    node.ctr("containers", "checkpoint", "--task", "--rw", "whole", "checkpoint/whole:1")
    assert left_to_walking(node, before) == 0
    assert log(node)[before:].count("default: /var/lib/containerd/") == 1
    node.ctr("tasks", "delete", "--force", "whole")
    node.ctr("containers", "delete", "whole")
    node.ctr("containers", "restore", "--live", "--rw", "whole", "checkpoint/whole:1")
    pid = int(node.ctr("tasks", "list").stdout.splitlines()[1].split()[1])
    assert Path(f"/proc/{pid}/root/kept").read_text() == "kept"
    node.ctr("tasks", "delete", "--force", "whole")
    node.ctr("containers", "delete", "whole")
