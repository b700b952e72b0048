"""Several things at once with one container or one directory: one of them wins, the others get a clear sentence, and
nobody waits for ever.

A take is stopped at its end, while CRIU holds the processes and the layer is about to be written; a restore at its
beginning, while CRIU has made no process yet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from node.containers import CTR, IMAGE, OURS, pid, remove, start, status, wait_for
from node.leftovers import clear, leftovers
from node.shims import CallFailed, Shim, daemons
from shim import task
from shim.errors import ShimError
from tests.node.test_faults import TICK, Stages, restoring, ticks

torture = pytest.mark.skipif("FERMATA_TORTURE" not in os.environ, reason="only in make torture")

# Writes down each SIGTERM that it gets, and goes on.
DEAF = (
    """
import os, signal
signal.signal(signal.SIGTERM, lambda *given: os.close(os.open("/told", os.O_WRONLY | os.O_CREAT | os.O_EXCL)))
"""
    + TICK
)


@pytest.fixture
def stages(node):
    made = Stages(node)
    yield made
    made.go_on()
    node.exec(["rm", "-rf", "/srv/stages", "/srv/taken", "/srv/again"])


@pytest.fixture
def takes(node, stages):
    """A container whose take stops where CRIU holds it."""
    hook = node.path("/usr/local/lib/fermata/shim/hook.sh")
    text = hook.read_text()
    hook.write_text(text.replace("#!/bin/sh\n", "#!/bin/sh\n/srv/stages/script\n", 1))
    start(node, "one", "python3", "-c", DEAF)
    wait_for(lambda: ticks(node, "one"), "the container to run")
    stages.stop_at("post-dump")
    yield stages
    hook.write_text(text)


@pytest.fixture
def restores(node, stages):
    """A snapshot at /srv/taken whose restore stops at its beginning."""
    start(node, "source", "python3", "-c", TICK)
    wait_for(lambda: ticks(node, "source"), "the source to run")
    Shim(node, "source").checkpoint("/srv/taken")
    remove(node, "source")
    config = node.path("/etc/fermata/config.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text('[criu.options]\naction-script = "/srv/stages/script"\n')
    stages.stop_at("pre-restore")
    yield stages
    config.unlink()


class Taking:
    """A take under way; `end` waits for it and says what it was refused with, or None."""

    def __init__(self, node, name="one", directory="/srv/taken", *, leave_running=True):
        self.shim = Shim(node, name)
        self.said = None

        def take():
            try:
                self.shim.checkpoint(directory, leave_running=leave_running, timeout=60)
            except (CallFailed, ShimError) as error:
                self.said = str(error)

        self.thread = threading.Thread(target=take)
        self.thread.start()

    def end(self):
        self.thread.join(40)
        assert not self.thread.is_alive(), "the take hangs"
        return self.said


def finished(node, directory="/srv/taken"):
    return node.path(f"{directory}/fermata.json").exists()


def calling(node, *words):
    """ctr, which waits."""
    return node.popen([*CTR, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


# Takes ---------------------------------------------------------------------------------------------------------------


def test_of_two_takes_of_a_container_one_is_refused(node, takes):
    first = Taking(node)
    takes.wait()
    sentence = "^a snapshot of one is being taken already: wait for it, then try again$"
    with pytest.raises(CallFailed, match=sentence):
        Shim(node, "one").checkpoint("/srv/again", timeout=20)
    with pytest.raises(CallFailed, match=sentence):
        Shim(node, "one").checkpoint("/srv/taken", timeout=20)
    takes.go_on()
    assert first.end() is None
    assert finished(node)
    assert not node.path("/srv/again").exists()
    assert ticks(node, "one")
    Shim(node, "one").checkpoint("/srv/again")


def test_of_two_takes_into_a_directory_one_is_refused(node, takes):
    first = Taking(node)
    takes.wait()
    start(node, "two", "python3", "-c", TICK)
    with pytest.raises(CallFailed, match=r"^another snapshot is being written into /srv/taken: name a new one$"):
        Shim(node, "two").checkpoint("/srv/taken", timeout=20)
    takes.go_on()
    assert first.end() is None
    assert finished(node)
    with pytest.raises(CallFailed, match=r"^snapshot directory /srv/taken is not empty: name a new one$"):
        Shim(node, "two").checkpoint("/srv/taken", timeout=20)
    assert ticks(node, "one")
    assert ticks(node, "two")


@torture
@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("stage", ["pre-dump", "network-lock", "post-dump"])
def test_a_signal_in_a_take_reaches_the_program_after_it(node, takes, stage, leave):
    """Where the take ends the container, the signal comes too late for it, and is not in the snapshot."""
    takes.stop_at(stage)
    told = Path(f"/proc/{pid(node, 'one')}/root/told")
    first = Taking(node, leave_running=leave)
    takes.wait()
    terminating = calling(node, "tasks", "kill", "--signal", "SIGTERM", "one")
    takes.go_on()
    assert first.end() is None
    terminating.wait(20)
    if leave:
        wait_for(told.exists, "the signal")
        assert ticks(node, "one")
    else:
        wait_for(lambda: status(node, "one") == "STOPPED", "the end")
    client = restoring(node)
    assert client.wait(30) == 0, client.stdout.read()
    assert ticks(node, "two")


@torture
@pytest.mark.parametrize("leave", [True, False])
def test_a_container_that_is_deleted_in_a_take_is_gone_after_it(node, takes, leave):
    first = Taking(node, leave_running=leave)
    takes.wait()
    deleting = calling(node, "tasks", "delete", "--force", "one")
    takes.go_on()
    first.end()
    assert deleting.wait(30) == 0, deleting.stdout.read()
    assert status(node, "one") is None
    node.ctr("containers", "delete", "one")
    assert leftovers(node) == []
    if finished(node):
        client = restoring(node)
        assert client.wait(30) == 0, client.stdout.read()
        assert ticks(node, "two")


@torture
@pytest.mark.parametrize("leave", [True, False])
def test_a_program_that_is_killed_in_a_take_ends_and_is_reported(node, takes, leave):
    """By somebody who does not ask containerd, such as the kernel for want of memory."""
    program = pid(node, "one")
    assert program > 1
    first = Taking(node, leave_running=leave)
    takes.wait()
    os.kill(program, signal.SIGKILL)
    takes.go_on()
    said = first.end()
    assert said is None or said.startswith("snapshot of one failed: "), said
    assert finished(node) == (said is None)
    wait_for(lambda: status(node, "one") == "STOPPED", "the end")
    remove(node, "one")
    assert leftovers(node) == []


@torture
def test_a_client_that_pauses_and_resumes_in_a_take_is_served_after_it(node, takes):
    first = Taking(node)
    takes.wait()
    pausing = calling(node, "tasks", "pause", "one")
    takes.go_on()
    assert first.end() is None
    assert pausing.wait(20) == 0, pausing.stdout.read()
    assert status(node, "one") == "PAUSED"
    assert finished(node)
    takes.stop_at("post-dump")
    second = Taking(node, directory="/srv/again")
    takes.wait()
    resuming = calling(node, "tasks", "resume", "one")
    takes.go_on()
    assert second.end() is None
    assert resuming.wait(20) == 0, resuming.stdout.read()
    wait_for(lambda: status(node, "one") == "RUNNING", "the container to go on")
    assert ticks(node, "one")


@torture
def test_a_client_that_goes_away_in_a_take_leaves_a_snapshot_and_a_container_that_runs(node, takes):
    shim = Shim(node, "one")
    client = shim.connect()
    version = "v3" if node.containerd_version() >= (2,) else "v2"
    request = task.CheckpointTaskRequest(id="one", path="/srv/taken").encode()
    asking = threading.Thread(target=lambda: answer(client, f"containerd.task.{version}.Task", request))
    asking.start()
    takes.wait()
    client._sock.shutdown(2)
    asking.join(20)
    takes.go_on()
    wait_for(lambda: finished(node), "the snapshot")
    wait_for(lambda: ticks(node, "one"), "the container to go on")
    Shim(node, "one").checkpoint("/srv/again")
    assert daemons(node) == [shim.pid]


def answer(client, service, request):
    try:
        client.call(service, "Checkpoint", request)
    except ShimError:
        client.close()


# Restores ------------------------------------------------------------------------------------------------------------


@torture
def test_a_second_container_of_the_same_id_is_refused_and_does_not_harm_the_restore(node, restores):
    first = restoring(node)
    restores.wait()
    second = restoring(node)
    said = second.communicate(timeout=20)[0].decode()
    assert second.returncode != 0
    assert "already exists" in said
    restores.go_on()
    assert first.wait(30) == 0, first.stdout.read()
    assert ticks(node, "two")


@torture
def test_two_restores_of_a_snapshot_at_once_are_two_containers(node, restores):
    first, second = restoring(node), restoring(node, "three")
    restores.wait()
    restores.go_on()
    for client in (first, second):
        assert client.wait(30) == 0, client.stdout.read()
    assert ticks(node, "two")
    assert ticks(node, "three")


@torture
def test_a_container_that_is_deleted_in_its_restore_is_gone(node, restores):
    client = restoring(node)
    restores.wait()
    deleting = calling(node, "tasks", "delete", "--force", "two")
    assert client.wait(30) != 0
    deleting.wait(30)
    restores.go_on()
    wait_for(lambda: status(node, "two") is None, "the container to go")
    clear(node)
    assert leftovers(node) == []
    again = restoring(node)
    assert again.wait(30) == 0, again.stdout.read()
    assert ticks(node, "two")


@torture
def test_the_record_of_a_container_cannot_be_deleted_in_its_restore(node, restores):
    client = restoring(node)
    restores.wait()
    said = calling(node, "containers", "delete", "two").communicate(timeout=30)[0].decode()
    assert "cannot delete a non stopped container" in said
    restores.go_on()
    assert client.wait(30) == 0, client.stdout.read()
    assert ticks(node, "two")


@torture
def test_a_snapshot_that_vanishes_in_its_restore_is_a_failed_restore_and_no_more(node, restores):
    client = restoring(node)
    restores.wait()
    node.exec(["mv", "/srv/taken", "/srv/away"])
    restores.go_on()
    said = client.communicate(timeout=40)[0].decode()
    node.exec(["mv", "/srv/away", "/srv/taken"])
    assert client.returncode == 0 or "restore of /srv/taken failed: " in said
    assert ticks(node, "two") == (client.returncode == 0)
    clear(node)
    assert leftovers(node) == []
    again = node.ctr(
        "run", "-d", "--runtime", OURS, "--annotation", "fermata/restore-from=/srv/taken", IMAGE, "two", "true"
    )
    assert again.returncode == 0
    assert ticks(node, "two")
