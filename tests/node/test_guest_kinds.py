"""Weights that stay out of snapshots, in containers of other kinds: with a user namespace, of a read-only root, and of
images whose /run is not what it mostly is.
"""

from __future__ import annotations

import json
import os

import pytest

from node.containers import CTR, IMAGE, OURS, pid, remove
from node.leftovers import clear
from tests.node.guests import MOUNT, ON, SERVER, SHARE, STORE, answers, serve, shared

TORTURE = "FERMATA_TORTURE" in os.environ
TAKEN, ROOT = "/srv/taken", "/srv/root"
MAPPED = ("--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")


@pytest.fixture(scope="module")
def model(running_node):
    with shared(running_node, 5 << 20) as path:
        yield path


@pytest.fixture(autouse=True)
def store(node, model):
    yield node.path(STORE)
    clear(node)
    node.exec(["sh", "-c", f"rm -rf {STORE} {TAKEN}"])


def take(node, outcome="out"):
    node.exec(["fermata", "checkpoint", "one", TAKEN])
    record = json.loads(node.path(f"{TAKEN}/fermata.json").read_text())
    assert (record["guest"] or {}).get("outcome") == outcome
    return record


def restore(node, *options):
    words = ("--runtime", OURS, "--annotation", f"fermata/restore-from={TAKEN}", *options, IMAGE, "two", "true")
    return node.ctr("run", "--detach", *words, check=False, timeout=60)


def comes_and_goes(node, *options):
    """Its weights stay out of a snapshot, and it answers the same after it and restored."""
    first = serve(node, "one", options=(*ON, *options))
    record = take(node)
    assert answers(node, "one")["answer"] == first["answer"]
    done = restore(node, *MOUNT, *options)
    assert done.returncode == 0, done.stderr
    assert answers(node, "two")["answer"] == first["answer"]
    return record


@pytest.mark.skipif(not TORTURE, reason="only in make torture")
def test_a_container_whose_root_is_read_only_keeps_its_weights_out(node):
    comes_and_goes(node, "--read-only")


def test_a_container_with_a_user_namespace_keeps_its_weights_out_and_is_restored_with_it(node):
    """CRIU reads the images as the container's root, to whom the snapshot's directory is shut."""
    comes_and_goes(node, *MAPPED)
    with open(f"/proc/{pid(node, 'two')}/uid_map") as file:
        assert file.read().split() == ["0", "100000", "65536"]
    top = os.stat(node.path(TAKEN))
    assert (top.st_uid, top.st_gid, top.st_mode & 0o027) == (0, 0, 0)


# What stands for /run in an image; and what becomes of a container of it.
RUNS = {
    "none": "rm -r run",
    "to /var/run": "rm -r run; rm -rf var/run; mkdir var/run; ln -s /var/run run",
    "relative": "rm -r run; mkdir elsewhere; ln -s elsewhere run",
    "out of it": "rm -r run; ln -s /../../../srv run",
    "to nothing": "rm -r run; ln -s /nowhere/at/all run",
}


@pytest.fixture
def root(node):
    """An image's files, mounted for writing, as the root of containers."""
    node.exec(["mkdir", ROOT])
    node.exec([*CTR, "images", "mount", "--rw", IMAGE, ROOT])
    yield node.path(ROOT)
    clear(node)
    node.exec(["umount", ROOT])
    node.exec([*CTR, "snapshots", "remove", ROOT])
    node.exec(["sh", "-c", f"rmdir {ROOT}; rm -f /srv/one.json /srv/two.json"])


@pytest.mark.parametrize("kind", RUNS if TORTURE else ("to /var/run",))
def test_an_image_whose_run_is_something_else(node, root, kind):
    node.exec(["sh", "-c", f"cd {ROOT} && {RUNS[kind]}"])
    before = sorted(path.name for path in node.path("/srv").iterdir())
    words = specified(node, "one", {"fermata/guest": "on"}, "/usr/bin/python3", "-c", SERVER)
    done = node.ctr(*words, check=False)
    assert done.returncode == 0, done.stderr
    first = answers(node, "one")
    take(node)
    assert sorted(path.name for path in node.path("/srv").iterdir()) == sorted([*before, "one.json", "taken"])
    remove(node, "one")
    done = node.ctr(*specified(node, "two", {"fermata/restore-from": TAKEN}, "/bin/true"), check=False)
    assert done.returncode == 0, done.stderr
    assert answers(node, "two")["answer"] == first["answer"]


def specified(node, name, annotations, *command):
    """`ctr`'s words for a container whose /run is the image's: `ctr` itself mounts something there."""
    spec = json.loads(node.ctr("oci", "spec").stdout)
    spec["annotations"] = annotations
    spec["root"] = {"path": ROOT}
    spec["process"]["args"] = command
    mounts = [mount for mount in spec["mounts"] if mount["destination"] != "/run"]
    spec["mounts"] = [
        *mounts,
        {"destination": "/opt/guest", "type": "bind", "source": SHARE, "options": ["rbind", "ro"]},
    ]
    node.path(f"/srv/{name}.json").write_text(json.dumps(spec))
    return ("run", "--detach", "--runtime", OURS, "--config", f"/srv/{name}.json", name)
