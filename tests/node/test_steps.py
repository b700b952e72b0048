"""A fault at every step of the code of a take and of a restore, listed from the code itself (`tests/node/points.py`).

Where a step fails (no space, no descriptor) the take or restore fails with a sentence, or goes on without what is not
needed. Where the daemon dies, all is cleaned up after. Never is a container lost with its snapshot, nothing is left, no
call hangs, and the same works the next time. `make torture` meets all of the steps, half of them on each of the two
stacks; `make test` sees that there is none which it would not meet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time

import pytest

from node.containers import CTR, IMAGE, OURS, remove, start, status, wait_for
from node.leftovers import clear, leftovers
from node.shims import CallFailed, Shim
from shim.errors import ShimError
from tests.node.points import Points, named, steps, touches
from tests.node.test_faults import TICK, ticks
from tests.node.test_places import mounted

torture = pytest.mark.skipif("FERMATA_TORTURE" not in os.environ, reason="only in make torture")
TAKEN, AGAIN = "/srv/taken", "/srv/again"

# Steps that no test here comes to, and where they are met: by words of theirs.
ELSEWHERE = (
    "_copy_logs",  # the CRI plugin's work path: test_cri.py
    "full",  # layers by comparison: test_round_trip.py
    "join_cgroups",  # test_lifecycle.py, in the pod's control group
    "return self.forward(call)",  # of containers that are not there: test_lifecycle.py
    "gpu",  # tests/gpu
    "move_gpu_state",
    "container.replaced",  # below
    "container.images.close()",  # with a user namespace: test_guest_kinds.py
    "self._give_weights(",  # test_guest_faults.py
    "self._check_weights(",
    "host file",  # hostfiles: test_network.py
    "killed",  # a CRIU that dies: test_faults.py
    "detach_below",
    "unmounted",
    "kept {when}",  # a sweep that fails: tests/unit/shim/test_lockrules.py
    "made_by_runc",
    "raise_loopback",  # a namespace of runc's own: test_network.py
    "reset the connection",
)


@pytest.fixture(scope="module")
def stopping(running_node):
    made = Points(running_node)
    yield made
    made.close()


@pytest.fixture
def points(node, stopping):
    stopping.renew()
    yield stopping
    stopping.go_on()
    node.exec(["rm", "-rf", TAKEN, AGAIN])


def begin(node, name="one"):
    start(node, name, "python3", "-c", TICK)
    wait_for(lambda: ticks(node, name), "the container to run")


def take(node, directory=TAKEN, *, leave_running=True, name="one"):
    """What it was refused with; None when it succeeded."""
    try:
        Shim(node, name).checkpoint(directory, leave_running=leave_running, timeout=40)
    except (CallFailed, ShimError) as error:
        return str(error)
    return None


def restore(node, name="two", *options, source=TAKEN):
    words = ("--runtime", OURS, "--annotation", f"fermata/restore-from={source}", *options)
    return node.ctr("run", "--detach", *words, IMAGE, name, "true", check=False, timeout=60)


def goes_on(node, name):
    return status(node, name) == "RUNNING" and ticks(node, name)


def files(node, directory=TAKEN):
    path = node.path(directory)
    return [found.name for found in path.iterdir()] if path.exists() else []


def descriptors(node):
    return len(os.listdir(f"/proc/{Shim(node, 'one').pid}/fd"))


def half(node, found):
    return found[1 if node.stack == "sid" else 0 :: 2]


# Which steps there are -----------------------------------------------------------------------------------------------


def test_every_step_of_the_code_is_met_here(node, points):
    """Else a fault at it would be tried by nobody: have a test come to it, or say above who does."""
    begin(node)
    assert take(node) is None
    assert take(node, AGAIN) is None
    seen = set(points.seen())
    points.plan(named("take.Take._layer_of", "layerwriter.write("), "fail")
    assert "No space left" in take(node, "/srv/third")
    seen.update(points.seen())
    points.plan(named("take._Hook._answer", "sendall("), "fail")
    assert "CRIU: Script" in take(node, "/srv/third")
    seen.update(points.seen())
    config = node.path("/srv/criu.conf")
    config.write_text("verbosity 4\n")
    done = restore(node, "two", "--annotation", "org.criu.config=/srv/criu.conf")
    assert done.returncode == 0, done.stderr
    node.exec(["rm", f"{AGAIN}/pages-1.img"])
    words = ("--annotation", f"fermata/restore-from={AGAIN}", "--annotation", "fermata/check=warn")
    done = node.ctr("run", "--detach", "--null-io", "--runtime", OURS, *words, IMAGE, "three", "true", check=False)
    assert "CRIU" in done.stderr
    config.unlink()
    assert node.ctr("run", "--runtime", OURS, IMAGE, "four", "/none", check=False).returncode == 1
    assert take(node, "/srv/third", leave_running=False) is None
    node.exec(["rm", "-r", "/srv/third"])
    seen.update(points.seen())
    missed = [step for step in steps() if step not in seen and not any(word in step for word in ELSEWHERE)]
    assert missed == [], "\n".join(missed)


# A step fails --------------------------------------------------------------------------------------------------------


@torture
def test_a_step_of_a_take_that_fails_costs_no_more_than_the_take(node, points):
    begin(node)
    assert take(node) is None
    points.seen()
    assert take(node, AGAIN) is None
    met = [step for step in points.seen() if touches(step)]
    held = descriptors(node)
    for step in half(node, met):
        node.exec(["rm", "-rf", AGAIN])
        points.plan(step, "fail")
        said = take(node, AGAIN)
        assert points.reached, step
        assert (said is None) == ("fermata.json" in files(node, AGAIN)), (step, said)
        assert said is None or "fault in fermata" not in said, (step, said)
        assert said is not None or files(node, AGAIN), step
        assert goes_on(node, "one"), (step, said)
    assert list(node.path("/run/fermata").glob("hook-*")) == []
    points.go_on()
    node.exec(["rm", "-rf", AGAIN])
    assert take(node, AGAIN) is None
    assert descriptors(node) <= held


@torture
def test_a_step_that_fails_never_costs_a_container_and_its_snapshot(node, points):
    """A take that ends the container: either it goes on, or it has ended and its snapshot is there."""
    begin(node)
    points.seen()
    assert take(node, leave_running=False) is None
    remove(node, "one")
    met = [step for step in points.seen() if touches(step)]
    after = met[next(at for at, step in enumerate(met) if step.startswith("take._Hook._answer")) :]
    begin(node)
    for step in half(node, after):
        node.exec(["rm", "-rf", TAKEN])
        points.plan(step, "fail")
        said = take(node, leave_running=False)
        assert said is None or "fault in fermata" not in said, (step, said)
        if not goes_on(node, "one"):
            assert "fermata.json" in files(node), (step, said, files(node))
            points.go_on()
            remove(node, "one")
            done = restore(node)
            assert done.returncode == 0, (step, done.stderr)
            assert ticks(node, "two"), step
            remove(node, "two")
            begin(node)
        else:
            assert said is not None, step
            assert files(node) == [], step


@torture
def test_a_step_of_a_restore_that_fails_leaves_nothing(node, points):
    begin(node)
    assert take(node) is None
    remove(node, "one")
    points.seen()
    assert restore(node).returncode == 0
    met = [step for step in points.seen() if touches(step)]
    remove(node, "two")
    for step in half(node, met):
        points.plan(step, "fail")
        done = restore(node)
        assert points.reached, step
        assert "fault in fermata" not in done.stderr, (step, done.stderr)
        # Where the client is told of a failure, no container goes on all the same.
        assert (done.returncode == 0) == goes_on(node, "two"), (step, done.stderr)
        points.go_on()
        clear(node)
        assert leftovers(node) == [], step
    assert restore(node).returncode == 0
    assert ticks(node, "two")


# The daemon dies -----------------------------------------------------------------------------------------------------


@torture
@pytest.mark.parametrize("leave", [True, False])
def test_the_daemon_dies_at_a_step_of_a_take(node, points, leave):
    begin(node)
    points.seen()
    assert take(node, AGAIN, leave_running=leave) is None
    remove(node, "one")
    for step in half(node, points.seen()[leave::2]):
        if step.startswith(("snapshot.SnapshotShim.create", "snapshot.SnapshotShim.start", "criu.")):
            continue  # those of the container's own start; and the configuration is written before anything is done
        node.exec(["rm", "-rf", AGAIN])
        begin(node)
        points.plan(step, "die")
        assert take(node, AGAIN, leave_running=leave) is not None, step
        assert points.reached, step
        wait_for(lambda: status(node, "one") is None, "the container to be given up")
        node.ctr("containers", "delete", "one")
        assert leftovers(node) == [], step
        assert list(node.path("/run/fermata").glob("hook-*")) == [], step
        points.go_on()
        if "fermata.json" in files(node, AGAIN):  # then it is whole
            node.exec(["mv", AGAIN, TAKEN])
            done = restore(node)
            assert done.returncode == 0, (step, done.stderr)
            assert ticks(node, "two"), step
            remove(node, "two")
            node.exec(["rm", "-r", TAKEN])


@torture
def test_the_daemon_dies_at_a_step_of_a_restore(node, points):
    begin(node)
    assert take(node) is None
    remove(node, "one")
    points.seen()
    assert restore(node).returncode == 0
    remove(node, "two")
    for step in half(node, points.seen()):
        points.plan(step, "die")
        done = restore(node)
        assert points.reached, step
        assert done.returncode != 0 or status(node, "two") in (None, "UNKNOWN"), step
        points.go_on()
        wait_for(lambda: status(node, "two") is None, "the container to be given up")
        clear(node)
        assert leftovers(node) == [], step
        done = restore(node)
        assert done.returncode == 0, (step, done.stderr)
        assert ticks(node, "two"), step
        remove(node, "two")


UPPERS = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots"


@torture
def test_a_restore_that_dies_gives_back_the_files_that_it_was_to_replace(node, points):
    """`ctr c restore --rw` has put files there before; the directory that they are in is put aside until the end."""
    begin(node)
    node.ctr("images", "delete", "snapshot/one:1", check=False)  # of a run that failed
    node.ctr("containers", "checkpoint", "--task", "--rw", "one", "snapshot/one:1")
    remove(node, "one")
    points.plan(named("restore.apply_layer", "layerwriter.apply("), "wait")
    command = [*CTR, "containers", "restore", "--rw", "--live", "two", "snapshot/one:1"]
    client = node.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: points.reached, "the restore to come to the layer")
    upper = max(node.path(UPPERS).glob("*/fs"), key=lambda path: int(path.parent.name))
    (upper / "former").write_text("kept")
    points.plan(named("snapshot.SnapshotShim._restore", "self.forward(call)"), "die")
    assert client.wait(40) != 0
    assert points.reached
    points.go_on()
    wait_for(lambda: status(node, "two") is None, "the container to be given up")
    assert leftovers(node) == []
    assert (upper / "former").read_text() == "kept"
    assert sorted(path.name for path in upper.parent.iterdir()) == ["fs", "work"]
    node.ctr("containers", "delete", "two")
    node.ctr("images", "delete", "snapshot/one:1")


# The client waits no more --------------------------------------------------------------------------------------------


def test_a_client_whose_time_is_over_costs_no_more_than_the_take(node, points):
    """CRIU is not let go on then: the container would end, and its snapshot be nobody's."""
    begin(node)
    shim, failed = Shim(node, "one"), []
    points.plan(named("take.Take._while_held", "self.steps['layer']"), "wait")
    limit = 0.5

    def taking():
        try:
            shim.checkpoint(TAKEN, leave_running=False, timeout=limit)
        except (CallFailed, ShimError) as error:
            failed.append(str(error))

    began = time.monotonic()
    thread = threading.Thread(target=taking)
    thread.start()
    wait_for(lambda: points.reached and time.monotonic() - began > limit * 2, "the layer")
    points.go_on()
    thread.join(30)
    (said,) = failed
    assert said.startswith("snapshot of one failed: the client's time limit passed")
    assert ticks(node, "one")
    assert files(node) == []
    assert take(node, leave_running=False) is None


# The clock -----------------------------------------------------------------------------------------------------------


@torture
def test_a_clock_that_is_set_forth_and_back_harms_nothing(node, points):
    """The machine's own clock is everybody's: what is set here is what a shim reads of it."""
    with points.unsteady_clock():
        begin(node)
        for number in range(12):  # more than there are logs kept of
            assert take(node, f"{AGAIN}/{number}") is None
            assert ticks(node, "one")
        assert take(node) is None
        done = restore(node)
    assert done.returncode == 0, done.stderr
    assert ticks(node, "two")
    logs = [path.name for path in node.path("/var/log/fermata/default/one").iterdir()]
    assert len({name[:8] for name in logs}) > 1, "the clock was not set"
    taken = json.loads((node.path(TAKEN) / "fermata.json").read_text())
    kept = node.path("/var/log/fermata/default/two").glob("*-restore/restore.json")
    restored = json.loads(max(kept, key=lambda path: path.stat().st_mtime).read_text())
    for seconds in (*taken["steps"].values(), *restored["steps"].values()):
        assert 0 <= seconds < 100


# Power loss ----------------------------------------------------------------------------------------------------------


@torture
def test_after_a_power_loss_a_snapshot_is_whole_or_none(node, points, tmp_path):
    """What a disk has been given by a moment is what it has after a power loss then: a file behind a loop device, which
    is copied while the take waits."""
    begin(node)
    file, moments = tmp_path / "disk", {}
    steps_of_it = {"before its name": "os.rename(", "with its name": "_sync("}
    with mounted(node, "xfs", file) as place:
        for moment, words in steps_of_it.items():
            points.plan(named("manifest.publish", words), "wait")
            thread = threading.Thread(target=take, args=(node, f"{place}/{moment[:4]}"))
            thread.start()
            wait_for(lambda: points.reached, "the step")
            moments[moment] = shutil.copyfile(file, tmp_path / moment)
            points.go_on()
            thread.join(40)
        moments["at the end"] = shutil.copyfile(file, tmp_path / "at the end")
    found = {}
    for moment, copy in moments.items():
        with mounted(node, "xfs", copy) as place:
            for directory in node.path(place).iterdir():
                named_so = (directory / "fermata.json").exists()
                found.setdefault(directory.name, []).append(named_so)
                if named_so:
                    done = restore(node, "two", source=f"{place}/{directory.name}")
                    assert done.returncode == 0, (moment, directory.name, done.stderr)
                    assert ticks(node, "two")
                    remove(node, "two")
    assert found["befo"] == [False, True, True]
    assert found["with"][-1]
