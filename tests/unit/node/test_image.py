from __future__ import annotations

import hashlib
import json
import tarfile

import pytest

from node import NodeError, image


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "etc/left-out").mkdir(parents=True)
    (root / "etc/motd").write_text("hello\n")
    (root / "etc/left-out/secret").write_text("no\n")
    return root


def blob(archive, digest):
    with tarfile.open(archive) as tar:
        return tar.extractfile("blobs/" + digest.replace(":", "/")).read()


def test_an_image_is_an_oci_layout_in_which_every_digest_and_size_is_right(root, tmp_path):
    archive = image.from_directory(root, tmp_path / "image.tar", "thing:v1")
    with tarfile.open(archive) as tar:
        assert json.load(tar.extractfile("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.load(tar.extractfile("index.json"))["manifests"]
    manifest = json.loads(blob(archive, entry["digest"]))
    for descriptor in (entry, manifest["config"], *manifest["layers"]):
        data = blob(archive, descriptor["digest"])
        assert descriptor["digest"] == "sha256:" + hashlib.sha256(data).hexdigest()
        assert descriptor["size"] == len(data)
    config = json.loads(blob(archive, manifest["config"]["digest"]))
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]


def test_what_is_excluded_stays_out_of_an_image_and_all_else_is_in(root, tmp_path):
    archive = image.from_directory(root, tmp_path / "image.tar", "thing:v1", exclude=["etc/left-out"])
    with tarfile.open(image.layer_of(archive, tmp_path / "layer.tar")) as layer:
        assert sorted(layer.getnames()) == [".", "./etc", "./etc/motd"]


def test_the_name_in_an_archive_is_the_full_one(root, tmp_path):
    archive = image.from_directory(root, tmp_path / "image.tar", "thing:v1")
    assert image.name_in(archive) == "docker.io/library/thing:v1"


def test_an_archive_that_is_no_image_is_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w"):
        pass
    with pytest.raises(NodeError, match="is no OCI layout"):
        image.name_in(tmp_path / "x.tar")


def test_a_synthetic_image_has_as_many_entries_as_asked(tmp_path):
    archive = image.synthetic(tmp_path / "image.tar", "big:latest", 1234, size=10)
    with tarfile.open(image.layer_of(archive, tmp_path / "layer.tar")) as layer:
        members = layer.getmembers()
    assert len(members) == len({member.name for member in members}) == 1234
    assert {member.size for member in members if member.isfile()} == {10}
