"""What criuconf writes is what the installed CRIU takes, and what it reads CRIU reads alike."""

from __future__ import annotations

import json
import os
import pathlib
import time

import pytest

from criuconf import explain
from criuconf.options import DECIDED_ELSEWHERE, FLAG, OPTIONAL, PLAIN, VALUE, kind, with_off_forms
from criuconf.syntax import parse
from node.containers import pid, status

LIBRARY = "/usr/local/lib/fermata"

ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import criuconf
criu = criuconf.probe("criu", None)
print(json.dumps([criu.path, criu.version, sorted(criu.options), criu.feature("compress")]))
"""

RENDER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import criuconf
given = json.loads(sys.argv[2])
print(criuconf.render(criuconf.probe("criu", None), criuconf.Request(**given)).text, end="")
"""

# Everything that needs one of the defaults: a semaphore, a file open by a name that is gone while another is left, a
# lock, an unlinked file above CRIU's own limit, and, where CRIU can, a connection.
NEEDY = """
import fcntl, multiprocessing, os, socket, sys, time
lock = multiprocessing.Lock()
renamed = open("/dev/shm/first", "w+")
os.link("/dev/shm/first", "/dev/shm/second")
os.unlink("/dev/shm/first")
held = open("/dev/shm/held", "w")
fcntl.flock(held, fcntl.LOCK_EX)
ghost = open("/dev/shm/ghost", "wb+")
ghost.write(b"x" * (2 << 20))
ghost.flush()
os.unlink("/dev/shm/ghost")
ends = []
if sys.argv[1] == "connected":
    server = socket.create_server(("127.0.0.1", 0))
    ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
n = 0
while True:
    n += 1
    if ends:
        ends[0].sendall(b"!")
        assert ends[1].recv(1) == b"!"
    with lock:
        assert os.fstat(ghost.fileno()).st_size == 2 << 20
        assert os.fstat(renamed.fileno()).st_ino == os.stat("/dev/shm/second").st_ino
        with open("/dev/shm/n", "w") as file:
            file.write(str(n))
    time.sleep(0.02)
"""


@pytest.fixture
def criu(node):
    path, version, options, compress = json.loads(node.exec(["python3", "-I", "-S", "-c", ASK, LIBRARY]).stdout)
    return path, tuple(version), frozenset(options), compress


@pytest.fixture
def criu_config(node, request):
    """Where the host and the node see a configuration file; the node's path is the same in every operation."""
    inside = f"/srv/{request.node.originalname}.conf"
    yield inside, node.path(inside)
    node.path(inside).unlink(missing_ok=True)


def render(node, **request):
    given = json.dumps({"libdir": "/srv/no-plugins"} | request)
    return node.exec(["python3", "-I", "-S", "-c", RENDER, LIBRARY, given]).stdout


def new_sockets_are_refused(version):
    """CRIU before 4.2 asks for socket options that inet sockets do not have from Linux 6.16 on."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return version < (4, 2) and release >= (6, 16)


def wait_for(condition, what, timeout=20):
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.fixture
def network(node):
    """A network namespace that outlives the container, since runc restores its own ones without any interface up."""
    name = "criuconf-test"
    node.exec(["ip", "netns", "add", name])
    try:
        node.exec(["ip", "-n", name, "link", "set", "lo", "up"])
        yield f"/run/netns/{name}"
    finally:
        node.exec(["ip", "netns", "delete", name])


def reached(node, container):
    """How far the program in a container has come, as it says itself; 0 when it does not run."""
    if status(node, container) != "RUNNING":
        return 0
    count = pathlib.Path(f"/proc/{pid(node, container)}/root/dev/shm/n")
    return int((count.read_text() if count.exists() else "") or 0)


def start(node, image, container, config, *arguments, network=None):
    node.ctr(
        "run",
        "--detach",
        "--annotation",
        f"org.criu.config={config}",
        *(["--with-ns", f"network:{network}"] if network else []),
        image,
        container,
        "python3",
        "-c",
        NEEDY,
        *arguments,
    )
    wait_for(lambda: reached(node, container) >= 3, "the container to be under way")


def remove(node, container):
    node.ctr("tasks", "delete", "--force", container, check=False)
    node.ctr("containers", "delete", container, check=False)


# `criu --OPTION` alone, with a value, and negated: getopt's complaint tells what the option takes.
KINDS = r"""
for name in "$@"; do
  for form in "--$name" "--$name=1 --version" "--no-$name --version"; do
    answer=$(criu --no-default-config $form 2>&1 </dev/null | head -n 1)
    case "$answer" in
      *unrecognized*) printf 'unknown ' ;;
      *"requires an argument"*) printf 'value ' ;;
      *"allow an argument"*) printf 'none ' ;;
      *) printf 'taken ' ;;
    esac
  done
  echo "$name"
done
"""


def test_every_option_takes_what_criuconf_says_and_no_other_is_missed(node, criu):
    _, version, options, _ = criu
    newer = {"compress", "image-io-mode", "plugin-option"} if version < (4, 3) else set()
    asked = sorted((options | newer) - DECIDED_ELSEWHERE)
    answers = node.exec(["sh", "-c", KINDS, "kinds", *asked], timeout=120).stdout.splitlines()
    expected = {
        VALUE: ("value", "taken"),
        OPTIONAL: ("taken", "taken"),
        FLAG: ("taken", "none", "taken"),
        PLAIN: ("taken", "none", "unknown"),
    }
    wrong = []
    for answer in answers:
        *forms, name = answer.split()
        wanted = ("unknown",) if name in newer else expected[kind(name)]
        if tuple(forms[: len(wanted)]) != wanted:
            wrong.append((name, forms, wanted))
    assert wrong == []
    assert len(answers) == len(asked)


@pytest.mark.parametrize(
    "line",
    [
        "log-file plain",
        "log-file   spaced   # why",
        "log-file\ttabbed",
        "log-file=attached",
        'log-file "quoted"',
        r'log-file "quo\"ted"',
        "log-file before#after",
        'log-file "before#after"',
        "log-f short",
        "log-file one\nlog-file two",
    ],
)
def test_a_file_is_read_as_criu_reads_it(node, criu, criu_config, line):
    inside, outside = criu_config
    outside.write_text(f"{line}\nverbosity=4\n")
    folder = node.path("/srv/read")
    folder.mkdir()
    try:
        # There is no such process: CRIU reads its configuration, opens its log and fails.
        node.exec(["criu", "dump", "-t", "4194303", "-D", "/srv/read", "--config", inside], check=False)
        made = [path.name for path in folder.iterdir() if path.stat().st_size]
    finally:
        node.exec(["rm", "-rf", "/srv/read"])
    names = with_off_forms(criu[2])
    assert made == [list(parse(line, names, "file"))[-1].value]


@pytest.mark.parametrize(
    "line", ["log-level 4", 'libdir "/a', "libdir /a bc", 'libdir "/a" bc', "--link-remap", "ver 4"]
)
def test_what_criuconf_refuses_criu_refuses(node, criu_config, line):
    inside, outside = criu_config
    outside.write_text(f"{line}\n")
    assert node.exec(["criu", "check", "--config", inside], check=False).returncode != 0


def test_a_dump_and_a_restore_by_the_rendered_files_work(node, image, criu, criu_config, network):
    inside, outside = criu_config
    (node.path("/srv") / "no-plugins").mkdir(exist_ok=True)
    outside.write_text(render(node, operation="dump", verbosity=4))
    mode = "alone" if new_sockets_are_refused(criu[1]) else "connected"
    start(node, image, "needy", inside, mode, network=network)
    try:
        before = reached(node, "needy")
        node.ctr("containers", "checkpoint", "--task", "needy", "needy-checkpoint")
        remove(node, "needy")
        outside.write_text(render(node, operation="restore", verbosity=4))
        node.ctr("containers", "restore", "--live", "needy-again", "needy-checkpoint")
        wait_for(lambda: reached(node, "needy-again") > before + 3, "the container to go on")
    finally:
        remove(node, "needy")
        remove(node, "needy-again")
        node.ctr("images", "remove", "needy-checkpoint", check=False)


def test_without_them_the_same_dump_fails_and_is_explained(node, image, criu, criu_config):
    inside, outside = criu_config
    outside.write_text("ghost-limit 4M\nfile-locks\n")
    start(node, image, "plain", inside, "alone")
    try:
        done = node.ctr("containers", "checkpoint", "--task", "plain", "plain-checkpoint", check=False)
        assert done.returncode != 0
        (kept,) = node.path("/run/containerd/io.containerd.runtime.v2.task/default/plain").glob("criu-dump.log")
        assert explain(str(kept)).cause == "link-remap"
    finally:
        remove(node, "plain")


def test_network_sockets_are_explained_where_this_criu_is_too_old_for_the_kernel(node, image, criu, criu_config):
    if not new_sockets_are_refused(criu[1]):
        pytest.skip("this CRIU and kernel agree on socket options")
    inside, outside = criu_config
    outside.write_text(render(node, operation="dump"))
    start(node, image, "connected", inside, "connected")
    try:
        assert node.ctr("containers", "checkpoint", "--task", "connected", "never", check=False).returncode != 0
        (kept,) = node.path("/run/containerd/io.containerd.runtime.v2.task/default/connected").glob("criu-dump.log")
        assert explain(str(kept)).cause == "socket-options-moved"
    finally:
        remove(node, "connected")


def test_network_lock_in_the_file_is_fatal_before_the_version_from_which_it_is_written(node, image, criu, criu_config):
    inside, outside = criu_config
    written = "network-lock nftables" in render(node, operation="dump")
    assert written == (criu[1] >= (4, 3))
    outside.write_text("network-lock nftables\nlink-remap\nfile-locks\nghost-limit 4M\n")
    start(node, image, "locked", inside, "alone")
    try:
        done = node.ctr("containers", "checkpoint", "--task", "locked", "locked-checkpoint", check=False)
        assert (done.returncode == 0) == written
        if not written:
            assert explain(f"{done.stderr}\n").cause == "criu-ended"
    finally:
        remove(node, "locked")
        node.ctr("images", "remove", "locked-checkpoint", check=False)


def test_compress_is_refused_where_criu_is_not_built_with_it(node, criu):
    if criu[3]:
        pytest.skip("this CRIU is built with LZ4")
    given = json.dumps({"operation": "dump", "libdir": "/l", "extra": {"compress": True}})
    done = node.exec(["python3", "-I", "-S", "-c", RENDER, LIBRARY, given], check=False)
    assert "CriuConfError: config.toml, [criu.options] compress" in done.stderr
