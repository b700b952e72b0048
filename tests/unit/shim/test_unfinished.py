from __future__ import annotations

import os
import shutil
import subprocess

import pytest

import layerwriter
from shim import unfinished


def at_work(directory, *before):
    """A program called runc that works in a directory, by its command line. It ends with its input."""
    command = ["bash", "-c", 'exec -a runc sh -c "echo; read line" "$1/restore-1"', "bash", str(directory)]
    process = subprocess.Popen([*before, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"\n"
    return process


def test_a_runc_that_works_below_the_directory_is_ended_and_none_beside_it(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one-more").mkdir()
    with at_work(tmp_path / "one") as one, at_work(tmp_path / "one-more") as other:
        assert unfinished.end(f"{tmp_path}/one") == {one.pid}
        assert one.wait() == -9
        assert other.poll() is None
        other.stdin.close()
        assert unfinished.end(f"{tmp_path}/one") == set()


def test_the_directory_may_be_gone(tmp_path):
    with at_work(tmp_path / "one") as one:
        assert unfinished.end(f"{tmp_path}/one") == {one.pid}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace of its own")
def test_a_runc_of_another_node_on_this_machine_is_left_alone(tmp_path):
    """Its container has the same name, and so have the directories; they are others all the same."""
    (tmp_path / "one").mkdir()
    mount = 'mount -t tmpfs none "$0" && mkdir "$0/one" && exec "$@"'
    with at_work(tmp_path / "one", "unshare", "--mount", "sh", "-c", mount, str(tmp_path)) as other:
        assert unfinished._processes(f"{tmp_path}/one") == set()
        other.stdin.close()


def test_the_root_is_no_directory_of_an_operation():
    for wrong in ("/", "", "//", "relative"):
        with pytest.raises(ValueError, match="is no directory of an operation's"):
            unfinished.end(wrong)


def test_what_a_restore_was_replacing_is_brought_back(tmp_path):
    upper, aside, runc = tmp_path / "fs", tmp_path / ".fs.fermata-0123456789abcdef", tmp_path / "runc"
    for path in (upper, runc):
        path.mkdir()
    (upper / "former").touch()
    record = unfinished.record(str(runc), replaced=unfinished.replacing(str(upper)))
    upper.rename(aside)
    upper.mkdir()
    (upper / "restored").touch()
    unfinished.undo(record)
    assert [path.name for path in upper.iterdir()] == ["former"]
    assert [path.name for path in tmp_path.iterdir()] == ["fs"]
    unfinished.undo(record)
    assert [path.name for path in upper.iterdir()] == ["former"]


def test_a_record_of_a_former_version_is_understood(tmp_path):
    upper = tmp_path / "fs"
    upper.mkdir()
    (upper / "restored").touch()
    unfinished.undo(f"{tmp_path}/runc\n{upper}\n\n")
    assert list(upper.iterdir()) == []


@pytest.mark.parametrize("how", ["discard", "bring_back"])
def test_files_that_are_deleted_meanwhile_are_no_failure(tmp_path, monkeypatch, how):
    """containerd removes a deleted container's files while its shim's delete is still at work."""
    upper, runc = tmp_path / "snapshot/fs", tmp_path / "runc"
    for path in (upper, runc):
        path.mkdir(parents=True)
    work = getattr(layerwriter, how)

    def too_late(*given):
        shutil.rmtree(upper.parent)
        work(*given)

    monkeypatch.setattr(layerwriter, how, too_late, raising=False)
    files = {"upper": str(upper)} if how == "discard" else {"replaced": unfinished.replacing(str(upper))}
    unfinished.undo(unfinished.record(str(runc), **files))
    assert not runc.exists()
