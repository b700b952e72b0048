"""The command line, and what the commands that speak to containerd make of a snapshot."""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys

import pytest

from shim import cli, operation
from shim.containerd import chain_id
from shim.errors import ShimError
from shim.manifest import Manifest
from tests.unit.shim import snapshots


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def options(**changes: object) -> argparse.Namespace:
    values = {"id": "c2", "namespace": "prod", "mount": [], "env": [], "label": [], "force": False, "image": None}
    return argparse.Namespace(**{**values, **changes})


def adapted(spec: dict | None = None, **changes: object) -> dict:
    given = copy.deepcopy({**snapshots.SPEC, **(spec or {})})
    return operation.adapt(given, Manifest(snapshots.DATA), "/s", options(**changes))


def test_help_names_every_command_and_imports_none():
    done = python(
        "import sys; from shim.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('shim.')])"
    )
    listing, _, modules = done.stdout.rpartition("\n[")
    assert all(f"    {name}" in listing for name in cli.COMMANDS)
    assert set(modules.strip("]\n").replace("'", "").split(", ")) == {"shim.errors", "shim.cli"}


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_its_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: fermata {command} ")


def test_a_failure_is_one_sentence_and_status_1(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "gone")]) == 1
    assert capsys.readouterr().err == (
        f"fermata: no snapshot at {tmp_path}/gone: the directory does not exist on this node\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["checkpoint", "c"],
            "the following arguments are required: DIR: `fermata checkpoint --help` shows the syntax",
        ),
        (["restore", "--typo", "d", "c"], "unrecognized arguments: --typo: `fermata --help` shows the syntax"),
        (
            ["flush-locks", "--all", "--netns", "/x"],
            "not allowed with argument --all: `fermata flush-locks --help` shows",
        ),
        (["dance"], f"there is no command dance; there are {', '.join(cli.COMMANDS)}"),
        ([], "the following arguments are required: COMMAND: `fermata --help` shows the syntax"),
    ],
)
def test_a_command_line_without_sense_is_one_sentence_and_status_2(words, sentence, capsys):
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.startswith("fermata: ") and sentence in said.err and said.err.count("\n") == 1


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path):
    for at in range(3000):
        (tmp_path / f"{'d' * 60}{at}").mkdir()
        (tmp_path / f"{'d' * 60}{at}/core-1.img").touch()
    code = f"import sys; from shim.cli import main; sys.exit(main(['ls', {str(tmp_path)!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (0, b"")


def test_without_grpcio_the_sentence_says_what_to_install(tmp_path):
    done = python(
        "import sys; sys.modules['grpc'] = None\n"
        "from shim.cli import main; sys.exit(main(['checkpoint', 'c', '/nowhere/d']))"
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "fermata: this command speaks to containerd with the Python library grpcio, which is not"
    )
    assert "install the package python3-grpcio" in done.stderr


def test_a_containers_shim_imports_nothing_of_the_command():
    done = python("import sys; import shim.bootstrap, shim.snapshot; print(*sys.modules)")
    loaded = set(done.stdout.split())
    names = ("check", "cli", "containerd", "doctor", "host", "images", "inspect", "manifest", "operation")
    assert not loaded & {"grpc", "argparse", *(f"shim.{name}" for name in names)}


def test_the_new_container_has_its_own_control_group_and_says_where_it_comes_from():
    spec = adapted()
    assert spec["linux"]["cgroupsPath"] == "/default/c2"
    assert spec["annotations"] == {"fermata/layer": "carry", "fermata/restore-from": "/s"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/kubepods/pod1/c1", "/kubepods/pod1/c2"),
        ("system.slice:cri-containerd:c1", "system.slice:cri-containerd:c2"),
        ("", "/prod/c2"),
        ("/elsewhere", "/prod/c2"),
    ],
)
def test_a_control_group_is_named_after_the_new_container(path, expected):
    assert adapted({"linux": {"cgroupsPath": path}})["linux"]["cgroupsPath"] == expected


def test_force_becomes_the_annotation_and_is_not_inherited():
    assert adapted(force=True)["annotations"]["fermata/check"] == "warn"
    assert "fermata/check" not in adapted({"annotations": {"fermata/check": "warn"}})["annotations"]


def test_a_namespace_path_that_is_gone_is_replaced_by_a_namespace_of_its_own():
    namespaces = [{"type": "network", "path": "/nowhere/net"}, {"type": "ipc", "path": "/proc/self/ns/ipc"}]
    kept = adapted({"linux": {"namespaces": namespaces}})["linux"]["namespaces"]
    assert kept == [{"type": "network"}, {"type": "ipc", "path": "/proc/self/ns/ipc"}]


def test_a_mount_takes_the_place_of_the_one_with_its_destination():
    spec = adapted(mount=["type=bind,src=/new,dst=/models,options=rbind:rw", "src=/b,dst=/b"])
    assert [mount["destination"] for mount in spec["mounts"]] == ["/proc", "/models", "/b"]
    assert spec["mounts"][1] == {
        "type": "bind",
        "source": "/new",
        "destination": "/models",
        "options": ["rbind", "rw"],
    }


def test_an_environment_variable_takes_the_place_of_its_namesake():
    assert adapted(env=["A=2", "B="])["process"]["env"] == ["PATH=/bin", "A=2", "B="]


@pytest.mark.parametrize(
    "changes", [{"mount": ["dst=/a"]}, {"mount": ["src=/a,dst=a"]}, {"mount": ["src=/a,to=/b"]}, {"env": ["A"]}]
)
def test_what_cannot_be_read_is_refused_by_its_option(changes):
    [option] = changes
    with pytest.raises(ShimError, match=f"^--{option} "):
        adapted(**changes)


def test_a_terminal_is_refused():
    with pytest.raises(ShimError, match="had a terminal, which this command cannot give"):
        adapted({"process": {"terminal": True}})


def test_the_chain_id_is_the_image_specifications():
    # Equal to what containerd names the snapshots of an image with these layers.
    one, two = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    assert chain_id([one]) == one
    import hashlib

    assert chain_id([one, two]) == "sha256:" + hashlib.sha256(f"{one} {two}".encode()).hexdigest()
