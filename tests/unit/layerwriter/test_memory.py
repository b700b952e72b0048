"""Memory does not grow with what is written or read. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import layerwriter
import layerwriter.links
from layerwriter import header
from tests.unit.layerwriter.tars import block, entry, extended, tar

MOST = 64 << 10
"""KiB of resident memory, Python's own included."""

RUN = """
import sys
import layerwriter, layerwriter.links
try:
    {}
except layerwriter.LayerError as failure:
    print(str(failure)[:500], file=sys.stderr)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line.split()[1])
"""


def peak(code: str, *arguments: object) -> tuple[int, str]:
    """Run a statement. Returns the process's peak in KiB, and the LayerError that it raised."""
    argv = [sys.executable, "-c", RUN.format(code), *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
    return int(done.stdout), done.stderr


@pytest.fixture
def ram(tmp_path: Path):
    """A directory in memory, where a hundred thousand files are made in a moment."""
    where = tmp_path / "ram"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", where], check=True)
    yield where
    subprocess.run(["umount", where], check=True)


def test_a_wide_directory_and_many_hard_links(ram):
    upper = ram / "upper"
    (upper / "one").mkdir(parents=True)
    (upper / "other").mkdir()
    for number in range(20_000):
        (upper / "one" / f"a-file-with-some-name-{number}").touch()
        os.link(upper / "one" / f"a-file-with-some-name-{number}", upper / "other" / f"another-name-{number}")
    few = "layerwriter.links._MOST = 5000; "  # as a hundred times as many files would
    used, error = peak(f"{few}layerwriter.write(sys.argv[1], sys.argv[2])", upper, ram / "layer")
    assert (max(used, MOST), error) == (MOST, "")
    (ram / "fs").mkdir()
    used, error = peak("layerwriter.apply(sys.argv[1], sys.argv[2])", ram / "layer", ram / "fs")
    assert (max(used, MOST), error) == (MOST, "")
    for number in (0, 1, 4_999, 5_000, 19_999):
        one = (ram / "fs/one" / f"a-file-with-some-name-{number}").stat()
        assert (one.st_ino, 2) == ((ram / "fs/other" / f"another-name-{number}").stat().st_ino, one.st_nlink)


def test_hard_links_are_found_in_the_database_too(tmp_path, monkeypatch):
    monkeypatch.setattr(layerwriter.links, "_MOST", 2)
    links = layerwriter.links.Links()
    files = [tmp_path / f"file-{number}" for number in range(6)]
    for file in files:
        file.touch()
        os.link(file, f"{file}-second")
        os.link(file, f"{file}-third")
    for name, expected in (("", None), ("-second", 1), ("-third", 1)):
        for file in files:
            path = os.fsencode(f"{file}{name}")
            assert links.first(os.stat(path), path) == (os.fsencode(file) if expected else None)
    for file in files:  # all links were met, so nothing is remembered
        assert links.first(os.stat(file), b"again") is None


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_large_files(ram, compression):
    upper = ram / "upper"
    upper.mkdir()
    (upper / "noise").write_bytes(os.urandom(1 << 20) * 200)
    (upper / "zeros").write_bytes(bytes(100 << 20))
    used, error = peak(
        f"layerwriter.write(sys.argv[1], sys.argv[2], compression={compression!r})", upper, ram / "layer"
    )
    assert (max(used, MOST), error) == (MOST, "")
    (ram / "fs").mkdir()
    used, error = peak("layerwriter.apply(sys.argv[1], sys.argv[2])", ram / "layer", ram / "fs")
    assert (max(used, MOST), error) == (MOST, "")


def hostile():
    many = b"".join(header.record(b"k%d" % number, b"") for number in range(700_000))[: 8 << 20]
    yield "many records", extended(many[: many.rindex(b"\n") + 1])
    sparse = header.record(b"GNU.sparse.offset", b"0") + header.record(b"GNU.sparse.numbytes", b"0")
    records = header.record(b"GNU.sparse.size", b"1") + sparse * 150_000
    yield "many sparse records", extended(records) + block()
    numbers = header.record(b"GNU.sparse.map", b",".join([b"0"] * 4_000_000))
    yield "many sparse parts", extended(header.record(b"GNU.sparse.size", b"1") + numbers) + block()
    yield "a deep path", extended(header.record(b"path", b"a/" * 4_000_000 + b"a")) + block()
    yield "a deep link", extended(header.record(b"linkpath", b"a/" * 4_000_000 + b"a")) + block(kind=b"1")
    yield "a large attribute", extended(header.record(b"SCHILY.xattr.user.a", bytes(8_000_000))) + block()
    yield "a long name", block(kind=b"L", size=b"%011o" % (1 << 20)) + b"a/" * (1 << 19) + block()
    text = b"%d\n" % 190_000 + b"".join(b"%d\n0\n" % number for number in range(190_000))
    text += bytes(-len(text) % 512)
    keys = header.record(b"GNU.sparse.major", b"1") + header.record(b"GNU.sparse.minor", b"0")
    yield "a long map", entry(b"f", text, records=keys + header.record(b"GNU.sparse.realsize", b"%d" % (1 << 50)))


CASES = dict(hostile())


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_header(tmp_path, name):
    (tmp_path / "layer").write_bytes(tar(CASES[name]))
    (tmp_path / "fs").mkdir()
    used, error = peak("layerwriter.apply(sys.argv[1], sys.argv[2])", tmp_path / "layer", tmp_path / "fs")
    assert used < MOST, used
    assert error != ""
    assert os.listdir(tmp_path) == ["layer", "fs"] or sorted(os.listdir(tmp_path)) == ["fs", "layer"]


def test_frames_that_ask_for_much_memory_are_refused(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    data = tar(*[entry(b"f%d" % number, os.urandom(1 << 20) * 10) for number in range(16)])
    compressor = zstandard.ZstdCompressor(compression_params=options)
    with (tmp_path / "layer").open("wb") as file, compressor.stream_writer(file) as stream:
        stream.write(data)
    (tmp_path / "fs").mkdir()
    used, error = peak("layerwriter.apply(sys.argv[1], sys.argv[2])", tmp_path / "layer", tmp_path / "fs")
    assert used < MOST, used
    assert "needs 134217728 bytes of memory" in error


@pytest.mark.parametrize("level", [1, 19])
def test_one_frame_of_another_tool_is_read_in_pieces(tmp_path, level):
    zstandard = pytest.importorskip("zstandard")
    data = tar(entry(b"f", (os.urandom(1 << 18) + bytes(1 << 20)) * 60))
    compressor = zstandard.ZstdCompressor(level=level)
    with (tmp_path / "layer").open("wb") as file, compressor.stream_writer(file) as stream:
        stream.write(data)
    (tmp_path / "fs").mkdir()
    used, error = peak("layerwriter.apply(sys.argv[1], sys.argv[2])", tmp_path / "layer", tmp_path / "fs")
    assert (max(used, MOST), error) == (MOST, "")
    assert next(iter(layerwriter.read(tmp_path / "layer"))).size == (tmp_path / "fs/f").stat().st_size
