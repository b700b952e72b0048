"""Snapshots made to harm whoever restores them, calls made to confuse the shim, and other users of the node.

Each is answered with a sentence, at once, and nothing of the attempt stays. docs/threat-model.md names what is held
against what.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time

import pytest

from node.containers import CTR, IMAGE, OURS, pid, remove, start, status, wait_for
from node.leftovers import leftovers
from node.shims import CallFailed, Shim, daemons
from tests.fuzz import calls

TORTURE = "FERMATA_TORTURE" in os.environ
GOOD, BAD = "/srv/trusted", "/srv/hostile"
WRITER = "open('/file', 'w').write('kept'); open('/done', 'w'); import time; time.sleep(1000)"


@pytest.fixture(scope="module")
def good(running_node):
    start(running_node, "source", "python3", "-c", WRITER)
    wait_for((running_node.path(f"/proc/{pid(running_node, 'source')}/root") / "done").exists, "the file")
    Shim(running_node, "source").checkpoint(GOOD, leave_running=False)
    remove(running_node, "source")
    yield running_node.path(GOOD)
    running_node.exec(["rm", "-rf", GOOD])


@pytest.fixture
def bad(node, good):
    copy = node.path(BAD)
    shutil.copytree(good, copy)
    yield copy
    node.exec(["rm", "-rf", BAD])


def refusal(node, *options):
    """What a restore from the bad snapshot is refused with, at once, so that nothing stays."""
    words = ("--runtime", OURS, "--annotation", f"fermata/restore-from={BAD}", *options)
    began = time.monotonic()
    done = node.ctr("run", "--detach", *words, IMAGE, "two", "true", check=False, timeout=20)
    assert time.monotonic() - began < 15
    assert done.returncode == 1
    assert "a fault in fermata itself" not in done.stderr
    node.ctr("containers", "delete", "two")
    assert leftovers(node) == []
    return done.stderr


def rewrite(bad, **changes):
    path = bad / "fermata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def replaced(name, make):
    def change(bad):
        (bad / name).unlink()
        make(bad / name)

    return change


def cut(name):
    def change(bad):
        os.truncate(bad / name, 4096)

    return change


def layer_of_another_directory(bad):
    rewrite(bad, layer={**json.loads((bad / "fermata.json").read_text())["layer"], "file": "../trusted/layer.tar"})


def without_digest(bad):
    layer = json.loads((bad / "fermata.json").read_text())["layer"]
    del layer["digest"]
    rewrite(bad, layer=layer)


def twice(bad):
    path = bad / "fermata.json"
    path.write_text(path.read_text().replace("{", '{"gpu": null,', 1))


def given_away(bad):
    os.chown(bad, 65534, 65534)


def written_by_all(bad):
    bad.chmod(0o777)


HOSTILE = {
    "manifest is a directory": (replaced("fermata.json", os.mkdir), "fermata.json is no regular file"),
    "manifest is a fifo": (replaced("fermata.json", os.mkfifo), "fermata.json is no regular file"),
    "manifest is a link": (replaced("fermata.json", lambda path: path.symlink_to("/etc/shadow")), "cannot read "),
    "manifest of 100 MB": (lambda bad: os.truncate(bad / "fermata.json", 100 << 20), "is larger than"),
    "manifest of brackets": (lambda bad: (bad / "fermata.json").write_text("[" * 4_000_000), "is damaged: "),
    "half a character": (lambda bad: rewrite(bad, requires={"architecture": "\ud800"}), "is damaged: "),
    "gpu is a list": (lambda bad: rewrite(bad, gpu=[1]), "is damaged: gpu is not an object"),
    "a name twice": (twice, "is damaged: the name 'gpu' is in an object twice"),
    "size below zero": (lambda bad: rewrite(bad, requires={"memory": -1}), "requires.memory is out of range"),
    "layer left out": (lambda bad: rewrite(bad, layer=None), "names the file layer.tar and has no layer"),
    "layer is a link": (replaced("layer.tar", lambda path: path.symlink_to("/etc/shadow")), "layer.tar is no regular"),
    "layer is a fifo": (replaced("layer.tar", os.mkfifo), "layer.tar is no regular file"),
    "layer is elsewhere": (layer_of_another_directory, "is damaged: layer.file is no name of a file"),
    "layer without digest": (without_digest, "the digest 'None' is not of the form sha256:"),
    "image is a link": (replaced("core-1.img", lambda path: path.symlink_to("/dev/zero")), "core-1.img is no regular"),
    "image is a fifo": (replaced("pages-1.img", os.mkfifo), "pages-1.img is no regular file"),
    "an image more": (lambda bad: (bad / "core-2.img").write_bytes(b"x"), "fermata.json does not name core-2.img"),
    "a fifo more": (lambda bad: os.mkfifo(bad / "irmap-cache"), "irmap-cache is no regular file"),
    "cut off": (cut("pages-1.img"), "pages-1.img has 4096 bytes and was written with"),  # CRIU 4.1 reads on for ever
    "of another user": (given_away, "the directory can be written to by others than root (owner 65534"),
    "everybody's": (written_by_all, "the directory can be written to by others than root"),
}


# Of the manifest's, tests/unit/shim/test_manifest.py has more.
SOME = (
    "half a character",
    "gpu is a list",
    "layer left out",
    "image is a fifo",
    "an image more",
    "cut off",
    "of another user",
)


@pytest.mark.parametrize("kind", HOSTILE if TORTURE else SOME)
def test_a_hostile_snapshot_is_refused_at_once(node, bad, kind):
    change, words = HOSTILE[kind]
    change(bad)
    assert words in refusal(node)


# CRIU 4.1 reads on for ever behind the end of some images.
IMAGES = ("pages-1.img", "pagemap-1.img", "core-1.img", "mm-1.img", "files.img", "pstree.img", "tmpfs-dev-*.img")


@pytest.mark.skipif(not TORTURE, reason="only in make torture")
@pytest.mark.parametrize("image", IMAGES)
def test_images_that_are_cut_off_and_described_so_do_not_keep_anybody_waiting(node, bad, image):
    config = node.path("/etc/fermata/config.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("[criu]\nrestore_timeout = 5\n")
    path = sorted(bad.glob(image))[0]
    os.truncate(path, path.stat().st_size // 2)
    files = json.loads((bad / "fermata.json").read_text())["files"]
    rewrite(bad, files={**files, path.name: path.stat().st_size})
    try:
        said = refusal(node)
        assert f"restore of {BAD} failed: " in said or f"{path.name} is cut short" in said
    finally:
        config.unlink()


@pytest.mark.parametrize("kind", ["layer is a fifo", "image is a link"])
def test_who_waives_the_check_still_gets_no_other_file_than_the_snapshots(node, bad, kind):
    change, words = HOSTILE[kind]
    change(bad)
    assert words in refusal(node, "--annotation", "fermata/check=warn")


def test_a_directory_of_another_user_is_no_place_for_a_containers_memory(node):
    start(node, "one")
    node.exec(["install", "-d", "-o", "65534", BAD])
    try:
        with pytest.raises(CallFailed, match=rf"^snapshot directory {BAD} belongs to user 65534, who could read "):
            Shim(node, "one").checkpoint(BAD)
    finally:
        node.exec(["rm", "-r", BAD])
    assert status(node, "one") == "RUNNING"


def test_another_user_of_the_node_gets_at_nothing(node):
    """Neither at the sockets, nor at the state, nor at the logs; nor at the snapshot."""
    start(node, "one")
    Shim(node, "one").checkpoint(BAD)
    socket = next(path.name for path in node.path("/run/containerd/s").iterdir() if path.name.startswith("f-"))
    attempts = [
        f"import socket; socket.socket(socket.AF_UNIX).connect('/run/containerd/s/{socket}')",
        "import os; os.listdir('/run/fermata')",
        "import os; os.listdir('/var/log/fermata')",
        "open('/run/fermata/x', 'w')",
        "open('/var/log/fermata/x', 'w')",
        f"import os; os.listdir('{BAD}')",
    ]
    become = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    try:
        for attempt in attempts:
            done = node.exec(["python3", "-c", become + attempt], check=False)
            assert "PermissionError" in done.stderr, (attempt, done)
        for place in ("/run/fermata", "/var/log/fermata"):
            for path in (node.path(place), *node.path(place).rglob("*")):
                assert path.stat().st_uid == 0
                assert not path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o700, path
    finally:
        node.exec(["rm", "-r", BAD])


def test_frames_that_nobody_should_send_leave_a_shim_that_serves(node):
    start(node, "one")
    shim = Shim(node, "one")
    seconds = 60 if TORTURE else 3
    before = daemons(node)
    count = calls.attack(shim.connect, seconds=seconds, seed=1)
    assert count > 100
    assert daemons(node) == before
    assert status(node, "one") == "RUNNING"
    assert node.ctr("tasks", "exec", "--exec-id", "a", "one", "sh", "-c", "exit 3", check=False, timeout=20)[0] == 3
    held = len(os.listdir(f"/proc/{before[0]}/fd"))
    shim.checkpoint(BAD)
    node.exec(["rm", "-r", BAD])
    assert len(os.listdir(f"/proc/{before[0]}/fd")) <= held + 2


def test_a_container_with_the_longest_names_is_taken_and_restored(node, image):
    namespace, name = "n" * 76, "a" * 76
    node.import_image(namespace=namespace)
    node.ctr("run", "-d", "--runtime", OURS, image, name, "sleep", "1000", namespace=namespace)
    Shim(node, name, namespace).checkpoint(BAD, leave_running=False)
    node.ctr("tasks", "delete", "--force", name, namespace=namespace)
    node.ctr("containers", "delete", name, namespace=namespace)
    other = "b" * 76
    options = ("--annotation", f"fermata/restore-from={BAD}")
    node.ctr("run", "-d", "--runtime", OURS, *options, image, other, "true", namespace=namespace)
    assert node.ctr("tasks", "exec", "--exec-id", "x", other, "true", namespace=namespace).returncode == 0
    node.exec(["rm", "-r", BAD])


def test_many_takes_of_one_container_at_once_are_one_take_and_refusals(node):
    start(node, "one")
    takes = [
        node.popen(
            [*CTR, "containers", "checkpoint", "--task", "one", f"at-once/{number}:1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(4)
    ]
    said = [take.communicate(timeout=40)[0].decode() for take in takes]
    assert any(take.returncode == 0 for take in takes)
    for take, words in zip(takes, said, strict=True):
        assert take.returncode == 0 or "a fault" not in words, words
    node.ctr("tasks", "resume", "one", check=False)
    wait_for(lambda: status(node, "one") == "RUNNING", "the container to go on")
    node.ctr("images", "delete", *(f"at-once/{number}:1" for number in range(4)), check=False)
