"""The shim's command line and the forms in which a stock shim's `start` answers."""

from __future__ import annotations

import pytest

from shim.bootstrap import Arguments, _listen
from shim.errors import ShimError
from shim.stock import Bootstrap, find
from shim.task import BootstrapResult


@pytest.mark.parametrize(
    "words",
    [
        ["-namespace", "n", "-id", "c", "-debug", "start"],
        ["--namespace", "n", "--id", "c", "--debug", "start"],
        ["-namespace=n", "-id=c", "-debug=true", "start"],
        ["--namespace=n", "--id=c", "-debug=1", "--", "start"],
    ],
)
def test_flags_are_gos(words):
    arguments = Arguments(words)
    assert arguments.values == {"namespace": "n", "id": "c"}
    assert arguments.switches == {"debug"}
    assert arguments.action == "start"


def test_a_switch_can_be_off_and_flags_end_at_the_action():
    arguments = Arguments(["-debug=false", "delete", "-id", "x"])
    assert (arguments.switches, arguments.action, arguments.values) == (set(), "delete", {})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["-nonsense", "x"], "not defined: -nonsense"), (["-id"], "needs an argument: -id")],
)
def test_what_cannot_be_understood_is_named(words, sentence):
    with pytest.raises(ShimError, match=sentence):
        Arguments(words)


def test_a_missing_flag_is_named():
    with pytest.raises(ShimError, match="-id is required"):
        Arguments(["start"]).required("id")


TEXT = b"unix:///run/containerd/s/0123"
JSON = b'{"version":3,"address":"unix:///run/containerd/s/0123","protocol":"ttrpc"}\n'
SPACED = b'{ "version": 2, "address": "unix:///run/containerd/s/0123" }'
PROTOBUF = (
    BootstrapResult(version=3, address="unix:///run/containerd/s/0123", protocol="ttrpc").encode() + b"\x22\x01\x01"
)


@pytest.mark.parametrize("answer", [TEXT, JSON, SPACED, PROTOBUF], ids=["text", "json", "spaced-json", "protobuf"])
def test_an_address_is_answered_in_the_form_that_it_came_in(answer):
    bootstrap = Bootstrap(answer)
    assert bootstrap.address == "unix:///run/containerd/s/0123"
    changed = bootstrap.with_address("unix:///run/f")
    assert Bootstrap(changed).address == "unix:///run/f"
    if answer is PROTOBUF:
        decoded = BootstrapResult.decode(changed)
        assert (decoded.version, decoded.protocol, decoded.unknown) == (3, "ttrpc", b"\x22\x01\x01")
    else:
        assert changed == answer.replace(b"/run/containerd/s/0123", b"/run/f")


@pytest.mark.parametrize("answer", [b"", b"{}", b"panic: something", b'{"address":1}'])
def test_an_answer_without_an_address_is_an_error(answer):
    with pytest.raises(ShimError, match="no address"):
        Bootstrap(answer)


def test_a_stock_shim_is_found_beside_containerd_first(tmp_path, monkeypatch):
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        binary = tmp_path / folder / "containerd-shim-runc-v2"
        binary.touch()
        binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find(None, str(tmp_path / "beside" / "containerd")) == str(tmp_path / "beside/containerd-shim-runc-v2")
    assert find(None, "containerd") == str(tmp_path / "path/containerd-shim-runc-v2")
    assert find(str(tmp_path / "beside/containerd-shim-runc-v2"), None).startswith(str(tmp_path / "beside"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ShimError, match=r"no stock shim.*/nowhere.*config.toml"):
        find(None, None)
    with pytest.raises(ShimError, match="names /no/such"):
        find("/no/such", None)


def test_a_socket_that_somebody_serves_is_left_alone_and_a_dead_one_is_replaced(tmp_path):
    path = str(tmp_path / "s")
    first = _listen(path)
    assert first is not None
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert _listen(path) is None
    first.close()
    second = _listen(path)
    assert second is not None
    second.close()
