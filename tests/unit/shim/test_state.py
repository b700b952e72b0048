"""What is kept of a container outside the shim's memory."""

from __future__ import annotations

import os

import pytest

from shim.errors import ShimError
from shim.state import KEPT_OPERATIONS, State, remove_tree


@pytest.fixture
def state(tmp_path):
    made = State("default", "c1", run=str(tmp_path / "run"), logs=str(tmp_path / "log"))
    made.create()
    return made


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb", "-a", "é", "a b", "a'b", "$(x)", "x" * 77])
def test_a_name_that_is_no_identifier_is_refused(name):
    with pytest.raises(ShimError, match="not an identifier"):
        State("default", name)
    with pytest.raises(ShimError, match="not an identifier"):
        State(name, "c1")


@pytest.mark.parametrize("name", ["a", "A.b_c-d", "0" * 76])
def test_an_identifier_of_containerds_is_taken(name):
    assert State("k8s.io", name).path == f"/run/fermata/k8s.io/{name}"


def test_the_directory_is_for_its_owner_alone(state):
    assert os.stat(state.path).st_mode & 0o777 == 0o700
    assert os.stat(state.write("file", "text")).st_mode & 0o777 == 0o600
    assert state.read("file") == "text"
    assert state.read("other") is None


def test_no_directory_of_ours_is_anybody_elses_to_write_whatever_the_umask_is(tmp_path):
    made = State("default", "c1", run=str(tmp_path / "run"), logs=str(tmp_path / "log"))
    old = os.umask(0)
    try:
        made.create()
        made.new_log_dir("dump")
    finally:
        os.umask(old)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len(modes) == 7
    assert set(modes.values()) == {0o700}


def test_removing_takes_the_namespaces_directory_with_it_once_it_is_empty(state, tmp_path):
    other = State("default", "c2", run=str(tmp_path / "run"), logs=str(tmp_path / "log"))
    other.create()
    state.write("file", "text")
    state.remove()
    assert os.listdir(tmp_path / "run/default") == ["c2"]
    other.remove()
    other.remove()
    assert os.listdir(tmp_path / "run") == []


def test_one_file_can_be_kept(state):
    for name in ("one", "other"):
        state.write(name, "text")
    os.mkdir(f"{state.path}/directory")
    state.remove(keep="one")
    assert os.listdir(state.path) == ["one"]
    state.remove()
    state.remove(keep="one")
    assert not os.path.exists(state.path)


def test_the_logs_of_the_newest_ten_operations_are_kept(state):
    made = [state.new_log_dir("dump") for _ in range(KEPT_OPERATIONS + 3)]
    assert len(set(made)) == len(made)
    kept = sorted(os.listdir(state.log_path))
    assert kept == [os.path.basename(path) for path in made[-KEPT_OPERATIONS:]]


def test_the_logs_of_an_operation_stay_when_the_clock_was_set_back(state):
    for number in range(KEPT_OPERATIONS + 1):
        os.mkdir(f"{state.log_path}/29990101T000000.{number:06d}-dump") if number else state.new_log_dir("dump")
    path = state.new_log_dir("dump")
    assert os.path.isdir(path)
    assert len(os.listdir(state.log_path)) == KEPT_OPERATIONS


def test_logs_that_cannot_be_kept_are_a_sentence(state):
    os.mkdir(os.path.dirname(os.path.dirname(state.log_path)))
    with open(os.path.dirname(state.log_path), "w"):
        pass
    with pytest.raises(ShimError, match=r"^cannot keep the logs of a dump in \S+/log/default/c1: Not a directory"):
        state.new_log_dir("dump")


def test_a_tree_is_removed_without_following_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "gone/deep").mkdir(parents=True)
    (tmp_path / "gone/link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone/deep/file").touch()
    remove_tree(str(tmp_path / "gone"))
    remove_tree(str(tmp_path / "gone"))
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["file"]
