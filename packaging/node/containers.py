"""Containers of a node, handled with ``ctr``, and containerd's events about them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from node.errors import NodeError
from node.image import TEST_IMAGE
from node.node import SOCKET, Node
from node.records import Records, Task

OURS, STOCK = "io.containerd.fermata.v1", "io.containerd.runc.v2"
CTR = ("ctr", "--address", SOCKET)
IMAGE = f"docker.io/library/{TEST_IMAGE}"

Seen = TypeVar("Seen")


def wait_for(condition: Callable[[], Seen], what: str, timeout: float = 30) -> Seen:
    """Ask again until the condition holds, and return what it says. Raises NodeError after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while not (seen := condition()):
        if time.monotonic() > until:
            raise NodeError(f"waited {timeout} s in vain for {what}")
        time.sleep(0.02)
    return seen


def start(node: Node, name: str, *command: str, runtime: str = OURS, options: Sequence[str] = ()) -> None:
    """Start a container of the test image in the background; without a command, one that waits."""
    node.ctr("run", "--detach", "--runtime", runtime, *options, IMAGE, name, *(command or ("sleep", "1000")))


def remove(node: Node, name: str) -> None:
    """End and delete a container, whatever state it is in."""
    node.ctr("tasks", "resume", name, check=False)
    node.ctr("tasks", "delete", "--force", name, check=False)
    node.ctr("containers", "delete", name)


def status(node: Node, name: str) -> str | None:
    """RUNNING, PAUSED, STOPPED or UNKNOWN; None when the container has no task."""
    return _task(node, name)[1]


def pid(node: Node, name: str) -> int:
    """The host's pid of the container's first process; 0 when there is none."""
    return _task(node, name)[0]


def _task(node: Node, name: str) -> tuple[int, str | None]:
    try:
        return tasks(node).get(name, (0, None))
    except ImportError:  # gRPC's library, which tests have
        for line in node.ctr("tasks", "list").stdout.splitlines()[1:]:
            words = line.split()
            if words[0] == name:
                return int(words[1]), words[2]
        return 0, None


def tasks(node: Node) -> dict[str, Task]:
    """The tasks by their containers' names. A test may ask many times while it waits."""
    with Records(node) as records:
        return records.running()


class Events:
    """What ``ctr events`` prints, from now on."""

    def __init__(self, node: Node) -> None:
        self.out = node.path("/srv/events")
        with self.out.open("wb") as file:
            self.process = node.popen([*CTR, "events"], stdout=file)
        # It does not say when it begins to listen.
        count = iter(range(10000))
        wait_for(
            lambda: node.ctr("namespaces", "label", "default", f"ready={next(count)}") and self.out.stat().st_size,
            "a first event",
        )

    def of(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """A container's events as (topic, fields): times left out, pids and directories numbered as they appear."""
        pids: dict[int, int] = {}
        found = []
        for line in self.out.read_text().splitlines():
            # A line that is still being written has no end yet.
            match = re.search(r" (/\S+) (\{.*\})$", line)
            if match is None:
                continue
            fields = json.loads(match[2])
            if name not in (fields.get("container_id"), fields.get("id"), fields.get("key")):
                continue
            if "pid" in fields:
                fields["pid"] = pids.setdefault(fields["pid"], len(pids))
            if "exited_at" in fields:
                fields["exited_at"] = "given"
            text = re.sub(r"/(snapshots|fifo)/\d+/", r"/\1/N/", json.dumps(fields).replace(name, "NAME"))
            found.append((match[1], json.loads(text)))
        return found

    def topics(self, name: str) -> list[str]:
        """The topics alone."""
        return [topic for topic, _ in self.of(name)]

    def wait(self, name: str, topic: str, count: int = 1) -> None:
        """Wait until there were so many events of a topic."""
        wait_for(lambda: self.topics(name).count(topic) >= count, f"{topic} of {name}")

    def end(self) -> None:
        """Stop listening."""
        self.process.kill()
        self.process.wait()
        self.out.unlink()
