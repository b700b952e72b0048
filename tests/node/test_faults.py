"""Whatever is killed, and whoever goes away, at whatever step of a take or a restore: the container is as it was or
cleanly gone, nothing is left, no call hangs, and the same is done again without a fault.

The steps are those at which CRIU runs an action script; a test fails when there is one that is not met here.
`make test` meets some of them, `make torture` every step with every victim.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from node.containers import CTR, IMAGE, OURS, pid, remove, start, status, wait_for
from node.leftovers import clear, leftovers
from node.shims import STOCK_NAME, CallFailed, Shim, daemons, processes
from shim.errors import ShimError

TICK = """
import os, time
while True:
    with open("/tick.new", "w") as file: file.write(str(time.monotonic_ns()))
    os.rename("/tick.new", "/tick")
    time.sleep(0.02)
"""
# Stops CRIU at the step that /srv/stage names, for as long as it does.
STAGE = """#!/bin/sh
echo "$CRTOOLS_SCRIPT_ACTION" >>/srv/stages/seen
[ "$CRTOOLS_SCRIPT_ACTION" = "$(cat /srv/stages/stop 2>/dev/null)" ] || exit 0
touch /srv/stages/reached
while [ -e /srv/stages/stop ]; do sleep 0.02; done
"""
TORTURE = "FERMATA_TORTURE" in os.environ

OF_A_TAKE = ("pre-dump", "network-lock", "post-dump", "network-unlock")
OF_A_RESTORE = (
    *("pre-restore", "setup-namespaces", "post-setup-namespaces", "post-restore"),
    *("network-unlock", "pre-resume", "post-resume"),
)
VICTIMS = ("ours", "stock", "runc", "criu", "script", "containerd")

# Both shims' death ends the container. Otherwise it goes on, and the take has failed unless only containerd went.
SOME_TAKES = [
    ("pre-dump", "stock", True),
    ("post-dump", "criu", False),
    ("post-dump", "containerd", True),
]
SOME_RESTORES = [
    ("pre-restore", "stock"),
    ("pre-restore", "runc"),
    ("post-setup-namespaces", "ours"),
]
TAKES = [
    (stage, victim, leave)
    for stage in OF_A_TAKE
    for victim in VICTIMS
    for leave in (True, False)
    if leave or stage != "network-unlock"  # a dump that ends the container leaves the network locked
]
RESTORES = [(stage, victim) for stage in OF_A_RESTORE for victim in VICTIMS]


class Stages:
    """Where CRIU is stopped."""

    def __init__(self, node):
        self.node = node
        self.top = node.path("/srv/stages")
        self.top.mkdir(exist_ok=True)
        script = self.top / "script"
        script.write_text(STAGE)
        script.chmod(0o755)

    def stop_at(self, stage):
        (self.top / "reached").unlink(missing_ok=True)
        (self.top / "stop").write_text(stage)

    def wait(self):
        wait_for((self.top / "reached").exists, "CRIU to come to the step")

    def go_on(self):
        (self.top / "stop").unlink(missing_ok=True)

    @property
    def seen(self):
        return set((self.top / "seen").read_text().split())


@pytest.fixture
def stages(node):
    made = Stages(node)
    yield made
    made.go_on()
    node.exec(["rm", "-rf", "/srv/stages", "/srv/taken", "/srv/again"])


@pytest.fixture
def takes(node, stages):
    """The action script of a take also stops where it is told to."""
    hook = node.path("/usr/local/lib/fermata/shim/hook.sh")
    text = hook.read_text()
    hook.write_text(text.replace("#!/bin/sh\n", "#!/bin/sh\n/srv/stages/script\n", 1))
    yield stages
    hook.write_text(text)


@pytest.fixture
def restores(node, stages):
    """A snapshot at /srv/taken, and a configuration under which its restore stops where it is told to."""
    start(node, "source", "python3", "-c", TICK)
    wait_for(lambda: ticks(node, "source"), "the source to run")
    Shim(node, "source").checkpoint("/srv/taken")
    remove(node, "source")
    config = node.path("/etc/fermata/config.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text('[criu.options]\naction-script = "/srv/stages/script"\n')
    yield stages
    config.unlink()


def ticks(node, name):
    """Whether the container's program is seen to go on."""
    path = Path(f"/proc/{pid(node, name)}/root/tick")
    with contextlib.suppress(OSError):
        before = path.read_text()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            if path.read_text() != before:
                return True
            time.sleep(0.02)
    return False


def strike(node, victim):
    """Kill one or all of a kind."""
    if victim == "containerd":
        node.restart_containerd(kill=True)
        return
    if victim in ("ours", "stock"):
        victims = daemons(node) if victim == "ours" else daemons(node, STOCK_NAME)
    elif victim == "script":
        victims = [found.pid for found in processes(node) if "/srv/stages/script" in found.words]
    else:
        victims = [found.pid for found in processes(node) if called(found.pid) == victim]
    assert victims, f"there is no {victim}"
    for found in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)


def called(process):
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return None


def left(node):
    """What the removal of all containers leaves."""
    clear(node)
    return leftovers(node)


# A take ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "victim", "leave"), TAKES if TORTURE else SOME_TAKES)
def test_a_take_in_which_somebody_dies_costs_no_more_than_the_take(node, takes, stage, victim, leave):
    start(node, "one", "python3", "-c", TICK)
    wait_for(lambda: ticks(node, "one"), "the container to run")
    shim, failed = Shim(node, "one"), []

    def take():
        try:
            shim.checkpoint("/srv/taken", leave_running=leave, timeout=40)
        except (CallFailed, ShimError) as error:
            failed.append(str(error))

    takes.stop_at(stage)
    taking = threading.Thread(target=take)
    taking.start()
    takes.wait()
    strike(node, victim)
    takes.go_on()
    taking.join(20)
    assert not taking.is_alive(), "the take hangs"
    assert all("a fault in fermata itself" not in text for text in failed)
    finished = node.path("/srv/taken/fermata.json").exists()
    assert finished == (not failed)
    if victim in ("ours", "stock"):
        wait_for(lambda: status(node, "one") is None, "the container to be given up")
    elif leave or failed:
        assert status(node, "one") == "RUNNING"
        assert ticks(node, "one")
        Shim(node, "one").checkpoint("/srv/again")
    assert left(node) == []
    assert list(node.path("/run/fermata").glob("hook-*")) == []
    if victim in ("ours", "stock"):  # its name is free for another
        start(node, "one")
        Shim(node, "one").checkpoint("/srv/again")


def test_every_step_of_a_take_is_met_here(node, takes):
    start(node, "one")
    Shim(node, "one").checkpoint("/srv/taken")
    assert takes.seen == set(OF_A_TAKE)


# A restore ------------------------------------------------------------------------------------------------------------


def restoring(node, name="two"):
    """A client that restores."""
    options = ["--annotation", "fermata/restore-from=/srv/taken"]
    command = [*CTR, "run", "--detach", "--runtime", OURS, *options, IMAGE, name, "true"]
    return node.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def restores_again(node):
    """The same name, from the same snapshot, in a new container."""
    node.path("/etc/fermata/config.toml").write_text("")
    client = restoring(node)
    assert client.wait(30) == 0, client.stdout.read()
    assert ticks(node, "two")


@pytest.mark.parametrize(("stage", "victim"), RESTORES if TORTURE else SOME_RESTORES)
def test_a_restore_in_which_somebody_dies_leaves_nothing(node, restores, stage, victim):
    restores.stop_at(stage)
    client = restoring(node)
    restores.wait()
    strike(node, victim)
    restores.go_on()
    said = client.communicate(timeout=30)[0].decode()
    if client.returncode == 0:
        assert ticks(node, "two")
    assert "a fault in fermata itself" not in said
    wait_for(lambda: status(node, "two") in (None, "RUNNING", "CREATED", "STOPPED"), "containerd to be done with it")
    assert left(node) == []
    restores_again(node)


def test_a_container_whose_shims_died_in_its_restore_can_be_started_again(node, restores):
    """What the restore had brought of its files is gone, so that it is no container which has run before."""
    restores.stop_at("pre-restore")
    client = restoring(node)
    restores.wait()
    strike(node, "ours")
    assert client.wait(30) != 0
    restores.go_on()
    node.path("/etc/fermata/config.toml").write_text("")
    wait_for(lambda: status(node, "two") is None, "containerd to be done with it")
    wait_for(lambda: leftovers(node, wait=0) == [], "its clean-up")
    node.ctr("tasks", "start", "--detach", "two", timeout=30)
    assert ticks(node, "two")


def test_a_kill_ends_a_restore_that_does_not_end(node, restores):
    restores.stop_at("pre-restore")
    client = restoring(node)
    restores.wait()
    node.ctr("tasks", "kill", "--signal", "SIGKILL", "two", check=False, timeout=20)
    assert client.wait(20) != 0
    restores.go_on()
    assert left(node) == []
    restores_again(node)


def test_a_restore_that_does_not_end_is_ended_when_its_time_is_over(node, restores):
    config = node.path("/etc/fermata/config.toml")
    config.write_text(f"[criu]\nrestore_timeout = 1\n{config.read_text()}")
    restores.stop_at("pre-restore")
    client = restoring(node)
    said = client.communicate(timeout=30)[0].decode()
    assert "restore of /srv/taken failed: CRIU had not come to an end after 1 s ([criu] restore_timeout)" in said
    restores.go_on()
    assert left(node) == []
    restores_again(node)


@pytest.mark.parametrize("stage", OF_A_RESTORE if TORTURE else ["pre-restore"])
def test_a_client_that_goes_away_in_a_restore_leaves_a_container_that_answers(node, restores, stage):
    """Nobody is at the other end of its output any more when the stock shim opens it."""
    restores.stop_at(stage)
    client = restoring(node)
    restores.wait()
    client.kill()
    client.wait()
    restores.go_on()
    wait_for(lambda: status(node, "two") == "RUNNING", "the container", timeout=20)
    assert ticks(node, "two")
    assert node.ctr("tasks", "exec", "--exec-id", "a", "two", "true", timeout=20).returncode == 0
    assert left(node) == []


def test_a_take_of_a_container_that_is_being_restored_is_refused_and_harms_nothing(node, restores):
    restores.stop_at("pre-restore")
    client = restoring(node)
    restores.wait()
    with pytest.raises(CallFailed, match=r"^two has not been restored yet: take a snapshot once it runs$"):
        Shim(node, "two").checkpoint("/srv/again", timeout=20)
    restores.go_on()
    assert client.wait(30) == 0, client.stdout.read()
    assert ticks(node, "two")
    Shim(node, "two").checkpoint("/srv/again")


def test_every_step_of_a_restore_is_met_here(node, restores):
    client = restoring(node)
    assert client.wait(30) == 0, client.stdout.read()
    assert restores.seen == set(OF_A_RESTORE)


# The node -------------------------------------------------------------------------------------------------------------


def test_a_container_is_cleaned_up_after_whatever_the_configuration_says_by_now(node):
    start(node, "one")
    config = node.path("/etc/fermata/config.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("[layer\n")
    try:
        strike(node, "ours")
        wait_for(lambda: status(node, "one") is None, "the container to be given up")
        assert left(node) == []
    finally:
        config.unlink()


@pytest.mark.parametrize("leave", [True, False] if TORTURE else [True])
@pytest.mark.parametrize("stage", OF_A_TAKE[:-1] if TORTURE else ["post-dump"])
def test_a_snapshot_directory_that_vanishes_is_a_failed_take_and_no_more(node, takes, stage, leave):
    start(node, "one", "python3", "-c", TICK)
    wait_for(lambda: ticks(node, "one"), "the container to run")
    takes.stop_at(stage)
    failed = []

    def take():
        try:
            Shim(node, "one").checkpoint("/srv/taken", leave_running=leave, timeout=40)
        except CallFailed as error:
            failed.append(str(error))

    taking = threading.Thread(target=take)
    taking.start()
    takes.wait()
    node.exec(["rm", "-r", "/srv/taken"])
    takes.go_on()
    taking.join(20)
    (sentence,) = failed
    assert sentence.startswith("snapshot of one failed: ")
    assert ticks(node, "one")
    Shim(node, "one").checkpoint("/srv/again")


def test_a_restore_whose_logs_cannot_be_kept_is_refused(node, restores):
    node.exec(["mount", "-t", "tmpfs", "-o", "ro", "none", "/var/log/fermata"])
    try:
        client = restoring(node)
        said = client.communicate(timeout=30)[0].decode()
    finally:
        node.exec(["umount", "/var/log/fermata"])
    assert "cannot keep the logs of a restore in /var/log/fermata/default/two: Read-only file system" in said
    assert left(node) == []
