"""How long a container stands still for a snapshot with its files, and how long the snapshot takes.

Both runtimes snapshot the same program over the same files in the same node, in turn: under the stock runtime with
`ctr c checkpoint --task --rw`, which pauses the container for the whole of it; under fermata with the task API's
Checkpoint, where only CRIU's hold counts, and with `ctr c checkpoint --task`, which pauses the container as well.

    python3 bench/take.py [--stack sid] [--entries 50000] [--files 6000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / "packaging")]

from node import Node, image  # noqa: E402 (the path comes first)
from node.shims import Shim  # noqa: E402

FERMATA, STOCK = "io.containerd.fermata.v1", "io.containerd.runc.v2"
PROGRAM = """
import os, time
block = os.urandom(19 << 10)
for number in range(FILES):
    if number % 100 == 0:
        os.makedirs(f"/files/{number // 100}")
    with open(f"/files/{number // 100}/{number}", "wb") as file:
        file.write(block)
open("/ready", "w").close()
while True:
    time.sleep(1)
"""


def image_of(node: Node, entries: int, scratch: Path) -> str:
    """Import an image of so many entries over the test image's."""
    base = image.test_image(node.stack, Path(node.facts["root"]))
    archive = scratch / "large.tar"
    image.synthetic(archive, "bench/large:1", entries, base=image.layer_of(base, scratch / "base.tar"))
    return node.import_image(archive)


def start(node: Node, reference: str, name: str, runtime: str, files: int) -> None:
    """Start the program and wait until its files are there."""
    program = PROGRAM.replace("FILES", str(files))
    node.ctr("run", "-d", "--runtime", runtime, reference, name, "python3", "-c", program)
    while node.ctr("tasks", "exec", "--exec-id", f"e{time.time_ns()}", name, "ls", "/ready", check=False).returncode:
        time.sleep(0.2)


def timed(node: Node, *words: str) -> float:
    """The seconds that a ctr command takes."""
    began = time.monotonic()
    node.ctr(*words, timeout=600)
    return time.monotonic() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stack", default="sid")
    parser.add_argument("--entries", type=int, default=50_000, help="entries of the image below (default: %(default)s)")
    parser.add_argument("--files", type=int, default=6_000, help="files of 19 KiB written (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    stock, paused, held, direct = [], [], [], []
    with tempfile.TemporaryDirectory() as scratch, Node.up(stack_name=arguments.stack) as node:
        reference = image_of(node, arguments.entries, Path(scratch))
        start(node, reference, "stock", STOCK, arguments.files)
        start(node, reference, "ours", FERMATA, arguments.files)
        shim = Shim(node, "ours")
        for number in range(arguments.rounds):
            stock.append(timed(node, "containers", "checkpoint", "--task", "--rw", "stock", f"snapshot/stock:{number}"))
            paused.append(timed(node, "containers", "checkpoint", "--task", "ours", f"snapshot/ours:{number}"))
            began = time.monotonic()
            shim.checkpoint(f"/srv/ours/{number}", timeout=600)
            direct.append(time.monotonic() - began)
            held.append(json.loads(node.path(f"/srv/ours/{number}/fermata.json").read_text())["frozen"])
    base = statistics.median(stock)
    print(f"image of {arguments.entries} entries, {arguments.files} files written; medians of {arguments.rounds}")
    for label, values in (
        ("stock, ctr c checkpoint --task --rw: paused and total", stock),
        ("fermata, ctr c checkpoint --task: paused and total", paused),
        ("fermata, task API into a directory: total", direct),
        ("fermata, task API into a directory: frozen", held),
    ):
        median = statistics.median(values)
        print(f"{label:56} {median:8.3f} s   stock is {base / median:6.1f} times that")


if __name__ == "__main__":
    main()
