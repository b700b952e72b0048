"""The .deb on the distributions that it is for: installed beside what they have, used, removed, nothing left.

FERMATA_DISTRIBUTIONS   the ones to try, comma-separated, or `all` (`make deb-check`). Otherwise those whose root the
                        tests of the nodes have made anyway
FERMATA_ROOT_…          a root made elsewhere, a directory or a tar file: FERMATA_ROOT_UBUNTU_22_04 and so on
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from node import stack
from node.errors import NodeError
from node.scratch import Scratch
from node.stack import Recipe
from shim import RUNTIME, __version__
from tests import distributions

PACKAGES = ("python3", "python3-grpcio", "containerd", "runc")
NODES = {"debian-13": "trixie", "sid": "sid"}
RECIPES = {
    "debian-12": Recipe("deb-debian-12", ("bookworm",), PACKAGES),
    "ubuntu-22.04": Recipe("deb-ubuntu-22.04", ("jammy",), PACKAGES),
    "ubuntu-24.04": Recipe("deb-ubuntu-24.04", ("noble",), PACKAGES),
}
PYTHON = {"debian-12": "3.11", "debian-13": "3.13", "sid": "3.1", "ubuntu-22.04": "3.10", "ubuntu-24.04": "3.12"}
ASKED = os.environ.get("FERMATA_DISTRIBUTIONS", ",".join(NODES))
IMPORT = """
import compileall, importlib, os, sys
top = sys.argv[1]
sys.path.insert(0, top)
assert compileall.compile_dir(top, quiet=1, force=True)
count = 0
for package in ("shim", "layerwriter", "criuconf", "differ"):
    for name in sorted(os.listdir(f"{top}/{package}")):
        if name.endswith(".py") and name != "__main__.py":
            importlib.import_module(f"{package}.{name[:-3]}".removesuffix(".__init__"))
            count += 1
print(sys.version_info[0], sys.version_info[1], count)
"""
START = """
import json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
os.makedirs("/run/containerd/s", exist_ok=True)
os.makedirs("/run/bundle")
os.chdir("/run/bundle")
os.mkfifo("log")
keep = os.open("log", os.O_RDWR | os.O_NONBLOCK)
json.dump({"ociVersion": "1.0.0", "annotations": {}, "linux": {}}, open("config.json", "w"))
flags = ["-namespace", "n", "-address", "/run/containerd/containerd.sock", "-publish-binary", "/usr/bin/containerd"]
argv = [sys.argv[2], *flags, "-id", "c"]
answer = subprocess.run([*argv, "start"], check=True, stdout=subprocess.PIPE, timeout=60).stdout
from shim import stock, task
from shim.client import Client
path = stock.Bootstrap(answer).address.removeprefix("unix://")
for service in task.SERVICES:  # the stock shim knows one of them
    with Client(path) as client:
        response = client.call(service, "Connect", task.IdRequest(id="c").encode())
    if not response.status or not response.status.code:
        print(os.path.basename(path)[:2], service)
stock.end_unused(path)
"""


@pytest.fixture(params=PYTHON)
def distribution(request):
    if ASKED != "all" and request.param not in ASKED.split(","):
        pytest.skip("only `make deb-check` tries it")
    return request.param


@pytest.fixture
def root(distribution, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a root of a distribution needs root")
    given = os.environ.get("FERMATA_ROOT_" + re.sub(r"\W", "_", distribution).upper())
    try:
        if given:
            lower = stack.unpacked(Path(given))
        elif distribution in NODES:
            lower = stack.root(NODES[distribution])
        else:
            lower = stack.built(RECIPES[distribution])
    except NodeError as error:
        if distribution.startswith("ubuntu"):
            pytest.skip(f"no root of {distribution}: {str(error).splitlines()[0]}")
        raise
    return Scratch(lower, tmp_path)


def starts(root, library, program):
    """A shim that serves the stock shim's calls, and ends when it is asked to."""
    said = root.run("python3", "-I", "-c", START, library, program).stdout
    assert re.fullmatch(r"f- containerd\.task\.v[23]\.Task\n", said), said


def test_it_is_installed_used_and_removed(distribution, root, package):
    before = root.files()
    inside = root.put(package, package.name)
    root.run("dpkg", "--install", inside)
    major, minor, count = root.run("python3", "-I", "-c", IMPORT, "/usr/lib/fermata").stdout.split()
    assert f"{major}.{minor}".startswith(PYTHON[distribution])
    assert int(count) > 60
    assert root.run("fermata", "--version").stdout == f"fermata {__version__}\n"
    assert RUNTIME in root.run("containerd-shim-fermata-v1", "-v").stdout
    # What there is to find depends on the kernel and on what else is installed: that it is told, and how, does not.
    told = root.run("fermata", "doctor", check=False)
    assert (told.returncode, told.stderr) in ((0, ""), (1, ""))
    assert len(told.stdout.splitlines()) > 10
    assert re.search(r"^\W*problem.*containerd", told.stdout, re.M), told.stdout
    asked = root.run("fermata", "checkpoint", "c", "/srv/c", check=False)
    said = "containerd does not answer at /run/containerd/containerd.sock"
    if distribution == "ubuntu-22.04":
        said = "this command cannot speak to containerd: grpcio 1.30.2 of Ubuntu 22.04's package never comes back"
    assert asked.stderr.startswith(f"fermata: {said}"), asked
    starts(root, "/usr/lib/fermata", "/usr/bin/containerd-shim-fermata-v1")
    info = root.run("containerd-shim-fermata-v1", "-info", check=False)
    old = root.run("containerd-shim-runc-v2", "-info", check=False).returncode
    assert info.returncode == old and (old or RUNTIME in info.stdout), info
    root.run("bash", "-c", ". /usr/share/bash-completion/completions/fermata && complete -p fermata")
    root.run("dpkg", "--install", inside)  # an upgrade to itself
    root.run("dpkg", "--remove", "fermata")
    assert sorted(root.files() ^ before) == []
    root.run("dpkg", "--purge", "fermata")
    assert sorted(root.files() ^ before) == []


def test_a_shim_starts_from_what_pip_installs(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a root of a distribution needs root")
    (tmp_path / "root").mkdir()
    root = Scratch(stack.root("trixie"), tmp_path / "root")
    made = distributions.wheel(distributions.sdist(tmp_path), tmp_path)
    prefix = tmp_path / "root/upper/opt/fermata"
    distributions.run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--prefix", prefix, made)
    )
    (library,) = prefix.glob("lib/python3*/site-packages")
    inside = f"/opt/fermata/{library.relative_to(prefix)}"
    starts(root, inside, "/opt/fermata/bin/containerd-shim-fermata-v1")
