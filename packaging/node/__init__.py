"""A private containerd node for demonstrations and tests.

with Node.up(stack_name="trixie") as node:
    node.import_image()
    node.ctr("run", "--rm", "fermata-test:latest", "one", "true")
"""

from __future__ import annotations

from node.errors import NodeError
from node.node import Node, Result

__all__ = ["Node", "NodeError", "Result"]
