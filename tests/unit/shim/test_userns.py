"""Images that the root of a container's user namespace can read."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

from shim import check, manifest, userns
from shim.errors import ShimError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to map groups takes root")

MAPPED = [{"containerID": 0, "hostID": 100000, "size": 1000}]
SPEC = {"linux": {"uidMappings": MAPPED, "gidMappings": MAPPED}}


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "snapshot"
    made.mkdir(0o700)
    (made / "core-1.img").write_text("core")
    (made / "core-1.img").chmod(0o600)
    return made


def reads(path, uid, gid):
    """Whether a user of the node reads a file through a path that it cannot look up itself, as CRIU does."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    pid = os.fork()
    if pid == 0:
        libc = ctypes.CDLL(None)
        if libc.setgroups(0, None) or libc.setresgid(gid, gid, gid) or libc.setresuid(uid, uid, uid):
            os._exit(3)
        try:
            os.close(os.open("core-1.img", os.O_RDONLY, dir_fd=top))
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(top)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_only_the_root_of_the_container_reads_the_images_besides_root(directory):
    try:
        images = userns.Images(str(directory), SPEC)
    except ShimError as error:
        pytest.skip(str(error))
    assert reads(images.path, 100000, 100000)
    assert reads(images.path, 0, 65534)
    assert not reads(images.path, 100000, 100001)
    assert not reads(str(directory), 100000, 100000)
    images.close()
    images.close()
    assert not os.path.exists(images.path)


def test_a_file_system_that_cannot_map_groups_is_said_to_be_one(directory):
    with pytest.raises(ShimError, match="cannot be restored here: the container has a user namespace, whose root has"):
        userns.Images("/proc/self", SPEC)
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "unshare"], check=False).returncode == 1


def test_a_container_that_maps_its_users_otherwise_is_refused():
    other = [{"containerID": 0, "hostID": 200000, "size": 1000}]
    taken = manifest.Manifest({"spec": SPEC})
    assert list(check._users(taken, SPEC)) == []
    (users, groups) = check._users(taken, {"linux": {"uidMappings": other, "gidMappings": other}})
    assert "maps its users to 200000+1000 of the node, and the snapshot's mapped them to 100000+1000" in users.text
    assert "maps its groups" in groups.text
