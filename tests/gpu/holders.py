"""Starting and asking the programs of programs/holder.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "holder.py"


class Asked:
    """The two files by which a program of programs/holder.py is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def ready(self, limit: float = 120) -> None:
        """Wait until the program holds its state."""
        until = time.monotonic() + limit
        while not (self.folder / "ready").exists():
            if time.monotonic() > until:
                raise TimeoutError(f"the program in {self.folder} did not get ready: {self.log()}")
            time.sleep(0.02)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    def ask(self, word: str, limit: float = 60) -> Any:
        """Ask and wait for the answer."""
        self.put(word)
        return self.answer(limit)

    def put(self, word: str) -> None:
        # A restored program remembers the last question that it saw: the numbers never come again.
        self._count = time.monotonic_ns()
        (self.folder / "ask.new").write_text(json.dumps({"n": self._count, "do": word}))
        (self.folder / "ask.new").rename(self.folder / "ask")

    def answer(self, limit: float = 60) -> Any:
        until = time.monotonic() + limit
        while time.monotonic() < until:
            try:
                found = json.loads((self.folder / "answer").read_text())
            except (FileNotFoundError, ValueError):
                found = {"n": -1}
            if found["n"] == self._count:
                return found["value"]
            time.sleep(0.002)
        raise TimeoutError(f"no answer in {limit:.0f} s: {self.log()}")


class Holder(Asked):
    """A program of programs/holder.py outside of any container."""

    def __init__(self, kind: str, size: float) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="fermata-gpu-")))
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), kind, str(self.folder), str(size)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """The program and all that descends from it."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X"):
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
        found = [self.process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found

    def stop(self) -> None:
        for pid in reversed(self.pids()):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()


class LooseTree:
    """A Holder as shim.gpu sees a container; pausing is only remembered, as there is no container to freeze."""

    def __init__(self, holder: Holder) -> None:
        self.id = "loose"
        self._holder = holder

    def pids(self) -> list[int]:
        return self._holder.pids()

    def paused(self) -> bool:
        return False

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass
