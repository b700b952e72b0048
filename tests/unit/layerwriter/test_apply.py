"""An apply is all or nothing, and can be taken back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import layerwriter
from layerwriter import header
from tests.unit.layerwriter.tars import MOMENT, entry, tar


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    fs = tmp_path / "snapshot/fs"
    fs.mkdir(parents=True)
    return fs


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "layer.tar"
    path.write_bytes(tar(entry(b"./", mode=0o700, uid=7, gid=8), entry(b"new", b"new")))
    return path


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_content_is_replaced_only_on_request(upper, layer):
    (upper / "old").write_bytes(b"old")
    with pytest.raises(layerwriter.LayerError, match="not empty"):
        layerwriter.apply(layer, upper)
    assert names(upper) == ["old"]
    layerwriter.apply(layer, upper, replace=True)
    assert names(upper) == ["new"]
    assert names(upper.parent) == ["fs"]


def test_the_directory_itself_becomes_the_layers_root(upper, layer):
    os.setxattr(upper, "trusted.overlay.origin", b"former")
    layerwriter.apply(layer, upper)
    found = upper.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid, found.st_mtime_ns) == (0o700, 7, 8, MOMENT)
    assert os.listxattr(upper) == []


def test_a_layer_without_a_root_keeps_the_directorys_own(upper, tmp_path):
    os.chown(upper, 5, 6)
    os.chmod(upper, 0o2751)
    os.setxattr(upper, "user.kept", b"1")
    os.setxattr(upper, "trusted.overlay.origin", b"former")
    os.utime(upper, ns=(1, 2))
    (tmp_path / "rootless.tar").write_bytes(tar(entry(b"d/"), entry(b"d/f", b"x")))
    layerwriter.apply(tmp_path / "rootless.tar", upper)
    found = upper.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid, found.st_mtime_ns) == (0o2751, 5, 6, 2)
    assert os.listxattr(upper) == ["user.kept"]
    assert ((upper / "d").stat().st_gid, (upper / "d").stat().st_mode & 0o7777) == (0, 0o755)


def test_undo_brings_the_former_content_back(upper, layer):
    (upper / "old").write_bytes(b"old")
    before = list(layerwriter.record(upper))
    inode = upper.stat().st_ino
    applied = layerwriter.apply(layer, upper, replace=True, keep_old=True)
    assert names(upper) == ["new"]
    applied.undo()
    assert list(layerwriter.compare(before, upper)) == []
    assert upper.stat().st_ino == inode
    assert names(upper.parent) == ["fs"]
    applied.commit()
    applied.undo()
    assert names(upper) == ["old"]


def test_commit_removes_the_former_content_for_good(upper, layer):
    (upper / "old").write_bytes(b"old")
    applied = layerwriter.apply(layer, upper, replace=True, keep_old=True)
    assert len(names(upper.parent)) == 2
    applied.commit()
    applied.undo()
    assert names(upper) == ["new"]
    assert names(upper.parent) == ["fs"]


def test_used_as_a_context_an_error_undoes(upper, layer):
    (upper / "old").write_bytes(b"old")
    with pytest.raises(RuntimeError), layerwriter.apply(layer, upper, replace=True, keep_old=True):
        raise RuntimeError("the restore failed")
    assert names(upper) == ["old"]
    with layerwriter.apply(layer, upper, replace=True, keep_old=True):
        pass
    assert names(upper) == ["new"]
    assert names(upper.parent) == ["fs"]


def test_no_file_descriptor_stays_open(upper, layer, tmp_path):
    bad = tmp_path / "bad.tar"
    bad.write_bytes(tar(*[entry(b"d%d/" % i) for i in range(100)], entry(b"d0/x", b"1" * (2 << 20)), b"x" * 512))
    before = names(Path("/proc/self/fd"))
    for path, replace in ((layer, False), (layer, True), (bad, True), (upper / "missing", True)):
        try:
            layerwriter.apply(path, upper, replace=replace)
        except layerwriter.LayerError:
            assert path != layer
    list(layerwriter.read(layer))
    layerwriter.write(upper, tmp_path / "again.tar")
    list(layerwriter.record(upper))
    assert names(Path("/proc/self/fd")) == before


KILLED = """
import sys, layerwriter
from layerwriter import unpack
def stop(*_):
    print("ready", flush=True)
    sys.stdin.read()
unpack.NewTree.finish = stop
layerwriter.apply(sys.argv[1], sys.argv[2], replace=True)
"""


def test_what_a_killed_apply_left_goes_with_the_next(upper, layer):
    (upper / "old").write_bytes(b"old")
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, layer, upper], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        assert len(names(upper.parent)) == 2
        with pytest.raises(layerwriter.LayerError, match="another layer is being applied"):
            layerwriter.apply(layer, upper, replace=True)
        assert len(names(upper.parent)) == 2
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert names(upper) == ["old"]
    assert len(names(upper.parent)) == 2
    layerwriter.apply(layer, upper, replace=True)
    assert names(upper) == ["new"]
    assert names(upper.parent) == ["fs"]


def test_former_content_that_is_kept_is_not_taken_for_a_leftover(upper, layer):
    (upper / "old").write_bytes(b"old")
    applied = layerwriter.apply(layer, upper, replace=True, keep_old=True)
    with pytest.raises(layerwriter.LayerError, match="another layer is being applied"):
        layerwriter.apply(layer, upper, replace=True)
    applied.undo()
    assert names(upper) == ["old"]


def test_a_missing_target_and_a_missing_layer_are_named(upper, layer, tmp_path):
    with pytest.raises(layerwriter.LayerError, match="missing"):
        layerwriter.apply(layer, tmp_path / "missing")
    with pytest.raises(layerwriter.LayerError, match=r"gone\.tar"):
        layerwriter.apply(tmp_path / "gone.tar", upper)
    with pytest.raises(layerwriter.LayerError, match=r"a symlink|Not a directory"):
        os.symlink(upper, tmp_path / "link")
        layerwriter.apply(layer, tmp_path / "link")


def test_nothing_is_inherited_from_the_directory_around_it(upper, layer):
    """The parent's default ACL and setgid bit are no part of the layer."""
    from tests.unit.layerwriter.trees import DEFAULT

    os.setxattr(upper.parent, "system.posix_acl_default", DEFAULT)
    os.chown(upper.parent, 0, 99)
    os.chmod(upper.parent, 0o2777)
    layerwriter.apply(layer, upper)
    for path in (upper, upper / "new"):
        assert os.listxattr(path) == []
    assert (upper / "new").stat().st_gid == 0
    assert upper.stat().st_mode & 0o7777 == 0o700


def test_a_directory_passes_nothing_on_to_its_children(upper, tmp_path):
    """A default ACL, a setgid bit and inode flags are set on a directory, and its children come later or much later."""
    from tests.unit.layerwriter.trees import DEFAULT

    records = header.xattr_record(b"system.posix_acl_default", DEFAULT) + header.record(b"FERMATA.flags", b"Ad")
    (tmp_path / "l.tar").write_bytes(
        tar(
            entry(b"d/", mode=0o2775, gid=50, records=records),
            entry(b"d/one", b"1"),
            entry(b"d/sub/"),
            entry(b"other", b"o"),
            entry(b"d/two", b"2"),
            entry(b"d/fifo", kind=header.FIFO),
        )
    )
    layerwriter.apply(tmp_path / "l.tar", upper)
    items = {item.path: item for item in layerwriter.record(upper)}
    for name in (b"d/one", b"d/two", b"d/sub", b"d/fifo"):
        assert (items[name].xattrs, items[name].flags, items[name].gid) == ({}, 0, 0), name
    assert items[b"d"].xattrs == {b"system.posix_acl_default": DEFAULT}
    assert (items[b"d"].flags, items[b"d"].mtime, items[b"d"].mode) == (0xC0, MOMENT, 0o2775)


def test_a_directorys_time_survives_children_in_any_order(upper, tmp_path):
    (tmp_path / "l.tar").write_bytes(
        tar(
            entry(b"a/b/one", b"1"),
            entry(b"a/", mtime=1000, mode=0o711),
            entry(b"c/", mtime=2000),
            entry(b"a/b/two", b"2"),
            entry(b"c/link", kind=header.LINK, link=b"a/b/one"),
            entry(b"a/b/", mtime=3000),
            entry(b"a/three", b"3"),
        )
    )
    layerwriter.apply(tmp_path / "l.tar", upper)
    assert [(upper / n).stat().st_mtime_ns for n in ("a", "c", "a/b")] == [1000, 2000, 3000]
    assert (upper / "a").stat().st_mode & 0o7777 == 0o711
    assert (upper / "c/link").read_bytes() == b"1"


def test_the_layer_is_read_once_and_by_one_name(upper, layer):
    """A layer that is swapped for another one behind its name while it is read is still the one that was opened."""
    began = time.monotonic()
    os.rename(layer, layer.with_name("moved"))
    fd = os.open(layer.with_name("moved"), os.O_RDONLY)
    try:
        layerwriter.apply(f"/proc/self/fd/{fd}", upper)
    finally:
        os.close(fd)
    assert names(upper) == ["new"]
    assert time.monotonic() >= began


def test_what_a_killed_apply_left_is_discarded_and_nothing_else(tmp_path):
    upper, staged, other = tmp_path / "fs", tmp_path / ".fs.fermata-0123456789abcdef", tmp_path / "work"
    for path in (upper, staged, other):
        (path / "deep").mkdir(parents=True)
        (path / "deep/file").write_text("x")
    upper.chmod(0o751)
    layerwriter.discard(upper)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fs", "work"]
    assert list(upper.iterdir()) == []
    assert upper.stat().st_mode & 0o777 == 0o751
    assert (other / "deep/file").exists()
    layerwriter.discard(upper)


APPLY = """
import os, sys, layerwriter
{before}
layerwriter.apply(sys.argv[1], sys.argv[2], replace=True, keep_old=True)
os.kill(os.getpid(), 9)
"""
# The last moment before the two change places.
STOPPED = "import layerwriter.syscalls\nlayerwriter.syscalls.exchange = lambda *given: os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("before", ["", STOPPED], ids=["after it was put aside", "before"])
def test_what_a_killed_apply_would_have_replaced_is_brought_back(upper, layer, before):
    (upper / "old").write_bytes(b"old")
    upper.chmod(0o751)
    inode = upper.stat().st_ino
    command = [sys.executable, "-c", APPLY.format(before=before), str(layer), str(upper)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert len(names(upper.parent)) == 2
    assert names(upper) == (["old"] if before else ["new"])
    layerwriter.bring_back(upper, inode)
    layerwriter.bring_back(upper, inode)
    assert names(upper.parent) == ["fs"]
    assert names(upper) == ["old"]
    assert upper.stat().st_mode & 0o777 == 0o751
