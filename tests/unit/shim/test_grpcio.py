"""gRPC for Python: the one version that must never be called."""

from __future__ import annotations

import sys
import types

import pytest

from shim import containerd, grpcio
from shim.errors import ShimError


def test_what_ubuntu_22_04_has_is_refused():
    assert "never comes back" in grpcio.broken("1.30.2", (3, 10))


@pytest.mark.parametrize(("version", "python"), [("1.30.2", (3, 9)), ("1.51.1", (3, 10)), ("", (3, 10))])
def test_others_are_taken(version, python):
    assert grpcio.broken(version, python) is None


def test_a_command_says_what_to_do(monkeypatch):
    fake = types.ModuleType("grpc")
    fake.__version__ = "1.30.2"
    monkeypatch.setitem(sys.modules, "grpc", fake)
    monkeypatch.setattr(grpcio.sys, "version_info", (3, 10, 12))
    with pytest.raises(ShimError, match=r"Ubuntu 22.04.*pip install 'grpcio>=1.48'"):
        containerd.Client("/run/x.sock", "default")


def test_a_missing_one_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ShimError, match="which is not installed: install the package python3-grpcio"):
        containerd.Client("/run/x.sock", "default")
