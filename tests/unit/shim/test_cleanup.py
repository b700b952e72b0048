"""Who listens at a socket's path, and what is left when nobody does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from shim.cleanup import listener

SERVE = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_listener_is_found_though_another_process_made_the_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{tmp_path}/socket")
        made.listen()
        assert listener(f"{tmp_path}/socket") == os.getpid()
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[made.fileno()]) as heir:
            made.close()
            assert listener(f"{tmp_path}/socket") == heir.pid
            heir.stdin.close()


def test_nobody_is_found_at_a_path_without_a_socket_or_with_a_dead_one(tmp_path):
    assert listener(f"{tmp_path}/socket") is None
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{tmp_path}/socket")
        made.listen()
    assert listener(f"{tmp_path}/socket") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace of its own")
def test_a_socket_of_the_same_path_in_another_mount_namespace_is_not_meant(tmp_path):
    path = f"{tmp_path}/socket"
    elsewhere = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$1" && exec "$2" -c "$3" "$1/socket"', "sh"]
    with subprocess.Popen(
        [*elsewhere, str(tmp_path), sys.executable, SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        assert listener(path) is None
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path)
            made.listen()
            assert listener(path) == os.getpid()
        assert listener(path) is None
        os.unlink(path)
        other.stdin.close()
