"""The edited specification in the hands of a real runc: io_uring is refused, all else goes on, also after a restore."""

from __future__ import annotations

import errno
import json
import pathlib
import time

import pytest

from shim.specedits import IO_URING, apply

BUNDLE = "/srv/specedits"
ENOSYS = errno.ENOSYS

PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
answers = []
setup, enter, register = (8, ctypes.create_string_buffer(120)), (-1, 0, 0, 0, 0, 0), (-1, 0, 0, 0)
for number, arguments in ((425, setup), (426, enter), (427, register)):
    ctypes.set_errno(0)
    answers.append(0 if libc.syscall(number, *arguments) >= 0 else ctypes.get_errno())
"""
ONCE = PROBE + "print(*answers, os.environ.get('VLLM_WORKER_MULTIPROC_METHOD'))"
FOREVER = f"""
import time
null = os = __import__("os")
descriptor = os.open("/dev/null", os.O_RDWR)
for each in (0, 1, 2):
    os.dup2(descriptor, each)
while True:
    exec({PROBE!r})
    with open("/dev/shm/answers", "a") as file:
        print(*answers, file=file)
    time.sleep(0.02)
"""


class Bundle:
    """A bundle of the node's own root file system for runc."""

    def __init__(self, node):
        self.node = node
        node.exec(["mkdir", "-p", f"{BUNDLE}/rootfs", f"{BUNDLE}/images"])
        node.exec(["mount", "--bind", "/", f"{BUNDLE}/rootfs"])
        node.exec(["runc", "spec", "--bundle", BUNDLE])
        self.file = node.path(f"{BUNDLE}/config.json")
        self.spec = json.loads(self.file.read_text())
        self.spec["process"]["terminal"] = False
        # Below the node's own cgroup, not below that of whoever runs the tests.
        self.spec["linux"]["cgroupsPath"] = "/specedits"
        self.spec["mounts"] = [each for each in self.spec["mounts"] if each["type"] != "cgroup"]

    def write(self, code):
        self.spec["process"]["args"] = ["python3", "-c", code]
        self.file.write_text(json.dumps(self.spec))

    def run(self):
        self.write(ONCE)
        return self.node.exec(["runc", "run", "--bundle", BUNDLE, "specedits"]).stdout.split()

    def remove(self):
        for name in ("specedits", "specedits-again"):
            self.node.exec(["runc", "delete", "--force", name], check=False)
        self.node.exec(["umount", f"{BUNDLE}/rootfs"])
        self.node.exec(["rm", "-rf", BUNDLE])


@pytest.fixture
def bundle(node):
    made = Bundle(node)
    yield made
    made.remove()


@pytest.fixture
def containerds_profile(node, image):
    node.ctr("containers", "create", "--seccomp", image, "profile")
    spec = json.loads(node.ctr("containers", "info", "--spec", "profile").stdout)
    node.ctr("containers", "delete", "profile")
    return spec["linux"]["seccomp"]


def test_without_the_edit_io_uring_works_here(bundle):
    bundle.spec["annotations"] = {IO_URING: "allow"}
    apply(bundle.spec)
    assert bundle.run() == ["0", str(errno.EBADF), str(errno.EINVAL), "spawn"]


def test_without_a_profile_io_uring_is_not_there_and_all_else_is(bundle):
    apply(bundle.spec)
    assert bundle.run() == [str(ENOSYS)] * 3 + ["spawn"]


def test_in_containerds_own_profile_io_uring_is_refused(bundle, containerds_profile):
    bundle.spec["linux"]["seccomp"] = containerds_profile
    apply(bundle.spec)
    answers = bundle.run()
    assert set(answers[:3]) <= {str(errno.EPERM), str(errno.ENOSYS)}


@pytest.mark.parametrize("place", [0, 999], ids=["first", "last"])
def test_a_profile_that_allows_io_uring_is_overruled_and_the_rest_of_it_counts(bundle, containerds_profile, place):
    rules = containerds_profile["syscalls"]
    names = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
    rules.insert(place, {"names": names, "action": "SCMP_ACT_ALLOW"})
    rules.insert(0, {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 77})
    bundle.spec["linux"]["seccomp"] = containerds_profile
    apply(bundle.spec)
    assert bundle.run() == [str(ENOSYS)] * 3 + ["spawn"]
    bundle.write("import os\ntry: os.mkdir('/dev/shm/x')\nexcept OSError as error: print(error.errno)")
    assert bundle.node.exec(["runc", "run", "--bundle", BUNDLE, "specedits"]).stdout.split() == ["77"]


def test_the_refusal_is_there_again_after_a_restore(bundle):
    apply(bundle.spec)
    bundle.write(FOREVER)
    node = bundle.node
    node.exec(["runc", "run", "--detach", "--bundle", BUNDLE, "specedits"])

    def answers(name):
        pid = json.loads(node.exec(["runc", "state", name]).stdout)["pid"]
        file = pathlib.Path(f"/proc/{pid}/root/dev/shm/answers")
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(name, count):
        until = time.monotonic() + 20
        while len(answers(name)) < count:
            assert time.monotonic() < until
            time.sleep(0.02)
        return answers(name)

    wait_for("specedits", 3)
    where = ["--image-path", f"{BUNDLE}/images", "--work-path", f"{BUNDLE}/images"]
    node.exec(["runc", "checkpoint", *where, "specedits"])
    node.exec(["runc", "restore", "--detach", *where, "--bundle", BUNDLE, "specedits-again"])
    before = len(answers("specedits-again"))
    found = wait_for("specedits-again", before + 3)
    assert set(found) == {f"{ENOSYS} {ENOSYS} {ENOSYS}"}
