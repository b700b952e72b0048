"""The one error of this package's inner parts."""

from __future__ import annotations


class GuestError(Exception):
    """Something that stops a step, as a sentence for a person; the program itself is as it was before the step."""
