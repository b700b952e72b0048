"""Which directory holds a difference: exactly when the layers of one side are those below the other's topmost."""

from __future__ import annotations

import pytest

from differ.messages import Mount
from differ.mounts import Unsuited, upper


def overlay(*options):
    return [Mount(type="overlay", source="overlay", options=list(options))]


def bind(path, *options):
    return [Mount(type="bind", source=str(path), options=list(options) or ["ro", "rbind"])]


ACTIVE = ("workdir=/s/9/work", "upperdir=/s/9/fs", "lowerdir=/s/2/fs:/s/1/fs", "index=off")


@pytest.fixture
def parameters(tmp_path):
    directory = tmp_path / "parameters"
    directory.mkdir()
    return directory


@pytest.fixture
def found(parameters):
    return lambda left, right: upper(left, right, str(parameters))


def test_a_container_over_several_layers(found):
    made = found(overlay("lowerdir=/s/2/fs:/s/1/fs", "index=off"), overlay(*ACTIVE))
    assert (made.path, made.xattr_prefix, made.base) == ("/s/9/fs", "trusted.", False)


def test_a_container_over_one_layer(found):
    right = overlay("index=off", "userxattr", "workdir=/w", "upperdir=/u", "lowerdir=/s/1/fs")
    made = found(bind("/s/1/fs"), right)
    assert (made.path, made.xattr_prefix) == ("/u", "user.")


def test_a_committed_layer_over_others(found):
    assert found(bind("/s/1/fs"), overlay("lowerdir=/s/2/fs:/s/1/fs")).path == "/s/2/fs"


def test_a_layer_over_nothing(found, tmp_path):
    layer, view = tmp_path / "snapshots/1/fs", tmp_path / "snapshots/2/fs"
    layer.mkdir(parents=True)
    view.mkdir(parents=True)
    made = found(bind(view), bind(layer, "rw", "rbind"))
    assert (made.path, made.base) == (str(layer), True)
    (view / "file").write_text("")
    with pytest.raises(Unsuited, match="not an empty directory"):
        found(bind(view), bind(layer, "rw", "rbind"))


@pytest.mark.parametrize(
    ("left", "right", "why"),
    [
        (overlay("lowerdir=/s/3/fs:/s/1/fs"), overlay(*ACTIVE), "layers of left"),
        (overlay("lowerdir=/s/1/fs:/s/2/fs"), overlay(*ACTIVE), "layers of left"),
        (bind("/s/2/fs"), overlay(*ACTIVE), "layers of left"),
        (overlay("upperdir=/s/2/fs", "workdir=/w", "lowerdir=/s/1/fs"), overlay(*ACTIVE), "left is an overlay with"),
        (bind("/proc"), bind("/s/2/fs"), "not an empty directory"),
        ([], overlay(*ACTIVE), "left is 0 mounts"),
        (overlay(*ACTIVE), [], "right is 0 mounts"),
        (bind("/s/1/fs") * 2, overlay(*ACTIVE), "left is 2 mounts"),
        ([Mount(type="ext4", source="/dev/x")], overlay(*ACTIVE), "type 'ext4'"),
        (overlay("lowerdir=/s/2/fs:/s/1/fs"), overlay(*ACTIVE, "uidmap=0:1000:1"), "uidmap=0:1000:1"),
        (overlay("lowerdir=/s/2/fs:/s/1/fs"), overlay(*ACTIVE, "lowerdir+=/s/0/fs"), r"lowerdir\+=/s/0/fs"),
        (overlay("lowerdir=/s/2/fs:/s/1/fs"), overlay(*ACTIVE, "redirect_dir=on"), "redirect_dir=on"),
        (overlay("lowerdir=/s/2/fs:/s/1/fs"), overlay(*ACTIVE, "metacopy=on"), "metacopy=on"),
        (overlay("lowerdir=/s/2/fs:/s/1/fs"), overlay(*ACTIVE, "index=on"), "index=on"),
        (overlay("lowerdir=/s/2/fs:/s/1/fs"), overlay(*ACTIVE[:2]), "without lowerdir="),
        (bind("/s/1/fs"), overlay("upperdir=/u", "lowerdir=/s/1\\:/fs"), "plain absolute path"),
        (bind("/s/1/fs", "ro", "idmap=1"), overlay("upperdir=/u", "lowerdir=/s/1/fs"), "idmap=1"),
        ([Mount(type="bind", source="/s/1/fs", target="/sub")], overlay("upperdir=/u", "lowerdir=/s/1/fs"), "/sub"),
    ],
)
def test_everything_else_is_left_to_others(found, left, right, why):
    with pytest.raises(Unsuited, match=why):
        found(left, right)


def test_a_kernel_whose_default_hides_changes_is_left_to_others(found, parameters):
    (parameters / "metacopy").write_text("Y\n")
    with pytest.raises(Unsuited, match="metacopy"):
        found(bind("/s/1/fs"), overlay("upperdir=/u", "lowerdir=/s/1/fs"))


def test_a_plain_bind_of_another_snapshotter_is_left_to_others(found, tmp_path):
    empty, other = tmp_path / "native/1", tmp_path / "native/2"
    empty.mkdir(parents=True)
    other.mkdir(parents=True)
    with pytest.raises(Unsuited, match="overlay snapshotter"):
        found(bind(empty), bind(other, "rw", "rbind"))
