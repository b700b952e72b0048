"""The wheel: what pip installs from it is found by the programs that it installs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile

import pytest

from node.stack import PROJECT
from shim import RUNTIME, __version__


def run(*argv):
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # Built from a copy: setuptools leaves its work beside the sources.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = run("git", "-C", PROJECT, "ls-files").splitlines() if (PROJECT / ".git").exists() else None
    names = listed or ["pyproject.toml", "README.md", "shim", "layerwriter", "criuconf", "differ", "packaging"]
    present = [name for name in names if (PROJECT / name).exists()]
    packed = subprocess.run(["tar", "-C", PROJECT, "-cf", "-", *present], check=True, capture_output=True, timeout=60)
    subprocess.run(["tar", "-C", source, "-xf", "-"], input=packed.stdout, check=True, timeout=60)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source)
    (made,) = out.glob("*.whl")
    return made


def test_its_programs_start_from_where_pip_puts_them(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    said = run(tmp_path / "venv/bin/containerd-shim-fermata-v1", "-v")
    assert said.split() == ["containerd-shim-fermata-v1:", "Version:", __version__, "Runtime:", RUNTIME]
    assert run(tmp_path / "venv/bin/fermata", "--version") == f"fermata {__version__}\n"
    # By a link too, as an operator makes one on containerd's path.
    link = tmp_path / "containerd-shim-fermata-v1"
    link.symlink_to(tmp_path / "venv/bin/containerd-shim-fermata-v1")
    assert __version__ in run(link, "-v")


def test_it_holds_every_file_of_the_packages(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("shim", "layerwriter", "criuconf", "differ"):
        for path in (PROJECT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                name = str(path.relative_to(PROJECT))
                tracked = subprocess.run(
                    ["git", "-C", PROJECT, "ls-files", "--error-unmatch", name], capture_output=True, check=False
                )
                assert name in names or tracked.returncode, name
    assert sysconfig.get_python_version() >= "3.10"
