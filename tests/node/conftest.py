from __future__ import annotations

from pathlib import Path

import pytest

from node.containers import Events
from node.leftovers import clear, leftovers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.node)


@pytest.fixture
def node(running_node):
    """A node with the test image. Every test must end with a node that its containers left clean."""
    running_node.exec(["rm", "-rf", "/srv/snapshot"])  # of a test that failed
    yield running_node
    running_node.start_containerd()
    clear(running_node)
    assert leftovers(running_node) == []


@pytest.fixture
def image():
    return "docker.io/library/fermata-test:latest"


@pytest.fixture
def events(node):
    """containerd's events from the test's beginning."""
    listening = Events(node)
    yield listening
    listening.end()
