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


def pod_container(path, annotations, name="server", kind="container"):
    own = {"io.kubernetes.cri.container-type": kind, **({"io.kubernetes.cri.container-name": name} if name else {})}
    return bundle(path, {"annotations": {**own, **annotations}})


@pytest.mark.parametrize("order", [1, -1])
def test_an_annotation_that_names_the_container_counts_more_than_one_for_the_pod(tmp_path, order):
    given = {
        "fermata/restore-from": "/pods",
        "fermata/restore-from.server": "/mine",
        "fermata/restore-from.sidecar": "/others",
        "fermata/layer": "carry",
        "fermata/layer.sidecar": "none",
        "other/annotation": "kept",
    }
    made = pod_container(tmp_path, dict(list(given.items())[::order]))
    made.settle()
    ours = {key: value for key, value in made.annotations.items() if not key.startswith("io.")}
    assert ours == {"fermata/restore-from": "/mine", "fermata/layer": "carry", "other/annotation": "kept"}


def test_a_pause_container_is_left_alone_by_the_pods_annotations(tmp_path):
    made = pod_container(tmp_path, {"fermata/restore-from": "/a", "fermata/layer.server": "none"}, None, "sandbox")
    made.settle()
    assert list(made.annotations) == ["io.kubernetes.cri.container-type"]


@pytest.mark.parametrize("kind", ["container", "sandbox"])
def test_all_that_makes_no_sense_is_named_at_once(tmp_path, kind):
    wrong = {
        "fermata/restore": "/a",
        "fermata/layer": "some",
        "fermata/layer.other": "any",
        "fermata/restore-from.": "/a",
        "fermata/restore-from.other": "a",
    }
    with pytest.raises(ShimError) as refused:
        pod_container(tmp_path, wrong, "server" if kind == "container" else None, kind).settle()
    said = str(refused.value).split("; ")
    assert said[0].startswith("unknown annotation fermata/restore (there are fermata/check, ")
    assert said[1:] == [
        "annotation fermata/layer is 'some', it can be carry or none",
        "annotation fermata/layer.other is 'any', it can be carry or none",
        "annotation fermata/restore-from. ends with a dot: the name of a container of the pod goes there",
        "annotation fermata/restore-from.other is 'a', it must be the absolute path of a snapshot directory",
    ]


@pytest.mark.parametrize(("kind", "name"), [("container", "server"), ("sandbox", None)])
def test_a_pods_network_cannot_be_private(tmp_path, kind, name):
    with pytest.raises(ShimError, match="'private', and a container of a pod has the pod's network: leave it out"):
        pod_container(tmp_path, {"fermata/netns": "private"}, name, kind).settle()
    pod_container(tmp_path, {"fermata/netns": "keep"}, name, kind).settle()
    bundle(tmp_path, {"annotations": {"fermata/netns": "private"}}).settle()


def test_a_containers_name_outside_of_a_pod_is_refused(tmp_path):
    made = bundle(tmp_path, {"annotations": {"fermata/restore-from.server": "/a"}})
    with pytest.raises(ShimError, match=r"names a container of a pod, and this one is in none: leave out \.server"):
        made.settle()


def test_a_pods_annotation_restores_no_container_from_the_snapshot_of_another(tmp_path):
    taken = {"spec": {"annotations": {"io.kubernetes.cri.container-name": "server"}}}
    given = {"fermata/restore-from": "/a"}
    meant = {"fermata/restore-from.sidecar": "/a"}
    for name, held in (("server", given), ("sidecar", meant)):
        made = pod_container(tmp_path, held, name)
        made.settle()
        made.check_recorded_name("/a", taken)
    made = pod_container(tmp_path, given, "sidecar")
    made.settle()
    with pytest.raises(
        ShimError, match=r"taken of a container 'server', while this one is 'sidecar': annotate the pod "
    ):
        made.check_recorded_name("/a", taken)
    made.check_recorded_name("/a", {"spec": {}})  # taken outside of a pod
