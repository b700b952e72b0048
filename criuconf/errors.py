"""The one error type of this package."""

from __future__ import annotations


class CriuConfError(Exception):
    """Something about CRIU or its configuration cannot work. The message says what, and what to do."""
