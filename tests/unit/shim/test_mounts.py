from __future__ import annotations

import os
import subprocess

import pytest

from shim import mounts

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


@pytest.fixture
def mount():
    made = []

    def at(path):
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(path)], check=True)
        made.append(path)
        return path

    yield at
    for path in reversed(made):
        subprocess.run(["umount", "-l", str(path)], stderr=subprocess.DEVNULL, check=False)


def test_what_a_killed_criu_left_mounted_goes_with_its_mount_points(tmp_path, mount):
    yard = mount(tmp_path / ".criu.cgyard.a b\\c")
    mount(yard / "memory")
    (tmp_path / "restore.log").touch()
    assert mounts.detach_below(str(tmp_path)) == [str(yard / "memory"), str(yard)]
    assert os.listdir(tmp_path) == ["restore.log"]
    assert mounts.below(str(tmp_path)) == []
    assert mounts.detach_below(str(tmp_path)) == []


def test_mounts_beside_the_directory_stay(tmp_path, mount):
    inside, beside = tmp_path / "one", tmp_path / "one-more"
    inside.mkdir()
    mount(beside)
    assert mounts.detach_below(str(inside)) == []
    assert os.path.ismount(beside)


def test_a_directory_that_is_not_there_has_no_mounts(tmp_path):
    assert mounts.detach_below(str(tmp_path / "absent")) == []
