"""Bringing nodes up and down: nothing is left, nothing collides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node import Node, NodeError, cgroup, image, stack

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root")
STACK = os.environ.get("FERMATA_STACKS", "trixie").split(",")[0]


@pytest.fixture(scope="session")
def built():
    """The root, so that no test's own time goes into building it."""
    return stack.root(stack.choose(STACK)[0], stack.Progress())


@pytest.fixture
def fresh(built):
    """Nodes made by a test; whatever happens, they go."""
    made: list[Node] = []

    def up(**options) -> Node:
        node = Node.up(stack_name=STACK, install=False, **options)
        made.append(node)
        return node

    yield up
    for node in made:
        node.down()


def traces(node: Node) -> list[str]:
    """What this machine still shows of a node."""
    token, found = node.facts["token"], []
    found += [f"process {pid}" for pid in node.processes()]
    found += [f"cgroup {h.mountpoint}" for h in cgroup.hierarchies() if cgroup.directory(h, token).exists()]
    for info in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            text = info.read_text()
        except OSError:
            continue
        if token in text or f"{node.directory}/" in text:
            found.append(f"mount seen by {info.parent.name}")
    found += [str(path) for path in node.directory.parent.glob(f"*{node.directory.name}*")]
    return found


@pytest.fixture(scope="module")
def small_image(tmp_path_factory):
    """Directories only, imported in no time: a container gets its programs from the node's /usr."""
    root = tmp_path_factory.mktemp("image")
    for path in ("usr", "proc", "sys", "dev", "etc", "tmp"):
        (root / path).mkdir()
    for path in ("bin", "lib", "lib64"):
        (root / path).symlink_to(f"usr/{path}")
    return image.from_directory(root, root.with_name("small.tar"), "small:latest")


def start(node: Node, archive: Path, container: str) -> None:
    name = node.import_image(archive)
    programs = "type=bind,src=/usr,dst=/usr,options=rbind:ro"
    node.ctr("run", "--detach", "--mount", programs, name, container, "sleep", "1000")


def busy(node: Node, archive: Path) -> None:
    """Give the node a paused container, a named network namespace, and a process beside them."""
    node.exec(["ip", "netns", "add", "left-behind"])
    start(node, archive, "busy")
    node.ctr("tasks", "pause", "busy")
    node.popen(["sleep", "1000"])


def test_down_leaves_no_trace(fresh, small_image):
    node = fresh()
    busy(node, small_image)
    shown = " ".join(traces(node))
    for expected in ("process", "cgroup", "mount", str(node.directory)):
        assert expected in shown
    node.down()
    assert traces(node) == []


def test_down_leaves_no_trace_of_a_node_whose_processes_were_all_killed(fresh, small_image):
    node = fresh()
    busy(node, small_image)
    for pid in (node.pid, node.containerd_pid()):
        os.kill(pid, signal.SIGKILL)
    shims = [pid for pid in node.processes() if b"containerd-shim" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert shims
    for pid in shims:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(node.pid, 0)
    assert not node.alive()
    assert node.processes(), "the paused container should still be there, or this shows nothing"
    node.down()
    assert traces(node) == []


def test_down_does_nothing_the_second_time(fresh):
    node = fresh()
    node.down()
    node.down()
    assert Node.take_down(node.name) is False


def test_two_nodes_hold_containers_of_one_name_and_know_nothing_of_each_other(fresh, small_image):
    first, second = fresh(), fresh()
    for node in (first, second):
        start(node, small_image, "same")
    assert first.ctr("tasks", "list", "-q").stdout == second.ctr("tasks", "list", "-q").stdout == "same\n"
    first.down()
    assert "RUNNING" in second.ctr("tasks", "list").stdout


def test_what_is_written_in_a_node_is_not_written_to_what_it_was_made_from(fresh):
    node = fresh()
    root = Path(node.facts["root"])
    node.exec(["sh", "-c", "echo changed >/etc/fermata-test; echo changed >/usr/local/fermata-test; rm /etc/passwd"])
    assert not (root / "etc/fermata-test").exists()
    assert not (root / "usr/local/fermata-test").exists()
    assert (root / "etc/passwd").exists()


def test_a_name_in_use_is_refused(fresh):
    node = fresh()
    with pytest.raises(NodeError, match="is up already"):
        fresh(name=node.name)
    assert node.ctr("version").returncode == 0


def test_a_command_that_takes_too_long_is_ended_and_named(fresh):
    node = fresh()
    with pytest.raises(NodeError, match=r"sleep 1000 took longer than 0\.2 s"):
        node.exec(["sleep", "1000"], timeout=0.2)


def test_input_output_and_status_pass_through_exec(fresh):
    node = fresh()
    assert node.exec(["sh", "-c", "cat; echo no >&2; exit 7"], input="yes", check=False) == (7, "yes", "no\n")
    with pytest.raises(NodeError, match="ended with 7"):
        node.exec(["sh", "-c", "exit 7"])


def test_containerd_reads_the_drop_ins_that_a_test_brings(fresh):
    node = fresh(drop_ins={"10-metrics.toml": '[metrics]\n  address = "127.0.0.1:0"\n'})
    assert "127.0.0.1:0" in node.exec(["containerd", "config", "dump"]).stdout


def test_the_cri_plugins_are_on_only_when_asked_for(fresh):
    assert "io.containerd.grpc.v1" in (said := fresh().ctr("plugins", "list").stdout)
    assert " cri " not in said
    plugins = fresh(cri=True).ctr("plugins", "list").stdout
    assert any("cri" in line.split() and line.split()[-1] == "ok" for line in plugins.splitlines())


def test_the_command_line_runs_what_it_is_told(fresh):
    node = fresh()
    command = [sys.executable, str(stack.PROJECT / "packaging/node")]
    done = subprocess.run(
        [*command, "run", node.name, "--", "sh", "-c", "echo in; exit 5"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (5, "in\n")
    done = subprocess.run([*command, "run", "nowhere", "--", "true"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("node: no node nowhere is up; start one:")


def test_fermata_is_installed_and_compiled_by_the_python_that_runs_it(fresh):
    node = fresh()
    node.install()
    version = node.exec(["python3", "-c", "import sys; print(sys.implementation.cache_tag)"]).stdout.strip()
    compiled = node.exec(["find", "/usr/local/lib/fermata", "-name", "*.pyc"]).stdout.split()
    assert compiled
    assert all(f".{version}." in path for path in compiled)
