"""The steps of a take and a restore, spoken with a real process over its socket."""

from __future__ import annotations

import os

import pytest

WEIGHTS = """
import hashlib, random, mmap
import fermata
weights = bytearray(random.Random(1).randbytes(40 << 20))
small = bytearray(b"bias" * 25)
fermata.exclude_from_snapshot({"weights": weights, "small": small}, name="model")
def digest():
    with fermata.using():
        return hashlib.sha256(weights + small).hexdigest()
def resident():
    import re
    text = open("/proc/self/smaps_rollup").read()
    return int(re.search(r"^Rss: +([0-9]+)", text, re.M).group(1)) << 10
"""


@pytest.mark.parametrize(
    ("write", "read", "direct"),
    [("write", "read", False), ("write", "read", True), ("mmap", "mmap", False)],
    ids=["calls", "direct", "mapped"],
)
def test_weights_are_gone_and_come_back(program, shim, write, read, direct):
    process = program(WEIGHTS)
    before, full = process.ask("digest()"), int(process.ask("resident()"))
    packs, released = shim.take(process, by=write)
    assert [pack["name"] for pack in packs] == ["model"]
    assert released["released"] > (40 << 20) - 8192
    assert int(process.ask("resident()")) < full - (39 << 20)
    assert process.ask("bytes(weights[8192:8200])") == repr(bytes(8))
    answer = shim.restore(process, packs, by=read, direct=direct)
    assert answer["back"] == packs[0]["bytes"], answer
    assert process.ask("digest()") == before


def test_whoever_uses_the_weights_waits_until_they_are_back(program, shim):
    process = program(WEIGHTS)
    before = process.ask("digest()")
    packs, _ = shim.take(process)
    process.tell("digest()")
    shim.restore(process, packs)
    assert process.read() == before


def test_the_same_weights_are_asked_for_once(program, shim):
    process = program(WEIGHTS)
    packs, _ = shim.take(process)
    shim.restore(process, packs)
    call = process.call()
    again = shim.prepare(call)
    assert again == packs
    assert shim.write(call, again) == 0
    os.stat(shim.path(packs[0]))
