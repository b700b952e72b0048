"""gzip and zstd, of whatever tool, whole and damaged."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest

import layerwriter
from layerwriter.compression import compressor
from tests.unit.layerwriter.tars import entry, tar

NOISE = random.Random(1).randbytes(3 << 20)
DATA = tar(entry(b"noise", NOISE), entry(b"zeros", bytes(3 << 20)), entry(b"last", b"last"))


def zstd(data: bytes, size: int = 1 << 20) -> bytes:
    compress = compressor()
    return b"".join(compress(memoryview(data[at : at + size])) for at in range(0, len(data), size))


def stream(data: bytes, **options) -> bytes:
    """One frame that does not say its size, as `tar --zstd` and Go write it."""
    zstandard = pytest.importorskip("zstandard")
    encoder = zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compressobj()
    return encoder.compress(data) + encoder.flush()


SKIPPABLE = b"\x55\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"


def whole() -> dict[str, bytes]:
    return {
        "gzip": gzip.compress(DATA),
        "gzip members": b"".join(gzip.compress(DATA[at : at + 700_000]) for at in range(0, len(DATA), 700_000)),
        "zstd": zstd(DATA),
        "small frames": zstd(DATA, 40_000),
        "a large frame": zstd(DATA, 1 << 30),
        "a frame without its size": stream(DATA),
        "without a checksum": stream(DATA, write_checksum=False),
        "level 19": stream(DATA, level=19),
        "skippable frames": SKIPPABLE + zstd(DATA[: 1 << 20]) + SKIPPABLE + zstd(DATA[1 << 20 :]) + SKIPPABLE,
        "all kinds": zstd(DATA[:1000]) + stream(DATA[1000:2000000]) + SKIPPABLE + zstd(DATA[2000000:], 5 << 19),
        "empty frames": zstd(DATA[:5000], 5000) + stream(b"") + zstd(DATA[5000:]),
    }


WHOLE = whole()


@pytest.fixture
def apply(tmp_path: Path):
    (tmp_path / "fs").mkdir()

    def apply(data: bytes) -> Path:
        (tmp_path / "layer").write_bytes(data)
        layerwriter.apply(tmp_path / "layer", tmp_path / "fs", replace=True)
        return tmp_path / "fs"

    return apply


@pytest.mark.parametrize("name", WHOLE)
def test_a_compressed_layer_is_read(apply, name):
    fs = apply(WHOLE[name])
    assert (fs / "noise").read_bytes() == NOISE
    assert (fs / "zeros").read_bytes() == bytes(3 << 20)
    assert (fs / "last").read_bytes() == b"last"


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_one_is_refused(apply, name):
    data = WHOLE[name]
    for size in (10, len(data) // 2, len(data) - 1):
        if name == "skippable frames" and size == len(data) - 1:
            continue  # behind the tar's end, where nothing is missing
        with pytest.raises(layerwriter.LayerError):
            apply(data[:size])
    with pytest.raises(layerwriter.LayerError):
        apply(data + b"garbage")
    for at in (len(data) // 3, len(data) // 2):
        changed = bytearray(data)
        changed[at] ^= 0x55
        if changed != data and name != "without a checksum":
            try:
                fs = apply(bytes(changed))
            except layerwriter.LayerError:
                continue
            assert (fs / "noise").read_bytes() == NOISE, at  # it was in what nobody reads


def test_a_cut_off_one_is_named_so(apply):
    for data in (gzip.compress(DATA), zstd(DATA), stream(DATA)):
        with pytest.raises(layerwriter.LayerError, match="cut off"):
            apply(data[: len(data) // 2])


def test_a_gzip_file_that_lacks_only_its_end_is_refused(apply):
    """The tar is whole, but nothing vouches for it."""
    with pytest.raises(layerwriter.LayerError, match="cut off"):
        apply(gzip.compress(DATA)[:-4])


def test_a_frame_that_lies_about_its_size_is_refused(apply):
    frame = bytearray(zstd(os.urandom(5000), 5000))
    # Two bytes of size, 256 less than it is, behind magic, descriptor: a single segment.
    assert frame[4] >> 5 & 1
    frame[5] ^= 1
    with pytest.raises(layerwriter.LayerError, match="zstd data is damaged"):
        apply(bytes(frame))


def test_zstd_that_is_missing_is_said_before_anything_is_written(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(layerwriter.LayerError, match="python3-zstandard"):
        layerwriter.write(tmp_path, tmp_path / "layer", compression="zstd")
    assert os.listdir(tmp_path) == []
