"""Real overlay mounts for the tests of layers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Overlay:
    """An overlay mount: `image` is its lowest layer, `upper` its upper directory, `merged` where it is mounted."""

    def __init__(self, base: Path, options: str) -> None:
        self.base = base
        self.image, self.upper, self.work, self.merged = (base / n for n in ("image", "upper", "work", "merged"))
        self.lowerdirs = [str(self.image)]
        self.options = options
        for path in (self.image, self.upper, self.work, self.merged):
            path.mkdir(exist_ok=True)

    def mount(self, upper: Path | None = None) -> Path:
        lower = ":".join(self.lowerdirs)
        options = f"lowerdir={lower},upperdir={upper or self.upper},workdir={self.work}{self.options}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.merged], check=True)
        return self.merged

    def unmount(self) -> None:
        if os.path.ismount(self.merged):
            subprocess.run(["umount", self.merged], check=True)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Callable[..., Overlay]]:
    """A function that prepares an overlay, for tests that fill the image and mount it."""
    if os.geteuid() != 0:
        pytest.skip("overlays are mounted by root")
    made: list[Overlay] = []

    def make(options: str = ",index=off", name: str = "overlay") -> Overlay:
        base = tmp_path / name
        base.mkdir()
        made.append(Overlay(base, options))
        return made[-1]

    yield make
    for mounted in made:
        mounted.unmount()
