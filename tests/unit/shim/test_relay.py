"""The relay between containerd and the stock shim. The far side here is a ttrpc server of the test's own."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from shim import ttrpc
from shim.client import Client
from shim.errors import NOT_FOUND, RESOURCE_EXHAUSTED, ShimError
from shim.log import Log
from shim.relay import Relay


class FarSide:
    """Answers every request with `METHOD:PAYLOAD`, after what `before` does; ends when told to."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.seen = []
        self.connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        reader = ttrpc.FrameReader()
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            for frame in reader.feed(data):
                self.seen.append(frame)
                if frame.kind == ttrpc.REQUEST:
                    request = ttrpc.Request.decode(frame.data)
                    answer = ttrpc.Response(payload=request.method.encode() + b":" + request.payload)
                    connection.sendall(ttrpc.Frame(frame.stream, ttrpc.RESPONSE, 0, answer.encode()).encode())
                else:
                    connection.sendall(frame.encode())

    def end(self):
        for sock in (self.listener, *self.connections):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # ended before
            sock.close()


@pytest.fixture
def relay(tmp_path):
    far = FarSide(str(tmp_path / "far"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "near"))
    listener.listen()
    release = threading.Event()

    def refuse(call):
        raise ShimError("no such thing: make one", NOT_FOUND)

    def break_down(call):
        raise ZeroDivisionError("a fault")

    def bytes_in_a_name(call):
        raise ShimError(os.fsdecode(b"no file a\xffb"), NOT_FOUND)

    def wait(call):
        assert release.wait(20)
        return ttrpc.Response(payload=b"waited")

    handlers = {
        "Ours": lambda call: ttrpc.Response(payload=b"ours:" + call.request.payload),
        "Refuse": refuse,
        "Break": break_down,
        "Wait": wait,
        "Unsendable": lambda call: ttrpc.Response(payload=object()),
        "Bytes": bytes_in_a_name,
    }
    with (tmp_path / "log").open("wb") as log:
        served = Relay(
            socket.socket(fileno=listener.detach()),
            str(tmp_path / "far"),
            lambda service, method: handlers.get(method) if service == "task" else None,
            Log(log.fileno()),
        )
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        served.far, served.release, served.thread = far, release, thread
        served.near, served.log_file = str(tmp_path / "near"), tmp_path / "log"
        yield served
        release.set()
        far.end()
        thread.join(15)
        assert not thread.is_alive(), "the relay outlived the far side"


@pytest.fixture
def client(relay):
    with Client(relay.near) as client:
        client._sock.settimeout(20)
        yield client


def _call(client, method, payload=b"", service="task"):
    return client.call(service, method, payload, timeout_nano=15 * 10**9)


def test_a_call_that_is_not_ours_goes_on_as_it_came(relay, client):
    assert _call(client, "State", b"x").payload == b"State:x"
    assert _call(client, "Ours", b"x", service="sandbox").payload == b"Ours:x"
    assert [frame.stream for frame in relay.far.seen] == [1, 3]


def test_a_call_of_ours_does_not_reach_the_far_side(relay, client):
    assert _call(client, "Ours", b"x").payload == b"ours:x"
    assert _call(client, "State").ok
    assert [frame.stream for frame in relay.far.seen] == [3]


def test_a_refusal_comes_as_its_sentence_and_code(client):
    status = _call(client, "Refuse").status
    assert (status.code, status.message) == (NOT_FOUND, "no such thing: make one")


def test_a_fault_of_our_own_is_answered_and_logged(relay, client):
    status = _call(client, "Break").status
    assert "a fault in fermata itself" in status.message
    assert "ZeroDivisionError" in status.message
    assert b"in break_down" in relay.log_file.read_bytes()
    assert _call(client, "State").ok


def test_an_answer_that_cannot_be_sent_is_a_fault_that_is_answered(client):
    assert "a fault in fermata itself" in _call(client, "Unsendable").status.message


def test_bytes_that_are_no_text_are_shown_in_an_answer(client):
    assert _call(client, "Bytes").status.message == "no file a\\udcffb"


def test_other_calls_are_served_while_one_of_ours_takes_its_time(relay):
    with Client(relay.near) as slow, Client(relay.near) as quick:
        result = []
        thread = threading.Thread(target=lambda: result.append(_call(slow, "Wait").payload))
        thread.start()
        assert _call(quick, "State").ok
        assert not result
        relay.release.set()
        thread.join(15)
        assert result == [b"waited"]


def test_streaming_frames_and_what_is_no_request_go_both_ways(relay, client):
    frames = [
        ttrpc.Frame(1, ttrpc.DATA, ttrpc.REMOTE_OPEN, b"data"),
        ttrpc.Frame(3, 9, 0, b"unknown type"),
        ttrpc.Frame(1, ttrpc.DATA, ttrpc.REMOTE_CLOSED | ttrpc.NO_DATA),
    ]
    client._sock.sendall(b"".join(frame.encode() for frame in frames))
    reader = ttrpc.FrameReader()
    back = []
    while len(back) < 3:
        back += reader.feed(client._sock.recv(4096))
    assert [frame.encode() for frame in back] == [frame.encode() for frame in frames]


@pytest.mark.parametrize("stream", [2, 1], ids=["even", "reused"])
def test_a_stream_id_that_no_server_takes_is_left_to_the_stock_shim(relay, client, stream):
    assert _call(client, "State").ok
    request = ttrpc.Request(service="task", method="Ours")
    client._sock.sendall(ttrpc.Frame(stream, ttrpc.REQUEST, 0, request.encode()).encode())
    reader = ttrpc.FrameReader()
    (frame,) = reader.feed(client._sock.recv(4096))
    assert ttrpc.Response.decode(frame.data).payload == b"Ours:"


def test_too_large_a_message_is_refused_and_the_connection_goes_on(relay, client):
    length = ttrpc.MAX_DATA + 1
    header = length.to_bytes(4, "big") + (1).to_bytes(4, "big") + bytes((ttrpc.REQUEST, 0))
    client._sock.sendall(header + bytes(length))
    (frame,) = ttrpc.FrameReader().feed(client._sock.recv(4096))
    assert ttrpc.Response.decode(frame.data).status.code == RESOURCE_EXHAUSTED
    client._stream = 1
    assert _call(client, "State").ok
    assert [frame.stream for frame in relay.far.seen] == [3]


def test_a_message_of_the_largest_size_passes_both_ways(client):
    payload = bytes(range(256)) * ((ttrpc.MAX_DATA - 100) // 256)
    assert _call(client, "Echo", payload).payload == b"Echo:" + payload


def test_many_clients_that_do_not_read_are_served_in_the_end(relay):
    payload = bytes(1 << 20)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    request = ttrpc.Request(service="task", method="Echo", payload=payload).encode()
    for sock in clients:
        sock.settimeout(30)
        sock.connect(relay.near)

    def send(sock):
        for number in range(3):
            sock.sendall(ttrpc.Frame(2 * number + 1, ttrpc.REQUEST, 0, request).encode())

    senders = [threading.Thread(target=send, args=(sock,)) for sock in clients]
    for thread in senders:
        thread.start()
    for sock in clients:
        reader, frames = ttrpc.FrameReader(), []
        while len(frames) < 3:
            frames += reader.feed(sock.recv(1 << 20))
        assert [frame.stream for frame in frames] == [1, 3, 5]
        sock.close()
    for thread in senders:
        thread.join(15)


def test_when_the_far_side_ends_a_call_of_ours_is_still_answered(relay):
    with Client(relay.near) as client:
        result = []
        thread = threading.Thread(target=lambda: result.append(_call(client, "Wait").payload))
        thread.start()
        while not relay._running:
            pass
        relay.far.end()
        relay.thread.join(0.5)
        assert relay.thread.is_alive()
        relay.release.set()
        thread.join(15)
        assert result == [b"waited"]
    relay.thread.join(15)
    assert not relay.thread.is_alive()


def test_when_the_far_side_ends_the_relay_ends(relay, client):
    assert _call(client, "State").ok
    relay.far.end()
    relay.thread.join(15)
    assert not relay.thread.is_alive()
    assert client._sock.recv(10) == b""


def test_a_client_that_goes_away_in_the_middle_of_a_call_harms_nobody(relay):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(relay.near)
    request = ttrpc.Request(service="task", method="Wait").encode()
    sock.sendall(ttrpc.Frame(1, ttrpc.REQUEST, 0, request).encode())
    while not relay._running:
        pass
    sock.close()
    relay.release.set()
    with Client(relay.near) as client:
        assert _call(client, "State").ok
