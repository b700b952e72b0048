from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shim import hostfiles
from shim.errors import ShimError

ROOT = os.geteuid() == 0


@pytest.fixture
def state(tmp_path):
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def node(tmp_path):
    """A directory that stands for the node's root file system; it is on the same one as the test's own files."""
    path = Path(os.path.realpath(tmp_path)) / "node"
    path.mkdir()
    return path


def bind(source: Path | str, destination: str = "/etc/resolv.conf", *options: str) -> dict:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", "ro", *options]}


def adopt(state: Path, node: Path, *mounts: dict) -> tuple[list[hostfiles.Edit], list[dict]]:
    spec = {"mounts": list(mounts)}
    return hostfiles.adopt(spec, str(state), str(node)), spec["mounts"]


@pytest.fixture
def linked(node):
    """A resolv.conf that is a symlink, as systemd-resolved makes it."""
    (node / "run").mkdir()
    target = node / "run" / "stub-resolv.conf"
    target.write_bytes(b"nameserver 127.0.0.53\noptions edns0\n\xff")
    link = node / "resolv.conf"
    link.symlink_to("run/stub-resolv.conf")
    return link


def test_a_symlinked_resolv_conf_is_replaced_by_a_copy(state, node, linked):
    edits, mounts = adopt(state, node, bind(linked))
    copy = state / "resolv.conf"
    assert mounts[0]["source"] == str(copy)
    assert copy.read_bytes() == linked.read_bytes()
    assert not copy.is_symlink()
    [edit] = edits
    assert (edit.destination, edit.source, edit.copy) == ("/etc/resolv.conf", str(linked), str(copy))
    assert "stub-resolv.conf" in edit.reason


def test_a_symlink_further_up_the_path_counts_too(state, node, linked):
    (node / "etc").symlink_to(".")
    edits, _ = adopt(state, node, bind(node / "etc" / "run" / "stub-resolv.conf"))
    assert len(edits) == 1


@pytest.mark.parametrize("destination", ["/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc//hosts"])
def test_each_of_the_three_files_has_a_copy_of_its_own(state, node, linked, destination):
    _, mounts = adopt(state, node, bind(linked, destination))
    assert mounts[0]["source"] == str(state / Path(destination).name)


def test_a_plain_file_of_the_root_file_system_stays_the_clients(state, node):
    source = node / "hosts"
    source.write_text("127.0.0.1 localhost\n")
    edits, mounts = adopt(state, node, bind(source, "/etc/hosts"))
    assert edits == []
    assert mounts[0]["source"] == str(source)
    assert list(state.iterdir()) == []


@pytest.mark.skipif(not ROOT, reason="only root may mount")
def test_a_file_of_another_file_system_is_replaced(state, node):
    other = node / "run"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(other)], check=True)
    try:
        (other / "hostname").write_text("pod-7\n")
        edits, mounts = adopt(state, node, bind(other / "hostname", "/etc/hostname"))
        assert "root file system" in edits[0].reason
        assert Path(mounts[0]["source"]).read_text() == "pod-7\n"
    finally:
        subprocess.run(["umount", str(other)], check=True)


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o4755])
def test_mode_owner_and_times_are_kept(state, node, linked, mode):
    target = linked.resolve()
    if ROOT:
        os.chown(target, 1234, 4321)
    target.chmod(mode)
    os.utime(target, ns=(1_000_000_001, 2_000_000_003))
    adopt(state, node, bind(linked))
    mine, theirs = (state / "resolv.conf").stat(), target.stat()
    for name in ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
        assert getattr(mine, name) == getattr(theirs, name), name


def test_the_clients_options_are_kept_and_propagation_is_private(state, node, linked):
    _, mounts = adopt(state, node, bind(linked, "/etc/resolv.conf", "noexec", "rslave"))
    assert mounts[0]["options"] == ["rbind", "ro", "noexec", "rprivate"]
    (node / "hosts").touch()
    _, mounts = adopt(state, node, bind(node / "hosts", "/etc/hosts"))
    assert mounts[0]["options"] == ["rbind", "ro", "rprivate"]


def test_a_bind_mount_is_known_by_its_type_or_by_its_options(state, node, linked):
    by_type = {"destination": "/etc/hosts", "type": "bind", "source": str(linked)}
    by_option = {"destination": "/etc/hostname", "source": str(linked), "options": ["bind"]}
    neither = {"destination": "/etc/resolv.conf", "type": "tmpfs", "source": str(linked), "options": ["ro"]}
    edits, mounts = adopt(state, node, by_type, by_option, neither)
    assert [edit.destination for edit in edits] == ["/etc/hosts", "/etc/hostname"]
    assert mounts[2] == {"destination": "/etc/resolv.conf", "type": "tmpfs", "source": str(linked), "options": ["ro"]}


def test_other_mounts_are_not_touched(state, node, linked):
    mount = bind(linked, "/data/resolv.conf", "rslave")
    before = dict(mount, options=list(mount["options"]))
    edits, mounts = adopt(state, node, mount)
    assert (edits, mounts) == ([], [before])


def test_a_new_attempt_replaces_the_copy(state, node, linked):
    adopt(state, node, bind(linked))
    linked.resolve().write_text("nameserver 10.0.0.2\n")
    adopt(state, node, bind(linked))
    assert (state / "resolv.conf").read_text() == "nameserver 10.0.0.2\n"
    assert [entry.name for entry in state.iterdir()] == ["resolv.conf"]


def test_what_is_missing_is_left_for_runc_to_refuse(state, node):
    (node / "dangling").symlink_to("nowhere")
    for source in (node / "absent", node / "dangling", "relative/hosts"):
        edits, mounts = adopt(state, node, bind(source))
        assert edits == []
        assert mounts[0]["source"] == str(source)


def test_a_fifo_a_directory_and_a_huge_file_are_left_alone(state, node):
    os.mkfifo(node / "fifo")
    (node / "directory").mkdir()
    with (node / "huge").open("wb") as file:
        file.truncate(hostfiles.LIMIT + 1)
    for name in ("fifo", "directory", "huge"):
        link = node / f"link-{name}"
        link.symlink_to(name)
        edits, mounts = adopt(state, node, bind(link))
        assert edits == []
        assert mounts[0]["source"] == str(link)
    assert list(state.iterdir()) == []


def test_a_symlink_under_the_copys_name_is_not_followed(state, node, linked, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (state / "resolv.conf").symlink_to(victim)
    adopt(state, node, bind(linked))
    assert victim.read_text() == "mine"
    assert not (state / "resolv.conf").is_symlink()


def test_a_copy_that_cannot_be_written_is_an_error_that_names_both_files(node, linked, tmp_path):
    with pytest.raises(ShimError) as failure:
        adopt(tmp_path / "absent", node, bind(linked))
    assert str(linked) in str(failure.value)
    assert "absent/resolv.conf" in str(failure.value)


def test_a_spec_without_mounts_is_no_error(state):
    assert hostfiles.adopt({}, str(state)) == []
    assert hostfiles.adopt({"mounts": None}, str(state)) == []
