"""The cases of this folder, each as a test. What they measure is kept by `python3 tests/gpu` instead."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import containers
import moving
import pytest
import serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA driver here (no /dev/nvidiactl)"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="this Python has no torch"),
]


@pytest.mark.parametrize("name", moving.CASES)
def test_moving(name):
    moving.CASES[name]()


@pytest.mark.parametrize("name", containers.CASES)
def test_containers(name, machine):
    containers.CASES[name](machine)


@pytest.mark.skipif("FERMATA_SERVING" not in os.environ, reason="takes minutes and 40 GB: set FERMATA_SERVING=1")
@pytest.mark.parametrize("name", serving.CASES)
def test_serving(name, machine):
    serving.CASES[name](machine)
