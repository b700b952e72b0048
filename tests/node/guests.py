"""Programs that keep their weights out of snapshots, in containers of a node: what they need, and what they say."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from node.containers import pid, start, wait_for
from node.node import Node
from node.stack import PROJECT

SHARE = "/srv/guest"
STORE = "/var/lib/fermata/weights"
MOUNT = ("--mount", f"type=bind,src={SHARE},dst=/opt/guest,options=rbind:ro")
ON = ("--annotation", "fermata/guest=on", *MOUNT)

# Its answer depends on every byte of its weights.
SERVER = """
import json, os, sys, time, zlib
sys.path.insert(0, "/opt/guest")
import fermata
with open("/opt/guest/model", "rb") as file:
    model = bytearray(file.read())
fermata.exclude_from_snapshot(model, name="model")
events = []
fermata.on_prepare(lambda: events.append("prepare"))
fermata.on_restore(lambda: events.append("restore"))
rounds = 0
while True:
    with fermata.using():
        answer = zlib.crc32(model)
    rounds += 1
    with open("/dev/shm/state.new", "w") as file:
        json.dump({"rounds": rounds, "answer": answer, "events": events}, file)
    os.rename("/dev/shm/state.new", "/dev/shm/state")
    if os.path.exists("/ready") or rounds == 3 and sys.argv[1:] != ["late"]:
        fermata.snapshot_ready()
    time.sleep(0.1)
"""


@contextlib.contextmanager
def shared(node: Node, size: int) -> Iterator[Path]:
    """What a node has for the containers: the library, the stand-in, and a model of so many bytes."""
    share = node.path(SHARE)
    shutil.rmtree(share, ignore_errors=True)
    share.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "guest/fermata", share / "fermata", ignore=ignored)
    shutil.copy(PROJECT / "tests/unit/shim/programs.py", share)
    node.exec(["sh", "-c", f"head -c {size} /dev/urandom >{SHARE}/model"])
    yield share / "model"
    shutil.rmtree(share)


def state(node: Node, name: str) -> dict[str, object] | None:
    """What the program said last of itself."""
    try:
        found: dict[str, object] = json.loads(Path(f"/proc/{pid(node, name)}/root/dev/shm/state").read_text())
        return found
    except (OSError, ValueError):
        return None


def answers(node: Node, name: str) -> dict[str, object]:
    """What the program says of itself, after it was seen to answer again."""
    before = wait_for(lambda: state(node, name), f"{name}'s first word", timeout=60)["rounds"]
    return wait_for(lambda: (now := state(node, name)) and now["rounds"] > before + 1 and now, f"{name} to go on", 60)


def serve(node: Node, name: str, *words: str, options: tuple[str, ...] = ON) -> dict[str, object]:
    """Start the server, and what it says once it answers."""
    start(node, name, "python3", "-c", SERVER, *words, options=options)
    return answers(node, name)
