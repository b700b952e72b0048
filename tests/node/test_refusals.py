"""What cannot work is refused at once, in a sentence that says what and what to do, and nothing of it stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time

import pytest

from node.containers import IMAGE, OURS, pid, remove, start, status, wait_for
from node.leftovers import leftovers
from node.shims import CallFailed, Shim

GOOD, BAD = "/srv/good", "/srv/bad"
WRITER = "open('/file', 'w').write('kept'); open('/done', 'w'); import time; time.sleep(1000)"


@pytest.fixture(scope="module")
def good(running_node):
    """A snapshot directory with nothing wrong, of a container that has written a file and mounts /srv/shared."""
    running_node.path("/srv/shared").mkdir(exist_ok=True)
    start(running_node, "source", "python3", "-c", WRITER, options=[*MOUNT])
    root = running_node.path(f"/proc/{pid(running_node, 'source')}/root")
    wait_for((root / "done").exists, "the file")
    Shim(running_node, "source").checkpoint(GOOD, leave_running=False)
    remove(running_node, "source")
    yield running_node.path(GOOD)
    running_node.exec(["rm", "-rf", GOOD, BAD, "/srv/shared"])


MOUNT = ("--mount", "type=bind,src=/srv/shared,dst=/shared,options=rbind:rw")


@pytest.fixture
def bad(node, good):
    """A copy of the snapshot, to be damaged."""
    copy = node.path(BAD)
    shutil.copytree(good, copy)
    yield copy
    with contextlib.suppress(NotADirectoryError):
        shutil.rmtree(copy, ignore_errors=True)
    copy.unlink() if copy.is_file() else None


def refusal(node, *words, name="two"):
    """The sentence with which a container of that name is refused; that it was, at once, and that nothing stays."""
    began = time.monotonic()
    done = node.ctr("run", "--detach", "--runtime", OURS, *words, IMAGE, name, "sleep", "1000", check=False, timeout=20)
    assert done.returncode == 1, done
    assert time.monotonic() - began < 15
    node.ctr("containers", "delete", name)
    assert leftovers(node) == []
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("ctr: "))
    return sentence


def restoring(directory):
    return ("--annotation", f"fermata/restore-from={directory}")


def rewritten(bad, change):
    """Change the manifest of a snapshot."""
    manifest = json.loads((bad / "fermata.json").read_text())
    change(manifest)
    (bad / "fermata.json").write_text(json.dumps(manifest))


def emptied(bad):
    shutil.rmtree(bad)
    bad.mkdir()


def turned_into_a_file(bad):
    shutil.rmtree(bad)
    bad.write_text("")


def flipped_in_the_layer(bad):
    layer = next(bad.glob("layer.tar*"))
    data = bytearray(layer.read_bytes())
    data[len(data) // 3] ^= 1
    layer.write_bytes(data)


def turned_into_a_fifo(bad):
    (bad / "fermata.json").unlink()
    os.mkfifo(bad / "fermata.json")


CANNOT = f"snapshot {BAD} cannot be restored here: "
DAMAGED = {
    "missing": (shutil.rmtree, f"no snapshot at {BAD}: the directory does not exist on this node"),
    "a file": (turned_into_a_file, f"no snapshot at {BAD}: it is a file, a snapshot is a directory"),
    "empty": (emptied, f"no snapshot at {BAD}: the directory is empty"),
    "unfinished": (
        lambda bad: (bad / "fermata.json").unlink(),
        f"no snapshot at {BAD}: it has no fermata.json, so the take did not finish, or it is not fermata's; take it "
        "again",
    ),
    "a later version": (
        lambda bad: rewritten(bad, lambda manifest: manifest["version"].update(major=7, minor=2)),
        f"snapshot {BAD} has format version 7.2, this fermata reads 1.x: restore it with the version that took it, or "
        "take it again",
    ),
    "damaged": (
        lambda bad: (bad / "fermata.json").write_text('{"version": '),
        f"{BAD}/fermata.json is damaged: Expecting value: line 1 column 13 (char 12); take the snapshot again",
    ),
    "somebody else's": (
        lambda bad: (bad / "fermata.json").write_text("[]"),
        f"{BAD}/fermata.json has no version: it is not fermata's",
    ),
    "a fifo": (turned_into_a_fifo, f"{BAD}/fermata.json is "),
    "no layer": (
        lambda bad: next(bad.glob("layer.tar*")).unlink(),
        f"{CANNOT}layer.tar is not in the directory: copy the snapshot again, whole",
    ),
    "another layer": (flipped_in_the_layer, f"snapshot {BAD}: its layer cannot be unpacked: "),
    "no images": (
        lambda bad: (bad / "inventory.img").unlink(),
        f"{CANNOT}inventory.img is not in the directory: copy the snapshot again, whole",
    ),
    "another architecture": (
        lambda bad: rewritten(bad, lambda manifest: manifest["requires"].update(architecture="sparc64")),
        f"{CANNOT}it was taken on sparc64, this node is {os.uname().machine}: restore it on a node of its kind",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_snapshot_that_cannot_be_restored_is_refused(node, bad, damage):
    change, sentence = DAMAGED[damage]
    change(bad)
    said = refusal(node, *MOUNT, *restoring(BAD))
    assert re.fullmatch(rf"ctr: (failed to create shim task: )?{re.escape(sentence)}.*", said), said


def test_a_restore_that_fails_leaves_the_writable_layer_as_it_was(node, bad):
    core = next(bad.glob("core-1.img"))
    core.write_bytes(bytes(core.stat().st_size))
    snapshots = node.path("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots")
    before = set(snapshots.iterdir())
    done = node.ctr(
        *("run", "--detach", "--runtime", OURS, *MOUNT, *restoring(BAD), IMAGE, "two", "true"), check=False, timeout=20
    )
    assert done.returncode == 1
    assert f"restore of {BAD} failed: CRIU: " in done.stderr
    node.ctr("tasks", "delete", "--force", "two", check=False)
    (made,) = set(snapshots.iterdir()) - before
    assert sorted(path.name for path in made.iterdir()) == ["fs", "work"]
    assert list((made / "fs").iterdir()) == []
    assert leftovers(node) == []
    # So it can be tried again, with the whole snapshot in that place.
    shutil.copyfile(f"{node.path(GOOD)}/core-1.img", core)
    node.ctr("tasks", "start", "--detach", "two")
    assert (node.path(f"/proc/{pid(node, 'two')}/root") / "file").read_text() == "kept"
    remove(node, "two")


def test_all_that_is_wrong_is_named_at_once(node, bad):
    rewritten(bad, lambda manifest: manifest["requires"].update(architecture="sparc64"))
    next(bad.glob("layer.tar*")).unlink()
    said = refusal(node, *restoring(BAD))
    for part in (
        "it was taken on sparc64",
        "this container lacks the mount /shared (bind, from /srv/shared on the source node): add it to the container's "
        "mounts",
        "layer.tar is not in the directory",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("annotation", "sentence"),
    [
        ("fermata/restore-form=/srv/good", "unknown annotation fermata/restore-form (there are "),
        ("fermata/netns=shared", "annotation fermata/netns is 'shared', it can be "),
        ("fermata/layer=", "annotation fermata/layer is '', it can be "),
        (
            "fermata/restore-from=srv/good",
            "annotation fermata/restore-from is 'srv/good', it must be the absolute path of a snapshot directory",
        ),
    ],
)
def test_an_annotation_that_makes_no_sense_is_refused_by_name(node, annotation, sentence):
    assert sentence in refusal(node, "--annotation", annotation)


def test_a_container_that_has_run_is_not_restored_over(node, good):
    """Its second start would lose the files that it has written since."""
    start(node, "two", options=[*MOUNT, *restoring(GOOD)])
    root = node.path(f"/proc/{pid(node, 'two')}/root")
    assert (root / "file").read_text() == "kept"
    (root / "since").write_text("since")
    node.ctr("tasks", "kill", "--signal", "SIGKILL", "two")
    wait_for(lambda: status(node, "two") == "STOPPED", "the container's end")
    node.ctr("tasks", "delete", "two")
    done = node.ctr("tasks", "start", "--detach", "two", check=False, timeout=20)
    assert done.returncode == 1
    assert (
        "container two has files in its writable layer already, so it has run before: a restore by annotation would "
        f"lose them; create a new container to restore {GOOD} again"
    ) in done.stderr
    assert leftovers(node) == []
    upper = next(node.path("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots").glob("*/fs/since"))
    assert upper.read_text() == "since"
    remove(node, "two")


def test_a_directory_with_something_in_it_is_no_place_for_a_snapshot(node, good):
    start(node, "one")
    before = sorted(path.name for path in good.iterdir())
    with pytest.raises(CallFailed, match=f"^snapshot directory {GOOD} is not empty: name a new one$"):
        Shim(node, "one").checkpoint(GOOD)
    with pytest.raises(CallFailed, match=r"^snapshot directory '[^/]*relative' must be an absolute path$"):
        Shim(node, "one").checkpoint("relative")
    assert sorted(path.name for path in good.iterdir()) == before
    assert status(node, "one") == "RUNNING"
    remove(node, "one")


# What the node lacks ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without(node, path):
    """A file of the node is not there for a while."""
    node.exec(["mv", path, f"{path}.away"])
    try:
        yield
    finally:
        node.exec(["mv", f"{path}.away", path])


@contextlib.contextmanager
def configured(node, text):
    """The node's /etc/fermata/config.toml."""
    folder = node.path("/etc/fermata")
    there = folder.exists()
    folder.mkdir(exist_ok=True)
    file = folder / "config.toml"
    file.write_text(text)
    try:
        yield
    finally:
        file.unlink()
        if not there:
            folder.rmdir()


def test_a_node_without_a_stock_shim_says_where_it_was_looked_for(node):
    with without(node, "/usr/bin/containerd-shim-runc-v2"):
        said = refusal(node)
    assert "no stock shim: containerd-shim-runc-v2 is neither beside containerd nor on PATH (" in said
    assert "install it there, or name it in /etc/fermata/config.toml: [shim] stock_shim = " in said


def test_a_stock_shim_that_is_configured_and_missing_is_named(node):
    with configured(node, '[shim]\nstock_shim = "/opt/none"\n'):
        said = refusal(node)
    assert "no stock shim: /etc/fermata/config.toml names /opt/none as stock_shim, which is no executable" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[shim]\nstok_shim = 'x'\n", "/etc/fermata/config.toml: unknown key stok_shim in [shim]; there are "),
        ("[layers]\n", "/etc/fermata/config.toml: unknown section [layers]; there are "),
        ("[layer]\nlimit = 'much'\n", "/etc/fermata/config.toml: [layer] limit = 'much'; it must be a whole number"),
        ("[layer\n", "/etc/fermata/config.toml: "),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_name(node, text, sentence):
    with configured(node, text):
        assert sentence in refusal(node)


def test_without_criu_containers_run_and_snapshots_are_refused(node, good):
    criu = node.exec(["sh", "-c", "command -v criu"]).stdout.strip()
    with without(node, criu):
        start(node, "one")
        sentence = r"there is no criu in PATH or \S+; install criu >= 4\.0"
        with pytest.raises(CallFailed, match=f"^{sentence}$"):
            Shim(node, "one").checkpoint("/srv/none")
        said = node.ctr("containers", "checkpoint", "--task", "one", "none:1", check=False, timeout=20)
        assert said.returncode == 1
        assert re.search(sentence, said.stderr)
        assert node.ctr("tasks", "exec", "--exec-id", "more", "one", "sh", "-c", "exit 3", check=False).returncode == 3
        assert status(node, "one") == "RUNNING"
        assert not node.path("/srv/none").exists()
        remove(node, "one")
        assert re.search(sentence, refusal(node, *MOUNT, *restoring(GOOD)))


# Faults of our own --------------------------------------------------------------------------------------------------


def test_a_state_directory_that_cannot_be_made_is_named(node):
    node.exec(["mv", "/run/fermata", "/run/fermata.away"])
    try:
        node.path("/run/fermata").write_text("in the way")
        said = refusal(node)
    finally:
        node.exec(["rm", "/run/fermata"])
        node.exec(["mv", "/run/fermata.away", "/run/fermata"])
    assert re.search(
        "cannot keep the container's state in /run/fermata/default/two: (Not a directory|File exists); something that "
        "is no directory is in the way, remove it",
        said,
    )


def test_a_full_disk_under_the_state_directory_is_an_answer(node):
    node.exec(["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "none", "/run/fermata"])
    try:
        node.exec(["sh", "-c", "head -c 4096 /dev/zero >/run/fermata/full"], check=False)
        done = node.ctr("run", "--detach", "--runtime", OURS, IMAGE, "two", "true", check=False, timeout=20)
    finally:
        node.exec(["umount", "/run/fermata"])
    assert done.returncode == 1
    assert (
        "cannot keep the container's state in /run/fermata/default/two: No space left on device; make room there"
    ) in done.stderr
    node.ctr("containers", "delete", "two")
    assert leftovers(node) == []


@contextlib.contextmanager
def planted(node, module, text):
    """A fault in the installed fermata: a module that raises as soon as it is needed."""
    file = node.path(f"/usr/local/lib/fermata/shim/{module}.py")
    whole = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(whole)
        node.install()


FAULT = "raise RuntimeError('planted')\n"


def test_a_fault_in_a_call_is_its_answer_and_the_container_goes_on(node, good):
    with planted(node, "take", FAULT):
        start(node, "one")
        sentence = r"^Checkpoint: a fault in fermata itself: RuntimeError\('planted'\); see containerd's log$"
        with pytest.raises(CallFailed, match=sentence):
            Shim(node, "one").checkpoint("/srv/none")
        assert status(node, "one") == "RUNNING"
        remove(node, "one")
    # The module is imported already when the shim starts, so its fault shows when something of it is needed.
    with planted(node, "restore", "def prepare():\n    pass\n\n\ndef __getattr__(name):\n    " + FAULT):
        said = refusal(node, *MOUNT, *restoring(GOOD))
        assert "Create: a fault in fermata itself: RuntimeError('planted'); see containerd's log" in said


@pytest.mark.parametrize(
    "fault",
    [
        FAULT,
        # Met only by the daemon, whose address containerd has been told by then.
        "class SnapshotShim:\n    def __init__(self, *given):\n        raise RuntimeError('planted')\n",
    ],
    ids=["start", "daemon"],
)
def test_a_shim_that_cannot_start_leaves_no_stock_shim(node, fault):
    with planted(node, "snapshot", fault):
        said = refusal(node)
    assert fault != FAULT or "fermata: a fault in fermata itself: RuntimeError('planted'), /usr/local/" in said
