"""The commands of the documentation, run as they stand there."""

from __future__ import annotations

import re

import pytest

from node.containers import IMAGE, remove, status
from node.stack import PROJECT


def commands(page, section):
    """The lines of the indented blocks of a page's section; a line that ends with a backslash goes on."""
    text = (PROJECT / page).read_text()
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    joined = re.sub(r"\\\n\s*", "", body)
    return [line.strip() for line in re.findall(r"^    (?=\w)(.*)$", joined, re.MULTILINE)]


@pytest.mark.parametrize(
    ("page", "section", "containers"),
    [
        ("README.md", "Use", ["song", "song-2", "song-3"]),
        ("docs/operator.md", "A first snapshot", ["song", "song-2", "song-3", "song-4"]),
    ],
)
def test_the_commands_of_a_page_work_in_their_order(node, page, section, containers):
    ran = 0
    for command in commands(page, section):
        if command.startswith("make "):
            continue  # the node has what it installs
        if "IMAGE song" in command and command.endswith("IMAGE song"):
            command += " sleep 1000"
        done = node.exec(["sh", "-c", command.replace("IMAGE", IMAGE)], check=False, timeout=60)
        assert done.returncode == 0 or command.startswith("fermata doctor"), (command, done)
        ran += 1
    assert ran > 3
    for name in containers:
        assert status(node, name) == "RUNNING"
    for name in containers:
        remove(node, name)
    node.exec(["rm", "-rf", "/srv/snapshots"])
    node.ctr("images", "remove", "--sync", "snapshot/song:1")
