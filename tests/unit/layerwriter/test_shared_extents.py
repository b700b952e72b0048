"""On a file system that shares extents, large files are in a layer, and out of it, without being copied."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import layerwriter
import layerwriter.sink
import layerwriter.source

BIG = 24 << 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """An xfs with reflinks on a loop device."""
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("mkfs.xfs is not installed (Debian: apt-get install xfsprogs)")
    base = tmp_path_factory.mktemp("xfs")
    image, where = base / "image", base / "mnt"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, where], check=True)
    yield where
    subprocess.run(["umount", where], check=True)
    image.unlink()


@pytest.fixture
def upper(disk: Path):
    base = disk / "test"
    fs = base / "snapshot/fs"
    fs.mkdir(parents=True)
    (fs / "before").write_bytes(b"b" * 700)
    (fs / "big").write_bytes(os.urandom(BIG + 777))
    with (fs / "sparse").open("wb") as file:
        for at in (1 << 20, 5 << 20):
            file.seek(at)
            file.write(os.urandom(1 << 20))
        file.truncate(9 << 20)
    (fs / "behind").write_bytes(b"e" * 700)
    os.sync()
    yield fs
    shutil.rmtree(base)


def used(disk: Path) -> int:
    os.sync()
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def digest(path: str | Path) -> str:
    return "sha256:" + hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_a_layer_takes_no_room_for_large_files(disk, upper):
    before = used(disk)
    layer = layerwriter.write(upper, disk / "test/layer.tar")
    assert layer.size > BIG
    assert used(disk) - before < BIG / 4
    assert layer.digest == digest(layer.path)

    fresh = disk / "test/fresh"
    fresh.mkdir()
    layerwriter.apply(layer, fresh)
    assert used(disk) - before < BIG / 4
    assert list(layerwriter.compare(upper, fresh)) == []


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_what_happens_after_the_first_step_is_not_in_the_layer(disk, upper, compression):
    before = list(layerwriter.record(upper))
    draft = layerwriter.begin(upper, disk / "test/layer.tar", compression=compression)
    with (upper / "big").open("r+b") as file:
        file.write(b"changed later" * 10000)
        file.truncate(BIG // 2)
    (upper / "sparse").unlink()
    layer = draft.finish()
    assert layer.digest == digest(layer.path)
    fresh = disk / "test/fresh"
    fresh.mkdir()
    layerwriter.apply(layer, fresh)
    assert list(layerwriter.compare(before, fresh)) == []


def test_a_discarded_draft_leaves_nothing(disk, upper):
    open_files = sorted(os.listdir("/proc/self/fd"))
    draft = layerwriter.begin(upper, disk / "test/layer.tar")
    draft.discard()
    draft.discard()
    assert sorted(os.listdir(disk / "test")) == ["snapshot"]
    assert sorted(os.listdir("/proc/self/fd")) == open_files
    with pytest.raises(layerwriter.LayerError):
        draft.finish()


def test_a_layer_from_another_disk_is_copied(upper, tmp_path):
    (tmp_path / "fs").mkdir()
    layer = layerwriter.write(upper, tmp_path / "layer.tar")
    layerwriter.apply(layer, tmp_path / "fs")
    assert list(layerwriter.compare(upper, tmp_path / "fs")) == []
    fresh = upper.parent.parent / "fresh"
    fresh.mkdir()
    layerwriter.apply(layer, fresh)
    assert list(layerwriter.compare(upper, fresh)) == []


def test_many_large_files_are_not_all_open_at_once(disk, upper, monkeypatch):
    for number in range(80):
        (upper / f"file-{number}").write_bytes(number.to_bytes(4, "little") * (1 << 18))
    os.sync()
    walked = threading.Event()
    hash_range = layerwriter.sink.Sink._digest_range

    def hash_later(*arguments):
        walked.wait(20)
        return hash_range(*arguments)

    monkeypatch.setattr(layerwriter.sink.Sink, "_digest_range", hash_later)
    before = len(os.listdir("/proc/self/fd"))
    draft = layerwriter.begin(upper, disk / "test/layer.tar")
    assert len(os.listdir("/proc/self/fd")) < before + 50
    walked.set()
    layer = draft.finish()
    assert layer.digest == digest(layer.path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("checked", [True, False])
def test_entries_behind_a_shared_file_are_read(disk, upper, checked):
    layer = layerwriter.write(upper, disk / "test/layer.tar")
    fresh = disk / "test/fresh"
    fresh.mkdir()
    layerwriter.apply(layer if checked else layer.path, fresh)
    assert (fresh / "behind").read_bytes() == b"e" * 700
    assert list(layerwriter.compare(upper, fresh)) == []


def test_a_layer_that_is_written_to_meanwhile_is_refused(disk, upper, monkeypatch):
    layer = layerwriter.write(upper, disk / "test/layer.tar")
    fresh = disk / "test/fresh"
    fresh.mkdir()
    finish = layerwriter.source.Source.finish

    def write_then_finish(source):
        with Path(layer.path).open("r+b") as file:
            file.seek(8 << 20)
            file.write(b"evil")
        finish(source)

    monkeypatch.setattr(layerwriter.source.Source, "finish", write_then_finish)
    with pytest.raises(layerwriter.LayerError, match="written to while it was applied"):
        layerwriter.apply(layer, fresh)
    assert os.listdir(fresh) == []
