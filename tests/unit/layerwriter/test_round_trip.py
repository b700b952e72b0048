"""What a container sees is the same after its layer was written and applied."""

from __future__ import annotations

import os

import pytest

import layerwriter
from tests.unit.layerwriter import trees


def differences(one: object, other: object) -> list[str]:
    return list(layerwriter.compare(one, other))


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("made_by", ["upperdir", "full-diff"])
def test_every_kind_of_change_comes_back(overlay, tmp_path, made_by, compression):
    source = overlay()
    trees.image(source.image)
    trees.changes(source.mount())
    before = list(layerwriter.record(source.merged))
    layer = tmp_path / "layer.tar"
    if made_by == "upperdir":
        made = layerwriter.write(source.upper, layer, compression=compression)
    else:
        made = layerwriter.full_diff(source.lowerdirs, source.merged, layer, compression=compression)
    assert made.made_by == made_by
    source.unmount()

    fresh = source.base / "fresh"
    fresh.mkdir()
    layerwriter.apply(made, fresh)
    source.work = source.base / "work2"
    source.work.mkdir()
    source.mount(upper=fresh)
    assert differences(before, source.merged) == []


def test_a_change_under_another_name_brings_its_directories_along(overlay, tmp_path):
    """With index=on, a write through one hard link shows under the other, in directories that nobody wrote to."""
    source = overlay(",index=on")
    (source.image / "one").mkdir()
    deep = source.image / "other/deep/deeper"
    deep.mkdir(parents=True)
    (source.image / "one/name").write_bytes(b"before")
    os.link(source.image / "one/name", deep / "name")
    for path, mode in ((deep, 0o711), (deep.parent, 0o705), (deep.parent.parent, 0o750)):
        os.chown(path, 5, 6)
        path.chmod(mode)
        os.utime(path, ns=(1, mode))
    merged = source.mount()
    (merged / "one/name").write_bytes(b"after")
    assert (merged / "other/deep/deeper/name").read_bytes() == b"after"
    before = list(layerwriter.record(merged))
    layer = layerwriter.full_diff(source.lowerdirs, merged, tmp_path / "layer.tar")
    paths = [entry.path for entry in layerwriter.read(layer.path)]
    assert paths == [b"", b"one", b"one/name", b"other", b"other/deep", b"other/deep/deeper", b"other/deep/deeper/name"]
    source.unmount()
    source.options = ",index=off"
    (source.base / "fresh").mkdir()
    source.work = source.base / "work2"
    source.work.mkdir()
    layerwriter.apply(layer, source.base / "fresh")
    assert differences(before, source.mount(upper=source.base / "fresh")) == []
