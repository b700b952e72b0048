from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from shim.attempt import Attempt, directories

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")


@pytest.fixture
def group():
    """The path of a control group that is nowhere yet."""
    path = f"/fermata-unit-{os.getpid()}/container"
    yield path
    for directory in map(Path, directories(path)):
        for member in (directory / "below", directory, directory.parent):
            if member.exists():
                member.rmdir()


def fill(path: str, below: str = "") -> subprocess.Popen:
    """Make the control group wherever it can be made, and put a process in."""
    process = subprocess.Popen(["sleep", "60"])
    for directory in directories(path):
        member = Path(directory, below)
        try:
            member.mkdir(parents=True, exist_ok=True)
            (member / "cgroup.procs").write_text(str(process.pid))
        except OSError:  # cpuset without processors, and hierarchies that are read-only
            continue
    assert any(Path(directory).is_dir() for directory in directories(path))
    return process


def test_what_a_failed_attempt_left_is_ended_and_removed(group):
    attempt = Attempt(group)
    processes = [fill(group), fill(group, "below")]
    assert attempt.undo() == 2
    assert [process.wait(10) for process in processes] == [-9, -9]
    assert not any(Path(directory).exists() for directory in directories(group))
    assert attempt.undo() == 0


def test_a_frozen_process_is_ended_too(group):
    attempt = Attempt(group)
    process = fill(group)
    for directory in map(Path, directories(group)):
        for name, word in (("freezer.state", "FROZEN"), ("cgroup.freeze", "1")):
            if (directory / name).exists():
                (directory / name).write_text(word)
    assert attempt.undo() == 1
    assert process.wait(10) == -9


def test_a_group_that_was_there_before_is_not_touched(group):
    process = fill(group)
    try:
        assert Attempt(group).undo() == 0
        assert process.poll() is None
        assert any(Path(directory).exists() for directory in directories(group))
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_older_than_the_attempt_is_none_of_it(group, monkeypatch):
    monkeypatch.setattr("shim.attempt.PATIENCE", 0.2)
    older = subprocess.Popen(["sleep", "60"])
    time.sleep(0.1)
    attempt = Attempt(group)
    younger = fill(group)
    try:
        for directory in map(Path, directories(group)):
            if directory.is_dir() and str(younger.pid) in (directory / "cgroup.procs").read_text().split():
                (directory / "cgroup.procs").write_text(str(older.pid))
        assert attempt.undo() == 1
        assert younger.wait(10) == -9
        assert older.poll() is None
    finally:
        for process in (older, younger):
            process.kill()
            process.wait()


def test_systemds_way_to_name_a_group_is_understood():
    for found in directories("kubepods-burstable-pod1.slice:cri-containerd:abc"):
        assert found.endswith(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-abc.scope"
        )
    for found in directories(":ctr:abc"):
        assert found.endswith("/system.slice/ctr-abc.scope")


@pytest.mark.parametrize("path", ["/", "/..", "//", "/a/..", "/../.."])
def test_the_root_of_a_hierarchy_is_never_named(path):
    """Asked of the names alone: nobody should try what happens if it were."""
    assert directories(path) == []


def test_what_an_attempt_left_whose_shim_died_is_found_by_its_record(group):
    record = Attempt(group).record
    process = fill(group)
    assert Attempt(group).record == ""  # by now it is somebody's
    assert Attempt.of_the_dead(record).undo() == 1
    assert process.wait(10) == -9
    assert not any(Path(directory).exists() for directory in directories(group))


def test_a_group_of_the_same_name_that_is_made_meanwhile_is_another_containers(group, monkeypatch):
    attempt = Attempt(group)
    process = fill(group)
    later = []

    def make_again(seconds):
        """While the undoing waits for the first process to end."""
        if not later and process.poll() is not None:
            for directory in directories(group):
                if Path(directory).is_dir():
                    Path(directory).rmdir()
            later.append(fill(group))

    monkeypatch.setattr("shim.attempt.time.sleep", make_again)
    monkeypatch.setattr("shim.attempt._remove", lambda group: bool(later))
    attempt.undo()
    (other,) = later
    assert other.poll() is None
    other.kill()
    other.wait()
    process.wait()
