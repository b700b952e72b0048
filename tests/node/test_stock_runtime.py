"""The node itself: containerd, runc and CRIU do in it what they do on any machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from node.leftovers import leftovers

COUNTER = """
import time
n = 0
while True:
    n += 1
    print(n, flush=True)
    time.sleep(0.02)
"""


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def wait_for(condition, what, timeout=20):
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.02)


def start_counter(node, image, container, log):
    node.ctr("run", "--detach", "--log-uri", f"file://{log}", image, container, "python3", "-c", COUNTER)


@pytest.fixture
def log(node, request):
    path = Path("/srv", request.node.name.replace("[", "-").replace("]", "") + ".log")
    yield path
    node.path(str(path)).unlink(missing_ok=True)


def test_a_container_runs_to_its_end_and_its_output_and_status_come_back(node, image):
    done = node.ctr("run", "--rm", image, "one", "python3", "-c", "print(6 * 7); raise SystemExit(3)", check=False)
    assert done.stdout == "42\n"
    assert done.returncode == 3


def test_criu_says_that_it_works_here(node):
    assert "Looks good" in "".join(node.exec(["criu", "check"])[1:])


def test_a_simple_container_goes_on_where_it_was_dumped(node, image, log):
    seen = node.path(str(log))
    start_counter(node, image, "before", log)
    wait_for(lambda: len(lines(seen)) >= 5, "the counter")
    node.ctr("containers", "checkpoint", "--task", "before", "checkpoint-of-counter")
    node.ctr("tasks", "kill", "--signal", "SIGKILL", "before")
    wait_for(lambda: "STOPPED" in node.ctr("tasks", "list").stdout, "the container's end")
    node.ctr("tasks", "delete", "before", check=False)
    node.ctr("containers", "delete", "before")
    reached = int(lines(seen)[-1])
    node.ctr("containers", "restore", "--live", "after", "checkpoint-of-counter")
    assert "RUNNING" in node.ctr("tasks", "list").stdout
    pid = node.ctr("tasks", "list").stdout.split("after")[1].split()[0]
    # Restored, not started again: a counter that began at 1 would have had no time to write this in its output.
    assert f"\0{COUNTER}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert reached >= 5
    node.ctr("images", "remove", "checkpoint-of-counter")


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_a_container_outlives_containerd_and_is_controlled_by_the_next(node, image, log, kill):
    start_counter(node, image, "lasting", log)
    first = node.containerd_pid()
    node.restart_containerd(kill=kill)
    assert node.containerd_pid() not in (None, first)
    seen = node.path(str(log))
    count = len(lines(seen))
    wait_for(lambda: len(lines(seen)) > count, "the container to go on")
    node.ctr("tasks", "kill", "--signal", "SIGKILL", "lasting")
    wait_for(lambda: "STOPPED" in node.ctr("tasks", "list").stdout, "the container's end")


def test_leftovers_names_what_a_running_container_has(node, image, log):
    assert leftovers(node) == []
    start_counter(node, image, "visible", log)
    found = "\n".join(leftovers(node, wait=0))
    for expected in ("process", "mount", "file /run/containerd/s/", "cgroup"):
        assert expected in found
