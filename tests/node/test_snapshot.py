"""A snapshot of a running container goes on in new containers, memory and files alike."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

from node.containers import CTR, OURS, STOCK, pid, remove, start, status, wait_for
from node.shims import OUR_NAME, CallFailed, Shim

WORKLOAD = Path(__file__).parents[2] / "packaging/demo/workload.py"
OURS_FIRST = "/usr/local/sbin/containerd-shim-runc-v2"


def run(node, name, *items, **options):
    start(node, name, "python3", "-c", WORKLOAD.read_text(), *items, **options)
    return wait_for(lambda: states(node, name), f"the workload of {name}")


def items(node):
    """The kinds of state that this node's CRIU can save: before 4.2 it saves no TCP connection on a current kernel."""
    version = tuple(map(int, re.search(r"Version: (\d+)\.(\d+)", node.exec(["criu", "--version"]).stdout).groups()))
    return ("counter", "mapped", "deleted", "lock", *(["connection"] if version >= (4, 2) else []))


def states(node, name):
    """What the workload says of its items, or None while it does not answer."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(20)
        try:
            asker.connect(f"/proc/{pid(node, name)}/root/run/state.sock")
        except OSError:
            return None
        with asker.makefile("rb") as answer:
            return {item: tuple(state) for item, state in json.load(answer).items()}


def goes_on(node, name, before):
    """Check that a workload is the one of before, every item of it well."""
    now = wait_for(lambda: states(node, name), f"the restored workload of {name}")
    assert {item: well for item, (well, _) in now.items()} == dict.fromkeys(before, True)
    for item, (_, shown) in before.items():
        if item == "counter":
            assert now[item][1].split(" ", 1)[1] == shown.split(" ", 1)[1]
            assert int(now[item][1].split()[0]) >= int(shown.split()[0])
        else:
            assert now[item][1] == shown
    return now


def restore(node, name, directory, **options):
    start(node, name, "true", options=["--annotation", f"fermata/restore-from={directory}"], **options)


@pytest.fixture
def directory(node):
    """Where a snapshot can go, removed at the end."""
    yield "/srv/snapshot"
    node.exec(["rm", "-rf", "/srv/snapshot"])


@pytest.fixture
def reference(node):
    """A name for a snapshot that containerd keeps, removed at the end."""
    yield "example.org/snapshot:1"
    node.ctr("images", "delete", "example.org/snapshot:1", check=False)


def test_a_snapshot_leaves_the_container_running_and_is_restored_into_two_at_once(node, directory):
    before = run(node, "one", *items(node))
    Shim(node, "one").checkpoint(directory)
    goes_on(node, "one", before)
    # Beside the one it was taken of, which still has its port, its names and its files.
    making = [threading.Thread(target=restore, args=(node, name, directory)) for name in ("two", "three")]
    for thread in making:
        thread.start()
    for thread in making:
        thread.join()
    for name in ("two", "three", "one"):
        goes_on(node, name, before)
    # Each has files of its own.
    roots = [node.path(f"/proc/{pid(node, name)}/root") for name in ("one", "two", "three")]
    (roots[1] / "only-in-two").touch()
    assert [(root / "only-in-two").exists() for root in roots] == [False, True, False]
    for name in ("one", "two", "three"):
        remove(node, name)


def test_what_a_client_has_stored_is_restored_live_into_two_at_once(node, reference):
    before = run(node, "one", *items(node))
    node.ctr("containers", "checkpoint", "--task", "one", reference)
    # One beside the container that it was taken of, one beside the other.
    making = [node.popen([*CTR, "containers", "restore", "--live", name, reference]) for name in ("two", "three")]
    assert [process.wait(60) for process in making] == [0, 0]
    for name in ("two", "three", "one"):
        goes_on(node, name, before)
    cgroups = {Path(f"/proc/{pid(node, name)}/cgroup").read_text() for name in ("one", "two", "three")}
    assert len(cgroups) == 3
    for name in ("one", "two", "three"):
        remove(node, name)


def test_a_snapshot_can_end_the_container(node, directory, events):
    before = run(node, "one", "counter", "mapped")
    Shim(node, "one").checkpoint(directory, leave_running=False)
    events.wait("one", "/tasks/exit")
    assert status(node, "one") == "STOPPED"
    remove(node, "one")
    restore(node, "one", directory)
    goes_on(node, "one", before)
    remove(node, "one")


def test_a_paused_container_stays_paused_and_its_snapshot_runs(node, directory):
    before = run(node, "one", "counter")
    node.ctr("tasks", "pause", "one")
    Shim(node, "one").checkpoint(directory)
    assert status(node, "one") == "PAUSED"
    restore(node, "two", directory)
    goes_on(node, "two", before)
    node.ctr("tasks", "resume", "one")
    goes_on(node, "one", before)
    remove(node, "one")
    remove(node, "two")


def test_a_restored_container_is_controlled_like_any_other(node, directory, events):
    run(node, "one", "counter")
    Shim(node, "one").checkpoint(directory)
    remove(node, "one")
    restore(node, "two", directory)
    assert node.ctr("tasks", "exec", "--exec-id", "more", "two", "sh", "-c", "exit 6", check=False).returncode == 6
    node.ctr("tasks", "pause", "two")
    assert status(node, "two") == "PAUSED"
    node.ctr("tasks", "resume", "two")
    node.ctr("tasks", "kill", "--signal", "SIGKILL", "two")
    wait_for(lambda: status(node, "two") == "STOPPED", "the container's end")
    remove(node, "two")
    wait_for(lambda: "/tasks/delete" in events.topics("two"), "the last event")
    topics = [topic for topic in events.topics("two") if topic.startswith("/tasks/")]
    assert topics == [
        *("/tasks/create", "/tasks/start", "/tasks/exec-added", "/tasks/exec-started", "/tasks/exit"),
        *("/tasks/paused", "/tasks/resumed", "/tasks/exit", "/tasks/delete"),
    ]


def test_a_snapshot_shows_the_stock_runtimes_events(node, reference, events):
    def observe(runtime):
        name = f"one-{runtime.split('.')[2]}"
        start(node, name, runtime=runtime)
        node.ctr("containers", "checkpoint", "--task", name, reference)
        events.wait(name, "/tasks/resumed")
        node.ctr("images", "delete", reference)
        seen = [(topic, sorted(fields)) for topic, fields in events.of(name) if topic.startswith("/tasks/")]
        remove(node, name)
        return seen

    stock, ours = observe(STOCK), observe(OURS)
    assert ours == stock
    # That one was taken, the shim does not say; that the container stood still meanwhile, it does.
    assert [topic for topic, _ in ours][2:] == ["/tasks/paused", "/tasks/resumed"]


def test_the_manifest_tells_what_is_in_the_directory(node, directory):
    run(node, "one", "mapped", "deleted")
    Shim(node, "one").checkpoint(directory)
    inside = node.path(directory)
    assert stat.S_IMODE(inside.stat().st_mode) == 0o700
    assert all(stat.S_ISREG(entry.lstat().st_mode) for entry in inside.iterdir())
    manifest = json.loads((inside / "fermata.json").read_text())
    assert manifest["version"]["major"] == 1
    assert (manifest["container"]["id"], manifest["container"]["namespace"]) == ("one", "default")
    assert manifest["container"]["left_running"] is True
    assert {"/proc", "/dev", "/sys"} <= {mount["destination"] for mount in manifest["requires"]["mounts"]}
    layer = manifest["layer"]
    packed = (inside / layer["file"]).read_bytes()
    assert layer["digest"] == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert layer["size"] > 0
    assert (layer["made_by"], layer["reason"]) == ("upperdir", None)
    assert 0 < manifest["steps"]["layer"] <= manifest["steps"]["total"]
    remove(node, "one")


@pytest.fixture
def first_on_path(node):
    """Our shim is what containerd finds for the stock runtime's name."""
    link = node.path(OURS_FIRST)
    link.symlink_to(f"/usr/local/bin/{OUR_NAME}")
    node.restart_containerd()  # it remembers where it found a shim
    yield
    link.unlink()
    node.restart_containerd()


def test_under_the_stock_runtimes_name_a_client_names_the_directory_and_the_end(node, first_on_path, directory):
    """`ctr` passes on where the snapshot goes, and that the container ends, for this name only."""
    before = run(node, "one", "counter", "mapped", runtime=STOCK)
    node.ctr("tasks", "checkpoint", "--image-path", directory, "one")
    goes_on(node, "one", before)
    assert node.path(f"{directory}/fermata.json").exists()
    node.exec(["rm", "-r", directory])
    node.ctr("tasks", "checkpoint", "--exit", "--image-path", directory, "one")
    wait_for(lambda: status(node, "one") in ("STOPPED", None), "the container's end")
    remove(node, "one")
    restore(node, "two", directory, runtime=STOCK)
    goes_on(node, "two", before)
    remove(node, "two")


def test_a_container_named_by_path_is_snapshotted_too(node, directory):
    by_path = f"/usr/local/bin/{OUR_NAME}"
    before = run(node, "one", "mapped", runtime=by_path)
    Shim(node, "one").checkpoint(directory)
    remove(node, "one")
    restore(node, "two", directory, runtime=by_path)
    goes_on(node, "two", before)
    remove(node, "two")


def test_two_snapshots_of_one_container_at_once_are_two_or_a_refusal(node):
    before = run(node, "one", "counter")
    shim, said = Shim(node, "one"), []

    def take(number):
        try:
            shim.checkpoint(f"/srv/at-once/{number}")
            said.append(None)
        except CallFailed as error:
            said.append(str(error))

    taking = [threading.Thread(target=take, args=(number,)) for number in range(2)]
    for thread in taking:
        thread.start()
    for thread in taking:
        thread.join()
    assert None in said
    for error in said:
        assert error is None or "a snapshot of one is being taken already" in error
    goes_on(node, "one", before)
    finished = [path.parent.name for path in node.path("/srv/at-once").glob("*/fermata.json")]
    assert len(finished) == said.count(None)
    node.exec(["rm", "-r", "/srv/at-once"])
    remove(node, "one")
