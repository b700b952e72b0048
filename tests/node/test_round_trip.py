"""A container's whole file system comes back in a new container, entry by entry, however its layer was made."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil

import pytest

import layerwriter
from node.containers import pid, remove, start, wait_for
from node.shims import Shim
from tests.unit.layerwriter import trees

ENTRIES = 27_000 if "FERMATA_TORTURE" in os.environ else 6_000

IMAGE_CHANGES = """
import os, shutil, time
# What the image has, changed, replaced and deleted.
os.chmod("/usr/bin/env", 0o4711); os.chown("/usr/share", 12, 34)
os.unlink("/etc/debian_version"); shutil.rmtree("/usr/share/doc", ignore_errors=True)
shutil.rmtree("/etc/alternatives"); os.makedirs("/etc/alternatives/deep"); open("/etc/alternatives/new", "w").write("n")
os.link("/etc/passwd", "/etc/passwd-linked"); os.rename("/etc/group", "/etc/group-renamed")
os.unlink("/etc/shells") if os.path.exists("/etc/shells") else None
os.mkdir("/etc/shells")
while True: time.sleep(1)
"""


def build(root) -> None:
    """A tree with every kind of entry, and many more files and directories."""
    trees.everything(root / "new")
    for number in range(300):
        directory = root / f"many/part-{number % 12}/directory-{number}"
        directory.mkdir(parents=True)
        for file in range(ENTRIES // 300):
            (directory / f"file-{file}").write_bytes(b"%d" % file * (file % 50))
        os.utime(directory, ns=(number, 1_500_000_000_000_000_000 + number))


def mountinfo(node, name) -> list[list[str]]:
    return [line.split() for line in node.path(f"/proc/{pid(node, name)}/mountinfo").read_text().splitlines()]


def record(node, name):
    """Every entry of a container's root file system; what else is mounted in it is not the layer's."""
    mounted = {os.fsencode(line[4]).lstrip(b"/") for line in mountinfo(node, name)} - {b""}
    root = f"{node.path('/proc')}/{pid(node, name)}/root/."
    return [item for item in layerwriter.record(root) if item.path not in mounted]


@pytest.fixture(scope="module")
def taken(running_node):
    """A running container with a large and varied tree, what it holds, and where snapshots go."""
    node = running_node
    start(node, "source", "python3", "-c", IMAGE_CHANGES)
    try:
        root = node.path(f"/proc/{pid(node, 'source')}/root")
        wait_for(lambda: (root / "etc/shells").is_dir(), "the changes to the image")
        build(root)
        before = record(node, "source")
        assert len(before) > ENTRIES
        yield node, before
    finally:
        remove(node, "source")
        node.exec(["sh", "-c", "rm -rf /srv/trip*"])


def snapshot(node, name: str):
    """Take a snapshot that leaves the container running. Returns the directory's path in the node and on the host."""
    where = f"/srv/trip-{name}"
    Shim(node, "source").checkpoint(where)
    return where, node.path(where)


def comes_back(node, before, where: str) -> None:
    target = f"into-{where.rpartition('-')[2]}"
    start(node, target, "true", options=["--annotation", f"fermata/restore-from={where}"])
    try:
        after = record(node, target)
    finally:
        remove(node, target)
    assert differences(before, after) == []


def differences(before, after) -> list[str]:
    # Left out of the comparison: the time of /tmp, where CRIU makes and removes files of its own.
    for items in (before, after):
        next(item for item in items if item.path == b"tmp").mtime = 0
    return list(layerwriter.compare(before, after))


def layer_of(path) -> dict[str, object]:
    return json.loads((path / "fermata.json").read_text())["layer"]


def test_the_layer_of_the_upper_directory(taken):
    node, before = taken
    where, path = snapshot(node, "upper")
    assert layer_of(path)["made_by"] == "upperdir"
    comes_back(node, before, where)
    # The container runs on, and nothing of it changed.
    assert differences(before, record(node, "source")) == []


def test_a_gzip_layer_in_its_place(taken):
    node, before = taken
    where, path = snapshot(node, "gzip")
    facts = json.loads((path / "fermata.json").read_text())
    layer = path / facts["layer"]["file"]
    with layer.open("rb") as plain, gzip.open(path / "packed", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed)
    (path / "packed").rename(layer)
    facts["layer"]["digest"] = "sha256:" + hashlib.sha256(layer.read_bytes()).hexdigest()
    facts["layer"]["size"] = facts["files"][layer.name] = layer.stat().st_size
    (path / "fermata.json").write_text(json.dumps(facts))
    comes_back(node, before, where)


def test_the_layer_of_a_full_comparison(taken):
    node, before = taken
    options = next(line[-1] for line in mountinfo(node, "source") if line[4] == "/").split(",")
    upper = next(option for option in options if option.startswith("upperdir="))[9:]
    mark = node.path(upper) / "new/file"
    os.setxattr(mark, "trusted.overlay.some-new-mark", b"1")  # as a kernel might that we do not know
    try:
        where, path = snapshot(node, "full")
    finally:
        os.removexattr(mark, "trusted.overlay.some-new-mark")
    assert layer_of(path)["made_by"] == "full-diff"
    assert "some-new-mark" in layer_of(path)["reason"]
    comes_back(node, before, where)


def test_the_layer_of_a_take_that_ends_the_container(taken):
    node, before = taken
    Shim(node, "source").checkpoint("/srv/trip-end", leave_running=False)
    comes_back(node, before, "/srv/trip-end")
