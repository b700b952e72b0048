"""The socket that containerd connects to: whose it may be, and who may come."""

from __future__ import annotations

import os
import stat

import pytest

from differ.messages import WRITE, Entry, WriteContentRequest, data_field
from differ.server import _check_directory, _opened, _remove_strays, main


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
