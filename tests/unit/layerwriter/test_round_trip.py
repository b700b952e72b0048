"""What a container sees is the same after its layer was written and applied."""

from __future__ import annotations

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
