"""A bundle's config.json: which cgroup a restored container gets."""

from __future__ import annotations

import json

import pytest

from shim.bundle import Bundle
from shim.errors import ShimError

TAKEN = {"container": {"id": "old"}}


def bundle(path, spec):
    (path / "config.json").write_text(json.dumps(spec))
    return Bundle(str(path))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/default/old", "/default/new"),
        ("/default/older", "/default/new"),  # from a container that the snapshot's was restored from
        ("system.slice:cri:old", "system.slice:cri:new"),
        ("/machine/old", "/machine/new"),
        ("/machine/mine", "/machine/mine"),
        ("system.slice:cri:mine", "system.slice:cri:mine"),
        ("old", "old"),
    ],
)
def test_a_container_made_from_anothers_spec_leaves_it_its_cgroup(tmp_path, path, expected):
    made = bundle(tmp_path, {"linux": {"cgroupsPath": path}})
    made.leave_cgroup(TAKEN, "default", "new")
    assert made.spec["linux"]["cgroupsPath"] == expected


@pytest.mark.parametrize("spec", [{}, {"linux": {}}, {"linux": None}])
def test_a_container_without_a_cgroup_of_its_own_stays_as_it_is(tmp_path, spec):
    made = bundle(tmp_path, spec)
    made.leave_cgroup({}, "default", "new")
    assert made.spec == spec


def test_a_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ShimError, match=f"^cannot read {tmp_path}/config.json: "):
        Bundle(str(tmp_path))
