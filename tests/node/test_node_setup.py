"""The script that sets a Kubernetes node up, on the configurations of containerd that such nodes have."""

from __future__ import annotations

import os

import pytest

from node import stack
from node.scratch import Scratch
from node.stack import PROJECT

CONFIG = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/fermata.toml"
IMPORTS = 'imports = ["/etc/containerd/conf.d/*.toml"]\n'
RUNC = """
[plugins."{plugin}".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."{plugin}".containerd.runtimes.runc.options]
    SystemdCgroup = true
"""
NEW, OLD = "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"


def prepared(name, package, top):
    if os.geteuid() != 0:
        pytest.skip("a root of a distribution needs root")
    top.mkdir()
    root = Scratch(stack.root(name), top)
    root.put(package, "fermata.deb")
    root.put(PROJECT / "packaging/kubernetes/node-setup.sh", "node-setup.sh")
    return root


def configure(root, text):
    root.run("sh", "-c", f"mkdir -p /etc/containerd; cat >{CONFIG}", stdin=text.encode())


def setup(root, *, check=True, env=""):
    return root.run("sh", "-c", f"{env} exec sh /srv/node-setup.sh /srv/fermata.deb", check=check)


def read(root, path):
    return root.run("cat", path).stdout


def options(dumped, runtime):
    """SystemdCgroup of a runtime, as containerd itself reads its configuration."""
    table = dumped.split(f"runtimes.{runtime}.options]")[1].split("\n\n")[0].split("[")[0]
    return "SystemdCgroup = true" in table


CASES = [
    pytest.param("sid", f"version = 3\n{IMPORTS}{RUNC.format(plugin=NEW)}", DROP_IN, id="2.x with drop-ins"),
    pytest.param("sid", f"version = 3\n{RUNC.format(plugin=NEW)}", CONFIG, id="2.x without drop-ins"),
    pytest.param("sid", f"version = 2\n{RUNC.format(plugin=OLD)}", CONFIG, id="2.x with a configuration for 1.7"),
    pytest.param("trixie", f"version = 2\n{IMPORTS}{RUNC.format(plugin=OLD)}", CONFIG, id="1.7 with runc"),
    pytest.param(
        "trixie", f'version = 2\n[plugins."{OLD}"]\n  sandbox_image = "own:1"\n', CONFIG, id="1.7 without runc"
    ),
    pytest.param("trixie", None, CONFIG, id="1.7 without a configuration"),
]


@pytest.mark.parametrize(("name", "text", "where"), CASES)
def test_containerd_knows_the_runtime_and_all_that_it_knew(name, text, where, package, tmp_path):
    root = prepared(name, package, tmp_path / "root")
    if text is None:
        root.run("rm", "-f", CONFIG)
    else:
        configure(root, text)
    said = setup(root).stdout
    assert "node-setup: restart containerd now\n" in said
    assert "containerd" in said.partition("restart containerd now")[2], "doctor has not spoken"
    dumped = root.run("containerd", "--config", CONFIG, "config", "dump").stdout
    assert "runtimes.fermata-runc]" in dumped and "runtimes.runc]" in dumped
    systemd = "SystemdCgroup = true" in (text or "")
    assert [options(dumped, runtime) for runtime in ("fermata", "fermata-runc", "runc")] == [systemd] * 3
    assert "own:1" not in (text or "") or "own:1" in dumped
    assert "runtimes.fermata]" in read(root, where)
    if where == CONFIG and text is not None:
        assert read(root, f"{CONFIG}.before-fermata") == text
    before = root.files()
    assert "names fermata already" in setup(root).stdout
    assert root.files() == before


def test_what_containerd_would_not_load_is_not_written(package, tmp_path):
    root = prepared("trixie", package, tmp_path / "root")
    configure(root, text := "version = 2\n[plugins\n")
    done = setup(root, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("add those of /usr/share/fermata/fermata-v*.toml by hand\n")
    assert read(root, CONFIG) == text
    assert root.run("ls", "/etc/containerd").stdout.split() == ["config.toml"]


def test_huge_pages_are_set_from_boot_on_when_asked_for(package, tmp_path):
    root = prepared("sid", package, tmp_path / "root")
    setup(root, env="HUGE_PAGES=always")
    text = read(root, "/etc/tmpfiles.d/fermata-huge-pages.conf")
    assert text.splitlines()[-1] == "w /sys/kernel/mm/transparent_hugepage/enabled - - - - always"
