"""Another version is installed while containers run: they keep theirs, and can be used, snapshotted and restored."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node.containers import IMAGE, OURS, pid, remove, start, status, wait_for
from node.shims import CallFailed, Shim, daemons
from node.stack import PROJECT

TICK = "import time; rounds = 0\nwhile True: rounds += 1; open('/ticks', 'w').write(str(rounds)); time.sleep(0.02)"
LIBRARY = "/usr/local/lib/fermata"
WITHOUT_LIBRARY = "42f8ac6"
TORTURE = "FERMATA_TORTURE" in os.environ


def git(*words):
    done = subprocess.run(["git", "-C", str(PROJECT), *words], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def other_version(folder, mark="OTHER"):
    """This version, changed so that none of its modules works in a process that has one of this version's."""
    for name in ("shim", "layerwriter", "criuconf", "differ", "packaging"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "README.md", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, folder)
    (folder / "docs").mkdir()
    init = folder / "shim/__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', '__version__ = "9.9.9"', init.read_text()) + f"\n{mark} = True\n")
    for path in [*folder.glob("shim/*.py"), *folder.glob("layerwriter/*.py"), *folder.glob("criuconf/*.py")]:
        if path.name not in ("__init__.py", "hook.py", "cuda.py", "library.py") and "__main__" not in path.name:
            future = "from __future__ import annotations\n"
            path.write_text(path.read_text().replace(future, f"{future}from shim import {mark} as _\n", 1))
    return folder


def earlier_version(folder):
    """The last release; until there is one, the last commit whose shims did not hold their library open."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the project's history is not here (no clone of it, or a shallow one)")
    commit = git("describe", "--tags", "--abbrev=0", "HEAD^") or git("rev-parse", "--verify", f"{WITHOUT_LIBRARY}^0")
    if not commit:
        pytest.skip(f"the history has neither a tag nor the commit {WITHOUT_LIBRARY}")
    packed = subprocess.run(["git", "-C", str(PROJECT), "archive", commit], check=True, capture_output=True, timeout=60)
    subprocess.run(["tar", "-C", str(folder), "-xf", "-"], input=packed.stdout, check=True, timeout=60)
    return folder


@pytest.fixture(params=[other_version, earlier_version], ids=["other", "earlier"])
def tree(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture
def trees(node, tree):
    """The two versions' trees, and this one is installed again at the end."""
    yield [PROJECT, tree]
    node.install()
    node.exec(["rm", "-rf", "/srv/up"])


def ticks(node, name):
    said = node.ctr("tasks", "exec", "--exec-id", f"x{time.monotonic_ns()}", name, "cat", "/ticks", check=False).stdout
    return int(said) if said.isdigit() else 0


def goes_on(node, name):
    before = wait_for(lambda: ticks(node, name), f"{name} to run")
    wait_for(lambda: ticks(node, name) > before, f"{name} to go on")
    return before


def is_usable(node, name, work):
    """State, exec, a snapshot by each way, a restore by each way, kill and delete."""
    assert status(node, name) == "RUNNING"
    before = goes_on(node, name)
    Shim(node, name).checkpoint(f"/srv/up/{work}-call")
    node.exec(["fermata", "checkpoint", name, f"/srv/up/{work}-command"])
    goes_on(node, name)
    annotation = ["--annotation", f"fermata/restore-from=/srv/up/{work}-call"]
    start(node, f"{name}-1", options=annotation)
    node.exec(["fermata", "restore", f"/srv/up/{work}-command", f"{name}-2"])
    for restored in (f"{name}-1", f"{name}-2"):
        assert goes_on(node, restored) >= before
    node.ctr("tasks", "kill", "--signal", "SIGKILL", name)
    wait_for(lambda: status(node, name) == "STOPPED", f"{name} to end")
    for each in (name, f"{name}-1", f"{name}-2"):
        remove(node, each)


@pytest.mark.parametrize("back", [False, True], ids=["upgrade", "downgrade"])
def test_containers_of_both_versions_are_usable_after_a_change(node, trees, back):
    here, there = trees if back else reversed(trees)
    node.install(here)
    start(node, "source", "python3", "-c", TICK)
    goes_on(node, "source")
    node.exec(["fermata", "checkpoint", "source", "/srv/up/before"])
    remove(node, "source")
    # Its shim loads what a snapshot needs after the change.
    start(node, "old", "python3", "-c", TICK)
    goes_on(node, "old")
    first = pid(node, "old")
    node.install(there)
    assert pid(node, "old") == first
    start(node, "new", "python3", "-c", TICK)
    is_usable(node, "old", "old")
    is_usable(node, "new", "new")
    # And what the one has taken, the other restores.
    start(node, "late", options=["--annotation", "fermata/restore-from=/srv/up/before"])
    goes_on(node, "late")
    remove(node, "late")


def test_a_snapshot_is_taken_by_the_version_that_the_container_was_started_with(node, tmp_path):
    start(node, "old", "python3", "-c", TICK)
    goes_on(node, "old")
    tree = other_version(tmp_path)
    with (tree / "shim/take.py").open("a") as file:
        file.write("\nraise RuntimeError('the other version')\n")
    node.install(tree)
    try:
        assert "9.9.9" in node.exec(["containerd-shim-fermata-v1", "-v"]).stdout
        start(node, "new", "python3", "-c", TICK)
        said = node.exec(["fermata", "doctor"], check=False).stdout
        assert re.search(r"running shims: \d+, 1 of them of an earlier version", said)
        Shim(node, "old").checkpoint("/srv/up")
        with pytest.raises(Exception, match="the other version"):
            Shim(node, "new").checkpoint("/srv/up-2")
    finally:
        node.install()
    remove(node, "old")
    remove(node, "new")
    node.exec(["rm", "-rf", "/srv/up"])


def test_containers_are_started_while_a_library_takes_anothers_place(node):
    """Each start meets a whole library, the one or the other."""
    source = f"{LIBRARY}.source"
    node.exec(["sh", "-c", f"cp -a {LIBRARY} {source} && find {source} -name __pycache__ -prune -exec rm -r {{}} +"])
    again = (
        f"while [ -e {source} ]; do cp -a {source} {LIBRARY}.new && "
        f"python3 -I {LIBRARY}.new/shim/library.py {LIBRARY}.new {LIBRARY} || exit 1; done"
    )
    installing = node.popen(["sh", "-c", again])
    try:
        for at in range(10):
            node.ctr("run", "--rm", "--runtime", OURS, IMAGE, f"c{at}", "true")
    finally:
        node.exec(["rm", "-r", source])
        status_ = installing.wait(60)
        node.exec(["rm", "-rf", f"{LIBRARY}.new"])
        node.install()
    assert status_ in (0, 1)  # 1: its source went in the middle of a copy
    assert daemons(node) == []


@pytest.mark.parametrize("count", [50 if TORTURE else 8])
def test_no_shim_mixes_versions_while_many_start_and_two_take_each_others_place(node, tmp_path, count):
    """Each of the two fails at once in a process that has a module of the other."""
    trees = f"{LIBRARY}.trees"
    for mark in ("ONE", "TWO"):
        (tmp_path / mark).mkdir()
        tree = other_version(tmp_path / mark, mark)
        for name in ("shim", "layerwriter", "criuconf", "differ"):
            shutil.copytree(tree / name, node.path(trees) / mark / name)
    again = (
        f"while [ -e {trees} ]; do for mark in ONE TWO; do cp -a {trees}/$mark {LIBRARY}.new && "
        f"python3 -I {LIBRARY}.new/shim/library.py {LIBRARY}.new {LIBRARY} && echo $mark >>/run/installed || exit 1; "
        "done; done"
    )
    before = len(node.log.read_text(errors="replace"))
    installed = node.path("/run/installed")
    installed.write_text("")
    installing = node.popen(["sh", "-c", again])
    names = [f"c{number}" for number in range(count)]
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: start(node, name, "sh", "-c", "sleep 1000; exit 3"), names))
    finally:
        both = wait_for(lambda: len(installed.read_text().split()) > 1, "both versions")
        node.exec(["rm", "-r", trees])
        installing.communicate(timeout=60)
        node.exec(["rm", "-rf", f"{LIBRARY}.new"])
    assert both
    try:
        refused = 0
        for number, name in enumerate(names):
            assert status(node, name) == "RUNNING"
            if number < 8:  # loads what its shim has not yet
                try:
                    Shim(node, name).checkpoint(f"/srv/up/{name}")
                except CallFailed as error:
                    assert str(error).startswith("another version of fermata was installed since")
                    refused += 1
        assert refused <= 1  # one may have started in the very moment
        for name in names:
            remove(node, name)
    finally:
        node.install()
        node.exec(["rm", "-rf", "/srv/up"])
    said = node.log.read_text(errors="replace")[before:]
    assert "cannot import name" not in said and "Traceback" not in said
    assert daemons(node) == []


def package(node, tree, out):
    """Build a tree's package; its path in the node."""
    argv = [sys.executable, str(tree / "packaging/deb/build.py"), str(out)]
    built = Path(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout.strip())
    node.path(f"/srv/{built.name}").write_bytes(built.read_bytes())
    return f"/srv/{built.name}"


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="builds a package for Debian")
def test_a_package_is_upgraded_and_downgraded_under_containers(bare, tmp_path):
    (tmp_path / "other").mkdir()
    this = package(bare, PROJECT, tmp_path / "this.out")
    other = package(bare, other_version(tmp_path / "other"), tmp_path / "other.out")
    asked = "while [ ! -e /srv/stop ]; do containerd-shim-fermata-v1 -v || echo failed; done >/srv/versions 2>&1"
    for number, (before, after) in enumerate([(this, other), (other, this)]):
        bare.exec(["dpkg", "--install", before], timeout=120)
        start(bare, "old", "python3", "-c", TICK)
        goes_on(bare, "old")
        asking = bare.popen(["sh", "-c", asked])
        bare.exec(["dpkg", "--install", after], timeout=120)
        bare.exec(["touch", "/srv/stop"])
        asking.wait(30)
        bare.exec(["rm", "/srv/stop"])
        # A shim that starts in the middle of it has the one version or the other.
        said = re.findall("Version: *(.*)|(failed|Error.*)", bare.path("/srv/versions").read_text())
        assert {problem for _, problem in said} == {""}
        assert len({version for version, _ in said}) == 2
        start(bare, "new", "python3", "-c", TICK)
        is_usable(bare, "old", f"{number}-old")
        is_usable(bare, "new", f"{number}-new")
        assert bare.exec(["find", "/usr/lib/fermata", "-name", ".changing"]).stdout == ""
