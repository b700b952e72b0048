"""In real network namespaces, with real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shim import lockrules, netns, sockets

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

OLD = socket.inet_aton("10.201.7.2")
OLD6 = socket.inet_pton(socket.AF_INET6, "fd00:201::2")


@pytest.fixture
def space():
    path = netns.create("unit", f"s{os.getpid()}")
    yield path
    netns.remove(path)


def ip(path, *words):
    command = ["nsenter", f"--net={path}", "ip", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def state(path):
    return [ip(path, *words.split()) for words in ("address", "route show table all", "-6 route show table all")]


def open_up(path, addresses):
    notes = []
    netns.inside(path, lambda: sockets.open_up(addresses, notes.append))
    return " ".join(notes)


def bind(path, address):
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    return netns.inside(path, lambda: socket.create_server((socket.inet_ntop(family, address), 7000), family=family))


@pytest.mark.parametrize("address", [OLD, OLD6])
def test_a_foreign_address_can_be_bound_while_it_is_open_and_stays_bound(space, address):
    with pytest.raises(OSError, match="assign"):
        bind(space, address)
    before = state(space)
    note = open_up(space, {address})
    server = bind(space, address)
    netns.inside(space, lambda: sockets.close_down(note))
    assert state(space) == before
    assert server.getsockname()[1] == 7000
    server.close()


def test_there_is_a_way_to_every_peer_while_it_is_open(space):
    note = open_up(space, {OLD, OLD6})
    assert "dev lo" in ip(space, "route", "get", "192.0.2.1", "from", "10.201.7.2")
    assert "dev lo" in ip(space, "-6", "route", "get", "2001:db8::1")
    netns.inside(space, lambda: sockets.close_down(note))
    with pytest.raises(subprocess.CalledProcessError):
        ip(space, "route", "get", "192.0.2.1")


def test_what_is_there_is_neither_added_nor_taken_away(space):
    ip(space, "address", "add", "10.201.7.2/24", "dev", "lo")
    ip(space, "route", "add", "default", "dev", "lo", "metric", "5")
    before = state(space)
    assert open_up(space, {OLD}) == ""
    assert state(space) == before


def test_closing_twice_is_no_error(space):
    before = state(space)
    note = open_up(space, {OLD, OLD6})
    for _ in range(2):
        netns.inside(space, lambda: sockets.close_down(note))
    assert state(space) == before


def test_it_is_open_until_the_last_has_left(space):
    before = state(space)
    first, second = lockrules.Use(space), lockrules.Use(space)
    first.open_up({OLD})
    second.open_up({OLD})
    first.release()
    assert "10.201.7.2" in ip(space, "address")
    second.release()
    assert state(space) == before


def test_a_killed_shims_opening_is_undone_by_the_next(space):
    before = state(space)
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from shim import lockrules
lockrules.Use({space!r}).open_up({{{OLD!r}}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False)
    assert "10.201.7.2" in ip(space, "address")
    lockrules.Use(space).release()
    assert state(space) == before


@pytest.fixture
def outside(space):
    """A pair of namespaces: `space` at 10.201.7.2 and a peer at 10.201.7.1."""
    peer = netns.create("unit", f"p{os.getpid()}")
    subprocess.run(
        ["ip", "link", "add", "ftest0", "netns", space, "type", "veth", "peer", "ftest1", "netns", peer], check=True
    )
    for path, device, address in ((space, "ftest0", "10.201.7.2/24"), (peer, "ftest1", "10.201.7.1/24")):
        ip(path, "address", "add", address, "dev", device)
        ip(path, "link", "set", device, "up")
    yield peer
    netns.remove(peer)


def connect(server_space, client_space, address):
    server = netns.inside(server_space, lambda: socket.create_server((address, 0)))
    port = server.getsockname()[1]
    client = netns.inside(client_space, lambda: socket.create_connection((address, port), 5))
    return server, client, server.accept()[0]


def test_a_connection_to_the_outside_is_reset_and_the_others_are_not(space, outside):
    _, away, peer = connect(outside, space, "10.201.7.1")
    _, here, there = connect(space, space, "127.0.0.1")
    _, mine, own = connect(space, space, "10.201.7.2")
    reset = netns.inside(space, lambda: sockets.reset_outside(os.getpid()))
    assert len(reset) == 1
    assert "to 10.201.7.1 port" in reset[0]
    with pytest.raises(ConnectionAbortedError):
        away.recv(1)
    for one, other in ((here, there), (mine, own)):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    peer.settimeout(5)
    with pytest.raises(ConnectionResetError):
        peer.recv(1)


def test_a_connection_from_an_address_that_is_gone_is_reset(space):
    note = open_up(space, {OLD})
    _, one, _ = connect(space, space, "10.201.7.2")
    netns.inside(space, lambda: sockets.close_down(note))
    netns.inside(space, lambda: sockets.reset_outside(os.getpid()))
    with pytest.raises(ConnectionAbortedError):
        one.recv(1)


def test_another_containers_connections_are_not_touched(space, outside):
    """Another's process is in another control group than this test's, or is none."""
    _, away, peer = connect(outside, space, "10.201.7.1")
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert netns.inside(space, lambda: sockets.reset_outside(gone.pid)) == []
    away.sendall(b"x")
    assert peer.recv(1) == b"x"
