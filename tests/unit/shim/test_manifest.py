"""fermata.json: what is read, what is refused, what is kept."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shim import check, gpu, guest, inspect, manifest, operation, weights
from shim.config import Config
from shim.errors import ShimError
from shim.rootfs import Rootfs
from shim.task import Mount
from shim.ttrpc import Response
from tests.unit.shim import snapshots

SCHEMA = json.loads(Path(__file__).parents[3].joinpath("docs/fermata.schema.json").read_text())


@pytest.fixture
def snapshot(tmp_path):
    return snapshots.make(tmp_path / "s")


def rewrite(snapshot: Path, **changes: object) -> None:
    path = snapshot / "fermata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read_error(directory: Path) -> str:
    with pytest.raises(ShimError) as error:
        manifest.read(str(directory))
    return str(error.value).replace(str(directory), "DIR")


def test_the_schema_is_one_and_describes_a_snapshot(snapshot):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads((snapshot / "fermata.json").read_text()), SCHEMA)


@pytest.mark.parametrize(
    "wrong", [{"taken": 5}, {"layer": {"file": "a/b"}}, {"version": {"major": 2, "minor": 0}}, {"steps": {"dump": "1"}}]
)
def test_the_schema_refuses_what_is_no_snapshot(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**snapshots.DATA, **wrong}, SCHEMA)


def test_unknown_keys_are_kept_when_a_client_adds_what_it_knows(snapshot):
    rewrite(snapshot, later={"a": [1]}, version={"major": 1, "minor": 7, "x": "y"})
    manifest.amend(str(snapshot), {"container": {"image": "b:2"}, "node": {"containerd": "2.1.9"}})
    data = json.loads((snapshot / "fermata.json").read_text())
    assert data["later"] == {"a": [1]}
    assert data["version"] == {"major": 1, "minor": 7, "x": "y"}
    assert data["container"] == {**snapshots.DATA["container"], "image": "b:2"}
    assert data["node"] == {"containerd": "2.1.9"}


def test_another_major_version_is_refused(snapshot):
    rewrite(snapshot, version={"major": 2, "minor": 1})
    assert read_error(snapshot) == (
        "snapshot DIR has format version 2.1, this fermata reads 1.x: restore it with the version that took it, or "
        "take it again"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "DIR/fermata.json is damaged: "),
        ("[]", "DIR/fermata.json has no version: it is not fermata's"),
        ('{"version": {"major": "1"}}', "DIR/fermata.json has no version: it is not fermata's"),
        ("[" * 100000, "DIR/fermata.json is damaged: "),
        ('{"version": {"major": 1}, "frozen": NaN}', "DIR/fermata.json is damaged: NaN is no number"),
        (
            '{"version": {"major": 1}, "taken": "\\ud800"}',
            "DIR/fermata.json is damaged: taken holds a character that no",
        ),
        ('{"version": {"major": 1}, "a\\u0000b": 1}', "DIR/fermata.json is damaged: a name in it holds a character"),
        ('{"version": {"major": 1}, "layer": {"file": "../x"}}', "DIR/fermata.json is damaged: layer.file is no name"),
        ('{"version": {"major": 1}, "layer": {}}', "DIR/fermata.json is damaged: layer.file is no name of a file"),
        ("1" * 5000, "DIR/fermata.json is damaged: "),
    ],
)
def test_what_is_no_manifest_is_refused(snapshot, text, sentence):
    (snapshot / "fermata.json").write_text(text)
    assert read_error(snapshot).startswith(sentence)


def test_a_manifest_that_is_a_link_is_not_followed(snapshot, tmp_path):
    (snapshot / "fermata.json").rename(tmp_path / "elsewhere")
    (snapshot / "fermata.json").symlink_to(tmp_path / "elsewhere")
    assert read_error(snapshot).startswith("cannot read DIR/fermata.json: ")


def test_every_file_but_the_manifest_is_listed_with_its_size(snapshot):
    (snapshot / ".fermata.json.staged").write_text("{}")
    files = manifest.files(str(snapshot))
    assert files["pages-1.img"] == 4096
    assert set(files) == {path.name for path in snapshot.iterdir()} - {"fermata.json", ".fermata.json.staged"}


def test_files_of_the_image_and_of_bind_mounts_are_required_and_those_of_the_writable_layer_are_not(snapshot, tmp_path):
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for path in (lower / "usr/bin/python3", upper / "root/data"):
        path.parent.mkdir(parents=True)
        path.touch()
    overlay = Rootfs([Mount(type="overlay", options=[f"lowerdir={lower}", f"upperdir={upper}"])])
    required = manifest.requirements(snapshots.SPEC, overlay, str(snapshot), "4.1.1")
    assert required["files"] == [snapshots.MODEL, snapshots.PYTHON]
    # Changed by the container: it comes back with the layer, whatever the new image has.
    (upper / "usr/bin").mkdir(parents=True)
    (upper / "usr/bin/python3").touch()
    required = manifest.requirements(snapshots.SPEC, overlay, str(snapshot), "4.1.1")
    assert required["files"] == [snapshots.MODEL]
    assert required["memory"] == 4096
    assert required["namespaces"] == ["mount", "network", "pid"]


def test_what_is_not_known_of_a_file_or_a_mount_can_be_read_back(snapshot):
    data = json.loads((snapshot / "fermata.json").read_text())
    data["requires"]["files"][0]["size"] = None  # an empty file
    data["requires"]["mounts"][1]["file"] = None  # its source could not be seen
    manifest.Manifest(data).write(str(snapshot))
    assert manifest.read(str(snapshot)).data == data


def test_a_description_that_could_not_be_read_back_is_never_written(snapshot):
    before = (snapshot / "fermata.json").read_text()
    data = json.loads(before)
    data["requires"]["files"][0]["size"] = "much"
    with pytest.raises(ShimError, match=r"would be unreadable: requires\.files\[0\]\.size is not a whole number"):
        manifest.Manifest(data).write(str(snapshot))
    assert (snapshot / "fermata.json").read_text() == before


def test_a_bind_mount_of_a_file_is_told_from_one_of_a_directory(tmp_path):
    (tmp_path / "file").touch()
    mounts = [
        {"destination": f"/{name}", "type": "bind", "source": str(tmp_path / name), "options": ["bind"]}
        for name in ("file", "", "gone")
    ]
    described = manifest.describe_mounts({"mounts": mounts})
    assert [mount.get("file") for mount in described] == [True, False, None]


PLACES = [
    *("taken", "container", "requires", "files", "layer", "gpu", "steps", "frozen", "spec", "node"),
    *("container.id", "requires.mounts", "requires.files", "requires.devices", "requires.cpu_features"),
    *("requires.memory", "layer.file", "layer.size", "spec.process", "spec.mounts", "spec.linux"),
]
ODD = [True, -1, 10**30, 1.5, "", "x", "../../etc/shadow", [], [[]], ["x"], [{}], {}, {"x": {"y": []}}, [None]]


@pytest.mark.parametrize("place", PLACES)
def test_whatever_stands_in_the_file_every_reader_of_it_has_a_sentence(snapshot, tmp_path, place):
    """Each is refused by name or used; nothing else is ever raised, and what is said can be sent."""
    *above, last = place.split(".")
    for odd in ODD:
        data = copy.deepcopy({**snapshots.DATA, "spec": snapshots.SPEC, "gpu": {"processes": [], "gpus": []}})
        into = data
        for name in above:
            into = into[name]
        into[last] = odd
        (snapshot / "fermata.json").write_text(json.dumps(data))
        args = {"force": False, "id": "b", "namespace": "default", "mount": ["src=/a,dst=/b"], "env": ["A=b"]}
        inspected = {"directory": str(snapshot), "json": False, "files": False, "plot": None}
        for read in (
            lambda: check.findings(str(snapshot), manifest.read(str(snapshot)), Config(), snapshots.SPEC, Rootfs([])),
            lambda: operation._spec(manifest.read(str(snapshot)), str(snapshot), argparse.Namespace(**args)),
            lambda: inspect.inspect(argparse.Namespace(**inspected)),
        ):
            try:
                read()
            except ShimError as error:
                Response.failure(error.code, str(error)).encode()


WHOLE = {
    **snapshots.DATA,
    "spec": {**snapshots.SPEC, "linux": {**snapshots.SPEC["linux"], "uidMappings": [], "gidMappings": []}},
    "files": {"inventory.img": 8, "layer.tar": 3},
    "gpu": {
        "driver": "580.1",
        "gpus": [{"uuid": "GPU-1", "model": "H200", "memory": 1 << 37}],
        "processes": [{"pid": 1, "command": "python3", "bytes": 5, "by_gpu": {"GPU-1": 5}}],
    },
    "guest": {
        "outcome": "out",
        "reason": None,
        "token": "0a",
        "processes": [{"pid": 1, "packs": [{"name": "model", "digest": f"sha256:{'a' * 64}", "bytes": 5}]}],
        "seconds": {"write": 0.5},
    },
}


def places(value, path=()):
    """Every place of a value of JSON, as the keys that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


VALUES = [found for place in places(WHOLE) if (found := functools.reduce(lambda at, key: at[key], place, WHOLE)) != {}]
TEXTS = st.sampled_from(["", "a\nb", "\u202e", "\x1b[31m", "../..", "/", "ü", "\U0001f3b5", "a" * 5000, "\0"])
EDITS = st.one_of(
    *(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXTS,
    ),
    st.sampled_from(VALUES),
    st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner, max_size=2)),
)


@given(st.sampled_from(sorted(places(WHOLE), key=str)), EDITS, st.sampled_from(["replace", "add", "remove"]))
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_edited_every_reader_of_it_has_a_sentence(snapshot, place, value, how):
    """One value of the file is another, a key is there that is unknown, or one is not: refused by name, or used."""
    data = copy.deepcopy(WHOLE)
    *above, last = place
    into = functools.reduce(lambda at, key: at[key], above, data)
    if how == "add" and isinstance(into, dict):
        into[f"{last}-x"] = value
    elif how == "remove":
        del into[last]
    else:
        into[last] = value
    (snapshot / "fermata.json").write_text(json.dumps(data))
    config = Config()
    config.weights_directory = str(snapshot.parent / "weights")
    try:
        read = manifest.read(str(snapshot))
    except ShimError as error:
        said = str(error)
        assert said.encode()
        assert "fermata.json" in said or "format version" in said
        if "is damaged: " in said and isinstance(last, str) and "a character that no text has" not in said:
            assert str(place[0]) in said, said
        return
    arguments = {"force": False, "id": "b", "namespace": "default", "mount": ["src=/a,dst=/b"], "env": ["A=b"]}
    inspected = {"directory": str(snapshot), "json": False, "files": False, "plot": None}
    for work in (
        lambda: check.findings(str(snapshot), read, config, snapshots.SPEC, Rootfs([])),
        lambda: operation._spec(read, str(snapshot), argparse.Namespace(**arguments)),
        lambda: inspect.inspect(argparse.Namespace(**inspected)),
        lambda: weights.digests_of(read.data.get("guest")),
        lambda: guest._wanted(read.data.get("guest") or {}),
        lambda: gpu.needed(read.data.get("gpu") or {}),
        lambda: gpu.misfits((read.data.get("gpu") or {}).get("gpus") or [], [{"uuid": "GPU-2", "model": "A"}], "580.1"),
        lambda: weights.reference(str(snapshot), str((read.data.get("guest") or {}).get("token"))),
    ):
        try:
            work()
        except ShimError as error:
            Response.failure(error.code, str(error)).encode()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"guest": {"outcome": "OUT", "processes": []}}, "guest.outcome is not one of out, inside and none"),
        ({"guest": {"processes": [{"pid": -1}]}}, r"guest.processes\[0\].pid is out of range"),
        ({"guest": {"processes": [{"packs": [{"bytes": 1 << 63}]}]}}, r"packs\[0\].bytes is out of range"),
        ({"requires": {"memory": -5}}, "requires.memory is out of range"),
        ({"version": {"major": 1, "minor": "1"}}, "version.minor is not a whole number"),
        ({"version": {"major": True}}, "has no version"),
    ],
)
def test_a_value_that_nobody_would_write_is_named(snapshot, change, sentence):
    (snapshot / "fermata.json").write_text(json.dumps({**snapshots.DATA, **change}))
    with pytest.raises(ShimError, match=sentence):
        manifest.read(str(snapshot))


def test_a_number_that_is_infinite_is_named(snapshot):
    (snapshot / "fermata.json").write_text('{"version": {"major": 1}, "frozen": 1e999}')
    with pytest.raises(ShimError, match="frozen is out of range"):
        manifest.read(str(snapshot))


def test_a_name_that_is_there_twice_is_refused(snapshot):
    """One reader of JSON takes the first value, another one the last."""
    text = json.dumps(snapshots.DATA)
    (snapshot / "fermata.json").write_text(text.replace('"gpu": null', '"gpu": null, "gpu": {}'))
    with pytest.raises(ShimError, match="is damaged: the name 'gpu' is in an object twice"):
        manifest.read(str(snapshot))


def test_a_layer_that_is_not_described_is_not_left_out(snapshot):
    data = {**WHOLE, "layer": None, "gpu": None, "guest": None}
    (snapshot / "fermata.json").write_text(json.dumps(data))
    found = check.findings(str(snapshot), manifest.read(str(snapshot)), Config(), snapshots.SPEC, Rootfs([]))
    assert any("names the file layer.tar and has no layer" in finding.text for finding in found)


def test_what_is_no_regular_file_is_refused_at_once(snapshot):
    path = snapshot / "fermata.json"
    path.unlink()
    path.mkdir()
    assert read_error(snapshot) == "DIR/fermata.json is no regular file: it is not fermata's"
    path.rmdir()
    os.mkfifo(path)
    assert read_error(snapshot) == "DIR/fermata.json is no regular file: it is not fermata's"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert read_error(snapshot) == "cannot read DIR/fermata.json: Too many levels of symbolic links"
    path.unlink()
    path.write_bytes(b" " * (5 << 20))
    assert read_error(snapshot) == "DIR/fermata.json is larger than 4194304 bytes: it is not fermata's"


def test_a_directory_around_a_snapshot_is_refused_with_the_one_that_is_meant(snapshot):
    with pytest.raises(ShimError, match=f"but {snapshot} has: name that directory"):
        manifest.read(str(snapshot.parent))
