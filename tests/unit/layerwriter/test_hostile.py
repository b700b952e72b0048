"""A layer that an attacker wrote, or that was damaged, changes nothing and is refused with the entry's name."""

from __future__ import annotations

import gzip
import hashlib
import os
import threading
from pathlib import Path

import pytest

import layerwriter
from layerwriter import header, newtree
from tests.unit.layerwriter.tars import block, entry, extended, tar

record, xattr = header.record, header.xattr_record


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An upper directory with content, in a directory where every stray file is seen."""
    fs = tmp_path / "snapshot/fs"
    fs.mkdir(parents=True)
    (fs / "old").write_bytes(b"old")
    (tmp_path / "outside").write_bytes(b"outside")
    return fs


def apply(target: Path, data: bytes, **options):
    layer = target.parent.parent / "layer.tar"
    layer.write_bytes(data)
    return layerwriter.apply(layer, target, replace=True, **options)


def refused(target: Path, data: bytes, *words: str, **options) -> str:
    """The error of a layer, after a look that it left nothing behind."""
    with pytest.raises(layerwriter.LayerError) as caught:
        apply(target, data, **options)
    assert sorted(p.name for p in target.parent.iterdir()) == ["fs"]
    assert [p.name for p in target.iterdir()] == ["old"]
    assert (target / "old").read_bytes() == b"old"
    assert (target.parent.parent / "outside").read_bytes() == b"outside"
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


FILE = entry(b"file", b"data")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (b"../outside", "`..`"),
        (b"a/../../outside", "`..`"),
        (b"..", "`..`"),
        (b"a/..", "`..`"),
        (b"/etc/passwd", "absolute"),
        (b"//etc/passwd", "absolute"),
    ],
)
def test_a_name_that_leads_out_is_refused(target, name, why):
    refused(target, tar(FILE, entry(name, b"evil")), "entry 2", layerwriter.layer.shown(name), why)
    refused(target, tar(FILE, entry(b"link", kind=header.LINK, link=name)), "entry 2", "link", "target", why)


def test_a_name_with_a_zero_byte_is_refused(target):
    refused(target, tar(extended(record(b"path", b"a\0b")) + block()), "zero byte")
    refused(target, tar(extended(record(b"linkpath", b"a\0b")) + block(kind=b"1")), "zero byte")
    refused(target, tar(extended(record(b"linkpath", b"a\0b")) + block(kind=b"2")), "zero byte")


def test_an_empty_name_is_refused(target):
    refused(target, tar(block(name=b"", magic=b"")), "empty")


@pytest.mark.parametrize("to", [b"/", b"..", b"../..", b"/proc/self/root", b"."])
def test_nothing_is_written_through_a_symlink(target, to):
    link = entry(b"link", kind=header.SYMLINK, link=to)
    refused(target, tar(link, entry(b"link/outside", b"evil")), "entry 2", "link/outside", "not a directory")
    refused(target, tar(link, entry(b"link/dir/")), "entry 2", "not a directory")
    refused(target, tar(link, entry(b"link/.wh.outside")), "entry 2", "not a directory")
    refused(target, tar(link, entry(b"link/.wh..wh..opq")), "entry 2", "not a directory")
    refused(target, tar(link, entry(b"hard", kind=header.LINK, link=b"link/outside")), "entry 2", "link/outside")
    refused(target, tar(link, entry(b"link", b"evil")), "entry 2", "twice")
    refused(target, tar(link, entry(b"link/")), "entry 2", "twice")


def test_a_symlink_of_the_target_is_not_followed(target):
    os.symlink(target.parent.parent / "outside", target / "name")
    apply(target, tar(entry(b"name", b"mine")))
    assert (target.parent.parent / "outside").read_bytes() == b"outside"
    assert (target / "name").read_bytes() == b"mine"
    assert not (target / "name").is_symlink()


def test_a_hard_link_reaches_only_what_the_layer_brought(target):
    refused(target, tar(entry(b"link", kind=header.LINK, link=b"old")), "entry 1", "link to old")
    refused(target, tar(entry(b"link", kind=header.LINK, link=b"link")), "entry 1", "link to link")
    refused(target, tar(entry(b"a", kind=header.LINK, link=b"b"), entry(b"b", kind=header.LINK, link=b"a")), "entry 1")
    refused(target, tar(entry(b"d/"), entry(b"link", kind=header.LINK, link=b"d")), "entry 2", "link to d")
    refused(target, tar(entry(b".wh.gone"), entry(b"link", kind=header.LINK, link=b"gone")), "deleted")
    refused(target, tar(entry(b"link", kind=header.LINK, link=b".wh.gone")), "mark of a deletion")
    refused(target, tar(entry(b"link", kind=header.LINK, link=b"./")), "root")


def test_a_hard_link_to_a_symlink_does_not_follow_it(target):
    symlink = entry(b"symlink", kind=header.SYMLINK, link=b"../outside")
    apply(target, tar(symlink, entry(b"link", kind=header.LINK, link=b"symlink")))
    assert (target / "link").is_symlink()


def test_an_entry_may_be_there_once(target):
    twice = "twice"  # files are made beside the reading, so the number may be that of either entry
    refused(target, tar(FILE, FILE), "entry", "file", twice)
    refused(target, tar(entry(b"d/"), entry(b"d/")), "entry 2", "d", twice)
    refused(target, tar(entry(b"d/"), entry(b"d", b"x")), "entry", "d", twice)
    refused(target, tar(FILE, entry(b"file/")), "entry", "file", twice)
    refused(target, tar(entry(b"./"), entry(b"./")), "entry 2", twice)
    refused(target, tar(FILE, entry(b".wh.file")), "entry", "file", twice)
    refused(target, tar(entry(b".wh.file"), FILE), "entry 2", "file", twice)
    refused(target, tar(entry(b".wh.d"), entry(b"d/")), "entry 2", "d", twice)
    refused(target, tar(entry(b".wh.d"), entry(b".wh.d")), "entry 2", "d", twice)
    refused(target, tar(entry(b"d/"), entry(b"d/.wh..wh..opq"), entry(b"d/.wh..wh..opq")), "entry 3", "d", twice)
    refused(target, tar(entry(b"./file"), entry(b"file")), "entry 2", "file", twice)


def test_nothing_can_be_inside_a_deletion_or_a_file(target):
    refused(target, tar(entry(b".wh.d"), entry(b"d/file")), "entry 2", "d/file", "not a directory")
    refused(target, tar(FILE, entry(b"file/inside")), "entry 2", "file/inside", "not a directory")
    refused(target, tar(entry(b".wh.d/some-file")), "inside a mark of a deletion")
    refused(target, tar(entry(b".wh.d/.wh.file")), "inside a mark of a deletion")


@pytest.mark.parametrize("name", [b".wh.", b".wh..", b".wh...", b"d/.wh.", b".wh..wh.aufs", b"d/.wh..wh.plnk"])
def test_a_deletion_of_nothing_is_refused(target, name):
    refused(target, tar(entry(b"d/"), entry(name)), "entry 2", "names nothing")


def test_a_deletion_is_an_empty_file(target):
    refused(target, tar(entry(b".wh.x", b"data")), "not an empty file")
    refused(target, tar(entry(b".wh.x", kind=header.SYMLINK, link=b"x")), "not an empty file")
    refused(target, tar(entry(b".wh.x/")), "not an empty file")


@pytest.mark.parametrize("mark", [b"opaque", b"redirect", b"metacopy", b"origin", b"whiteout", b"overlay.opaque"])
@pytest.mark.parametrize("prefix", ["trusted.", "user."])
def test_no_layer_can_plant_a_mark_of_the_overlay(target, mark, prefix):
    own = prefix.encode() + b"overlay."
    records = xattr(own + mark, b"y")
    apply(target, tar(entry(b"./", records=records), entry(b"d/", records=records), entry(b"f", records=records)),
          xattr_prefix=prefix)  # fmt: skip
    for path in (target, target / "d", target / "f"):
        assert os.listxattr(path) == [(own + b"overlay." + mark).decode()]


def test_a_device_that_is_a_whiteout_is_refused(target):
    refused(target, tar(entry(b"null", kind=header.CHARACTER, device=(0, 0))), "null", "0:0")


def test_a_file_that_was_cut_off_is_refused(target):
    whole = tar(FILE, entry(b"big", b"x" * 5000), entry(b"last", b"y", records=record(b"comment", b"c" * 2000)))
    apply(target, whole)
    (target / "file").rename(target / "old")
    for name in os.listdir(target):
        if name != "old":
            (target / name).unlink()
    (target / "old").write_bytes(b"old")
    for size in range(0, len(whole), 512):
        assert "cut off" in refused(target, whole[:size]) or size == 0
    for size in (1, 100, 511, 513, 1500, len(whole) - 1):
        refused(target, whole[:size], "cut off")


def test_an_empty_file_is_refused(target):
    refused(target, b"", "at the beginning", "cut off")


def test_garbage_is_refused(target):
    refused(target, b"garbage" * 1000, "at the beginning", "checksum")
    refused(target, os.urandom(1 << 16))
    refused(target, tar(FILE, b"\xff" * 512), "after entry 1, file", "checksum")


def test_data_behind_the_end_is_refused(target):
    refused(target, tar(FILE) + FILE + header.END, "after entry 1", "more data")
    refused(target, FILE + bytes(512) + FILE + header.END, "more data")
    refused(target, tar(FILE) + bytes(2 << 20), "zeros behind")
    apply(target, tar(FILE) + bytes(10240))


def test_a_giant_header_is_refused_before_it_is_read(target):
    for kind in (b"x", b"g", b"L", b"K"):
        giant = block(kind=kind, size=b"%011o" % (1 << 32))
        refused(target, tar(FILE, giant), "after entry 1", str(1 << 32))
        refused(target, tar(FILE, block(kind=kind, size=b"\x80" + b"\x7f" * 11)), "after entry 1")
        refused(target, tar(FILE, block(kind=kind, size=b"\xff" * 12)), "after entry 1")


def test_a_file_beyond_the_limit_is_refused_before_it_is_written(target):
    refused(target, tar(FILE, block(name=b"giant", size=b"%011o" % (1 << 30))), "giant", "limit", limit=1 << 20)
    refused(target, tar(FILE, block(name=b"giant", size=b"\x80" + b"\x7f" * 11)), "giant", "limit")
    refused(target, tar(FILE, block(name=b"negative", size=b"\xff" * 12)), "negative")


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(target):
    bomb = gzip.compress(tar(block(name=b"bomb", size=b"%011o" % (64 << 20)) + bytes(64 << 20)))
    assert len(bomb) < 100_000
    refused(target, bomb, "limit", limit=1 << 20)
    # Many entries, each of them within the limit.
    many = gzip.compress(tar(*[entry(b"f%d" % i, bytes(100_000)) for i in range(20)]))
    refused(target, many, "limit", limit=1 << 20)
    # No entry at all.
    headers = gzip.compress(extended(record(b"comment", b"x" * 400), kind=b"g") * 2000)
    refused(target, headers, "limit", limit=1 << 20)


@pytest.mark.parametrize(
    "records",
    [
        b"12 path=",
        b"path=x\n",
        b"0 path=x\n",
        b"-9 path=x\n",
        b"9 path=xyz\n",
        b"99999 path=x\n",
        b"9999999999999999999999 path=x\n",
        b"6 =x\n\n",
        b" 9 path=x\n",
        b"",
        b"9 path=x\x00",
        b"5 a\n=\n",
    ],
)
def test_pax_records_that_do_not_add_up_are_refused(target, records):
    refused(target, tar(FILE, extended(records) + block(name=b"next")), "entry 1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"size", b"-1"),
        (b"size", b"1e3"),
        (b"size", b"0x10"),
        (b"size", b"99999999999999999999999"),
        (b"uid", b"-1"),
        (b"uid", b"4294967295"),
        (b"gid", b"4294967296"),
        (b"mtime", b"now"),
        (b"mtime", b"1" * 50),
        (b"mtime", b"1.-5"),
        (b"mtime", b"--5"),
        (b"mtime", b"99999999999999999999"),
        (b"atime", b""),
        (b"SCHILY.acl.access", b"user::rwx"),
        (b"SCHILY.realsize", b"5"),
        (b"FERMATA.from-the-future", b"1"),
        (b"FERMATA.kind", b"rocket"),
        (b"GNU.sparse.major", b"1"),
        (b"SCHILY.xattr.user.a\0b", b"x"),
        (b"SCHILY.xattr.no-such-namespace.x", b"x"),
        (b"SCHILY.xattr.", b"x"),
        (b"SCHILY.xattr.user." + b"n" * 300, b"x"),
    ],
)
def test_a_record_without_a_sensible_meaning_is_refused(target, key, value):
    refused(target, tar(FILE, extended(record(key, value)) + block(name=b"victim")), "entry 2, victim")


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": b"rw-r--r"},
        {"uid": b"9999999"},
        {"size": b"-0000000001"},
        {"size": b"0_7"},
        {"mtime": b"+17"},
        {"kind": b"Z"},
        {"kind": b"D"},
        {"kind": b"M"},
        {"kind": b"V"},
        {"kind": b"N"},
        {"kind": b"1", "link": b"old", "size": b"%011o" % 4},
        {"kind": b"2", "link": b""},
        {"kind": b"5", "size": b"%011o" % 512},
    ],
)
def test_a_header_without_a_sensible_meaning_is_refused(target, fields):
    refused(target, tar(FILE, block(**fields) + bytes(512)), "entry")


def sparse(text: bytes, data: bytes, real: int) -> bytes:
    body = text + bytes(-len(text) % 512) + data
    records = (
        record(b"GNU.sparse.major", b"1")
        + record(b"GNU.sparse.minor", b"0")
        + record(b"GNU.sparse.name", b"sparse")
        + record(b"GNU.sparse.realsize", b"%d" % real)
    )
    return entry(b"GNUSparseFile.0/sparse", body, records=records)


@pytest.mark.parametrize(
    ("text", "data", "real"),
    [
        (b"1\n0\n8\n", b"12345678", 4),
        (b"1\n0\n4\n", b"12345678", 8),
        (b"1\n-4\n8\n", b"12345678", 8),
        (b"2\n0\n4\n2\n4\n", b"12345678", 8),
        (b"2\n4\n4\n0\n4\n", b"12345678", 8),
        (b"1\n9223372036854775807\n8\n", b"12345678", 8),
        (b"99999999\n0\n4\n", b"", 8),
        (b"9999999999999999999999\n", b"", 8),
        (b"x\n", b"", 8),
        (b"1" * 2000, b"", 8),
        (b"1\n0\n", b"", 8),
        (b"", b"", 8),
        (b"0\n", b"", 1 << 63),
    ],
)
def test_a_sparse_map_that_does_not_add_up_is_refused(target, text, data, real):
    refused(target, tar(FILE, sparse(text, data, real)), "entry 2, sparse")


def test_extended_headers_in_a_row_are_refused(target):
    one = extended(record(b"path", b"x"))
    refused(target, tar(FILE, one, one, block()), "two extended headers")
    refused(target, tar(FILE, one), "not followed")
    long_name = block(kind=b"L", size=b"%011o" % 2) + b"x\0" + bytes(510)
    refused(target, tar(FILE, long_name, long_name, block()), "two extended headers")
    refused(target, tar(FILE, long_name), "not followed")
    refused(target, tar(extended(record(b"path", b"x"), kind=b"g"), block()), "global header")


def test_a_wrong_digest_is_refused(target):
    layer = tar(FILE)
    right = "sha256:" + hashlib.sha256(layer).hexdigest()
    refused(target, layer + bytes(512), right, "was expected", digest=right)
    refused(target, layer, "sha256", digest="sha256:abc")
    refused(target, layer, "sha256", digest="md5:" + "0" * 64)
    compressed = gzip.compress(layer)
    refused(target, compressed, "was expected", digest=right)
    apply(target, compressed, digest="sha256:" + hashlib.sha256(compressed).hexdigest())


def test_a_deep_tree_needs_few_files_at_a_time(target):
    import resource

    depth = 600
    # With files on every level, which are made while directories far above are closed and opened again.
    parts = [entry(b"d/" * i + name) for i in range(1, depth + 1) for name in (b"", b"f", b"g")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        apply(target, tar(*parts, entry(b"d/" * depth + b"bottom", b"deep"), entry(b"top", b"t")))
        items = list(layerwriter.record(target))
        assert len(items) == 3 * depth + 3
        assert items[depth + 1].path == b"d/" * depth + b"bottom"
        again = layerwriter.write(target, target.parent.parent / "again.tar")
        layerwriter.apply(again, target, replace=True)
        assert list(layerwriter.compare(items, target)) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    apply(target, tar())  # removes the deep tree, which shutil.rmtree would not


def test_files_that_are_made_late_are_made_in_their_own_directories(target, monkeypatch):
    """Far down, directories above are closed: not while there are files to be made in them."""
    deep, made = threading.Event(), threading.Event()
    make = newtree.NewTree._make_small

    def make_late(tree, job, place):
        if threading.current_thread() is not threading.main_thread():
            deep.wait(0.5)  # in vain, if the main thread waits for this file before it goes too far
            make(tree, job, place)
            made.set()
            return
        if job[1].path.count(b"/") > 120:
            deep.set()
            made.wait(5)
        make(tree, job, place)

    monkeypatch.setattr(newtree.NewTree, "_make_small", make_late)
    levels = [entry(b"d/" * depth) + entry(b"d/" * depth + b"f", b"x") for depth in range(1, 200)]
    apply(target, tar(*levels))
    expected = {b"d/" * depth + b"f" for depth in range(1, 200)}
    assert {item.path for item in layerwriter.record(target) if item.kind == "file"} == expected
    apply(target, tar(entry(b"old", b"old")))


def test_too_many_directories_without_entries_are_refused(target, monkeypatch):
    monkeypatch.setattr(newtree, "_IMPLIED", 1000)
    apply(target, tar(*[entry(b"d%d/f" % i) for i in range(50)]))
    apply(target, tar(entry(b"old", b"old")))
    refused(target, tar(*[entry(b"d%d/f" % i) for i in range(400)]), "no entry of their own")
    refused(target, tar(entry(b"d/" * 400 + b"f")), "no entry of their own")


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(target, kind):
    layer = target.parent.parent / "layer"
    if kind == "fifo":
        os.mkfifo(layer)
    elif kind == "directory":
        layer.mkdir()
    else:
        layer = Path("/dev/zero")
    with pytest.raises(layerwriter.LayerError, match=r"is no regular file$"):
        layerwriter.apply(layer, target, replace=True)
    assert (target / "old").read_bytes() == b"old"
