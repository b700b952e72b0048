"""The socket that containerd connects to: whose it may be, and who may come."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from differ.check import _try
from differ.http2 import PREFACE
from differ.messages import DIFF, WRITE, Entry, WriteContentRequest, data_field
from differ.server import GOAWAY, Passages, _check_directory, _opened, _remove_strays, main


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o711)
    with pytest.raises(SystemExit, match="must belong to root"):
        _check_directory(str(tmp_path / "open"))
    (tmp_path / "open").chmod(0o700)
    _check_directory(str(tmp_path / "open"))


def test_the_socket_and_its_directory_are_the_owners_alone(tmp_path):
    path = tmp_path / "differ" / "differ.sock"
    for _ in range(2):  # over what a killed process left
        _opened(str(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_sockets_of_killed_processes_are_removed_and_nothing_else(tmp_path):
    for name in ("grpc-1.sock", "grpc-22.sock", "differ.sock"):
        (tmp_path / name).touch()
    _remove_strays(str(tmp_path))
    assert os.listdir(tmp_path) == ["differ.sock"]


def test_a_place_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--socket", str(tmp_path / "file" / "below" / "differ.sock")]) == 1
    assert "cannot be opened" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1 << 20])
def test_a_piece_behind_its_own_field_is_part_of_the_message(size):
    head = WriteContentRequest(action=WRITE, ref="r", offset=7, labels=[Entry(key="a", value="b")])
    data = os.urandom(size)
    message = WriteContentRequest.decode(head.encode() + data_field(size) + data)
    assert (message.data, message.ref, message.offset, message.labels[0].value) == (data, "r", 7, "b")


@pytest.fixture
def without_grpc(tmp_path):
    """A fermata-differ whose Python has no gRPC, and the address of its socket."""
    program = "import sys; sys.modules['grpc'] = None; from differ.server import main; sys.exit(main(sys.argv[1:]))"
    path = str(tmp_path / "differ" / "differ.sock")
    process = subprocess.Popen([sys.executable, "-c", program, "--socket", path], stderr=subprocess.PIPE, text=True)
    assert "python3-grpcio" in process.stderr.readline()
    yield path
    process.terminate()
    assert process.wait(10) == 0
    process.stderr.close()


def test_without_grpc_every_request_is_declined(without_grpc):
    grpc = pytest.importorskip("grpc")
    if os.geteuid() != 0:
        pytest.skip("only root can connect")
    with grpc.insecure_channel(f"unix:{without_grpc}") as channel:
        diff = channel.unary_unary(f"/{DIFF}/Diff")
        # More than what a connection or a request may hold before it is told to go on.
        for size in (0, 3, 20_000, *[60_000] * 40):
            with pytest.raises(grpc.RpcError) as failed:
                diff(bytes(size), timeout=20)
            assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert "not implemented" in failed.value.details()
    assert _try(without_grpc) is None


SLOW = """
import sys, threading
from differ import server
from shim import grpcio
load = grpcio.load
def slowly():
    print("loading", file=sys.stderr, flush=True)
    sys.stdin.read()
    return load()
grpcio.load = slowly
sys.exit(server.main(sys.argv[1:]))
"""


@pytest.fixture
def loading(tmp_path):
    """A fermata-differ that imports gRPC until its input ends, and the address of its socket."""
    pytest.importorskip("grpc")
    if os.geteuid() != 0:
        pytest.skip("only root can connect")
    path = str(tmp_path / "differ" / "differ.sock")
    argv = [sys.executable, "-c", SLOW, "--socket", path, "--address", str(tmp_path / "no containerd")]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "loading\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdin.close()
    process.stderr.close()


def test_while_grpc_is_imported_a_connection_has_its_first_bytes_and_its_request_waits(loading):
    grpc = pytest.importorskip("grpc")
    process, path = loading
    assert _try(path) is None, "the first frame"
    with grpc.insecure_channel(f"unix:{path}") as channel:
        grpc.channel_ready_future(channel).result(timeout=20)
        apply = channel.unary_unary(f"/{DIFF}/Apply")
        waiting = [apply.future(b"", timeout=60) for _ in range(3)]
        assert not any(call.done() for call in waiting)
        process.stdin.close()
        for call in waiting:
            assert call.code() == grpc.StatusCode.UNIMPLEMENTED
            assert "makes layers and applies none" in call.details()
        # The same connection goes on, over more than what may be sent before the settings of either side are known.
        for size in (0, 1 << 10, 200_000, 1 << 20):
            with pytest.raises(grpc.RpcError, match="applies none"):
                apply(bytes(size), timeout=20)


def test_who_goes_while_grpc_is_imported_costs_nobody_else_anything(loading):
    grpc = pytest.importorskip("grpc")
    process, path = loading
    for said in (b"", PREFACE, PREFACE + b"\0\0\4\0\0", PREFACE + bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + b"\0\3"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(said)
    process.stdin.close()
    with grpc.insecure_channel(f"unix:{path}") as channel, pytest.raises(grpc.RpcError, match="applies none"):
        channel.unary_unary(f"/{DIFF}/Apply")(b"", timeout=20)
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, PREFACE + b"\xff" * 40, PREFACE + b"\0\0\4\0\0"])
def test_what_is_no_request_ends_its_connection_alone(without_grpc, said):
    if os.geteuid() != 0:
        pytest.skip("only root can connect")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(without_grpc)
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert _try(without_grpc) is None


def frame(kind, payload, stream=0):
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big") + payload


@pytest.fixture
def passages(tmp_path):
    """Connections that are passed through, a way to make one, and where it comes out."""
    with socket.socket(socket.AF_UNIX) as inner:
        inner.bind(str(tmp_path / "inner"))
        inner.listen(1)
        inner.settimeout(10)
        made = Passages(str(tmp_path / "inner"))
        ends = []

        def connect(greeted=False):
            client, passed = socket.socketpair()
            threading.Thread(target=made.serve, args=(passed, greeted), daemon=True).start()
            server, _ = inner.accept()
            ends.extend((client, server))
            for end in ends:
                end.settimeout(10)
            return client, server

        yield made, connect
        for end in ends:
            end.close()


def test_a_client_is_sent_elsewhere_between_two_frames_and_what_is_under_way_goes_on(passages):
    made, connect = passages
    client, server = connect()
    first, answer = frame(4, b""), frame(0, os.urandom(3000), stream=1)
    server.sendall(first + answer[:100])
    assert client.recv(len(first), socket.MSG_WAITALL) == first
    leaving = threading.Thread(target=made.leave)
    leaving.start()
    assert client.recv(len(GOAWAY), socket.MSG_WAITALL) == GOAWAY
    server.sendall(answer[100:])
    assert client.recv(len(answer), socket.MSG_WAITALL) == answer
    client.sendall(b"still asking")
    assert server.recv(100) == b"still asking"
    server.shutdown(socket.SHUT_WR)
    client.shutdown(socket.SHUT_WR)
    leaving.join(10)
    assert client.recv(100) == b""


def test_nobody_is_sent_elsewhere_before_the_first_frame(passages):
    made, connect = passages
    client, server = connect()
    made.leave()
    first = frame(4, os.urandom(6))
    server.sendall(first)
    assert client.recv(len(first) + len(GOAWAY), socket.MSG_WAITALL) == first + GOAWAY


def test_who_was_greeted_can_be_sent_elsewhere_at_once(passages):
    made, connect = passages
    client, _ = connect(greeted=True)
    made.leave()
    assert client.recv(len(GOAWAY), socket.MSG_WAITALL) == GOAWAY
