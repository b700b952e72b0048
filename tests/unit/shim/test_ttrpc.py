"""ttrpc's frames, without I/O."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shim import ttrpc

FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=300)), max_size=8
)


def _same(frame, fields):
    return (frame.stream, frame.kind, frame.flags, frame.data) == fields and not frame.oversize


def test_the_header_is_length_stream_type_flags_big_endian():
    assert ttrpc.Frame(7, ttrpc.REQUEST, ttrpc.REMOTE_CLOSED, b"abc").encode() == b"\0\0\0\x03\0\0\0\x07\x01\x01abc"


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1, max_size=50))
def test_frames_come_out_however_the_bytes_come_in(frames, cuts):
    stream = b"".join(ttrpc.Frame(*fields).encode() for fields in frames)
    reader = ttrpc.FrameReader()
    out = []
    at = turn = 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        out += reader.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert len(out) == len(frames)
    assert all(_same(frame, fields) for frame, fields in zip(out, frames, strict=True))
    assert not reader.partial


def test_too_large_a_frame_is_reported_once_and_the_stream_goes_on():
    reader = ttrpc.FrameReader()
    length = ttrpc.MAX_DATA + 1
    header = length.to_bytes(4, "big") + (5).to_bytes(4, "big") + bytes((ttrpc.REQUEST, 0))
    (frame,) = reader.feed(header + b"x" * 1000)
    assert (frame.stream, frame.oversize, frame.data) == (5, length, b"")
    assert reader.partial


def test_the_frame_behind_too_large_a_one_is_read():
    reader = ttrpc.FrameReader()
    length = ttrpc.MAX_DATA + 10
    header = length.to_bytes(4, "big") + (5).to_bytes(4, "big") + bytes((ttrpc.REQUEST, 0))
    following = ttrpc.Frame(7, ttrpc.REQUEST, 0, b"next").encode()
    frames = reader.feed(header + b"x" * length + following)
    assert [frame.stream for frame in frames] == [5, 7]
    assert frames[1].data == b"next"


def test_a_frame_of_exactly_the_limit_is_taken():
    (frame,) = ttrpc.FrameReader().feed(ttrpc.Frame(1, ttrpc.DATA, 0, bytes(ttrpc.MAX_DATA)).encode())
    assert len(frame.data) == ttrpc.MAX_DATA
    assert not frame.oversize


def test_a_huge_announcement_takes_no_memory():
    reader = ttrpc.FrameReader()
    reader.feed(b"\xff\xff\xff\xff\0\0\0\x01\x01\0")
    reader.feed(bytes(1 << 20))
    assert len(reader._buffer) == 0
