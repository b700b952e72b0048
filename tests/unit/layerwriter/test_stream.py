"""A layer for an image: sent in order, complete, and the same for equal trees."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import socket
import subprocess
import tarfile

import pytest

from layerwriter import LayerError, NotPortable, compression, stream

SECOND = 1_000_000_000


@pytest.fixture
def upper(tmp_path):
    root = tmp_path / "upper"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "text").write_bytes(b"some text\n" * 400_000)
    (root / "a" / "noise").write_bytes(os.urandom(3 << 20))
    (root / "a" / "small").write_text("x")
    (root / "link").symlink_to("a")
    return root


def streamed(root, **options):
    out = bytearray()
    layer = stream(root, out.extend, **options)
    assert layer.digest == f"sha256:{hashlib.sha256(out).hexdigest()}"
    assert layer.size == len(out)
    return layer, bytes(out)


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member for member in tar}


def test_a_gzip_layer_holds_the_uncompressed_one(upper):
    plain, data = streamed(upper)
    layer, packed = streamed(upper, compression="gzip")
    assert gzip.decompress(packed) == data
    assert layer.diff_id == plain.diff_id == plain.digest
    assert len(packed) < len(data) - 3_000_000, "text gets smaller"
    assert len(packed) < 5 << 20, "noise gets no larger"


def test_gzip_of_level_0_stores(upper):
    _, data = streamed(upper)
    _, packed = streamed(upper, compression="gzip", gzip_level=0)
    assert gzip.decompress(packed) == data
    assert len(data) < len(packed) < len(data) * 1.01


@pytest.mark.parametrize("library", ["libisal.so.2", "no such library"])
def test_gzip_holds_the_same_with_isal_and_without(upper, library, monkeypatch):
    if library == compression._ISAL and compression.isal() is None:
        pytest.skip("needs libisal2")
    monkeypatch.setattr(compression, "_ISAL", library)
    assert (compression.isal() is None) == (library != "libisal.so.2")
    _, data = streamed(upper)
    _, packed = streamed(upper, compression="gzip")
    assert gzip.decompress(packed) == data
    assert len(packed) < len(data) - 3_000_000, "text gets smaller"
    assert len(packed) < 5 << 20, "noise gets no larger"
    assert packed == streamed(upper, compression="gzip")[1]


@pytest.mark.parametrize("library", ["libisal.so.2", "no such library"])
@pytest.mark.parametrize("size", [0, 1, 511, 65_537, 1 << 20])
@pytest.mark.parametrize("kind", ["noise", "zeros", "text"])
def test_every_piece_becomes_a_whole_gzip_member(library, size, kind, monkeypatch):
    monkeypatch.setattr(compression, "_ISAL", library)
    data = {"noise": os.urandom(size), "zeros": bytes(size), "text": (b"some words " * 100_000)[:size]}[kind]
    make = compression.gzip_compressor()
    for _ in range(2):  # what it keeps between pieces is of no consequence
        assert gzip.decompress(make(memoryview(bytearray(data)))) == data


def test_a_library_of_that_name_and_another_form_is_not_used(tmp_path, monkeypatch):
    source = tmp_path / "other.c"
    source.write_text("void isal_deflate_stateless_init(void *s) {} int isal_deflate_stateless(void *s) { return 0; }")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "other.so", source], check=True)
    monkeypatch.setattr(compression, "_ISAL", str(tmp_path / "other.so"))
    assert compression.isal() is None


def test_whoever_hashes_what_it_receives_saves_the_sender_that(upper):
    out = bytearray()
    plain = stream(upper, out.extend, hashed=False)
    packed = stream(upper, lambda data: None, hashed=False, compression="gzip")
    assert (plain.digest, plain.diff_id, plain.size) == ("", "", len(out))
    assert (packed.digest, packed.diff_id) == ("", f"sha256:{hashlib.sha256(out).hexdigest()}")


def test_a_zstd_layer_holds_the_uncompressed_one(upper, tmp_path):
    from layerwriter.compression import unzstd

    _, data = streamed(upper)
    _, packed = streamed(upper, compression="zstd")
    assert b"".join(bytes(part) for part in unzstd(iter([memoryview(packed)]))) == data


def test_equal_trees_make_equal_layers_also_after_reading(upper):
    for name in ("a/small", "a/text", "a", "."):
        os.utime(upper / name, ns=(5 * SECOND, 7 * SECOND + 123_456_789))
    _, before = streamed(upper)
    os.utime(upper / "a/small", ns=(99 * SECOND, 7 * SECOND + 123_456_789))
    _, after = streamed(upper)
    assert before == after
    assert members(before)["a/small"].mtime == pytest.approx(7.123456789)


def test_no_time_is_newer_than_the_source_date_epoch(upper):
    os.utime(upper / "a/small", ns=(0, 5 * SECOND + 3))
    _, data = streamed(upper, latest=1000 * SECOND)
    found = members(data)
    assert found["a/small"].mtime == pytest.approx(5.000000003)
    assert {member.mtime for name, member in found.items() if name != "a/small"} == {1000}


def test_sockets_and_the_nodes_own_labels_stay_here(upper):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(upper / "socket"))
    os.setxattr(upper / "a/small", "user.kept", b"1")
    os.setxattr(upper / "a/small", "user.a\nb", b"\0\xff")
    os.setxattr(upper / "a/small", "security.fermata", b"label")
    os.setxattr(upper / "a/small", "trusted.fermata", b"an administrator's")
    os.setxattr(upper / "a/small", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    _, data = streamed(upper)
    found = members(data)
    assert "socket" not in found
    names = {key for key in found["a/small"].pax_headers if key.startswith("SCHILY.xattr.")}
    assert names == {"SCHILY.xattr.user.kept", "SCHILY.xattr.user.a\nb", "SCHILY.xattr.security.capability"}


def test_a_hole_is_zeros(upper):
    with (upper / "sparse").open("wb") as file:
        file.truncate(5_000_001)
        file.seek(2_000_000)
        file.write(b"middle")
    _, data = streamed(upper)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = tar.getmember("sparse")
        assert not any(key.startswith("GNU.sparse") for key in member.pax_headers)
        assert tar.extractfile(member).read() == bytes(2_000_000) + b"middle" + bytes(2_999_995)


@pytest.mark.parametrize("name", [".wh.file", "a/.wh..wh..opq"])
def test_a_name_that_others_take_for_a_deletion_is_refused(upper, name):
    (upper / name).write_text("")
    with pytest.raises(NotPortable, match=r"\.wh\."):
        streamed(upper)


def test_a_mark_of_a_deletion_over_nothing_is_refused(upper):
    os.mknod(upper / "gone", 0o020000, os.makedev(0, 0))
    assert ".wh.gone" in members(streamed(upper)[1])
    with pytest.raises(NotPortable, match="gone: "):
        streamed(upper, base=True)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_receiver_that_fails_ends_the_walk_with_its_error(upper, compression):
    class Full(Exception):
        pass

    def send(data):
        raise Full

    with pytest.raises(Full):
        stream(upper, send, compression=compression)


def test_a_directory_that_is_gone_is_an_error_of_ours(tmp_path):
    with pytest.raises(LayerError, match="cannot be read"):
        stream(tmp_path / "gone", lambda data: None)
