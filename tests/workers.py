"""What runs beside what under pytest-xdist: `pytest -n 3`.

A node takes seconds to come up and much of a test's time is waiting, so that two stacks beside each other cost little
more than one. All tests of a stack's common node go to one worker, in their order; the rest is handed out by file.
"""

from __future__ import annotations

import os
import re

from xdist.scheduler import LoadScopeScheduling

# Files whose tests bring up nodes of their own.
APART = ("test_cri", "test_deb", "test_differ", "test_differ_file", "test_systemd")
STACK = re.compile(r"tests/node/(?P<file>\w+)\.py::.*?\[(?P<stack>trixie|sid|host)\b")


def share(test: str) -> str:
    """The name of what a test has to run together with."""
    if "FERMATA_NODE" in os.environ and test.startswith("tests/node/"):
        return "the one node"
    found = STACK.match(test)
    if not found:
        return test.partition("::")[0]
    return f"{found['file']} {found['stack']}" if found["file"] in APART else found["stack"]


class Shares(LoadScopeScheduling):
    """Gives a worker that has nothing to do the next share, in the order of collection: the long ones come first."""

    def _split_scope(self, nodeid: str) -> str:
        return share(nodeid)
