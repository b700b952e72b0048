"""`fermata doctor` on real nodes: a good one, and one for each thing that can be wrong with it."""

from __future__ import annotations

import contextlib
import json
import os

import pytest

from node import Node
from shim.doctor import dumps_internet_sockets

CRIU_RULES = """
table inet CRIU-99999 {
    chain output {
        type filter hook output priority filter; policy drop;
        meta mark 0x0000c114 accept
    }
}
"""
GHOST = """
import sys
sys.path.insert(0, "/usr/local/lib/fermata")
from shim import netns
netns.create("default", "ghost")
"""
RUNTIME_CLASS = """
version = {version}
[plugins.'{plugin}'.containerd.runtimes.fermata]
  runtime_type = 'io.containerd.fermata.v1'
"""
ANNOTATIONS = "  pod_annotations = ['fermata/*']\n"


@pytest.fixture
def node(running_node):
    """No test here makes a container."""
    return running_node


def doctor(node, *words):
    """(exit status, lines by name, what was fixed)."""
    done = node.exec(["fermata", "doctor", "--json", *words], check=False)
    answer = json.loads(done.stdout)
    lines: dict[str, list[dict]] = {}
    for line in answer["lines"]:
        lines.setdefault(line["name"], []).append(line)
    assert answer["healthy"] is (done.returncode == 0)
    return done.returncode, lines, answer["fixed"]


def problems(lines):
    """What is wrong with the node alone: lock rules may be of others, who share the machine and its network."""
    return [
        line for name, many in lines.items() for line in many if name != "lock rules" and line["level"] == "problem"
    ]


def problem(node, name, *words):
    """The one problem, which has this name."""
    status, lines, _ = doctor(node, *words)
    assert status == 1
    [found] = problems(lines)
    assert found["name"] == name
    return found


@contextlib.contextmanager
def moved(node, path):
    """A file of the node under another name meanwhile."""
    node.exec(["mv", path, f"{path}.away"])
    try:
        yield
    finally:
        node.exec(["mv", f"{path}.away", path])


def test_a_good_node_has_no_problem(node):
    status, lines, fixed = doctor(node)
    assert (problems(lines), fixed) == ([], [])
    assert status == any(line["level"] == "problem" for line in lines["lock rules"])
    version = ".".join(map(str, node.containerd_version()))
    assert lines["containerd"][0]["text"].startswith(version)
    if node.stack == "trixie" and not dumps_internet_sockets((4, 1, 1), os.uname().release):
        assert "4.1.1 cannot dump an internet socket on Linux" in lines["CRIU"][0]["text"]
    else:
        assert "Looks good" in lines["CRIU"][0]["text"]
    assert lines["runtime"][0]["text"] == ("io.containerd.fermata.v1 is /usr/local/bin/containerd-shim-fermata-v1")
    assert lines["stock shim"][0]["text"] == "/usr/bin/containerd-shim-runc-v2"
    assert "the CRI plugin is disabled" in lines["runtime class"][0]["text"]
    page = node.exec(["fermata", "doctor"], check=False).stdout
    assert f"ok       containerd: {version}" in page


def test_our_shim_that_containerd_does_not_find(node):
    with moved(node, "/usr/local/bin/containerd-shim-fermata-v1"):
        found = problem(node, "runtime")
    assert found["text"].startswith("containerd-shim-fermata-v1 is not on containerd's PATH (/")


def test_a_stock_shim_that_is_missing(node):
    with moved(node, "/usr/bin/containerd-shim-runc-v2"):
        found = problem(node, "stock shim")
    assert "containerd-shim-runc-v2 is neither beside containerd nor on PATH" in found["text"]


def test_runc_that_is_missing(node):
    with moved(node, "/usr/sbin/runc"):
        assert problem(node, "runc")["fix"] == "install the package runc"


def test_criu_that_is_missing_or_does_not_work_here(node):
    with moved(node, "/usr/sbin/criu"):
        assert "install criu" in problem(node, "CRIU")["text"]
        # One that answers all questions and whose check fails.
        script = 'case "$*" in check) echo "Error: no kcmp" >&2; exit 1;; *) exec /usr/sbin/criu.away "$@";; esac'
        path = node.path("/usr/sbin/criu")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        try:
            found = problem(node, "CRIU")
        finally:
            path.unlink()
    assert found["text"].endswith("`criu check` fails: Error: no kcmp")
    assert found["fix"] == "install a newer CRIU, or a kernel with what it misses"


def test_a_containerd_that_is_down(node):
    node.stop_containerd()
    try:
        found = problem(node, "containerd")
    finally:
        node.start_containerd()
    assert found["text"] == "none listens at /run/containerd/containerd.sock"


def test_a_configuration_with_a_mistake_in_it(node):
    path = node.path("/etc/fermata/config.toml")
    path.parent.mkdir(exist_ok=True)
    path.write_text("[criu]\nghostlimit = 1\n")
    try:
        found = problem(node, "configuration")
    finally:
        path.unlink()
    assert "unknown key ghostlimit in [criu]" in found["text"]


def test_a_disk_without_room_where_snapshots_go(node):
    node.exec(["mkdir", "/srv/small"])
    node.exec(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/srv/small"])
    try:
        _, lines, _ = doctor(node, "--dir", "/srv/small/snapshots")
    finally:
        node.exec(["umount", "/srv/small"])
        node.exec(["rmdir", "/srv/small"])
    [line] = [line for line in lines["room"] if "/srv/small" in line["text"] and "snapshots" in line["text"]]
    assert (line["level"], line["fix"]) == ("warning", "make room on the file system of /srv/small")


@pytest.mark.usefixtures("no_lock_rules_of_others")
def test_lock_rules_and_namespaces_that_were_left_behind_are_named_and_with_fix_removed(node):
    node.exec(["ip", "netns", "add", "locked"])
    node.exec(["nsenter", "--net=/run/netns/locked", "nft", "-f", "-"], input=CRIU_RULES)
    node.exec(["python3", "-I", "-c", GHOST])
    try:
        status, lines, _ = doctor(node)
        [line] = [line for line in lines["lock rules"] if line["level"] == "problem"]
        assert (status, line["fix"]) == (1, "fermata flush-locks --all")
        [line] = lines["network namespaces"]
        assert line["level"] == "warning"
        assert line["text"].startswith("1 belong to no container any more: /run/netns/")
        assert "ghost" in line["text"]
        fixed = doctor(node, "--fix")[2]
        assert fixed == ["lock rules: fermata flush-locks --all", "network namespaces: fermata doctor --fix"]
        assert "CRIU" not in node.exec(["nsenter", "--net=/run/netns/locked", "nft", "list", "ruleset"]).stdout
        assert "ghost" not in node.exec(["ls", "/run/netns"]).stdout
        [line] = doctor(node)[1]["network namespaces"]
        assert line["level"] == "ok"
    finally:
        node.exec(["ip", "netns", "delete", "locked"])


def test_a_runtime_class_for_the_kubelet_is_found_where_it_is(running_node):
    new = running_node.containerd_version() >= (2,)
    plugin = "io.containerd.cri.v1.runtime" if new else "io.containerd.grpc.v1.cri"
    text = RUNTIME_CLASS.format(version=3 if new else 2, plugin=plugin)
    with Node.up(stack_name=running_node.stack, cri=True, drop_ins={"20-class.toml": text + ANNOTATIONS}) as node:
        _, lines, _ = doctor(node)
        [line] = lines["runtime class"]
        assert (line["level"], line["text"]) == ("ok", "configured in /etc/containerd/conf.d/20-class.toml")
        path = node.path("/etc/containerd/conf.d/20-class.toml")
        path.write_text(text)
        [line] = doctor(node)[1]["runtime class"]
        assert line["level"] == "warning"
        assert line["text"].startswith("containerd lets no annotation of a pod through to fermata")
        path.unlink()
        [line] = doctor(node)[1]["runtime class"]
        assert line["level"] == "warning"
        assert line["fix"] == (
            f"add what packaging/containerd/fermata-v{3 if new else 2}.toml has to /etc/containerd/config.toml, then "
            "systemctl restart containerd"
        )
