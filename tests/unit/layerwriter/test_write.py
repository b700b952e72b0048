"""What of an upper directory goes into its layer, and what is said about the rest."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import layerwriter
from layerwriter import header
from layerwriter.reader import OPAQUE, SOCKET, WHITEOUT
from tests.unit.layerwriter import trees


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    path = tmp_path / "upper"
    path.mkdir()
    return path


def written(upper: Path, **options):
    """The layer of a directory, and its entries as (kind, path)."""
    layer = layerwriter.write(upper, upper.parent / "layer.tar", **options)
    found = [(entry.kind, entry.path) for entry in layerwriter.read(layer.path)]
    assert len(found) == layer.entries
    return layer, found


def applied(layer, upper: Path, **options) -> Path:
    fresh = upper.parent / "fresh"
    fresh.mkdir(exist_ok=True)
    layerwriter.apply(layer, fresh, replace=True, **options)
    return fresh


def same(one: Path, other: Path) -> None:
    assert list(layerwriter.compare(_items(one), _items(other))) == []


def _items(root: Path):
    """A record of an upper directory; nobody sees the time of a whiteout."""
    for item in layerwriter.record(root):
        if item.kind == "character device" and item.device == (0, 0):
            item.mtime = item.mode = 0
        yield item


def test_equal_trees_make_equal_layers(upper):
    trees.image(upper)  # without symlinks: the kernel has no way to read one that leaves its access time
    one = layerwriter.write(upper, upper.parent / "one.tar")
    again = layerwriter.write(upper, upper.parent / "again.tar")
    assert one.digest == again.digest == one.diff_id
    assert one.size == (upper.parent / "one.tar").stat().st_size


def test_writing_leaves_no_trace_in_the_tree(upper):
    (upper / "d").mkdir()
    (upper / "d/f").write_bytes(b"x")
    for path in (upper / "d/f", upper / "d", upper):
        os.utime(path, ns=(5, 10_000_000_000))
    layerwriter.write(upper, upper.parent / "layer.tar")
    assert [path.stat().st_atime_ns for path in (upper / "d/f", upper / "d", upper)] == [5, 5, 5]


def test_access_times_come_back(upper):
    (upper / "f").write_bytes(b"x")
    os.utime(upper / "f", ns=(-1_234_567_891, 10_000_000_000))
    layer, _ = written(upper)
    assert (applied(layer, upper) / "f").stat().st_atime_ns == -1_234_567_891


def test_the_digests_are_those_of_the_file_and_of_the_tar(upper):
    trees.image(upper)
    (upper / "big").write_bytes(os.urandom(5 << 20))
    layer = layerwriter.write(upper, upper.parent / "l.tar.zst", compression="zstd")
    zstandard = pytest.importorskip("zstandard")
    data = Path(layer.path).read_bytes()
    plain = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert layer.digest == "sha256:" + hashlib.sha256(data).hexdigest()
    assert layer.diff_id == "sha256:" + hashlib.sha256(plain).hexdigest()
    assert layer.diff_id == layerwriter.write(upper, upper.parent / "l.tar").digest


def test_both_kinds_of_whiteouts_are_deletions(upper):
    (upper / "d").mkdir()
    os.mknod(upper / "d/device", 0o020000, 0)
    (upper / "x").mkdir()
    os.setxattr(upper / "x", "trusted.overlay.opaque", b"x")
    (upper / "x/attribute").write_bytes(b"")
    os.setxattr(upper / "x/attribute", "trusted.overlay.whiteout", b"y")
    (upper / "x/file").write_bytes(b"")
    (upper / "d/not-in-a-marked-directory").write_bytes(b"")
    os.setxattr(upper / "d/not-in-a-marked-directory", "trusted.overlay.whiteout", b"y")
    layer, found = written(upper)
    assert (WHITEOUT, b"d/device") in found
    assert (WHITEOUT, b"x/attribute") in found
    assert (header.REGULAR, b"x/file") in found
    assert (header.REGULAR, b"d/not-in-a-marked-directory") in found
    assert all(kind != OPAQUE for kind, _ in found)
    fresh = applied(layer, upper)
    for name in ("d/device", "x/attribute"):
        assert (fresh / name).is_char_device()
        assert (fresh / name).stat().st_rdev == 0
    assert os.listxattr(fresh / "x") == []


@pytest.mark.parametrize("prefix", ["trusted.", "user."])
def test_an_opaque_directory_is_marked_in_front_of_its_children(upper, prefix):
    (upper / "a/b").mkdir(parents=True)
    (upper / "a/b/c").write_bytes(b"")
    for name in ("a", "a/b"):
        os.setxattr(upper / name, f"{prefix}overlay.opaque", b"y")
    layer, found = written(upper, xattr_prefix=prefix)
    assert [path for kind, path in found if kind == OPAQUE] == [b"a", b"a/b"]
    assert found.index((OPAQUE, b"a")) == found.index((header.DIRECTORY, b"a")) + 1
    fresh = applied(layer, upper, xattr_prefix=prefix)
    for name in ("a", "a/b"):
        assert os.getxattr(fresh / name, f"{prefix}overlay.opaque") == b"y"
    same(upper, fresh)


def test_the_other_prefix_is_the_containers_own(upper):
    (upper / "d").mkdir()
    os.setxattr(upper / "d", "user.overlay.opaque", b"y")
    os.setxattr(upper / "d", "user.overlay.redirect", b"/x")
    layer, found = written(upper)
    assert all(kind != OPAQUE for kind, _ in found)
    same(upper, applied(layer, upper))


def test_the_overlays_bookkeeping_is_left_out(upper):
    (upper / "d").mkdir()
    for name in ("origin", "impure", "nlink", "upper", "uuid"):
        os.setxattr(upper / "d", f"trusted.overlay.{name}", b"y")
        os.setxattr(upper, f"trusted.overlay.{name}", b"y")
    layer, _ = written(upper)
    assert [entry.xattrs for entry in layerwriter.read(layer.path)] == [[], []]


@pytest.mark.parametrize("mark", ["redirect", "metacopy", "verity", "some-future-mark"])
@pytest.mark.parametrize("prefix", ["trusted.", "user."])
def test_a_change_that_is_not_all_there_is_an_error_of_its_own(upper, mark, prefix):
    (upper / "d").mkdir()
    os.setxattr(upper / "d", f"{prefix}overlay.{mark}", b"x")
    with pytest.raises(layerwriter.HiddenChange, match="d: the upper directory alone"):
        written(upper, xattr_prefix=prefix)
    assert sorted(os.listdir(upper.parent)) == ["upper"]


def test_an_escaped_attribute_is_written_as_the_container_sees_it(upper):
    (upper / "f").write_bytes(b"")
    os.setxattr(upper / "f", "trusted.overlay.overlay.opaque", b"y")
    os.setxattr(upper / "f", "trusted.overlay.overlay.overlay.redirect", b"z")
    layer, _ = written(upper)
    entry = list(layerwriter.read(layer.path))[1]
    assert entry.xattrs == [(b"trusted.overlay.opaque", b"y"), (b"trusted.overlay.overlay.redirect", b"z")]
    same(upper, applied(layer, upper))


def test_names_that_look_like_deletions_come_back(upper):
    (upper / ".wh.dir/.wh..wh..opq").mkdir(parents=True)
    (upper / ".wh.dir/.wh..wh..opq/f").write_bytes(b"1")
    (upper / ".wh.dir/file").write_bytes(b"2")
    (upper / ".wh.file").write_bytes(b"3")
    (upper / ",wh.file").write_bytes(b"4")
    (upper / "x.wh.y").write_bytes(b"5")
    os.link(upper / ".wh.file", upper / "link")
    os.link(upper / ",wh.file", upper / ".wh.link")
    os.symlink(".wh.file", upper / ".wh.symlink")
    os.mknod(upper / ".wh..wh.gone", 0o020000, 0)
    os.mknod(upper / ".wh.dir/gone", 0o020000, 0)
    with (upper / ".wh.sparse").open("wb") as file:
        file.truncate(1 << 20)
    (upper / (".wh." + "n" * 251)).write_bytes(b"6")
    layer, _ = written(upper)
    same(upper, applied(layer, upper))
    [note] = layer.notes
    assert note.startswith("name that begins with .wh. (only this project's reader restores it): ")
    assert ".wh.file" in note
    assert "x.wh.y" not in note


def test_other_tools_do_not_take_such_a_name_for_a_deletion(upper):
    (upper / ".wh.file").write_bytes(b"3")
    layer, _ = written(upper)
    listed = subprocess.run(["tar", "-tf", layer.path], capture_output=True, text=True, check=True).stdout
    assert listed.split() == ["./", ",wh.file"]


def test_flags_come_back_and_are_noted(overlay):
    mounted = overlay()
    merged = mounted.mount()
    for name, flags in (("append", "+a"), ("immutable", "+i"), ("dump", "+d"), ("noatime", "+A")):
        (merged / name).write_bytes(b"x")
        subprocess.run(["chattr", flags, merged / name], check=True)
    (merged / "directory").mkdir()
    (merged / "directory/child").write_bytes(b"x")
    subprocess.run(["chattr", "+id", merged / "directory"], check=True)
    before = list(layerwriter.record(merged))
    layer = layerwriter.write(mounted.upper, mounted.base / "layer.tar")
    full = layerwriter.full_diff(mounted.lowerdirs, merged, mounted.base / "full.tar")
    mounted.unmount()
    for made in (layer, full):
        fresh = mounted.base / f"fresh-{made.made_by}"
        fresh.mkdir()
        layerwriter.apply(made, fresh)
        mounted.work = mounted.base / f"work-{made.made_by}"
        mounted.work.mkdir()
        mounted.mount(upper=fresh)
        assert list(layerwriter.compare(before, merged)) == []
        with pytest.raises(PermissionError):
            (merged / "immutable").write_bytes(b"y")
        for name in ("append", "immutable", "directory"):
            subprocess.run(["chattr", "-ia", merged / name], check=True)
        mounted.unmount()
        assert "immutable flag (only this project's reader restores it): directory, immutable" in made.notes
        assert "append-only flag (only this project's reader restores it): append" in made.notes


def test_a_sockets_listener_is_noted_by_name(upper):
    import socket

    for number in range(25):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(upper / f"socket-{number:02}"))
    layer, found = written(upper)
    assert (SOCKET, b"socket-07") in found
    [note] = layer.notes
    assert note.startswith("socket (its path is carried, but not what listens on it): socket-00, socket-01, ")
    assert note.endswith("socket-19 and 5 more")
    fresh = applied(layer, upper)
    same(upper, fresh)
    assert (fresh / "socket-07").is_socket()


def test_a_layer_over_its_limit_is_refused_by_name_and_leaves_nothing(upper):
    (upper / "a").write_bytes(b"x" * 1000)
    (upper / "big").write_bytes(b"x" * (3 << 20))
    with pytest.raises(layerwriter.LayerError, match="big takes the layer past its limit of 1048576 bytes"):
        written(upper, limit=1 << 20)
    assert sorted(os.listdir(upper.parent)) == ["upper"]
    for number in range(200):
        (upper / f"z{number}").write_bytes(b"x" * 8000)
    (upper / "big").unlink()
    with pytest.raises(layerwriter.LayerError, match="limit of 1048576 bytes"):
        written(upper, limit=1 << 20)


def test_the_estimate_is_near(upper):
    trees.everything(upper / "new", escaped=True)
    for number in range(300):
        (upper / f"f{number}").write_bytes(b"x" * 1000 * number)
    layer, _ = written(upper)
    estimate = layerwriter.measure(upper)
    assert estimate.entries == layer.entries
    assert 0.9 * layer.size < estimate.bytes < 1.1 * layer.size


def test_the_estimate_of_a_container_that_runs_does_not_mind_what_goes_away(upper):
    """Files and directories come and go all the time while it is made."""
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for number in range(8):
                (upper / f"d{number}").mkdir()
                (upper / f"d{number}/file").write_bytes(b"x")
            for number in range(8):
                (upper / f"d{number}/file").unlink()
                (upper / f"d{number}").rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(500):
            layerwriter.measure(upper)
    finally:
        stop.set()
        thread.join()


def test_a_sparse_file_takes_no_more_than_its_data(upper):
    with (upper / "sparse").open("wb") as file:
        file.seek(20 << 30)
        file.write(b"x")
    layer, _ = written(upper)
    assert layer.size < 16384
    fresh = applied(layer, upper)
    assert (fresh / "sparse").stat().st_blocks <= 16
    same(upper, fresh)


def test_a_large_file_begins_at_a_multiple_of_4_kib(upper):
    (upper / "a").write_bytes(b"x" * 777)
    (upper / "large").write_bytes(os.urandom(2 << 20))
    with (upper / "sparse").open("wb") as file:
        for at in (1 << 20, 3 << 20):
            file.seek(at)
            file.write(os.urandom(64 << 10))
    layer, _ = written(upper)
    data = Path(layer.path).read_bytes()
    assert data.index((upper / "large").read_bytes()) % 4096 == 0
    assert data.index((upper / "sparse").read_bytes()[1 << 20 :][: 64 << 10]) % 4096 == 0


def test_what_cannot_be_written_is_named_and_leaves_nothing(upper, tmp_path):
    with pytest.raises(layerwriter.LayerError, match="missing"):
        layerwriter.write(tmp_path / "missing", tmp_path / "l.tar")
    with pytest.raises(layerwriter.LayerError, match=r"no/such/l\.tar"):
        layerwriter.write(upper, tmp_path / "no/such/l.tar")
    with pytest.raises(layerwriter.LayerError, match="lz4"):
        layerwriter.write(upper, tmp_path / "l.tar", compression="lz4")
    assert sorted(os.listdir(tmp_path)) == ["upper"]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_full_disk_is_an_error_and_no_hang(upper, tmp_path, compression):
    for number in range(40):
        (upper / f"f{number}").write_bytes(os.urandom(1 << 20))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], check=True)
    try:
        with pytest.raises(layerwriter.LayerError, match="No space left"):
            layerwriter.write(upper, small / "l.tar", compression=compression)
        assert os.listdir(small) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_an_existing_layer_is_replaced_only_by_a_whole_one(upper, tmp_path):
    out = tmp_path / "layer.tar"
    out.write_bytes(b"former")
    (upper / "d").mkdir()
    os.setxattr(upper / "d", "trusted.overlay.redirect", b"x")
    with pytest.raises(layerwriter.HiddenChange):
        layerwriter.write(upper, out)
    assert out.read_bytes() == b"former"
    shutil.rmtree(upper / "d")
    layerwriter.write(upper, out)
    assert out.read_bytes() != b"former"
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_file_system_without_attributes_and_flags_is_written_and_applied_to(tmp_path):
    where = tmp_path / "ram"
    where.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", where], check=True)
    try:
        for name in ("upper/d", "fresh"):
            (where / name).mkdir(parents=True)
        for name in ("a", "b", "d/c"):
            (where / "upper" / name).write_bytes(name.encode() * 100)
        os.symlink("a", where / "upper/link")
        with pytest.raises(OSError, match="not supported"):
            os.setxattr(where / "upper/a", "user.x", b"")
        layerwriter.apply(layerwriter.write(where / "upper", where / "layer.tar"), where / "fresh")
        same(where / "upper", where / "fresh")
    finally:
        subprocess.run(["umount", where], check=True)


def test_a_file_that_cannot_be_read_is_named(upper, monkeypatch):
    (upper / "d").mkdir()
    (upper / "d/file").write_bytes(b"x")
    (upper / "d/file").rename(upper / "d/other")

    def listing(fd, *_):
        yield from (
            [("file", layerwriter.walk.FILE)] if os.listdir(fd) == ["other"] else [("d", layerwriter.walk.DIRECTORY)]
        )

    monkeypatch.setattr(layerwriter.upper, "listing", listing)
    with pytest.raises(layerwriter.LayerError, match=r"^d/file: No such file or directory"):
        layerwriter.write(upper, upper.parent / "layer.tar")
