"""How storages lie in a file, and what the file is called."""

from __future__ import annotations

import hashlib

from fermata.pack import HostPart, Pack, digest
from hypothesis import given, settings
from hypothesis import strategies as st


def pack(sizes, chunk=1 << 16):
    return Pack("model", "cpu", [HostPart(0, size, None, "part") for size in sizes], chunk=chunk)


sizes = st.lists(st.integers(1, 300_000), max_size=20)


@settings(deadline=None)
@given(sizes, st.sampled_from([4096, 1 << 16, 1 << 18]))
def test_every_byte_of_every_part_is_in_one_chunk_once(sizes, length):
    one = pack(sizes)
    seen = [0] * len(sizes)
    end = 0
    for number, chunk in enumerate(one.split(length)):
        assert (chunk.number, chunk.offset) == (number, end)
        end += chunk.length
        at = chunk.offset
        for piece in chunk.pieces:
            assert piece.offset >= at
            at = piece.offset + piece.length
            assert at <= end
            assert piece.start == seen[piece.part], "parts come in order, each from its beginning"
            assert piece.offset == one.offsets[piece.part] + piece.start
            seen[piece.part] += piece.length
    assert (seen, end) == (sizes, one.bytes)


@settings(deadline=None)
@given(sizes)
def test_parts_begin_at_pages_and_the_file_ends_at_one(sizes):
    one = pack(sizes)
    assert all(offset % 4096 == 0 for offset in one.offsets)
    assert one.bytes == sum(-(-size // 4096) * 4096 for size in sizes)


def test_the_digest_is_of_the_size_the_chunks_size_and_their_digests():
    text = "fermata weights 1\n8192\n4096\n" + "a" * 64 + "\n" + "b" * 64 + "\n"
    assert digest(8192, 4096, ["a" * 64, "b" * 64]) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
