from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shim import libc

TOP = Path(__file__).resolve().parents[3]


@pytest.fixture(params=[libc._lean, libc._usual])
def caller(request, monkeypatch):
    monkeypatch.setattr(libc, "_calls", [request.param()])


def test_a_call_reaches_the_kernel_with_its_arguments(caller, tmp_path):
    libc.call("symlink", b"where it points", os.fsencode(tmp_path / "link\N{SNOWMAN}"))
    assert os.readlink(tmp_path / "link\N{SNOWMAN}") == "where it points"
    libc.call("truncate", os.fsencode(_file(tmp_path)), 5 << 32)
    assert os.path.getsize(tmp_path / "file") == 5 << 32


def test_a_failure_names_the_function_the_reason_and_the_path(caller, tmp_path):
    with pytest.raises(FileNotFoundError) as failure:
        libc.call("umount2", os.fsencode(tmp_path / "missing"), 0)
    assert failure.value.filename == str(tmp_path / "missing")
    assert failure.value.strerror == "umount2: No such file or directory"


def test_a_call_imports_no_more_of_ctypes_than_its_c_side():
    program = (
        "import sys; from shim import libc; before = set(sys.modules)\n"
        "try: libc.call('umount2', b'/missing', 0)\n"
        "except FileNotFoundError: print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=TOP, env={"PYTHONPATH": str(TOP)}, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("['_ctypes']", "")


def _file(directory: Path) -> Path:
    (directory / "file").touch()
    return directory / "file"
