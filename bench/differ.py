"""How long containerd's diff of a container takes, and how long the container stands still for it.

Containers of a large image, and the same clients' commands with containerd's own walking differ and with
fermata-differ in front of it, in one node, by turns: what else the machine does meets both. Then a large layer beside
a copy of the same files to the same disk.

    python3 bench/differ.py [--stack sid trixie] [--entries 200000] [--files 200 6000] [--size 19456] [--rounds 3]
                             [--gzip-level 1] [--large 2048]
"""

from __future__ import annotations

import argparse
import os
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
# A file that does not get smaller.
LARGE = """
import os, time
with open("/large", "wb") as file:
    for _ in range(MIB): file.write(os.urandom(1 << 20))
time.sleep(3600)
"""
COPY = 'rm -rf "$2"; sync -f "$1"; exec cp -a "$1" "$2"'
SNAPSHOTS = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"
TAR = "application/vnd.oci.image.layer.v1.tar"
ROWS = (
    "ctr snapshots diff",
    "ctr snapshots diff, uncompressed",
    "ctr c checkpoint --task --rw",
    "  the container stood still",
    "ctr c checkpoint --task, no layer",
)


def image_of(node: Node, entries: int, scratch: Path) -> str:
    """Import an image of so many entries over the test image's."""
    base = image.test_image(node.stack, Path(node.facts["root"]))
    archive = scratch / "large.tar"
    image.synthetic(archive, "bench/large:1", entries, base=image.layer_of(base, scratch / "base.tar"))
    return node.import_image(archive)


def start(node: Node, reference: str, name: str, program: str) -> Path:
    """Start a program in a container. Returns its root."""
    mount = ["--mount", "type=tmpfs,src=tmpfs,dst=/run"]
    node.ctr("run", "-d", *mount, "--runtime", "io.containerd.runc.v2", reference, name, "python3", "-c", program)
    tasks = dict(line.split()[:2] for line in node.ctr("tasks", "list").stdout.splitlines()[1:])
    return Path(f"/proc/{tasks[name]}/root")


def wait(path: Path) -> None:
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.2)


def timed(node: Node, *argv: str) -> float:
    """The seconds that a command takes."""
    began = time.monotonic()
    node.exec(["sh", "-c", 'exec "$@" >/srv/out', "sh", *argv], timeout=600)
    return time.monotonic() - began


def measure(node: Node, name: str, root: Path, label: str) -> dict[str, float]:
    """The seconds of every row."""
    found = {ROWS[0]: timed(node, "ctr", "snapshots", "diff", name)}
    found[ROWS[1]] = timed(node, "ctr", "snapshots", "diff", "--media-type", TAR, name)
    (root / "run/measuring").unlink()
    wait(root / "run/measuring")
    checkpoint = ("ctr", "containers", "checkpoint", "--task")
    found[ROWS[2]] = timed(node, *checkpoint, "--rw", name, f"bench/{name}:{label}")
    time.sleep(0.1)
    found[ROWS[3]] = float((root / "run/longest").read_text())
    found[ROWS[4]] = timed(node, *checkpoint, name, f"bench/{name}:{label}-alone")
    return found


def large(node: Node, reference: str, mib: int, rounds: int) -> None:
    """Print how long one large file takes as a layer, by the differ's own count, and as a copy on the disk."""
    root = start(node, reference, "huge", LARGE.replace("MIB", str(mib)))
    while not (root / "large").exists() or (root / "large").stat().st_size < mib << 20:
        time.sleep(0.2)
    upper = next(path.parent for path in node.path(f"{SNAPSHOTS}/snapshots").glob("*/fs/large"))
    inside = f"{SNAPSHOTS}/snapshots/{upper.parent.name}/fs"
    copies, layers = [], []
    for _ in range(rounds):
        began = time.monotonic()
        node.exec(["sh", "-c", COPY, "sh", inside, f"{SNAPSHOTS}/copy"], timeout=600)
        node.exec(["sync", "-f", SNAPSHOTS], timeout=600)
        copies.append(time.monotonic() - began)
        node.exec(["rm", "-rf", f"{SNAPSHOTS}/copy"])
        node.exec(["sh", "-c", f"ctr snapshots diff --media-type {TAR} huge >/dev/null"], timeout=600)
        said = (node.logs / "differ.log").read_text().split()
        layers.append(float(said[-2]))
        node.ctr("content", "delete", next(word for word in reversed(said) if word.startswith("sha256:")).strip(","))
    copy, layer = statistics.median(copies), statistics.median(layers)
    print(f"one file of {mib} MiB: copied and synced {copy:.1f} s, uncompressed layer {layer:.1f} s")


def bench(stack: str, arguments: argparse.Namespace, scratch: Path) -> None:
    """Measure one stack, and print."""
    with Node.up(stack_name=stack) as node:
        reference = image_of(node, arguments.entries, scratch)
        roots = {}
        for files in arguments.files:
            program = PROGRAM.replace("FILES", str(files)).replace("SIZE", str(arguments.size))
            roots[files] = start(node, reference, f"wrote-{files}", program)
        for root in roots.values():
            wait(root / "run/longest")
        loads = [os.getloadavg()[0]]
        node.use_differ("--gzip-level", str(arguments.gzip_level))
        conf = node.path("/etc/containerd/conf.d/fermata-differ.toml")
        text = conf.read_text()
        found: dict[tuple[str, int, str], list[float]] = {}
        for number in range(arguments.rounds):
            for differ in ("walking", "fermata"):
                conf.write_text(text if differ == "fermata" else "")
                node.restart_containerd()
                for files, root in roots.items():
                    taken = measure(node, f"wrote-{files}", root, f"{differ}-{number}")
                    for row, seconds in taken.items():
                        found.setdefault((differ, files, row), []).append(seconds)
            loads.append(os.getloadavg()[0])
        print(
            f"stack {stack}, image of {arguments.entries} entries, {arguments.rounds} rounds, medians, gzip level "
            f"{arguments.gzip_level}; load {' '.join(f'{load:.1f}' for load in loads)}, {os.cpu_count()} cores"
        )
        for files in arguments.files:
            print(f"{f'{files} files of {arguments.size} bytes written':36} {'walking':>10} {'fermata':>10}")
            for row in ROWS:
                one, other = (statistics.median(found[differ, files, row]) for differ in ("walking", "fermata"))
                print(f"{row:36} {one:8.3f} s {other:8.3f} s   {one / other:6.1f} times as fast", flush=True)
        if arguments.large:
            large(node, reference, arguments.large, arguments.rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stack", nargs="+", default=["sid"], help="one or more (default: sid)")
    parser.add_argument("--entries", type=int, default=200_000, help="entries of the image (default: %(default)s)")
    parser.add_argument("--files", type=int, nargs="+", default=[200], help="files a container wrote (default: 200)")
    parser.add_argument("--size", type=int, default=19_456, help="bytes of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gzip-level", type=int, default=1, help="fermata-differ's (default: %(default)s)")
    parser.add_argument("--large", type=int, default=0, help="MiB of one large file beside a copy (default: none)")
    arguments = parser.parse_args()
    for stack in arguments.stack:
        with tempfile.TemporaryDirectory() as scratch:
            bench(stack, arguments, Path(scratch))


if __name__ == "__main__":
    main()
