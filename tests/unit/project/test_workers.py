"""Tests that are in each other's way are run by one worker."""

from __future__ import annotations

import pytest

from tests.workers import APART, share

HERE = "tests/node/test_takes.py::test_a_layer"


def test_all_tests_of_a_stacks_node_are_one_share():
    shares = {share(f"{HERE}[sid]"), share(f"{HERE}[sid-post-dump]"), share("tests/node/test_crash.py::test_it[sid-a]")}
    assert len(shares) == 1
    assert share(f"{HERE}[trixie]") not in shares


@pytest.mark.parametrize("file", APART)
def test_a_file_with_nodes_of_its_own_is_a_share_for_each_stack(file):
    tests = [f"tests/node/{file}.py::test_it[{stack}]" for stack in ("sid", "trixie")]
    assert len({*map(share, tests), share(f"{HERE}[sid]"), share(f"{HERE}[trixie]")}) == 4


def test_a_node_that_is_up_is_one_workers(monkeypatch):
    monkeypatch.setenv("FERMATA_NODE", "mine")
    assert share(f"{HERE}[mine]") == share("tests/node/test_crash.py::test_it[mine-a]")


def test_the_rest_goes_by_file():
    assert share("tests/unit/shim/test_wire.py::test_it[sid-1]") == "tests/unit/shim/test_wire.py"
