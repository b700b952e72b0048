"""The one error of this package."""

from __future__ import annotations


class NodeError(Exception):
    """Something about a node did not work; the text says what, and what to do about it."""
