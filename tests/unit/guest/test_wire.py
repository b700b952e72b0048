"""Messages, whatever pieces they come in, with the descriptors that belong to them."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
import time

import pytest
from fermata.errors import GuestError
from fermata.wire import Connection
from hypothesis import given, settings
from hypothesis import strategies as st


def limit(seconds=30.0):
    return time.monotonic() + seconds


@pytest.fixture
def ends():
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(other)
    yield mine, connection
    mine.close()
    connection.close()


def with_descriptors(sock, message, count):
    pipes = [os.pipe() for _ in range(count)]
    numbers = array.array("i", [come for come, _ in pipes])
    sock.sendmsg([json.dumps(message).encode() + b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    for pair in pipes:
        for one in pair:
            os.close(one)


KEYS = st.text(max_size=5).filter(lambda key: key != "fds")  # which says how many descriptors come


@settings(deadline=None)
@given(st.lists(st.dictionaries(KEYS, st.integers(), max_size=3), max_size=5), st.integers(1, 9))
def test_messages_arrive_in_pieces_of_any_size(messages, size):
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(other)
    data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)

    def speak():
        for start in range(0, len(data), size):
            mine.sendall(data[start : start + size])
        mine.shutdown(socket.SHUT_WR)

    speaker = threading.Thread(target=speak)  # a socket holds but a few hundred pieces that nobody has read
    speaker.start()
    try:
        for message in messages:
            assert connection.receive(limit()) == (message, [])
        assert connection.receive(limit()) is None
    finally:
        connection.close()
        speaker.join()
        mine.close()


def test_descriptors_come_with_their_message(ends):
    mine, connection = ends
    with_descriptors(mine, {"fds": 250}, 250)
    received = connection.receive(limit())
    assert received is not None
    assert received[0] == {"fds": 250}
    assert len(set(received[1])) == 250
    assert not any(os.get_inheritable(one) for one in received[1])
    for one in received[1]:
        os.close(one)


@pytest.mark.parametrize("said", [0, 1, 3, "two"])
def test_another_number_of_descriptors_is_refused_and_they_are_closed(ends, said):
    mine, connection = ends
    before = len(os.listdir("/proc/self/fd"))
    with_descriptors(mine, {"fds": said}, 2)
    with pytest.raises(GuestError, match="and 2 came"):
        connection.receive(limit())
    mine.close()
    connection.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"x\n", "no JSON"), (b"[]\n", "no JSON object"), (b"{", "ended inside"), (b"1" * (17 << 20), "longer than")],
)
def test_what_is_no_message_is_refused(data, words):
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(other)

    def speak():
        try:
            mine.sendall(data)
            mine.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    speaker = threading.Thread(target=speak)
    speaker.start()
    with pytest.raises(GuestError, match=words):
        connection.receive(limit())
    connection.close()
    speaker.join()
    mine.close()


def test_every_wait_ends(ends):
    _, connection = ends
    with pytest.raises(GuestError, match="limit"):
        connection.receive(limit(0.05))
    with pytest.raises(GuestError, match="could not be sent"):
        connection.send({"text": "x" * (8 << 20)}, limit(0.05))
