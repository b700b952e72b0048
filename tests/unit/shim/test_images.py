"""CRIU's image files."""

from __future__ import annotations

import pytest

from shim import images
from shim.errors import ShimError
from tests.unit.shim import snapshots


@pytest.fixture
def snapshot(tmp_path):
    return snapshots.make(tmp_path / "s")


def test_the_process_tree_with_names_threads_and_memory(snapshot):
    first, second = images.processes(str(snapshot))
    assert (first.pid, first.parent, first.name, first.threads, first.memory) == (1, 0, "server", 2, 4096)
    assert (second.pid, second.parent, second.name, second.threads, second.memory) == (9, 1, "worker", 1, 9 * 4096)


def test_open_files_and_sockets_in_words(snapshot):
    files = images.processes(str(snapshot))[0].files
    assert [(file.fd, file.text) for file in files] == [
        (0, "pipe"),
        (3, "/root/data"),
        (4, "tcp 127.0.0.17:8000 listening"),
        (5, "unix @hidden listening"),
    ]


def test_needed_files_have_the_mount_that_they_are_on_and_nameless_ones_are_left_out(snapshot):
    assert images.needed_files(str(snapshot)) == [
        ("/models", "/models/weights", 5, 0o100644),
        ("/", "/root/data", 3, 0o100644),
        ("/", "/usr/bin/python3", 11, 0o100755),
    ]


def test_a_mount_point_that_begins_with_a_dot_keeps_it():
    assert images.MountEntry(mountpoint="./.cache").path == "/.cache"
    assert images.MountEntry(mountpoint="/.cache").path == "/.cache"


def test_an_image_that_is_cut_short_is_named(snapshot):
    path = snapshot / "files.img"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ShimError, match=r"files\.img is cut short: copy the snapshot again, whole"):
        images.needed_files(str(snapshot))


def test_an_image_that_holds_something_else_is_named(snapshot):
    snapshots.image(snapshot / "pstree.img", b"\x0a\x7f")
    with pytest.raises(ShimError, match=r"pstree\.img is damaged: "):
        images.processes(str(snapshot))
