"""How long containerd's diff of a container takes, and how long the container stands still for it.

One container of a large image, and the same clients' commands with containerd's own walking differ and with
fermata-differ in front of it, in one node.

    python3 bench/differ.py [--stack sid] [--entries 200000] [--files 200] [--size 19456] [--rounds 3]
                             [--gzip-level 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / "packaging")]

from node import Node, image  # noqa: E402

# Half of what it writes gets smaller, half does not. Then it notes the longest time that it stood still.
PROGRAM = """
import os, time
words = [os.urandom(3).hex().encode() for _ in range(2000)]
for number in range(FILES):
    if number % 100 == 0:
        os.makedirs(f"/files/{number // 100}")
    noise = os.urandom(SIZE // 2)
    text = b" ".join([words[byte * 7] for byte in noise])[: SIZE - len(noise)]
    with open(f"/files/{number // 100}/{number}", "wb") as file:
        file.write(noise + text)
open("/ready", "w").close()
longest, last = 0, time.monotonic()
while True:
    time.sleep(0.001)
    now = time.monotonic()
    if not os.path.exists("/run/measuring"):
        longest = 0
        open("/run/measuring", "w").close()
    if now - last > longest:
        longest = now - last
        with open("/run/longest", "w") as file:
            file.write(str(longest))
    last = now
"""
ROWS = (
    "ctr snapshots diff",
    "ctr snapshots diff, uncompressed",
    "ctr c checkpoint --task --rw",
    "  the container stood still",
)


def image_of(node: Node, entries: int, scratch: Path) -> str:
    """Import an image of so many entries over the test image's."""
    base = image.test_image(node.stack, Path(node.facts["root"]))
    archive = scratch / "large.tar"
    image.synthetic(archive, "bench/large:1", entries, base=image.layer_of(base, scratch / "base.tar"))
    return node.import_image(archive)


def start(node: Node, reference: str, files: int, size: int) -> Path:
    """Start the program and wait until its files are there. Returns its root."""
    program = PROGRAM.replace("FILES", str(files)).replace("SIZE", str(size))
    mount = ["--mount", "type=tmpfs,src=tmpfs,dst=/run"]
    node.ctr("run", "-d", *mount, "--runtime", "io.containerd.runc.v2", reference, "large", "python3", "-c", program)
    pid = int(node.ctr("tasks", "list").stdout.splitlines()[1].split()[1])
    root = Path(f"/proc/{pid}/root")
    while not (root / "run/longest").exists():
        time.sleep(0.2)
    return root


def timed(node: Node, *argv: str) -> float:
    """The seconds that a command takes."""
    began = time.monotonic()
    node.exec(["sh", "-c", 'exec "$@" >/srv/out', "sh", *argv], timeout=600)
    return time.monotonic() - began


def measure(node: Node, root: Path, rounds: int, label: str) -> dict[str, list[float]]:
    """The seconds of every row, once for each round."""
    found: dict[str, list[float]] = {row: [] for row in ROWS}
    tar = "application/vnd.oci.image.layer.v1.tar"
    for number in range(rounds):
        found[ROWS[0]].append(timed(node, "ctr", "snapshots", "diff", "large"))
        found[ROWS[1]].append(timed(node, "ctr", "snapshots", "diff", "--media-type", tar, "large"))
        (root / "run/measuring").unlink()
        while not (root / "run/measuring").exists():
            time.sleep(0.01)
        reference = f"bench/{label}:{number}"
        found[ROWS[2]].append(timed(node, "ctr", "containers", "checkpoint", "--task", "--rw", "large", reference))
        time.sleep(0.1)
        found[ROWS[3]].append(float((root / "run/longest").read_text()))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stack", default="sid")
    parser.add_argument("--entries", type=int, default=200_000, help="entries of the image (default: %(default)s)")
    parser.add_argument("--files", type=int, default=200, help="files that the container wrote (default: %(default)s)")
    parser.add_argument("--size", type=int, default=19_456, help="bytes of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gzip-level", type=int, default=1, help="fermata-differ's (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Node.up(stack_name=arguments.stack) as node:
        reference = image_of(node, arguments.entries, Path(scratch))
        root = start(node, reference, arguments.files, arguments.size)
        walking = measure(node, root, arguments.rounds, "walking")
        node.use_differ("--gzip-level", str(arguments.gzip_level))
        node.restart_containerd()
        ours = measure(node, root, arguments.rounds, "ours")
    print(
        f"image of {arguments.entries} entries, {arguments.files} files of {arguments.size} bytes written, "
        f"{arguments.rounds} rounds, medians, stack {arguments.stack}, gzip level {arguments.gzip_level}"
    )
    print(f"{'':36} {'walking':>10} {'fermata':>10}")
    for row in ROWS:
        one, other = statistics.median(walking[row]), statistics.median(ours[row])
        print(f"{row:36} {one:8.3f} s {other:8.3f} s   {one / other:6.1f} times as fast")


if __name__ == "__main__":
    main()
