"""Nodes that are set up otherwise: /run without programs, and snapshots on other file systems."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

import pytest

from node.containers import IMAGE, OURS, pid, remove, start, wait_for
from node.shims import CallFailed, Shim
from tests.node.test_faults import TICK, ticks

torture = pytest.mark.skipif("FERMATA_TORTURE" not in os.environ, reason="only in make torture")

# A file with a hole, so that a file system which has none, or fills it, shows.
WRITER = "import os; os.truncate(os.open('/hole', os.O_CREAT | os.O_WRONLY), 64 << 20); open('/kept', 'w').write('x')\n"
PLACE = "/srv/place"


def round_trip(node, directory):
    start(node, "one", "python3", "-c", WRITER + TICK)
    wait_for(lambda: ticks(node, "one"), "the container to run")
    Shim(node, "one").checkpoint(directory)
    assert ticks(node, "one")
    remove(node, "one")
    words = ("--runtime", OURS, "--annotation", f"fermata/restore-from={directory}")
    node.ctr("run", "--detach", *words, IMAGE, "two", "true")
    assert ticks(node, "two")
    root = node.path(f"/proc/{pid(node, 'two')}/root")
    assert (root / "kept").read_text() == "x"
    assert (root / "hole").stat().st_size == 64 << 20
    remove(node, "two")


@torture
def test_nothing_is_run_from_run(node):
    node.exec(["mount", "-o", "remount,noexec", "/run"])
    try:
        round_trip(node, PLACE)
    finally:
        node.exec(["mount", "-o", "remount,exec", "/run"])
        node.exec(["rm", "-rf", PLACE])


@contextlib.contextmanager
def mounted(node, kind, file, place=PLACE):
    """A file system in a file, mounted in the node; made if there is none. Skips the test where that cannot be."""
    if kind not in node.exec(["cat", "/proc/filesystems"]).stdout.split():
        pytest.skip(f"this kernel has no {kind}")
    if not file.exists():
        program = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if program is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        with file.open("wb") as made:
            made.truncate(512 << 20)
        subprocess.run([program, str(file)], check=True, capture_output=True, timeout=60)
    loop = subprocess.run(["losetup", "--find", "--show", str(file)], capture_output=True, text=True, check=False)
    if loop.returncode != 0:
        pytest.skip(f"no loop device: {loop.stderr.strip()}")
    device = loop.stdout.strip()
    try:
        node.exec(["mkdir", "-p", place])
        node.exec(["mount", "-t", kind, *(["-o", "nouuid"] if kind == "xfs" else []), device, place])
        try:
            yield place
        finally:
            node.exec(["umount", place])
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture(params=["xfs", "btrfs"])
def disk(node, request, tmp_path):
    with mounted(node, request.param, tmp_path / "disk") as place:
        yield place


@torture
def test_a_snapshot_can_be_on_another_file_system(node, disk):
    round_trip(node, f"{disk}/snapshot")


@torture
def test_a_disk_that_fills_up_in_a_take_is_a_failed_take_and_no_more(node, disk):
    """Twice: while CRIU writes, and while the layer is written."""
    start(node, "one", "python3", "-c", f"import os\ntext = os.urandom(64 << 20)\n{TICK}")
    wait_for(lambda: ticks(node, "one"), "the container to run")
    layer = "import os; open('/big', 'wb').write(os.urandom(64 << 20))"
    for room in (48 << 20, 96 << 20):
        node.exec(["sync", "-f", disk])  # btrfs has no room for what was removed until then
        free = os.statvfs(node.path(disk)).f_bavail * os.statvfs(node.path(disk)).f_frsize
        node.exec(["fallocate", "--length", str(free - room), f"{disk}/full"])
        with pytest.raises(CallFailed, match=r"^snapshot of one failed: .*(space|full)"):
            Shim(node, "one").checkpoint(f"{disk}/snapshot")
        assert ticks(node, "one")
        assert not node.path(f"{disk}/snapshot").exists()
        node.exec(["rm", f"{disk}/full"])
        node.ctr("tasks", "exec", "--exec-id", "more", "one", "python3", "-c", layer)
    Shim(node, "one").checkpoint(f"{disk}/snapshot")
    remove(node, "one")
