"""Other people's readers make the same tree of our layers, and we of theirs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

import layerwriter
from tests.unit.layerwriter import trees


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    trees.everything(root / "new", escaped=True)
    return root


@pytest.fixture
def plain_tree(tmp_path: Path) -> Path:
    """A tree that is no upper directory, for tools that know nothing of overlays."""
    root = tmp_path / "tree"
    root.mkdir()
    trees.everything(root / "new")
    return root


def fresh(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


def run(*argv) -> str:
    """Run a program that must succeed. Returns what it wrote to its standard error."""
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, errors="surrogateescape")
    assert done.returncode == 0, done.stderr
    return done.stderr


def need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install {program})")
    return path


def records(root: Path, **changes):
    """A record in which what tar cannot carry is as others see it."""
    items = []
    for item in layerwriter.record(root):
        if item.kind == "socket":
            item.kind = "file"
            item.digest = hashlib.sha256(b"0").hexdigest()
        # What is escaped in an upper directory is not in a layer.
        item.xattrs = {k.replace(b"trusted.overlay.overlay.", b"trusted.overlay."): v for k, v in item.xattrs.items()}
        for field, value in changes.items():
            setattr(item, field, value)
        items.append(item)
    return items


def test_gnu_tar_takes_our_layers(tree, tmp_path):
    layer = layerwriter.write(tree, tmp_path / "layer.tar")
    target = fresh(tmp_path, "target")
    said = run("tar", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", layer.path, "-C", target)
    assert list(layerwriter.compare(records(tree), records(target))) == []
    complaints = [line for line in said.splitlines() if "time stamp" not in line]
    assert complaints == ["tar: Ignoring unknown extended header keyword 'FERMATA.kind'"]


def test_gnu_tar_finds_our_compressed_layers_too(tree, tmp_path):
    need("zstd")
    layer = layerwriter.write(tree, tmp_path / "layer.tar.zst", compression="zstd")
    target = fresh(tmp_path, "target")
    run("tar", "--zstd", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", layer.path, "-C", target)
    assert list(layerwriter.compare(records(tree), records(target))) == []


@pytest.mark.parametrize("sparse", [(), ("--sparse", "--sparse-version=1.0"), ("--sparse", "--sparse-version=0.1"),
                                    ("--sparse", "--sparse-version=0.0")])  # fmt: skip
@pytest.mark.parametrize("compression", [(), ("--gzip",), ("--zstd",)])
def test_gnu_tars_own_files_are_applied_as_it_extracts_them(plain_tree, tmp_path, sparse, compression):
    tree = plain_tree
    if compression == ("--zstd",):
        need("zstd")
    (tree / "new/socket").unlink()  # GNU tar leaves them out
    if not sparse:
        (tree / "new/holes/beyond-8-GiB").unlink()  # it would write 9 GiB of zeros
    made = tmp_path / "gnu.tar"
    options = ["--format=posix", "--xattrs", "--xattrs-include=*", "--numeric-owner", *sparse, *compression]
    run("tar", *options, "-C", tree, "-cf", made, ".")
    ours, theirs = fresh(tmp_path, "ours"), fresh(tmp_path, "theirs")
    layerwriter.apply(made, ours)
    run("tar", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", made, "-C", theirs)
    assert list(layerwriter.compare(records(ours), records(theirs))) == []


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "ustar", "v7"])
def test_formats_from_before_pax_are_applied_as_gnu_tar_extracts_them(plain_tree, tmp_path, form):
    tree = plain_tree
    (tree / "new/socket").unlink()
    shutil.rmtree(tree / "new/time")
    if form in ("ustar", "v7"):
        (tree / "new/holes/beyond-8-GiB").unlink()
    if form == "v7":
        for name in ("null", "disk", "fifo", "attributes/fifo"):
            (tree / "new" / name).unlink()
    made = tmp_path / "old.tar"
    sparse = ["--sparse"] if "gnu" in form else []
    argv = ["tar", f"--format={form}", "--numeric-owner", *sparse, "-C", tree, "-cf", made, "."]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, errors="surrogateescape")
    # What a format cannot hold (long names, large owners), GNU tar leaves out with an error.
    assert done.returncode == 0 or form in ("ustar", "v7")
    ours, theirs = fresh(tmp_path, "ours"), fresh(tmp_path, "theirs")
    layerwriter.apply(made, ours)
    run("tar", "--numeric-owner", "-xpf", made, "-C", theirs)
    assert list(layerwriter.compare(records(ours), records(theirs))) == []


def test_pythons_tarfile_reads_our_layers(tree, tmp_path):
    layer = layerwriter.write(tree, tmp_path / "layer.tar")
    with tarfile.open(layer.path) as tar:
        names = {os.fsencode(member.name) for member in tar}
    ours = {entry.path or b"." for entry in layerwriter.read(layer.path)}
    # tarfile strips no `./` of the root's name and gives sparse files their true name.
    assert names == ours


def layout(directory: Path, layers: list[Path]) -> None:
    """An OCI layout with one image, tagged `test`."""
    kind = "application/vnd.oci.image"
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"{kind}.{media}", "digest": f"sha256:{digest}", "size": len(data)}

    parts = [blob(layer.read_bytes(), "layer.v1.tar") for layer in layers]
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [part["digest"] for part in parts]},
        "history": [{"created_by": "test"} for _ in parts],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": parts,
    }
    named = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    named["annotations"] = {"org.opencontainers.image.ref.name": "test"}
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))


@pytest.fixture
def image(overlay, tmp_path):
    """The merged tree of an overlay, and an OCI layout with its image and its upper directory as layers."""
    mounted = overlay()
    trees.image(mounted.image)
    trees.changes(mounted.mount())
    (mounted.merged / "new/holes/beyond-8-GiB").unlink()  # the others write 9 GiB of zeros
    for name in ("2106", "2400"):
        for path in mounted.merged.glob(f"new/time/*{name}"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    base = layerwriter.write(mounted.image, tmp_path / "base.tar")
    layer = layerwriter.write(mounted.upper, tmp_path / "layer.tar")
    layout(tmp_path / "oci", [Path(base.path), Path(layer.path)])
    return mounted.merged, tmp_path / "oci"


def test_umoci_takes_our_layers(image, tmp_path):
    merged, oci = image
    need("umoci")
    run("umoci", "unpack", "--keep-dirlinks", "--image", f"{oci}:test", tmp_path / "bundle")
    ours, theirs = records(merged, holes=False), records(tmp_path / "bundle/rootfs", holes=False)
    for item in (*ours, *theirs):
        # Go's tar decodes no escapes in the names of attributes; umoci leaves out empty ones and the overlay's own.
        for name in list(item.xattrs):
            if b"%" in name or b"=" in name or b".overlay." in name or not item.xattrs[name]:
                del item.xattrs[name]
    # In an overlay, a file of the image has the links that the image's own layer gave it.
    assert list(layerwriter.compare(ours, theirs, ignore=("links",))) == []


def test_skopeo_copies_our_layers_and_finds_their_digests_right(image, tmp_path):
    _, oci = image
    need("skopeo")
    run("skopeo", "--insecure-policy", "copy", f"oci:{oci}:test", f"dir:{tmp_path}/copy")
    for layer in ("base", "layer"):
        digest = hashlib.sha256((tmp_path / f"{layer}.tar").read_bytes()).hexdigest()
        assert (tmp_path / "copy" / digest).read_bytes() == (tmp_path / f"{layer}.tar").read_bytes()
