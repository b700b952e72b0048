"""Real processes that look like runc and CRIU to the kernel: a parent with the working directory among its arguments,
and children called criu."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from shim import orphans

RUNC = """
import os, subprocess, sys
criu, work, how = sys.argv[1:4]
helper = subprocess.Popen([criu, "60"], cwd=work)
main = subprocess.Popen([criu, "0" if how == "done" else "60"], cwd=work)
container = subprocess.Popen(["sleep", "60"])
if how == "killed":
    main.kill()
if how != "running":
    os.waitid(os.P_PID, main.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
print(main.pid, helper.pid, container.pid, flush=True)
sys.stdin.read()
for process in (helper, main, container):
    process.kill()
    process.wait()
"""


@pytest.fixture
def runc(tmp_path):
    """A function that starts one; it returns the pids of CRIU, of CRIU's helper and of the container."""
    shutil.copy("/bin/sleep", tmp_path / "criu")
    work = tmp_path / "work"
    work.mkdir()
    started = []

    def start(how):
        command = [sys.executable, "-c", RUNC, str(tmp_path / "criu"), str(work), how]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        return [int(word) for word in process.stdout.readline().split()]

    start.work = str(work)
    start.started = started
    yield start
    for process in started:
        process.communicate()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_killed_criu_left_is_found(runc):
    _, helper, container = runc("killed")
    assert orphans.orphans(runc.work) == {helper, container}


@pytest.mark.parametrize("how", ["running", "done"])
def test_a_criu_at_work_or_done_has_no_orphans(runc, how):
    runc(how)
    assert orphans.orphans(runc.work) == set()


def test_another_restore_is_not_touched(runc, tmp_path):
    runc("killed")
    (tmp_path / "work-2").mkdir()
    assert orphans.orphans(str(tmp_path / "work-2")) == set()


def test_the_watch_kills_them_and_says_so(runc):
    said = []
    with orphans.Watch(runc.work, said.append, interval=0.05):
        _, helper, container = runc("killed")
        for _ in range(600):
            if not (alive(helper) or alive(container)):
                break
            signal.sigtimedwait([], 0.05)
    assert not alive(helper)
    assert not alive(container)
    assert len(said) >= 2
    assert str(helper) in " ".join(said)


def test_the_watch_ends_with_the_restore(runc):
    _, helper, container = runc("running")
    before = len(os.listdir("/proc/self/task"))
    with orphans.Watch(runc.work, print, interval=0.02):
        signal.sigtimedwait([], 0.1)
    # The kernel takes a thread off the list a moment after its last instruction.
    for _ in range(250):
        if len(os.listdir("/proc/self/task")) == before:
            break
        signal.sigtimedwait([], 0.02)
    assert len(os.listdir("/proc/self/task")) == before
    assert alive(helper)
    assert alive(container)
