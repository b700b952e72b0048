"""The shim's command line beside the stock shim's, run as containerd runs it."""

from __future__ import annotations

import subprocess

import pytest

from shim import RUNTIME, task
from shim.ttrpc import AnyMessage

OURS, STOCK = "containerd-shim-fermata-v1", "containerd-shim-runc-v2"


def run(node, *words, stdin=b""):
    process = node.popen(
        words, env={"MAX_SHIM_VERSION": "4"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = process.communicate(stdin, timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(
    "options",
    [b"", AnyMessage(type_url=task.RUNC_OPTIONS, value=task.RuncOptions(binary_name="runc").encode()).encode()],
    ids=["without options", "with runc's options"],
)
def test_info_is_the_stock_shims_under_our_name(node, options):
    status, out, err = run(node, OURS, "-info", stdin=options)
    stock_status, stock_out, _ = run(node, STOCK, "-info", stdin=options)
    assert status == stock_status, err
    if status:
        pytest.skip("this containerd's shim has no -info")
    ours, stock = task.RuntimeInfo.decode(out), task.RuntimeInfo.decode(stock_out)
    assert ours.name == RUNTIME
    assert stock.name == "io.containerd.runc.v2"
    assert ours.unknown == stock.unknown
    assert b"runc" in ours.unknown


def test_the_version_is_told(node):
    status, out, _ = run(node, OURS, "-v")
    assert status == 0
    assert RUNTIME in out.decode()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("start",), "flag -namespace is required; containerd runs this program, a person runs `fermata`"),
        (("-namespace", "n", "-id", "c", "stop"), "unknown action 'stop'"),
        (("-namespace", "../n", "-id", "c", "delete"), "namespace '../n' is not an identifier"),
        (("-nonsense",), "flag provided but not defined: -nonsense"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(node, words, sentence):
    status, out, err = run(node, OURS, *words)
    assert status == 1
    assert out == b""
    assert sentence in err.decode()
