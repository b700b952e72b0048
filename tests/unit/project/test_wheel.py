"""The sdist and the wheel: what pip installs from them is found by the programs that it installs."""

from __future__ import annotations

import sys
import tarfile
import zipfile

import pytest

from node.stack import PROJECT
from shim import RUNTIME, __version__
from tests import distributions
from tests.distributions import run


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return distributions.sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    return distributions.wheel(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    out = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(out)
    return out / f"fermata-{__version__}"


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
    assert (tmp_path / "venv/share/fermata/fermata-v3.toml").exists()


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        name for name in distributions.tracked() if name.split("/")[0] in ("shim", "layerwriter", "criuconf", "differ")
    }
    assert len(ours) > 60
    assert ours - names == set()


def test_the_sdist_holds_all_that_is_tracked(unpacked):
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert set(distributions.tracked()) - there <= {".gitignore"}


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="this is an sdist, unpacked")
def test_an_unpacked_sdist_can_be_installed_and_packaged_with_make(unpacked, tmp_path):
    run("make", "-C", unpacked, "install", f"DESTDIR={tmp_path}", f"PYTHON={sys.executable}")
    assert __version__ in run(tmp_path / "usr/local/bin/containerd-shim-fermata-v1", "-v")
    run("make", "-C", unpacked, "deb", f"PYTHON={sys.executable}")
    assert (unpacked / f"dist/fermata_{__version__}_all.deb").exists()
