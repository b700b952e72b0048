"""The file of an unfinished upload: it is opened only where everything is as containerd leaves it."""

from __future__ import annotations

import hashlib
import os

import pytest

from differ.ingest import Hidden, check, open_data

REF = "fermata-differ-1-abcd"
KEY = f"default/1/{REF}"


@pytest.fixture
def upload(tmp_path):
    """What containerd's content store has of an upload of five bytes."""
    directory = tmp_path / "ingest" / hashlib.sha256(KEY.encode()).hexdigest()
    directory.mkdir(parents=True)
    (directory / "ref").write_text(KEY)
    (directory / "data").write_bytes(b"12345")
    for name in ("startedat", "updatedat"):
        (directory / name).write_text("2026-12-01T00:00:00Z")
    return directory


def refused(upload, size=5, namespace="default", ref=REF):
    """Why it is not opened. No descriptor is left open."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Hidden) as reason:
        open_data(str(upload.parent.parent), namespace, ref, size)
    assert os.listdir("/proc/self/fd") == before
    return str(reason.value)


def test_the_file_is_written_where_containerd_has_it(upload):
    before = len(os.listdir("/proc/self/fd"))
    fd = open_data(str(upload.parent.parent), "default", REF, 5)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    os.pwrite(fd, b"678", 5)
    os.close(fd)
    assert (upload / "data").read_bytes() == b"12345678"


def test_the_root_may_be_reached_over_a_link(upload, tmp_path):
    (tmp_path / "elsewhere").symlink_to(upload.parent.parent)
    os.close(open_data(str(tmp_path / "elsewhere"), "default", REF, 5))


def test_what_is_not_there_is_said_without_the_uploads_name(upload):
    assert refused(upload, ref="another").endswith("the upload's directory: No such file or directory")
    assert refused(upload, namespace="other").endswith("the upload's directory: No such file or directory")
    (upload / "data").unlink()
    assert refused(upload).endswith("the upload's data: No such file or directory")
    (upload / "ref").unlink()
    assert refused(upload).endswith("the upload's ref: No such file or directory")
    upload.parent.rename(upload.parent.parent / "away")
    assert refused(upload).endswith("ingest: No such file or directory")


@pytest.mark.parametrize("said", ["", KEY[:-1], KEY + "x", KEY.replace("/1/", "/2/"), "x" * 9999])
def test_an_upload_of_another_name_is_refused(upload, said):
    (upload / "ref").write_text(said)
    assert "another upload" in refused(upload)


@pytest.mark.parametrize("size", [0, 4, 6])
def test_a_file_of_another_size_is_refused(upload, size):
    assert "another size" in refused(upload, size)


def test_a_link_in_the_files_place_is_refused(upload, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"12345")
    (upload / "data").unlink()
    (upload / "data").symlink_to(foreign)
    assert refused(upload).endswith("the upload's data: Too many levels of symbolic links")
    (upload / "data").unlink()
    (upload / "data").hardlink_to(foreign)
    assert "no file of containerd's alone" in refused(upload)


def test_what_is_no_regular_file_is_refused(upload):
    (upload / "data").unlink()
    os.mkfifo(upload / "data")
    assert refused(upload).endswith("the upload's data: No such device or address")
    reader = os.open(upload / "data", os.O_RDONLY | os.O_NONBLOCK)
    assert "no file of containerd's alone" in refused(upload, 0)
    os.close(reader)
    (upload / "data").unlink()
    (upload / "data").mkdir()
    assert refused(upload).endswith("the upload's data: Is a directory")


def test_a_link_on_the_way_is_refused(upload, tmp_path):
    upload.rename(tmp_path / "moved")
    upload.symlink_to(tmp_path / "moved")
    assert refused(upload).endswith("the upload's directory: Not a directory")
    upload.parent.rename(tmp_path / "moved-too")
    upload.parent.symlink_to(tmp_path / "moved-too")
    assert refused(upload).endswith("ingest: Not a directory")
    (tmp_path / "moved" / "ref").unlink()


def test_a_file_of_another_user_is_refused(upload):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(upload / "data", 1, 0)
    assert "no file of containerd's alone" in refused(upload)


def test_a_file_that_grew_is_refused_before_it_is_written(upload):
    fd = open_data(str(upload.parent.parent), "default", REF, 5)
    check(fd, 5)
    with (upload / "data").open("ab") as other:
        other.write(b"6")
    with pytest.raises(Hidden, match="another size"):
        check(fd, 5)
    os.close(fd)
