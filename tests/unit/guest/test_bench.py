"""The measurement from the command line, on the process's own memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).resolve().parents[3] / "guest"


def test_it_measures_each_combination(tmp_path):
    words = ["--device", "cpu", "--gib", "0.01", "--tensor-mib", "3", "--threads", "1,2", "--by", "read,direct,mmap"]
    done = subprocess.run(
        [sys.executable, "-m", "fermata.bench", str(tmp_path / "file"), *words, "--trials", "1", "--drop"],
        env={**os.environ, "PYTHONPATH": str(GUEST)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["by"], row["threads"]) for row in rows if row["step"] == "load"] == [
        (by, threads) for by in ("read", "direct", "mmap") for threads in (1, 2)
    ]
    assert all(row["rate"] > 0 for row in rows if row["step"] != "release")
