"""Snapshots of a container that keeps running: memory and files of one moment, and nothing lost when a take fails."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from node.containers import tasks
from node.shims import CallFailed, Shim

OURS = "io.containerd.fermata.v1"
TAKES = 20 if "FERMATA_TORTURE" in os.environ else 8

# A ledger whose records are counted in memory and in a file. One record is one write, and the program checks the file
# against its memory before each: the file may be at most the one record ahead that memory is about to count.
LEDGER = """
import json, os, threading
state = {"done": 0, "broken": None, "rounds": 0, "token": os.urandom(8).hex()}
fd = os.open("/ledger", os.O_RDWR | os.O_CREAT | os.O_APPEND)
def ledger():
    while True:
        size = os.stat("/ledger").st_size
        if size != 16 * state["done"] and not state["broken"]:
            state["broken"] = f"{size // 16} records, {state['done']} counted"
        os.write(fd, b"%015d\\n" % state["done"])
        state["done"] += 1
def report():
    import time
    while True:
        state["rounds"] += 1
        with open("/state.new", "w") as file:
            json.dump(state, file)
        os.rename("/state.new", "/state")
        time.sleep(0.02)
threading.Thread(target=ledger, daemon=True).start()
report()
"""

# A file held open by a name since unlinked, while another hard link lives; and one without any name.
UNLINKED = """
import json, os, time
os.makedirs("/data")
held = open("/data/a", "w+b", buffering=0)
held.write(b"before")
os.link("/data/a", "/data/b")
os.unlink("/data/a")
ghost = open("/data/ghost", "w+b", buffering=0)
ghost.write(b"x" * GHOST)
os.unlink("/data/ghost")
rounds = 0
while True:
    rounds += 1
    held.seek(0); ghost.seek(0)
    held.write(b"%06d" % rounds)
    same = open("/data/b", "rb").read() == b"%06d" % rounds
    inode = os.fstat(held.fileno()).st_ino == os.stat("/data/b").st_ino
    names = sorted(os.listdir("/data"))
    state = {"rounds": rounds, "same": same, "names": names, "ghost": len(ghost.read()), "inode": inode}
    with open("/state.new", "w") as file:
        json.dump(state, file)
    os.rename("/state.new", "/state")
    time.sleep(0.02)
"""


def wait_for(condition, what, timeout=30):
    until = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


def state(node, name):
    """What the program last said of itself."""
    try:
        return json.loads(Path(f"/proc/{tasks(node)[name][0]}/root/state").read_text())
    except (OSError, ValueError):
        return None


def runs_on(node, name):
    """The program's state, after it was seen to go on."""
    before = wait_for(lambda: state(node, name), f"{name}'s first word")["rounds"]
    return wait_for(lambda: (now := state(node, name)) and now["rounds"] > before + 2 and now, f"{name} to go on")


def run(node, image, name, program, *options):
    node.ctr("run", "-d", "--runtime", OURS, *options, image, name, "python3", "-c", program)
    return runs_on(node, name)


def take(node, name, reference):
    node.ctr("containers", "checkpoint", "--task", name, reference)


def restore(node, name, reference):
    node.ctr("containers", "restore", "--live", name, reference)
    return runs_on(node, name)


def restore_from(node, image, name, directory):
    node.ctr("run", "-d", "--runtime", OURS, "--annotation", f"fermata/restore-from={directory}", image, name, "true")
    return runs_on(node, name)


def remove(node, *names):
    for name in names:
        node.ctr("tasks", "delete", "--force", name)
        node.ctr("containers", "delete", name)


def daemon_of(node, name):
    """The pid of our daemon that serves a container."""
    return Shim(node, name).pid


@pytest.fixture
def references(node):
    """Names for snapshots, removed at the end."""
    names = []

    def new():
        names.append(f"snapshot/t{time.time_ns()}:1")
        return names[-1]

    yield new
    if names:
        node.ctr("images", "delete", *names, check=False)


@pytest.fixture
def configured(node):
    """Writes the node's configuration for the shims that are started from then on."""
    path = node.path("/etc/fermata/config.toml")

    def write(text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield write
    path.unlink(missing_ok=True)


def test_memory_and_files_are_of_one_moment_in_many_takes_in_a_row(node, image):
    """No client pauses the container here, so that only CRIU's hold makes one moment of memory and files."""
    run(node, image, "ledger", LEDGER)
    daemon, shim = daemon_of(node, "ledger"), Shim(node, "ledger")
    held = None
    for number in range(TAKES):
        shim.checkpoint(f"/srv/ledger/{number}")
        if number == 4:  # what is opened once has been by now
            held = _at_rest(node, daemon)
    assert _at_rest(node, daemon) == held
    now = runs_on(node, "ledger")
    assert now["broken"] is None
    remove(node, "ledger")
    counts = []
    for number in range(TAKES):
        name = f"ledger-{number}"
        restored = restore_from(node, image, name, f"/srv/ledger/{number}")
        assert restored["broken"] is None, f"take {number}"
        assert restored["token"] == now["token"]
        counts.append(restored["done"])
        remove(node, name)
    assert counts[0] < counts[-1]
    node.exec(["rm", "-r", "/srv/ledger"])


def _at_rest(node, daemon):
    """What is held once it stays the same: the daemon closes a connection a moment after its caller did."""

    def twice():
        one = _held(node, daemon)
        time.sleep(0.2)
        return one == _held(node, daemon) and one

    return wait_for(twice, "a daemon at rest")


def _held(node, daemon):
    """What a take could leave more of: descriptors, threads, processes, mounts, files."""
    listed = node.exec(["find", "/run/fermata", "/run/netns"]).stdout.splitlines()
    return {
        "descriptors": sorted(os.readlink(f"/proc/{daemon}/fd/{fd}").partition(":")[0] for fd in _fds(daemon)),
        "threads": len(os.listdir(f"/proc/{daemon}/task")),
        "processes": len(node.processes()),
        "mounts": len(Path(f"/proc/{node.pid}/mounts").read_text().splitlines()),
        "files": listed,
        "kept operations": len(node.exec(["ls", "/var/log/fermata/default/ledger"]).stdout.split()) <= 10,
    }


def _fds(pid):
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        found.append(fd)
    return found


def test_a_file_open_by_a_name_since_unlinked_comes_back(node, image, references):
    before = run(node, image, "unlinked", UNLINKED.replace("GHOST", "2000000"))
    assert before["same"]
    assert before["inode"]
    reference = references()
    take(node, "unlinked", reference)
    assert runs_on(node, "unlinked")["names"] == ["b"], "CRIU's link-remap file is still there"
    remove(node, "unlinked")
    after = restore(node, "unlinked-2", reference)
    assert after["same"]
    assert after["inode"]
    assert after["ghost"] == before["ghost"] == 2000000
    assert after["names"] == ["b"]
    remove(node, "unlinked-2")


def test_a_restored_container_can_be_taken_and_restored_again(node, image):
    run(node, image, "chain", LEDGER)
    token, last = state(node, "chain")["token"], -1
    name = "chain"
    for number in range(3):
        Shim(node, name).checkpoint(f"/srv/chain/{number}")
        remove(node, name)
        name = f"chain-{number}"
        now = restore_from(node, image, name, f"/srv/chain/{number}")
        assert now["broken"] is None
        assert now["token"] == token
        assert now["done"] > last
        last = now["done"]
    remove(node, name)
    node.exec(["rm", "-r", "/srv/chain"])


def _failing_take(node, name, words):
    """A take that fails with `words`, of the running and of the paused container, which stays so."""
    shim = Shim(node, name)
    for status in ("RUNNING", "PAUSED"):
        if status == "PAUSED":
            node.ctr("tasks", "pause", name)
        with pytest.raises(CallFailed, match=words):
            shim.checkpoint("/srv/failing")
        assert tasks(node)[name][1] == status
        assert node.exec(["sh", "-c", "ls -A /srv/failing; rm -rf /srv/failing"], check=False).stdout == ""
    rounds = state(node, name)["rounds"]
    time.sleep(0.1)
    assert state(node, name)["rounds"] == rounds, "paused, and yet it went on"
    node.ctr("tasks", "resume", name)
    assert runs_on(node, name).get("broken") is None


def test_a_take_that_criu_refuses_leaves_the_container_as_it_was(node, image, configured):
    configured("[criu]\nghost_limit = 1000\n")
    run(node, image, "ghost", UNLINKED.replace("GHOST", "2000"))
    _failing_take(node, "ghost", "ghost")
    remove(node, "ghost")


def test_a_paused_container_stays_paused_through_a_take(node, image):
    run(node, image, "paused", LEDGER)
    node.ctr("tasks", "pause", "paused")
    rounds = state(node, "paused")["rounds"]
    Shim(node, "paused").checkpoint("/srv/paused")
    time.sleep(0.1)
    assert tasks(node)["paused"][1] == "PAUSED"
    assert state(node, "paused")["rounds"] == rounds
    node.ctr("tasks", "resume", "paused")
    assert runs_on(node, "paused")["broken"] is None
    remove(node, "paused")
    assert restore_from(node, image, "paused-2", "/srv/paused")["broken"] is None
    remove(node, "paused-2")
    node.exec(["rm", "-r", "/srv/paused"])


def test_a_layer_that_is_too_large_is_refused_before_the_container_is_touched(node, image, configured):
    configured("[layer]\nlimit = 1000\n")
    run(node, image, "large", LEDGER)
    _failing_take(node, "large", r"raise \[layer\] limit in /etc/fermata/config.toml")
    assert node.exec(["sh", "-c", "ls /var/log/fermata/default/large 2>/dev/null"], check=False).stdout == ""
    remove(node, "large")


def test_a_layer_that_cannot_be_written_takes_the_dump_back(node, image):
    """The disk fills up while CRIU holds the processes: they go on, and the same directory can be used afterwards."""
    run(node, image, "full", LEDGER)
    shim, root = Shim(node, "full"), Path(f"/proc/{tasks(node)['full'][0]}/root")
    (root / "large").write_bytes(os.urandom(96 << 20))
    node.exec(["mkdir", "-p", "/srv/small"])
    node.exec(["mount", "-t", "tmpfs", "-o", "size=64m", "none", "/srv/small"])
    try:
        for leave_running in (True, False):
            with pytest.raises(CallFailed, match="No space left on device"):
                shim.checkpoint("/srv/small/snapshot", leave_running=leave_running)
            assert node.exec(["ls", "-A", "/srv/small"]).stdout == ""
            assert tasks(node)["full"][1] == "RUNNING"
            assert runs_on(node, "full")["broken"] is None
        (root / "large").unlink()
        shim.checkpoint("/srv/small/snapshot", leave_running=False)
        assert "fermata.json" in node.exec(["ls", "/srv/small/snapshot"]).stdout
        wait_for(lambda: tasks(node)["full"][1] == "STOPPED", "full to have ended")
    finally:
        node.exec(["umount", "-l", "/srv/small"])
        remove(node, "full")


def test_the_time_that_the_processes_stood_still_is_recorded(node, image):
    run(node, image, "frozen", LEDGER)
    Shim(node, "frozen").checkpoint("/srv/frozen")
    recorded = json.loads(node.exec(["cat", "/srv/frozen/fermata.json"]).stdout)
    assert recorded["steps"]["layer"] <= recorded["frozen"] <= recorded["steps"]["total"]
    remove(node, "frozen")
    node.exec(["rm", "-rf", "/srv/frozen"])


def test_an_empty_file_held_open_on_a_bind_mount_comes_back(node, image):
    """A lock file, say. Of its size there is nothing to compare, and the snapshot has to be readable all the same."""
    node.exec(["mkdir", "-p", "/srv/volume"])
    mount = ("--mount", "type=bind,src=/srv/volume,dst=/volume,options=rbind:rw")
    run(node, image, "empty", 'held = open("/volume/lock", "w")\n' + LEDGER, *mount)
    Shim(node, "empty").checkpoint("/srv/empty", leave_running=False)
    remove(node, "empty")
    options = (*mount, "--annotation", "fermata/restore-from=/srv/empty")
    node.ctr("run", "-d", "--runtime", OURS, *options, image, "empty-2", "true")
    assert runs_on(node, "empty-2")["broken"] is None
    remove(node, "empty-2")
    node.exec(["rm", "-r", "/srv/empty", "/srv/volume"])


def test_a_container_that_is_restored_without_input_and_output_can_be_taken_again(node, image):
    """As `fermata restore` makes one. The node's own /dev/null in it could not be dumped, and its input would end."""
    program = LEDGER.replace(
        "threading.Thread(target=ledger",
        "import sys\nthreading.Thread(target=lambda: state.update(input=sys.stdin.read())).start()\n"
        "threading.Thread(target=ledger",
    )
    run(node, image, "quiet", program)
    Shim(node, "quiet").checkpoint("/srv/quiet/0", leave_running=False)
    remove(node, "quiet")
    for number in range(2):
        options = ("--null-io", "--annotation", f"fermata/restore-from=/srv/quiet/{number}")
        node.ctr("run", "-d", "--runtime", OURS, *options, image, f"quiet-{number}", "true")
        now = runs_on(node, f"quiet-{number}")
        assert now["broken"] is None
        assert "input" not in now, "the end of its input was read"
        Shim(node, f"quiet-{number}").checkpoint(f"/srv/quiet/{number + 1}", leave_running=False)
        remove(node, f"quiet-{number}")
    node.exec(["rm", "-r", "/srv/quiet"])
