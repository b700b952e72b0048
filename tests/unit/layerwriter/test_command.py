"""python3 -m layerwriter, as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import layerwriter
from tests.unit.layerwriter import trees
from tests.unit.layerwriter.tars import entry, tar


def command(*words: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "layerwriter", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, errors="surrogateescape")


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    path = tmp_path / "upper"
    path.mkdir()
    trees.everything(path / "new", escaped=True)
    os.mknod(path / "gone", 0o020000, 0)
    return path


def test_a_layer_is_written_listed_and_applied(upper, tmp_path):
    layer, fresh = tmp_path / "layer.tar", tmp_path / "fresh"
    fresh.mkdir()
    done = command("write", upper, layer)
    assert done.returncode == 0
    said = dict(line.split(None, 1) for line in done.stdout.splitlines() if not line.startswith("note"))
    assert said["digest"] == said["diff_id"]
    assert said["made_by"] == "upperdir"
    assert "note     socket (its path is carried, but not what listens on it): new/socket" in done.stdout
    listed = command("list", layer).stdout.splitlines()
    assert len(listed) == int(said["entries"])
    assert "deleted gone" in listed
    assert any(line.startswith("h0644") and line.endswith(" new/hard-link link to new/file") for line in listed)
    assert any(line.endswith(" -1.500000000 new/time/before-1.5") for line in listed)
    assert command("apply", "--digest", said["digest"], layer, fresh).returncode == 0
    assert (fresh / "new/file").read_bytes() == b"content"


def test_compare_says_what_differs_and_by_its_status_that_something_does(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_bytes(b"x")
        os.utime(tmp_path / name / "same", (1, 1))
        os.utime(tmp_path / name, (1, 1))
    same = command("compare", tmp_path / "one", tmp_path / "other")
    assert (same.returncode, same.stdout) == (0, "")
    (tmp_path / "one/more").mkdir()
    os.chmod(tmp_path / "other/same", 0o600)
    for name in ("one", "other"):
        os.utime(tmp_path / name, (1, 1))
    differs = command("compare", tmp_path / "one", tmp_path / "other")
    assert differs.returncode == 1
    assert differs.stdout.splitlines() == ["only in the first: more (directory)", "same: mode 420 and 384"]


def test_a_record_is_one_json_object_a_line(upper):
    done = command("record", upper)
    assert done.returncode == 0
    items = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["path"] for item in items][:2] == [".", "gone"]
    [capable] = [item for item in items if item["path"] == "new/attributes/capable"]
    assert "security.capability" in capable["xattrs"]


def test_an_error_is_one_line_and_a_status(tmp_path):
    (tmp_path / "layer").write_bytes(tar(entry(b"../x")))
    (tmp_path / "fs").mkdir()
    for words in (("apply", tmp_path / "layer", tmp_path / "fs"), ("list", tmp_path / "layer"),
                  ("write", tmp_path / "none", tmp_path / "out")):  # fmt: skip
        done = command(*words)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("layerwriter: ")


def test_a_full_comparison_by_hand(overlay):
    mounted = overlay()
    trees.image(mounted.image)
    trees.changes(mounted.mount())
    done = command("full-diff", "--lower", mounted.image, mounted.merged, mounted.base / "layer.tar")
    assert done.returncode == 0
    assert "made_by  full-diff" in done.stdout
    assert {entry.path for entry in layerwriter.read(mounted.base / "layer.tar")} >= {b"deleted", b"new/file"}


def test_importing_the_package_imports_almost_nothing():
    """The shim imports it in a process that lives as long as a container."""
    code = "import sys; before = set(sys.modules); import layerwriter; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "layerwriter"]


def test_layers_need_none_of_the_slow_modules():
    code = (
        "import sys, layerwriter; layerwriter.write; layerwriter.apply; layerwriter.choose; "
        "print(*{'typing', 'dataclasses', 're', 'json', 'tarfile', 'subprocess', 'pathlib', 'enum', 'collections'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
