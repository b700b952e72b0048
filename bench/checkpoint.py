"""How long a snapshot of a large process takes by hand: `fermata checkpoint` against `ctr c checkpoint --task`.

One container of one runtime holds so much memory; both commands snapshot it in turn, left running. `ctr` has containerd
pack the images into its content store, `fermata` leaves them in a directory. What fermata writes is on disk when it
ends (fsync), what ctr writes is so as far as containerd syncs its blobs.

    python3 bench/checkpoint.py [--stack sid] [--gib 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / "packaging")]

from node import Node  # noqa: E402 (the path comes first)
from node.containers import IMAGE, OURS, STOCK, pid  # noqa: E402

# Random bytes: nothing on the way can make them smaller.
PROGRAM = """
import os, time
blocks = [os.urandom(1 << 26) for _ in range(BLOCKS)]
while True:
    time.sleep(1)
"""


def start(node: Node, name: str, runtime: str, gib: float) -> None:
    """Start the program and wait until it holds its memory."""
    blocks = int(gib * 16)
    program = PROGRAM.replace("BLOCKS", str(blocks))
    node.ctr("run", "-d", "--runtime", runtime, IMAGE, name, "python3", "-c", program)
    statm = Path(f"/proc/{pid(node, name)}/statm")
    while int(statm.read_text().split()[1]) * 4096 < blocks << 26:
        time.sleep(0.2)


def seconds(node: Node, *words: str) -> float:
    """How long a command in the node takes."""
    began = time.monotonic()
    node.exec(list(words), timeout=600)
    return time.monotonic() - began


def remove(node: Node, name: str) -> None:
    """End and delete a container."""
    node.ctr("tasks", "delete", "--force", name, check=False, timeout=120)
    node.ctr("containers", "delete", name, check=False)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", default="sid")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    took: dict[str, list[float]] = {
        "fermata checkpoint": [],
        "ctr c checkpoint, fermata": [],
        "ctr c checkpoint, stock": [],
    }
    with Node.up(stack_name=arguments.stack) as node:
        node.import_image()
        for runtime, name in ((OURS, "ours"), (STOCK, "stock")):
            start(node, name, runtime, arguments.gib)
            for number in range(arguments.rounds):
                if runtime == OURS:
                    took["fermata checkpoint"].append(seconds(node, "fermata", "checkpoint", name, "/srv/snapshot"))
                    node.exec(["fermata", "rm", "/srv/snapshot"])
                reference = f"bench/checkpoint:{number}"
                key = f"ctr c checkpoint, {'fermata' if runtime == OURS else 'stock'}"
                took[key].append(seconds(node, "ctr", "containers", "checkpoint", "--task", name, reference))
                node.ctr("images", "remove", "--sync", reference)
            remove(node, name)
    ours = statistics.median(took["fermata checkpoint"])
    print(f"a process of {arguments.gib:g} GiB on {arguments.stack}, median of {arguments.rounds}:")
    for name, values in took.items():
        middle = statistics.median(values)
        print(f"  {name:<26} {middle:6.2f} s  ({', '.join(f'{value:.2f}' for value in values)})  x{middle / ours:.2f}")


if __name__ == "__main__":
    main()
