from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shim import netns
from shim.errors import ShimError

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
HERE = Path("/proc/self/ns/net")


def spec(*namespaces: dict[str, str]) -> dict:
    return {"linux": {"namespaces": [{"type": "pid"}, *namespaces]}}


OWN, BROUGHT = {"type": "network"}, {"type": "network", "path": "/run/netns/cni-1"}
USER = {"type": "user"}


@pytest.mark.parametrize(
    ("namespaces", "annotation", "kind"),
    [
        ((OWN,), None, "private"),
        ((OWN,), "keep", "keep"),
        ((BROUGHT,), None, "keep"),
        ((BROUGHT,), "private", "private"),
        ((BROUGHT,), "keep", "keep"),
        ((), None, "keep"),
        ((), "private", "private"),
        ((OWN, USER), None, "keep"),
        ((OWN, USER), "keep", "keep"),
    ],
)
def test_who_gets_a_namespace_of_its_own(namespaces, annotation, kind):
    choice = netns.choose(spec(*namespaces), annotation)
    assert choice.kind == kind
    assert choice.reason


def test_a_spec_without_namespaces_has_the_hosts_network():
    assert netns.choose({}).kind == "keep"


@pytest.mark.parametrize("value", ["", "Private", "host", "private "])
def test_a_nonsense_annotation_is_refused_by_name_and_value(value):
    with pytest.raises(ShimError) as refusal:
        netns.choose(spec(OWN), value)
    assert "fermata/netns" in str(refusal.value)
    assert repr(value) in str(refusal.value)


def test_private_in_a_user_namespace_is_refused():
    with pytest.raises(ShimError, match="user namespace"):
        netns.choose(spec(OWN, USER), "private")


@pytest.mark.parametrize("before", [(OWN,), (BROUGHT,), ()])
def test_entering_replaces_the_network_and_nothing_else(before):
    config = spec(*before, USER)
    netns.enter(config, "/run/netns/x")
    assert config["linux"]["namespaces"] == [{"type": "pid"}, USER, {"type": "network", "path": "/run/netns/x"}]


@pytest.fixture
def container(request):
    name = f"t{os.getpid()}-{request.node.name[:40].rstrip('_')}"
    yield name
    for path in netns.ours("unit", name):
        netns.remove(path)


def inside(path: str, code: str) -> str:
    command = ["nsenter", f"--net={path}", sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@root
def test_loopback_is_up_for_both_address_families(container):
    path = netns.create("unit", container)
    code = """
import socket
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    server = socket.create_server((address, 0), family=family)
    client = socket.create_connection(server.getsockname()[:2], 5)
    client.sendall(b"ping")
    assert server.accept()[0].recv(4) == b"ping"
"""
    inside(path, code)


def namespaces_of_threads():
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found.add(Path(f"/proc/self/task/{task}/ns/net").stat().st_ino)
    return found


@root
def test_the_caller_and_its_threads_stay_where_they_were(container):
    before = HERE.stat().st_ino
    inodes = {os.stat(netns.create("unit", container)).st_ino for _ in range(5)}
    assert len(inodes) == 5
    assert before not in inodes
    until = time.monotonic() + 10
    while (tasks := namespaces_of_threads()) != {before}:  # a thread ends a moment after it has answered
        assert time.monotonic() < until, tasks


@root
def test_many_threads_may_create_at_once_and_nothing_is_left(container):
    before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mounts())
    paths: list[str] = []

    def work() -> None:
        for _ in range(5):
            paths.append(netns.create("unit", container))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 40
    assert sorted(paths) == netns.ours("unit", container)
    for path in paths:
        netns.remove(path)
    assert netns.ours("unit", container) == []
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mounts()) == before


def mounts() -> int:
    return sum("/fermata-unit+" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


@root
def test_a_new_namespace_has_the_settings_that_any_other_has(container):
    read = """
import os
for directory, _, names in os.walk("/proc/sys/net"):
    for name in names:
        try:
            print(directory, name, open(os.path.join(directory, name)).read().split())
        except OSError as cause:
            print(directory, name, cause.errno)
"""
    ordinary = subprocess.run(
        ["unshare", "-n", sys.executable, "-I", "-S", "-c", read], capture_output=True, text=True, check=True
    ).stdout
    path = netns.create("unit", container)
    # random by design
    theirs, mine = ({line for line in text.splitlines() if "stable_secret" not in line}
                    for text in (ordinary, inside(path, read)))  # fmt: skip
    assert mine == theirs
    assert len(mine) > 100


@root
def test_ip_netns_lists_it(container):
    path = netns.create("unit", container)
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert Path(path).name in listing.split()


@root
def test_an_unmount_reaches_other_mount_namespaces(container):
    path = netns.create("unit", container)
    other = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert path in Path(f"/proc/{other.pid}/mountinfo").read_text()
        netns.remove(path)
        assert path not in Path(f"/proc/{other.pid}/mountinfo").read_text()
    finally:
        other.kill()
        other.communicate()


@root
def test_removing_what_is_gone_or_half_made_is_no_error(container):
    path = netns.create("unit", container)
    netns.remove(path)
    netns.remove(path)
    Path(path).touch()  # what a kill between the file and the mount leaves
    assert netns.ours("unit", container) == [path]
    netns.remove(path)
    assert not Path(path).exists()


@root
def test_a_name_mounted_over_twice_is_removed(container):
    path = netns.create("unit", container)
    subprocess.run(["mount", "--bind", "/proc/self/ns/net", path], check=True)
    netns.remove(path)
    assert not Path(path).exists()
    assert path not in Path("/proc/self/mountinfo").read_text()


@root
def test_a_namespace_in_use_loses_its_name_and_lives_on(container):
    path = netns.create("unit", container)
    process = subprocess.Popen(["nsenter", f"--net={path}", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        inode = os.stat(path).st_ino
        netns.remove(path)
        assert Path(f"/proc/{process.pid}/ns/net").stat().st_ino == inode
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "path",
    [
        "/run/netns/cni-0815",
        "/run/netns/fermata-x",
        "/run/netns/fermata-a+b+../../../etc/passwd",
        "/run/netns/../fermata-a+b+0123456789abcdef",
        "/etc/passwd",
        "fermata-a+b+0123456789abcdef",
        "",
    ],
)
def test_a_path_that_is_not_ours_is_refused(path):
    with pytest.raises(ShimError, match="left alone"):
        netns.remove(path)


@root
def test_hyphens_do_not_make_one_containers_namespace_anothers(container):
    path = netns.create("unit", container)
    try:
        other = netns.create(f"unit-{container.partition('-')[0]}", container.partition("-")[2])
        assert netns.ours("unit", container) == [path]
        assert set(netns.ours()) >= {path, other}
    finally:
        netns.remove(other)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a+b", "ä", "x" * 77])
def test_a_name_that_containerd_would_not_give_is_refused(name):
    with pytest.raises(ShimError, match="identifier"):
        netns.create("unit", name)


@root
def test_a_failed_creation_leaves_nothing_and_says_what_the_kernel_said():
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from shim import netns
from shim.errors import ShimError
open("/proc/sys/user/max_net_namespaces", "w").write("0")
try:
    netns.create("unit", "refused")
except ShimError as failure:
    print(failure)
assert netns.ours("unit", "refused") == []
"""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-I", "-S", "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "unshare: No space left on device" in process.stdout, process.stderr
    assert process.returncode == 0, process.stderr


@root
def test_the_directory_is_made_a_shared_mount_once_on_a_node_that_never_had_one():
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from shim import netns
for _ in range(3):
    netns.remove(netns.create("unit", "first"))
print([line.split()[6] for line in open("/proc/self/mountinfo") if line.split()[4] == "/run/netns"])
"""
    script = 'mount -t tmpfs none /run && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    command += [sys.executable, "-I", "-S", "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.count("shared:") == 1
