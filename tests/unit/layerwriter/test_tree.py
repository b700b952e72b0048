"""A record has everything that a program can see, and a comparison names each difference."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import layerwriter
from tests.unit.layerwriter import trees


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two trees that are the same."""
    (tmp_path / "one").mkdir()
    trees.everything(tmp_path / "one/new", escaped=True)
    layer = layerwriter.write(tmp_path / "one", tmp_path / "layer")
    (tmp_path / "two").mkdir()
    layerwriter.apply(layer, tmp_path / "two")
    return tmp_path / "one/new", tmp_path / "two/new"


def keep_time(path: Path, change) -> None:
    found = path.lstat()
    change(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


CHANGES = {
    "mode": lambda path: path.chmod(0o600),
    "uid": lambda path: os.chown(path, 77, -1),
    "gid": lambda path: os.chown(path, -1, 77),
    "size": lambda path: path.write_bytes(b"content and more"),
    "digest": lambda path: path.write_bytes(b"CONTENT"),
    "xattrs": lambda path: os.setxattr(path, "user.x", b"1"),
    "flags": lambda path: subprocess.run(["chattr", "+d", path], check=True),
    "mtime": lambda path: os.utime(path, ns=(1, 1)),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_one_field_is_a_difference(pair, field):
    one, two = pair
    assert list(layerwriter.compare(one, two)) == []
    path = two / "owner-1"
    path.write_bytes(b"content")
    os.utime(path, (1, 2))
    (one / "owner-1").write_bytes(b"content")
    os.utime(one / "owner-1", (1, 2))
    if field == "mtime":
        CHANGES[field](path)
    else:
        keep_time(path, CHANGES[field])
    ignored = ("digest",) if field == "size" else ()
    [difference] = layerwriter.compare(one, two, ignore=ignored)
    assert difference.startswith(f"owner-1: {field} ")
    assert list(layerwriter.compare(one, two, ignore=(field, *ignored))) == []


def test_a_target_a_device_and_a_link_are_compared(pair):
    one, two = pair
    times = {path: path.lstat() for path in (two, two / "symlink", two / "null", two / "sticky")}
    for name in ("dangling", "null", "hard-link"):
        (two / name).unlink()
    os.symlink("/elsewhere/at all", two / "dangling")
    os.mknod(two / "null", 0o020666, os.makedev(1, 5))
    os.chmod(two / "null", 0o666)
    (two / "hard-link").write_bytes(b"content")
    for path in (two, two / "null"):
        os.utime(path, ns=(1, times[path].st_mtime_ns))
    found = "\n".join(layerwriter.compare(one, two, ignore=("mtime",)))
    assert "dangling: target b'/nowhere/at all' and b'/elsewhere/at all'" in found
    assert "null: device (1, 3) and (1, 5)" in found
    assert "hard-link: links 3 and 1, first b'file' and b''" in found
    assert "file: links 3 and 2" in found


def test_a_hole_and_zeros_have_one_content_and_are_two_things(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (tmp_path / "one/f").open("wb") as file:
        for at in (100, 70_000, 72_000, 1 << 20):
            file.seek(at)
            file.write(b"data")
        file.truncate(2 << 20)
    (tmp_path / "two/f").write_bytes((tmp_path / "one/f").read_bytes())
    [difference] = layerwriter.compare(tmp_path / "one", tmp_path / "two", ignore=("mtime",))
    assert difference == "f: holes True and False"


def test_another_file_system_is_one_directory(tmp_path):
    (tmp_path / "tree/mounted").mkdir(parents=True)
    (tmp_path / "tree/z").touch()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "tree/mounted"], check=True)
    try:
        (tmp_path / "tree/mounted/inside").touch()
        assert [item.path for item in layerwriter.record(tmp_path / "tree")] == [b"", b"mounted", b"z"]
    finally:
        subprocess.run(["umount", tmp_path / "tree/mounted"], check=True)


def test_entries_of_one_side_only_are_named_in_their_places(tmp_path):
    for name, paths in (("one", ("a/b", "a.c", "d")), ("two", ("a/c", "e"))):
        for path in paths:
            (tmp_path / name / path).mkdir(parents=True)
    found = list(layerwriter.compare(tmp_path / "one", tmp_path / "two", ignore=("mtime",)))
    assert found == [
        "only in the first: a/b (directory)",
        "only in the second: a/c (directory)",
        "only in the first: a.c (directory)",
        "only in the first: d (directory)",
        "only in the second: e (directory)",
    ]


def test_without_contents_no_file_is_read(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    assert [item.digest for item in layerwriter.record(tmp_path, contents=False)] == ["", ""]
