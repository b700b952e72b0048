"""GPU tests: every case of `python3 tests/gpu`, as pytest sees them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from machine import Machine


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    from machine import Machine

    with Machine() as made:
        yield made
