"""`fermata inspect`, `ls` and `rm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from shim import inspect, manifest
from shim.cli import main
from tests.unit.shim import snapshots


@pytest.fixture
def snapshot(tmp_path):
    return snapshots.make(tmp_path / "s")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_a_person_reads_where_from_how_large_who_and_how_long(snapshot, capsys):
    assert run("inspect", snapshot) == 0
    page = capsys.readouterr().out
    for part in (
        "container  c1 in default, left running\n",
        "image      docker.io/library/a:1\n",
        "taken      2026-01-02T03:04:05Z on ?: x86_64, kernel 6.1.0, CRIU 4.1.1, runc ?, containerd ?",
        "memory 4.0 KiB, layer 3 B, tmpfs 0 B, other ",
        "layer      2 entries, sha256:0\n",
        "GPU        none\n",
        "took       layer 0.500 s, dump 1.000 s, total 2.000 s; the processes stood still for 1.200 s\n",
        "\n1 server  4.0 KiB, 2 threads\n      0 pipe\n      3 /root/data\n      4 tcp 127.0.0.17:8000 listening\n",
        "\n  9 worker  36.0 KiB\n",
    ):
        assert part in page


def test_a_program_reads_the_same(snapshot, capsys):
    assert run("inspect", "--json", snapshot) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["container"]["id"] == "c1"
    assert found["sizes"]["layer"] == 3
    assert [process["name"] for process in found["processes"]] == ["server", "worker"]
    assert "spec" not in found


def test_many_open_files_are_cut_short_unless_all_are_asked_for(tmp_path, capsys):
    from shim import images

    directory = snapshots.make(tmp_path / "s")
    entries = [images.FdinfoEntry(fd=fd, id=8, type=2).encode() for fd in range(40)]
    snapshots.image(directory / "fdinfo-1.img", *entries)
    run("inspect", directory)
    assert "        and 28 more (--files)\n" in capsys.readouterr().out
    run("inspect", "--files", directory)
    assert "     39 pipe\n" in capsys.readouterr().out


def test_restores_of_this_snapshot_are_found_by_directory_and_time(snapshot, tmp_path):
    taken = snapshots.DATA["taken"]
    for at, (source, when) in enumerate([(snapshot, taken), (snapshot, "2025"), ("/other", taken), (snapshot, taken)]):
        folder = tmp_path / f"logs/default/c{at}/20260101T00000{at}-restore"
        folder.mkdir(parents=True)
        record = {
            "snapshot": str(source),
            "taken": when,
            "container": f"c{at}",
            "began": f"2026-0{9 - at}",
            "steps": {},
        }
        (folder / "restore.json").write_text(json.dumps(record))
    (tmp_path / "logs/default/c9/1-restore").mkdir(parents=True)
    (tmp_path / "logs/default/c9/1-restore/restore.json").write_text("{")
    found = inspect.restores(str(snapshot), taken, logs=str(tmp_path / "logs"))
    assert [record["container"] for record in found] == ["c3", "c0"]


def test_the_plot_has_a_bar_for_the_take_and_for_each_restore(snapshot, tmp_path):
    out = tmp_path / "t.svg"
    run("inspect", snapshot, "--plot", out)
    restores = [{"container": "<c2>", "steps": {"check": 0.5, "criu": 3.5}}]
    text = inspect.plot(manifest.read(str(snapshot)), restores)
    space = "{http://www.w3.org/2000/svg}"
    assert ElementTree.fromstring(out.read_text()).tag == f"{space}svg"
    root = ElementTree.fromstring(text)
    bars = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    titles = [bar.find(f"{space}title").text for bar in bars]
    assert titles == ["dump: 1.000 s", "layer: 0.500 s", "other: 0.500 s", "check: 0.500 s", "criu: 3.500 s"]
    # One scale: the take is half as long as the restore, and a step begins where the one before it ended.
    widths = [float(bar.get("width")) for bar in bars]
    assert sum(widths[:3]) == pytest.approx(sum(widths[3:]) / 2, abs=0.5)
    assert float(bars[1].get("x")) == pytest.approx(float(bars[0].get("x")) + widths[0], abs=0.2)
    assert any(label.text == "restore of <c2>" for label in root.iter(f"{space}text"))


def test_gpu_steps_stand_on_their_sides_of_the_dump():
    steps = {"gpu_lock": 1, "gpu_out": 2, "layer": 3, "dump": 4, "gpu_back": 5, "total": 15}
    assert [name for name, _ in inspect.in_order(steps)] == ["gpu_lock", "gpu_out", "dump", "layer", "gpu_back"]


def test_ls_has_the_newest_last_and_says_what_did_not_finish(tmp_path, capsys):
    snapshots.make(tmp_path / "b", taken="2026-05-01T00:00:00Z")
    snapshots.make(tmp_path / "a", taken="2026-06-01T00:00:00Z")
    (snapshots.make(tmp_path / "z") / "fermata.json").unlink()
    (tmp_path / "holiday").mkdir()
    assert run("ls", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["z", "b", "a"]
    assert "it has no fermata.json, so the take did not finish" in lines[0]
    assert lines[2].endswith("default/c1")
    assert run("ls", "--json", tmp_path) == 0
    assert [it["name"] for it in json.loads(capsys.readouterr().out)] == ["z", "b", "a"]


def test_rm_removes_a_snapshot(snapshot, capsys):
    assert run("rm", snapshot) == 0
    assert not snapshot.exists()


@pytest.mark.parametrize("name", [b"caf\xe9", "caf\u00e9".encode()], ids=["not UTF-8", "UTF-8"])
@pytest.mark.parametrize("words", [("ls", "--json"), ("ls",), ("inspect",), ("rm",)], ids=" ".join)
def test_a_name_of_any_bytes_is_told_whatever_the_terminal_can_show(tmp_path, words, name):
    there = tmp_path / "snapshots" / os.fsdecode(name)
    there.parent.mkdir()
    snapshots.make(there)
    where = there.parent if words[0] == "ls" else there
    code = "import sys; from shim.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", code, words[0], os.fsencode(where), *words[1:]]
    done = subprocess.run(argv, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done
    if "--json" in words:
        assert [os.fsencode(one["name"]) for one in json.loads(done.stdout)] == [name]
    assert b"caf" in done.stdout


@pytest.mark.parametrize("what", ["directory", "link", "no manifest", "itself a link"])
def test_rm_removes_nothing_when_one_of_its_arguments_is_no_snapshot(snapshot, tmp_path, capsys, what):
    other = snapshots.make(tmp_path / "other")
    named = other
    if what == "directory":
        (other / "photos").mkdir()
    elif what == "link":
        (other / "x.img").symlink_to("/etc/passwd")
    elif what == "no manifest":
        (other / "fermata.json").unlink()
    else:
        named = tmp_path / "alias"
        named.symlink_to(other)
    before = sorted(other.iterdir())
    assert run("rm", snapshot, named) == 1
    assert f"fermata: {named} is not removed: " in capsys.readouterr().err
    assert sorted(other.iterdir()) == before
    assert (snapshot / "fermata.json").exists()


def test_rm_removes_what_a_failed_take_left_when_asked_to(snapshot, capsys):
    (snapshot / "fermata.json").unlink()
    assert run("rm", snapshot) == 1
    assert "did not finish: --unfinished removes that too" in capsys.readouterr().err
    assert run("rm", "--unfinished", snapshot) == 0
    assert not snapshot.exists()


def test_rm_of_an_unrelated_directory_is_refused_also_with_unfinished(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/letter.txt").touch()
    assert run("rm", "--unfinished", tmp_path / "d") == 1
    assert (tmp_path / "d/letter.txt").exists()
