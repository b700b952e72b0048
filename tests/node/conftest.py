from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node import Node
from node.containers import Events
from node.leftovers import before, clear, go_back, leftovers
from node.stack import PROJECT

HERE = Path(__file__).parent
# The fixtures whose nodes are there for many tests.
NODES = ("running_node", "cluster", "differ_node")
FAILED = pytest.StashKey()


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[FAILED] = report.failed or item.stash.get(FAILED, False)
    return report


@pytest.fixture(autouse=True)
def tidy(request):
    """After a test that failed, its nodes are as they were before: for its second run, and for the next test."""
    found = [(request.getfixturevalue(name)) for name in NODES if name in request.fixturenames]
    states = [(node, before(node)) for node in found]
    request.node.stash[FAILED] = False
    yield
    for node, state in states:
        if request.node.stash[FAILED] or leftovers(node, but=state.left):
            go_back(node, state)
            node.install()  # tests write into the shim that is installed


@pytest.fixture
def node(running_node):
    """A node with the test image. Every test must end with a node that its containers left clean."""
    yield running_node
    running_node.start_containerd()
    clear(running_node)
    assert leftovers(running_node) == []


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The .deb of this tree."""
    out = tmp_path_factory.mktemp("deb")
    argv = [sys.executable, str(PROJECT / "packaging/deb/build.py"), str(out)]
    made = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
    return Path(made)


@pytest.fixture
def bare(stack_name):
    """A node without fermata."""
    if os.geteuid() != 0:
        pytest.skip("a node needs root")
    with Node.up(stack_name=stack_name, install=False) as node:
        node.import_image()
        yield node


@pytest.fixture
def image():
    return "docker.io/library/fermata-test:latest"


@pytest.fixture
def events(node):
    """containerd's events from the test's beginning."""
    listening = Events(node)
    yield listening
    listening.end()
