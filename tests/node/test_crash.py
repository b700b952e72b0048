"""containerd, our daemon or the stock shim die, and the container's life goes on or ends cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from node.containers import CTR, OURS, STOCK, pid, remove, start, status, wait_for
from node.leftovers import leftovers
from node.node import SOCKET
from node.shims import OUR_NAME, STOCK_NAME, Shim, bundle, daemons, recorded_address, serving
from shim import task
from shim.errors import ShimError
from shim.wire import Message

TICK = "import time\nwhile True: print(time.monotonic_ns(), flush=True); time.sleep(0.01)"


def gone(process):
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(process):
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: gone(process), f"the end of {process}")


def left(node):
    """What is left, but for the process that listens to events."""
    until = time.monotonic() + 5
    while True:
        found = [line for line in leftovers(node, wait=0) if not line.endswith(" events")]
        if not found or time.monotonic() > until:
            return found


class DeleteResponse(Message):
    """What the action `delete` prints."""

    FIELDS = {1: ("pid", int), 2: ("exit_status", int)}


# containerd restarted -----------------------------------------------------------------------------------------------


@pytest.fixture
def tick(node):
    log = node.path("/srv/tick.log")
    yield log
    log.unlink(missing_ok=True)


@pytest.mark.parametrize("killed", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_a_container_outlives_containerd_and_is_controlled_and_snapshotted_by_the_next(node, tick, killed):
    start(node, "one", "python3", "-c", TICK, options=["--log-uri", "file:///srv/tick.log"])
    start(node, "ended")
    start(node, "ended-stock", runtime=STOCK)
    ends = [pid(node, name) for name in ("ended", "ended-stock")]
    node.stop_containerd(kill=killed)
    for end in ends:
        os.kill(end, signal.SIGKILL)
    size = tick.stat().st_size
    wait_for(lambda: tick.stat().st_size > size, "the container to go on alone")
    node.start_containerd()
    assert status(node, "one") == "RUNNING"
    # What ended meanwhile is dealt with as under the stock runtime.
    assert status(node, "ended") == status(node, "ended-stock")
    remove(node, "ended")
    remove(node, "ended-stock")

    assert serving(node, Path(recorded_address(node, "one")).name) in daemons(node)
    assert node.ctr("tasks", "exec", "--exec-id", "more", "one", "sh", "-c", "exit 7", check=False).returncode == 7
    node.ctr("containers", "checkpoint", "--task", "one", "after-restart")
    # Through us: the stock shim alone would have made no layer.
    dumps = [path.name for path in node.path("/var/log/fermata/default/one").iterdir() if path.name.endswith("-dump")]
    assert dumps
    node.ctr("images", "remove", "after-restart")
    node.ctr("tasks", "kill", "--signal", "SIGKILL", "one")
    wait_for(lambda: status(node, "one") == "STOPPED", "the container's end")
    remove(node, "one")


# Our daemon killed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", ["ours", "stock", "both"])
@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_shim_killed_leaves_nothing_of_its_container(node, events, victims, paused):
    start(node, "one", "sh", "-c", "sleep 1000 & sleep 1000")
    processes = wait_for(lambda: (found := container_processes(node, "one"))[1:] and found, "its processes")
    if paused:
        node.ctr("tasks", "pause", "one")
    killed = {"ours": daemons(node), "stock": daemons(node, STOCK_NAME)}
    for victim in [*killed["ours"], *killed["stock"]] if victims == "both" else killed[victims]:
        with contextlib.suppress(ProcessLookupError):  # the clean-up after the first may have killed the second
            os.kill(victim, signal.SIGKILL)
    events.wait("one", "/tasks/exit")
    assert [fields["exit_status"] for topic, fields in events.of("one") if topic == "/tasks/exit"] == [137]
    # By containerd alone: nobody has deleted anything yet.
    assert left(node) == []
    assert all(gone(process) for process in processes)
    # And the container can be started again.
    assert node.ctr("tasks", "start", "--detach", "one").returncode == 0
    assert status(node, "one") == "RUNNING"


def container_processes(node, name):
    return [int(line.split()[0]) for line in node.ctr("tasks", "ps", name).stdout.splitlines()[1:]]


def test_a_client_that_waits_for_a_container_hears_of_its_shims_death(node, image):
    running = node.popen([*CTR, "run", "--rm", "--runtime", OURS, image, "one", "sleep", "1000"])
    wait_for(lambda: status(node, "one") == "RUNNING", "the container")
    kill(*daemons(node))
    assert running.wait(30) != 0
    assert left(node) == []


def test_the_shim_of_a_pod_killed_leaves_nothing_of_all_its_containers(node, events):
    names = ("pod", "two", "three")
    for name in names:
        start(node, name, options=["--annotation", "io.kubernetes.cri.sandbox-id=pod"])
    start(node, "apart")
    (victim,) = {Shim(node, name).pid for name in names}
    before = Shim(node, "apart").pid
    kill(victim)
    for name in names:
        events.wait(name, "/tasks/exit")
    wait_for(lambda: daemons(node) == [before] and len(daemons(node, STOCK_NAME)) == 1, "the pod's shims to end")
    assert status(node, "apart") == "RUNNING"
    remove(node, "apart")
    assert left(node) == []


def test_a_daemon_that_died_while_containerd_was_down_is_cleaned_up_after(node):
    start(node, "one")
    node.stop_containerd(kill=True)
    kill(*daemons(node))
    node.start_containerd()
    assert left(node) == []
    assert status(node, "one") is None


def test_a_daemon_killed_during_a_snapshot_leaves_nothing_and_no_snapshot(node):
    # A layer that takes a while to write, so that the daemon is met at it.
    write = "open('/big', 'wb').write(bytes(1 << 30)); open('/done', 'w'); import time; time.sleep(1000)"
    start(node, "one", "python3", "-c", write)
    wait_for(lambda: node.ctr("tasks", "exec", "--exec-id", "a", "one", "cat", "/done", check=False)[0] == 0, "a file")
    shim, failed = Shim(node, "one"), []

    def take():
        try:
            shim.checkpoint("/srv/snapshot")
        except Exception as error:
            failed.append(error)

    daemon = shim.pid
    taking = threading.Thread(target=take)
    taking.start()
    wait_for(lambda: list(node.path("/srv/snapshot").glob("*layer.tar*")), "the layer to be written")
    os.kill(daemon, signal.SIGKILL)
    taking.join()
    assert failed
    assert left(node) == []
    assert not node.path("/srv/snapshot/fermata.json").exists()
    assert list(node.path("/run/fermata").glob("hook-*")) == []
    node.exec(["rm", "-r", "/srv/snapshot"])


# By hand ------------------------------------------------------------------------------------------------------------


def action(node, name, word):
    flags = ["-namespace", "default", "-address", SOCKET, "-publish-binary", "/usr/bin/containerd", "-id", name]
    command = ["sh", "-c", 'cd "$1"; shift; exec "$@"', "sh", bundle(name), f"/usr/local/bin/{OUR_NAME}"]
    with node.popen([*command, *flags, "-bundle", bundle(name), word], stdout=subprocess.PIPE) as process:
        out = process.stdout.read()
    return process.returncode, out


def test_delete_by_hand_needs_no_daemon_and_works_twice(node):
    start(node, "one")
    first = pid(node, "one")
    node.stop_containerd(kill=True)
    kill(*daemons(node))
    code, out = action(node, "one", "delete")
    assert code == 0
    answer = DeleteResponse.decode(out)
    assert (answer.pid, answer.exit_status) == (first, 137)
    assert gone(first)
    assert daemons(node, STOCK_NAME) == []
    assert not node.path("/run/fermata/default").exists()
    assert list(node.path("/run/netns").iterdir()) == []
    assert action(node, "one", "delete")[0] == 0


def test_what_runc_does_by_hand_is_seen(node):
    runc = ["runc", "--root", "/run/containerd/runc/default"]
    start(node, "one")
    node.exec([*runc, "kill", "one", "KILL"])
    wait_for(lambda: status(node, "one") == "STOPPED", "the container's end")
    node.exec([*runc, "delete", "--force", "one"])
    assert "exit code 137" in node.ctr("tasks", "delete", "one").stderr
    node.ctr("containers", "delete", "one")
    assert left(node) == []


def test_calls_end_when_the_stock_shim_does(node):
    start(node, "one")
    version = 3 if node.containerd_version() >= (2,) else 2
    with Shim(node, "one").connect() as client:
        ended = []

        def wait():
            try:
                ended.append(
                    client.call(f"containerd.task.v{version}.Task", "Wait", task.ExecRequest(id="one").encode())
                )
            except ShimError as error:
                ended.append(error)

        call = threading.Thread(target=wait)
        call.start()
        kill(*daemons(node, STOCK_NAME))
        call.join(20)
    assert "went away" in str(ended)
    assert left(node) == []
