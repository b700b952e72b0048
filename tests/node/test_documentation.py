"""The commands of the documentation, run as they stand there; tests/documentation.py says which and where."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from node import Node, stack
from node.containers import remove, status
from node.scratch import Scratch
from node.stack import PROJECT
from tests.distributions import run
from tests.documentation import SCENARIOS

LOG = "tests/unit/criuconf/logs/address-missing.log"


def scenarios(place):
    chosen = [one for one in SCENARIOS if one.place == place]
    return pytest.mark.parametrize("scenario", chosen, ids=lambda one: f"{one.page}: {one.sections[0]}")


def told(text, done):
    """The commands that have findings, of the node that they are run on, may say so."""
    finding = text.startswith(("fermata doctor", "fermata check "))
    assert done.returncode == 0 or (finding and done.returncode == 1 and not done.stderr), (text, done)


def in_the_tree(scenario, text, **more):
    mine = ("PYTEST_", "FERMATA_NODE", "FERMATA_STACKS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    filled = scenario.filled(text, LOG=LOG, PYTHON=sys.executable, **more)
    return subprocess.run(
        ["sh", "-c", filled], cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False, env=environment
    )


@scenarios("node")
def test_the_commands_of_a_page_work_in_their_order(node, scenario):
    for text in [*scenario.before, *(one.text for one in scenario.commands()), *scenario.after]:
        if text.startswith("python3 -m "):
            told(text, in_the_tree(scenario, text))
        else:
            told(text, node.exec(["sh", "-c", scenario.filled(text)], check=False, timeout=60))
    assert [status(node, name) for name in scenario.running] == ["RUNNING"] * len(scenario.running)
    for name in scenario.running:
        remove(node, name)
    node.exec(["rm", "-rf", "/srv/snapshots", "/srv/snapshot"])
    node.exec(["sh", "-c", "ctr images remove --sync snapshot/song:1 2>/dev/null || :"])


def test_the_commands_for_the_source_tree_work_on_one_node():
    if os.geteuid() != 0:
        pytest.skip("a node needs root")
    name = f"documented-{os.getpid()}"
    scenarios = [one for one in SCENARIOS if one.place == "tree"]
    texts = {scenario.filled(one.text): scenario for scenario in scenarios for one in scenario.commands()}
    # Each page brings the node up first and takes it down last; here all of them do it once.
    in_order = sorted(texts, key=lambda text: (" down " in text) - (" up " in text))
    try:
        for text in in_order:
            told(text, in_the_tree(texts[text], text, NODE=name))
    finally:
        Node.take_down(name)
    assert [" up " in in_order[0], " down " in in_order[-1], len(in_order) > 6] == [True] * 3


def test_the_python_of_the_page_on_nodes_works():
    if os.geteuid() != 0:
        pytest.skip("a node needs root")
    lines = (PROJECT / "docs/node.md").read_text().split("\nIn Python:\n\n")[1].splitlines()
    program = "\n".join(line[4:] for line in lines[: lines.index("")]).replace('"…"', '""')
    assert "restart_containerd" in program
    program = f"import sys\n{program}\n    print(node.ctr('tasks', 'list').stdout)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[3] == "one"


@scenarios("bare")
def test_the_commands_for_a_machines_configuration_work_in_their_order(scenario, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a root of a distribution needs root")
    (tmp_path / "root").mkdir()
    root = Scratch(stack.root("sid"), tmp_path / "root")
    upper = tmp_path / "root/upper"
    run("make", "--silent", "-C", PROJECT, "install", f"DESTDIR={upper}")
    run(sys.executable, PROJECT / "packaging/deb/build.py", upper / "srv/dist")
    shutil.copytree(PROJECT / "packaging/kubernetes", upper / "srv/packaging/kubernetes")
    (upper / "etc/containerd").mkdir(parents=True)
    (upper / "etc/containerd/config.toml").write_text('version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    for text in [*scenario.before, *(one.text for one in scenario.commands()), *scenario.after]:
        told(text, root.run("sh", "-c", f"cd /srv; {scenario.filled(text)}", check=False))
    # What they leave is a configuration that containerd can read.
    assert "runtimes.runc]" in root.run("containerd", "config", "dump").stdout
