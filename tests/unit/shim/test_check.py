"""The check before a restore: each finding by its own, with the sentence that a person reads.

tests/node/test_check.py makes the mismatches happen at real restores.
"""

from __future__ import annotations

import copy
import json
import os

import pytest

from shim import check, host, manifest
from shim.check import Finding
from shim.config import Config
from shim.errors import ShimError
from shim.rootfs import Rootfs
from shim.task import Mount
from tests.unit.shim import snapshots


@pytest.fixture
def node(tmp_path, monkeypatch):
    """This machine with versions that do not depend on what is installed here."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/weights").write_bytes(b"12345")
    (tmp_path / "lower/usr/bin").mkdir(parents=True)
    (tmp_path / "lower/usr/bin/python3").write_bytes(b"interpreter")
    (tmp_path / "lower/usr/bin/python3").chmod(0o755)
    (tmp_path / "upper").mkdir()
    monkeypatch.setattr(host, "machine", lambda: "x86_64")
    monkeypatch.setattr(host, "kernel", lambda: "6.1.7-generic")
    monkeypatch.setattr(host, "program_version", lambda name: "1.1.15")
    monkeypatch.setattr(check, "_criu_version", lambda config: "4.1.1")
    return tmp_path


@pytest.fixture
def found(node):
    """The findings of a snapshot with some changed requirements and a container with a changed specification."""
    number = iter(range(100))

    def look(requires=None, spec=None, **changes):
        data = {**changes, "requires": {**snapshots.DATA["requires"], **(requires or {})}}
        directory = str(snapshots.make(node / f"s{next(number)}", **data))
        container = copy.deepcopy(snapshots.SPEC)
        container["mounts"][1]["source"] = str(node / "models")
        container.update(spec or {})
        overlay = Rootfs([Mount(type="overlay", options=[f"lowerdir={node}/lower", f"upperdir={node}/upper"])])
        return check.findings(directory, manifest.read(directory), Config(), container, overlay)

    return look


def texts(findings: list[Finding], level: str = "problem") -> list[str]:
    assert {finding.level for finding in findings} <= {level}
    return [finding.text for finding in findings]


def test_what_fits_has_no_findings(found):
    assert found() == []


def test_everything_that_does_not_fit_is_said_at_once(found):
    with pytest.raises(ShimError) as error:
        check.refuse("/s", found({"architecture": "aarch64", "criu": "9.9", "terminal": True}))
    assert str(error.value) == (
        "snapshot /s cannot be restored here: it was taken on aarch64, this node is x86_64: restore it on a node of "
        "its kind; this node's CRIU 4.1.1 is older than 9.9, which wrote the images: install CRIU 9.9 or newer; this "
        "container has no terminal and the snapshot's had a terminal: create it with a terminal"
    )


def test_a_snapshot_of_an_older_minor_version_that_records_less_is_restorable(found, node):
    directory = str(snapshots.make(node / "old", requires={}, layer=None))
    read = manifest.read(directory)
    assert check.findings(directory, read, Config(), {}, None) == []


def test_an_image_that_the_take_did_not_write_is_a_problem(found, node):
    (sentence,) = texts(found(files={"inventory.img": None, "core-1.img": None}))
    assert sentence.startswith("fermata.json does not name core-9.img, ")


def test_whatever_is_no_regular_file_is_a_problem(node):
    directory = snapshots.make(node / "s")
    (directory / "pages-9.img").symlink_to("/etc/shadow")
    os.mkfifo(directory / "fifo")
    assert texts(check.findings(str(directory), manifest.read(str(directory)), Config())) == [
        "fifo is no regular file: copy the snapshot again, whole",
        "pages-9.img is no regular file: copy the snapshot again, whole",
    ]


@pytest.mark.parametrize(
    ("mode", "changed", "what"),
    [
        (0o702, ".", "the directory"),
        (0o755, "core-1.img", "core-1.img"),
        (0o700, ".", None),
        (0o755, ".", None),
    ],
)
def test_what_others_could_have_written_is_a_problem(node, mode, changed, what):
    directory = snapshots.make(node / "s")
    if changed != ".":
        (directory / changed).chmod(0o666)
    directory.chmod(mode)
    found = texts(check.findings(str(directory), manifest.read(str(directory)), Config()))
    assert [sentence.partition(" can be written to by others than root")[0] for sentence in found] == [what] * bool(
        what
    )


def test_what_belongs_to_somebody_else_is_a_problem(node):
    if os.geteuid() != 0:
        pytest.skip("gives a directory away")
    directory = snapshots.make(node / "s")
    os.chown(directory, 1234, 0)
    (sentence,) = texts(check.findings(str(directory), manifest.read(str(directory)), Config()))
    assert sentence.startswith("the directory can be written to by others than root (owner 1234, ")


def test_very_many_problems_are_counted(found):
    with pytest.raises(ShimError, match=r"and 450 more, which `fermata check` names$"):
        check.refuse("/s", [Finding("problem", "x" * 10)] * 500)


def test_older_kernel_and_runc_are_warnings_that_refuse_nothing(found):
    findings = found({"kernel": "6.2.1", "runc": "1.2.0"})
    assert texts(findings, "warning") == [
        "this node's kernel 6.1.7-generic is older than 6.2.1, under which it was taken: what only the newer one has "
        "cannot be restored; update the kernel if the restore fails",
        "this node's runc 1.1.15 is older than 1.2.0 of the source node: update it if the restore fails",
    ]
    check.refuse("/s", findings)


def test_a_newer_kernel_or_patch_level_is_no_finding(found):
    assert found({"kernel": "5.10", "criu": "4.1", "runc": "1.1.15+ds1"}) == []
    assert found({"kernel": "6.1.99"}) == []


def test_a_deleted_file_of_the_image_counts_as_missing(found, node):
    if node.stat().st_uid != 0:
        pytest.skip("a whiteout is a device")
    import stat

    os.mknod(node / "upper-layer", 0o600 | stat.S_IFCHR, 0)
    path = node / "lower/usr/bin/python3"
    path.unlink()
    os.mknod(path, 0o600 | stat.S_IFCHR, 0)
    assert texts(found()) == [
        "the image is another one: 1 of 1 of its files that processes had open or mapped do not fit (/usr/bin/python3 "
        "is missing): create the container from docker.io/library/a:1"
    ]


def test_a_file_name_that_leads_out_of_the_directory_is_refused(found):
    first, *_ = texts(found(files={"../secret": 1}))
    assert first == "'../secret' is no name of a file of a snapshot: copy the snapshot again, whole"


def test_a_full_disk_is_seen_before_the_layer_is_unpacked(found, monkeypatch):
    monkeypatch.setattr(host, "room", lambda path: (2, 1))
    first, second = texts(found())
    assert first.startswith("its layer has 3 B and the disk of ")
    assert first.endswith(" has 2 B free: make room there")
    assert second.endswith(" has room for 1 more: remove some there")


def test_a_file_system_without_inode_counts_has_room(found, monkeypatch):
    monkeypatch.setattr(host, "room", lambda path: (1 << 40, -1))
    assert found() == []


def test_cpu_features_are_those_that_programs_choose_code_by(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2 sse4_2 aperfmperf avx512f md_clear\n")
    assert host.cpu_features(str(path)) == ["avx2", "avx512f", "sse4_2"]
    path.write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert host.cpu_features(str(path)) == ["asimd", "fp", "sve"]


@pytest.mark.parametrize(
    ("here", "there", "older"),
    [
        ("4.1.1", "4.3", True),
        ("4.3", "4.3", False),
        ("4.10", "4.9", False),
        ("1.4.3+ds1", "1.4.3", False),
        ("", "1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(here, there, older):
    assert host.older(here, there) is older


def test_the_command_tells_a_program_what_it_tells_a_person(found, node, capsys):
    from shim.cli import main

    directory = snapshots.make(node / "s", requires={**snapshots.DATA["requires"], "architecture": "riscv64"})
    assert main(["check", str(directory), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["restorable"] is False
    text = "it was taken on riscv64, this node is x86_64: restore it on a node of its kind"
    assert {"level": "problem", "text": text} in answer["findings"]
    assert main(["check", str(directory)]) == 1
    assert f"problem: {text}\n" in capsys.readouterr().out
