"""Weights that stay out of snapshots, in a real node: they come back, or the program does not.

The programs use the real library; where one has to misbehave, a stand-in speaks the protocol in its place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from node.containers import CTR, IMAGE, OURS, pid, remove, start, status, wait_for
from node.leftovers import clear, leftovers
from node.shims import CallFailed, Shim
from tests.node.guests import MOUNT, ON, STORE, answers, serve, shared

SIZE = (1 << 30) if "FERMATA_TORTURE" in os.environ else (64 << 20)
TAKEN = "/srv/taken"

STAND_IN = """
import json, os, sys, time
sys.path.insert(0, "/opt/guest")
from programs import Program
fails = {key: value.encode() if value[:1] == "{" else value for key, value in json.loads(sys.argv[1]).items()}
one = Program("/run/fermata", os.getpid(), bytes(range(256)) * 20000, **fails)
while True:
    with open("/tick.new", "w") as file: file.write(str(time.monotonic_ns()))
    os.rename("/tick.new", "/tick")
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def model(running_node):
    with shared(running_node, SIZE) as path:
        yield path


@pytest.fixture(autouse=True)
def store(node, model):
    """The node's store of weights, empty at the beginning and at the end."""
    path = node.path(STORE)
    yield path
    node.path("/etc/fermata/config.toml").unlink(missing_ok=True)
    clear(node)
    node.exec(["sh", "-c", f"rm -rf {STORE} /srv/taken* /srv/again*"])


@pytest.fixture
def configured(node):
    path = node.path("/etc/fermata/config.toml")

    def write(text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def stand_in(node, name, **fails):
    start(node, name, "python3", "-c", STAND_IN, json.dumps(fails), options=ON)
    wait_for(lambda: ticks(node, name), f"{name} to run")


def ticks(node, name):
    path = Path(f"/proc/{pid(node, name)}/root/tick")
    try:
        before = path.read_text()
    except OSError:
        return False
    time.sleep(0.2)
    return path.read_text() != before


def fermata(node, *words, check=True):
    return node.exec(["fermata", *words], check=check, timeout=120)


def restore(node, name, directory=TAKEN, check=True):
    options = ("--annotation", f"fermata/restore-from={directory}", *MOUNT)
    return node.ctr("run", "--detach", "--runtime", OURS, *options, IMAGE, name, "true", check=check, timeout=120)


def restoring(node, name):
    """A client that restores."""
    options = ("--annotation", f"fermata/restore-from={TAKEN}", *MOUNT)
    return node.popen([*CTR, "run", "--detach", "--runtime", OURS, *options, IMAGE, name, "true"])


def record(node, directory=TAKEN):
    return json.loads(node.path(f"{directory}/fermata.json").read_text())["guest"]


def memory(node, directory=TAKEN):
    """Bytes of the processes' memory in a snapshot."""
    return sum(path.stat().st_size for path in node.path(directory).glob("pages-*.img"))


def packs(store):
    return sorted(path.name for path in store.glob("*.weights"))


def references(store):
    return sorted(os.readlink(path) for path in store.glob("refs/*/*"))


def error_lines(node, name):
    return [
        line
        for line in node.log.read_text(errors="replace").splitlines()
        if f"container={name} " in f"{line} " and "level=error" in line
    ]


# Out and back ---------------------------------------------------------------------------------------------------------


def test_weights_stay_out_of_a_snapshot_and_the_program_answers_the_same(node, store):
    first = serve(node, "one")
    said = fermata(node, "checkpoint", "--when-ready", "one", TAKEN).stdout
    assert "weights: 64.0 MiB kept out" in said or SIZE != 64 << 20
    assert (record(node)["outcome"], record(node)["reason"]) == ("out", None)
    assert memory(node) < SIZE // 2
    assert (store / packs(store)[0]).stat().st_size == SIZE
    left = answers(node, "one")
    assert (left["answer"], left["events"]) == (first["answer"], ["prepare", "restore"])
    restore(node, "two")
    came = answers(node, "two")
    assert (came["answer"], came["events"]) == (first["answer"], ["prepare", "restore"])
    fermata(node, "restore", TAKEN, "three")
    assert answers(node, "three")["answer"] == first["answer"]
    assert "weights    " in fermata(node, "inspect", TAKEN).stdout
    assert "can be restored" in fermata(node, "check", TAKEN).stdout
    # And a second snapshot, of what was restored, writes none of them again.
    inode = (store / packs(store)[0]).stat().st_ino
    fermata(node, "checkpoint", "two", f"{TAKEN}-2")
    assert record(node, f"{TAKEN}-2")["outcome"] == "out"
    assert [(store / name).stat().st_ino for name in packs(store)] == [inode]
    assert references(store) == [TAKEN, f"{TAKEN}-2"]
    for name in ("one", "two", "three"):
        remove(node, name)
    assert f"{TAKEN}: removed" in fermata(node, "rm", TAKEN).stdout
    restore(node, "four", f"{TAKEN}-2")
    assert answers(node, "four")["answer"] == first["answer"]
    assert "of weights with it" in fermata(node, "rm", f"{TAKEN}-2").stdout
    assert packs(store) == []


def test_a_take_that_ends_the_container_keeps_its_weights_in_the_store(node, store):
    first = serve(node, "one")
    Shim(node, "one").checkpoint(TAKEN, leave_running=False)
    assert memory(node) < SIZE // 2
    remove(node, "one")
    restore(node, "two")
    assert answers(node, "two")["answer"] == first["answer"]


def test_a_client_that_pauses_the_container_and_packs_the_snapshot_is_served_too(node, store):
    first = serve(node, "one")
    node.ctr("containers", "checkpoint", "--task", "one", "snapshot/guest:1")
    try:
        assert status(node, "one") == "RUNNING"
        assert answers(node, "one")["answer"] == first["answer"]
        remove(node, "one")
        assert "for 1 snapshots that containerd has packed" in fermata(node, "prune").stdout
        node.ctr("containers", "restore", "--live", "two", "snapshot/guest:1")
        assert answers(node, "two")["answer"] == first["answer"]
    finally:
        node.ctr("images", "delete", "snapshot/guest:1")
    fermata(node, "prune", "--packed")
    assert packs(store) == []


def test_a_container_that_was_paused_is_paused_after_its_take(node):
    first = serve(node, "one")
    node.ctr("tasks", "pause", "one")
    Shim(node, "one").checkpoint(TAKEN)
    assert status(node, "one") == "PAUSED"
    assert record(node)["outcome"] == "out"
    node.ctr("tasks", "resume", "one")
    assert answers(node, "one")["answer"] == first["answer"]


def test_two_containers_of_the_same_weights_share_one_file(node, store):
    first = [serve(node, name) for name in ("one", "two")]
    takes = [threading.Thread(target=Shim(node, name).checkpoint, args=(f"{TAKEN}-{name}",)) for name in ("one", "two")]
    for take in takes:
        take.start()
    for take in takes:
        take.join(60)
    assert len(packs(store)) == 1
    assert references(store) == [f"{TAKEN}-one", f"{TAKEN}-two"]
    assert [answers(node, name)["answer"] for name in ("one", "two")] == [each["answer"] for each in first]


def test_a_take_waits_until_the_program_is_ready(node):
    serve(node, "one", "late")
    said = fermata(node, "checkpoint", "--when-ready", "--timeout", "0.5", "one", TAKEN, check=False)
    assert said.returncode == 1
    assert "one was not ready within 0.5 s: process 1 of the container is not ready" in said.stderr
    waiting = node.popen(["fermata", "checkpoint", "--when-ready", "one", TAKEN], stdout=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1)
    Path(f"/proc/{pid(node, 'one')}/root/ready").touch()
    assert waiting.wait(60) == 0
    start(node, "two")
    said = fermata(node, "checkpoint", "--when-ready", "two", f"{TAKEN}-2", check=False)
    assert "two cannot say when it is ready: it was started without the annotation" in said.stderr


def test_weights_come_from_a_read_only_store_in_memory_and_from_a_disk_past_its_cache(node, configured):
    node.exec(["sh", "-c", "mkdir -p /srv/memory; mount -t tmpfs -o mode=0700 weights /srv/memory"])
    try:
        configured('[weights]\ndirectory = "/srv/memory"\nread = "direct"\n')
        first = serve(node, "one")
        Shim(node, "one").checkpoint(TAKEN)
        node.exec(["mount", "-o", "remount,ro", "/srv/memory"])
        restore(node, "two")
        assert answers(node, "two")["answer"] == first["answer"]
        configured('[weights]\nread = "direct"\n')
        remove(node, "one")
        remove(node, "two")
        serve(node, "one")
        Shim(node, "one").checkpoint(f"{TAKEN}-2")
        restore(node, "two", f"{TAKEN}-2")
        assert answers(node, "two")["answer"] == first["answer"]
    finally:
        clear(node)
        node.exec(["sh", "-c", "umount -l /srv/memory; rmdir /srv/memory"])


# Inside ---------------------------------------------------------------------------------------------------------------


def stays_inside(node, name, reason, outcome="inside"):
    """A take that goes on with the weights inside, says so everywhere, and whose snapshot can be restored."""
    said = fermata(node, "checkpoint", name, TAKEN).stdout
    assert record(node)["outcome"] == outcome
    assert reason in record(node)["reason"]
    assert f"weights: inside: {record(node)['reason']}" in said
    assert reason in "".join(error_lines(node, name)).replace('\\"', '"')
    assert packs(node.path(STORE)) == []


def test_without_a_program_that_uses_the_library_the_snapshot_says_so(node):
    start(node, "one", options=ON)
    stays_inside(node, "one", "no program in the container listens at /run/fermata", "none")
    restore(node, "two")
    assert status(node, "two") == "RUNNING"


def test_links_to_sockets_of_the_node_are_not_followed(node):
    program = "ln -s /run/containerd/containerd.sock /run/fermata/5.sock; ln -s .. /run/fermata/6.sock; sleep 1000"
    start(node, "one", "sh", "-c", program, options=ON)
    wait_for(lambda: Path(f"/proc/{pid(node, 'one')}/root/run/fermata/6.sock").is_symlink(), "the links")
    stays_inside(node, "one", "no program in the container listens", "none")


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ({"prepare": "wait"}, "does not answer in time"),
        ({"prepare": '{"packs": "none"}\n'}, "at most 250 packs"),
        ({"write": "hang up"}, "has ended, or hung up"),
        ({"lie": "yes"}, "has another SHA-256"),
    ],
    ids=["silent", "nonsense", "gone", "lies"],
)
def test_a_program_that_fails_keeps_its_weights_and_runs_on(node, configured, fails, reason):
    configured("[weights]\ntimeout = 2\n")
    stand_in(node, "one", **fails)
    stays_inside(node, "one", reason)
    assert ticks(node, "one")
    restore(node, "two")
    assert ticks(node, "two")


def test_a_worker_that_dies_after_its_release_is_not_waited_for_at_the_restore(node):
    """It is a zombie in the snapshot; the other program has its weights back."""
    worker = json.dumps({"release": "die"})
    program = f"""
import subprocess, sys
subprocess.Popen(["python3", "-c", {STAND_IN.replace("tick", "tock")!r}, {worker!r}])
exec({STAND_IN.replace("json.loads(sys.argv[1])", "{}")!r})
"""
    start(node, "one", "python3", "-c", program, options=ON)
    sockets = Path(f"/proc/{pid(node, 'one')}/root/run/fermata")
    wait_for(lambda: len(list(sockets.glob("*.sock"))) == 2, "both programs")
    Shim(node, "one").checkpoint(TAKEN)
    found = record(node)
    assert (found["outcome"], [process["pid"] for process in found["processes"]]) == ("out", [1])
    assert ticks(node, "one")
    restore(node, "two")
    assert ticks(node, "two")


def test_a_full_disk_leaves_the_weights_inside(node, configured):
    node.exec(["sh", "-c", "mkdir -p /srv/small; mount -t tmpfs -o mode=0700,size=8m weights /srv/small"])
    try:
        configured('[weights]\ndirectory = "/srv/small"\n')
        first = serve(node, "one")
        stays_inside(node, "one", "make room there")
        assert memory(node) > SIZE
        assert [path.name for path in node.path("/srv/small").iterdir() if path.is_file()] == []
        restore(node, "two")
        assert answers(node, "two")["answer"] == first["answer"]
    finally:
        clear(node)
        node.exec(["sh", "-c", "umount -l /srv/small; rmdir /srv/small"])


def test_the_place_of_the_sockets_cannot_be_anothers(node):
    mount = ("--mount", "type=bind,src=/srv,dst=/run/fermata,options=rbind")
    done = node.ctr("run", "-d", "--runtime", OURS, *ON, *mount, IMAGE, "one", "sleep", "10", check=False)
    assert "the annotation fermata/guest needs /run/fermata in the container for itself" in done.stderr


# Lost -----------------------------------------------------------------------------------------------------------------


def taken(node):
    first = serve(node, "one")
    Shim(node, "one").checkpoint(TAKEN)
    remove(node, "one")
    return first


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("rm $f", "is not there; copy it from the node"),
        ("truncate -s 1M $f", "has 1048576 bytes and they have"),
        ("chmod 666 $f", "is no file of root's alone"),
    ],
    ids=["missing", "short", "open"],
)
def test_a_restore_without_its_weights_is_refused_before_anything(node, store, damage, words):
    first = taken(node)
    path = f"{STORE}/{packs(store)[0]}"
    node.exec(["sh", "-c", f"f={path}; cp -a $f /srv/taken-copy; {damage}"])
    done = restore(node, "two", check=False)
    assert done.returncode != 0
    assert words in done.stderr
    said = fermata(node, "check", TAKEN, check=False)
    assert (said.returncode, words in said.stdout) == (1, True)
    clear(node)
    assert leftovers(node) == []
    node.exec(["sh", "-c", f"cp -a /srv/taken-copy {path}; chmod 600 {path}"])
    restore(node, "two")
    assert answers(node, "two")["answer"] == first["answer"]


def test_a_program_whose_weights_have_one_bit_changed_does_not_serve(node, store):
    first = taken(node)
    path = store / packs(store)[0]
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)[0]
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 1]))
    done = restore(node, "two", check=False)
    assert done.returncode != 0
    assert f"restore of {TAKEN} failed: process 1 of the container: " in done.stderr
    assert status(node, "two") in (None, "STOPPED")
    node.ctr("tasks", "delete", "--force", "two", check=False)
    assert leftovers(node) == []
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(bytes([byte]))
    # The container that failed has lost nothing by it: it can be started once more.
    node.ctr("tasks", "start", "--detach", "two", timeout=60)
    assert answers(node, "two")["answer"] == first["answer"]


def test_a_program_that_cannot_have_its_weights_back_after_a_take_is_told_of(node):
    stand_in(node, "one", back='{"error": "the memory is gone"}\n')
    with pytest.raises(CallFailed, match=r"the snapshot in /srv/taken is complete, but .*: the memory is gone"):
        Shim(node, "one").checkpoint(TAKEN)
    assert record(node)["outcome"] == "out"


def test_weights_that_a_restore_reads_are_not_removed(node, store, configured):
    configured("[weights]\ntimeout = 4\n")
    stand_in(node, "one", armed="wait")
    Shim(node, "one").checkpoint(TAKEN, leave_running=False)
    remove(node, "one")
    client = restoring(node, "two")
    wait_for(lambda: status(node, "two"), "the restore")
    found = json.loads(fermata(node, "prune", "--packed", "--json").stdout)
    assert [one["outcome"] for one in found["weights"]] == ["in use"]
    assert client.wait(30) != 0
    clear(node)
    assert leftovers(node) == []
    found = json.loads(fermata(node, "prune", "--json").stdout)
    assert [one["outcome"] for one in found["weights"]] == ["kept"]


def test_a_daemon_that_dies_in_a_take_leaves_a_draft_that_is_pruned(node, store):
    stand_in(node, "one", write="wait")
    failed = []

    def take():
        try:
            Shim(node, "one").checkpoint(TAKEN, timeout=30)
        except Exception as error:
            failed.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    wait_for(lambda: list(store.glob("draft-*")), "the draft")
    assert json.loads(fermata(node, "prune", "--json").stdout)["drafts"] == []
    os.kill(Shim(node, "one").pid, signal.SIGKILL)
    taking.join(40)
    assert failed
    wait_for(lambda: status(node, "one") is None, "the container to be given up")
    clear(node)
    assert leftovers(node) == []
    assert "of a take that died" in fermata(node, "prune").stdout
    assert list(store.glob("draft-*")) == []


@pytest.mark.parametrize("end", ["kill", "daemon"])
def test_a_restore_that_ends_while_its_weights_come_back_leaves_nothing(node, end):
    stand_in(node, "one", armed="wait")
    Shim(node, "one").checkpoint(TAKEN, leave_running=False)
    remove(node, "one")
    client = restoring(node, "two")
    wait_for(lambda: ticks(node, "two"), "the program, which waits for its weights")
    if end == "kill":
        node.ctr("tasks", "kill", "--signal", "SIGKILL", "two", timeout=20)
    else:
        os.kill(Shim(node, "two").pid, signal.SIGKILL)
    assert client.wait(20) != 0
    clear(node)
    assert leftovers(node) == []
    found = json.loads(fermata(node, "prune", "--json").stdout)
    assert [one["outcome"] for one in found["weights"]] == ["kept"]
