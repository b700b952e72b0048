"""containerd takes layers that are written here, and layers that containerd writes are taken here: the same trees."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
from pathlib import Path

import pytest

import layerwriter
from tests.unit.layerwriter import trees

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
NAMESPACE = "layers"
NAME = "docker.io/library/layers:latest"


def pack(layers: list[Path], out: Path) -> None:
    """An OCI layout tar of an image with these uncompressed layers, the lowest first."""
    kind = "application/vnd.oci.image"
    blobs = {}

    def blob(data: bytes, media: str, **more):
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": f"{kind}.{media}", "digest": f"sha256:{digest}", "size": len(data), **more}

    parts = [blob(layer.read_bytes(), "layer.v1.tar") for layer in layers]
    config = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [part["digest"] for part in parts]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": parts,
    }
    named = {"annotations": {"io.containerd.image.name": NAME}}
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json", **named)]}
    files = {f"blobs/sha256/{digest}": data for digest, data in blobs.items()}
    files |= {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode()}
    with tarfile.open(out, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


class Store:
    """containerd's snapshots of one node, in a namespace of their own, mounted where the host sees them."""

    def __init__(self, node):
        self.node = node

    def ctr(self, *args: str) -> str:
        return self.node.ctr(*args, namespace=NAMESPACE).stdout

    def load(self, layers: list[Path]) -> None:
        """Import an image of these layers."""
        archive = self.node.path("/srv/layers.tar")
        pack(layers, archive)
        self.ctr("image", "import", "--no-unpack", "/srv/layers.tar")
        archive.unlink()

    def mount(self, *, writable: bool = False) -> Path:
        """Mount a new snapshot of the image. Returns where the host sees it. Its key is the path in the node."""
        self.node.path("/mnt/layers").mkdir(parents=True, exist_ok=True)
        self.ctr("image", "mount", *(["--rw"] if writable else []), NAME, "/mnt/layers")
        return self.node.path("/mnt/layers")

    def diff(self, media: str, out: Path) -> Path:
        """What containerd itself makes of the changes in the mounted snapshot."""
        argv = ["ctr", "-n", NAMESPACE, "snapshots", "diff", "--media-type", media, "/mnt/layers"]
        with out.open("wb") as file:
            assert self.node.popen(argv, stdout=file).wait(60) == 0
        return out

    def clear(self) -> None:
        self.node.ctr("image", "unmount", "--rm", "/mnt/layers", namespace=NAMESPACE, check=False)
        self.node.ctr("leases", "rm", "/mnt/layers", namespace=NAMESPACE, check=False)
        self.node.ctr("image", "rm", "--sync", NAME, namespace=NAMESPACE, check=False)


@pytest.fixture
def store(running_node):
    store = Store(running_node)
    yield store
    store.clear()


@pytest.fixture
def workshop(tmp_path):
    """An overlay on the host. Its image is also a layer."""
    for name in ("image", "upper", "work", "merged", "fresh", "work2"):
        (tmp_path / name).mkdir()
    trees.image(tmp_path / "image")
    yield tmp_path
    if os.path.ismount(tmp_path / "merged"):
        subprocess.run(["umount", tmp_path / "merged"], check=True)


def mount(base: Path, upper: str, work: str) -> Path:
    if os.path.ismount(base / "merged"):
        subprocess.run(["umount", base / "merged"], check=True)
    options = f"lowerdir={base}/image,upperdir={base}/{upper},workdir={base}/{work},index=off"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, base / "merged"], check=True)
    return base / "merged"


def as_containerd(items, *, sockets: bool):
    """A record without what containerd's own archives lose, whoever wrote or reads them."""
    seen = {}
    for item in items:
        if item.kind == "socket":
            if not sockets:
                continue
            item.kind = "file"  # tar has no sockets: ours is an empty file to others
            item.digest = hashlib.sha256(b"0").hexdigest()
        for name in list(item.xattrs):
            # It restores no `trusted.` attributes, and decodes no escapes in the names of others.
            if b"%" in name or b"=" in name or name.startswith(b"trusted."):
                del item.xattrs[name]
        if not 0 <= item.mtime < (1 << 63) - 1:
            item.mtime = 0  # its times begin in 1970 and end in 2262
        item.holes = False  # it writes the zeros of a hole
        seen[item.path] = item
    # Children inherit the default ACL of a directory that it restored before them.
    seen.pop(b"new/attributes/directory/does-not", None)
    seen[b""].mtime = 0  # it leaves the root as it made it
    return seen


def differences(one, other) -> list[str]:
    return list(layerwriter.compare(one.values(), other.values()))


def test_containerd_takes_our_layers(store, workshop):
    merged = mount(workshop, "upper", "work")
    trees.changes(merged)
    (merged / "new/holes/beyond-8-GiB").unlink()  # containerd would write 9 GiB of zeros
    expected = as_containerd(layerwriter.record(merged), sockets=True)
    base = layerwriter.write(workshop / "image", workshop / "base.tar")
    layer = layerwriter.write(workshop / "upper", workshop / "layer.tar")
    store.load([Path(base.path), Path(layer.path)])
    found = as_containerd(layerwriter.record(store.mount()), sockets=True)
    assert differences(expected, found) == []


@pytest.mark.parametrize("compressed", [True, False])
def test_containerds_own_diff_is_applied_as_containerd_applies_it(store, workshop, compressed):
    base = layerwriter.write(workshop / "image", workshop / "base.tar")
    store.load([Path(base.path)])
    changed = store.mount(writable=True)
    trees.changes(changed)
    (changed / "new/holes/beyond-8-GiB").unlink()
    media = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compressed else "")
    diff = store.diff(media, workshop / "diff")
    store.clear()
    assert (diff.read_bytes()[:2] == b"\x1f\x8b") == compressed

    layerwriter.apply(diff, workshop / "fresh")
    ours = as_containerd(layerwriter.record(mount(workshop, "fresh", "work2")), sockets=False)
    plain = workshop / "diff.tar"
    with plain.open("wb") as file:
        subprocess.run(["gzip", "-dc", diff] if compressed else ["cat", diff], stdout=file, check=True)
    store.load([Path(base.path), plain])
    theirs = as_containerd(layerwriter.record(store.mount()), sockets=False)
    assert differences(ours, theirs) == []
