"""How fast layers are written and applied, beside GNU tar, cp and containerd in the same run.

    python3 bench/layers.py [--directory DIR] [--rounds 7] [--gib 2] [--only small,big,shared,memory,node]

    small    6,000 files of 116 MB: writing a layer and applying it, against GNU tar with extended attributes
    big      one file of --gib GiB, against cp
    shared   the same on an xfs with reflinks, on a loop device, against cp with and without reflinks
    memory   the peak of processes that write and apply large and wide trees
    node     writing the layer against `ctr c checkpoint --task --rw` less the dump, on an image of 200,000 entries

The tools take turns, and the best round of each counts: the machine may be doing other things. Nothing is synced but
where it says so, as GNU tar and cp sync nothing. Our times hold the SHA-256 of the layer, which the others do not make.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / "packaging")]

import layerwriter  # noqa: E402 (the path comes first)

XATTRS = ("--xattrs", "--xattrs-include=*", "--numeric-owner")
PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
import layerwriter
{}
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def turns(rounds: int, *actions: tuple[Callable[[], object], Callable[[], object]]) -> list[float]:
    """The best time of each action, taken in turns. With each comes what prepares it, which does not count."""
    best = [float("inf")] * len(actions)
    for _ in range(rounds):
        for index, (prepare, action) in enumerate(actions):
            prepare()
            best[index] = min(best[index], timed(action))
    return best


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def nothing() -> None:
    pass


def show(what: str, ours: float, name: str, theirs: float, target: str = "") -> None:
    ratio = f"ratio {ours / theirs:6.3f}"
    print(f"{what:44} {ours:8.3f} s   {name:24} {theirs:8.3f} s   {ratio}   {target}", flush=True)


def small_files(root: Path) -> None:
    """6,000 files of 116 MB in 133 directories, most of them of some kilobytes."""
    numbers = random.Random(1)
    sizes = [int(numbers.lognormvariate(8.9, 1.3)) + 100 for _ in range(6000)]
    factor = 116e6 / sum(sizes)
    for index, size in enumerate(sizes):
        directory = root / f"lib/package-{index % 12}/module-{index % 120}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"file-{index}.py").write_bytes(numbers.randbytes(int(size * factor)))


def small(base: Path, rounds: int) -> None:
    upper, layer, other = base / "upper", base / "layer.tar", base / "gnu.tar"
    upper.mkdir()
    small_files(upper)
    os.sync()

    def unlink() -> None:
        layer.unlink(missing_ok=True)
        other.unlink(missing_ok=True)

    def settle() -> None:
        unlink()
        os.sync()

    pack = ("tar", *XATTRS, "--format=posix", "-C", upper, "-cf", other, ".")
    ours, theirs = turns(
        rounds,
        (unlink, lambda: layerwriter.write(upper, layer, sync=False)),
        (unlink, lambda: run(*pack)),
    )
    show("write 6,000 files, 116 MB", ours, "GNU tar", theirs, "at most 0.7")
    synced, theirs_synced = turns(
        max(3, rounds // 2),
        (settle, lambda: layerwriter.write(upper, layer)),
        (settle, lambda: (run(*pack), run("sync", other))),
    )
    show("  the same, on disk", synced, "GNU tar and sync", theirs_synced)
    still = min(_still(upper, layer) for _ in range(rounds))
    show("  until the container may go on", still, "GNU tar", theirs)

    made = layerwriter.write(upper, layer)
    numbers = iter(range(1000))

    def fresh(kind: str) -> Path:
        # Never where files were just removed: ext4 does not take their inodes again at once, and searches for others.
        path = base / f"{kind}-{next(numbers)}/fs"
        path.mkdir(parents=True)
        return path

    unpack = ("tar", *XATTRS, "-xpf", layer, "-C")
    ours, unchecked, theirs = turns(
        min(rounds, 5),
        (os.sync, lambda: layerwriter.apply(made, fresh("ours"))),
        (os.sync, lambda: layerwriter.apply(layer, fresh("unchecked"))),
        (os.sync, lambda: run(*unpack, fresh("tar"))),
    )
    show("apply it, its digest checked", ours, "GNU tar", theirs, "at most 0.8")
    show("  without a digest", unchecked, "GNU tar", theirs)


def _still(upper: Path, layer: Path) -> float:
    began = time.perf_counter()
    draft = layerwriter.begin(upper, layer)
    taken = time.perf_counter() - began
    draft.finish(sync=False)
    return taken


def big_file(path: Path, gib: float) -> None:
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(int(gib * 1024)):
            file.write(number.to_bytes(8, "little") + block[8:])


def big(base: Path, gib: float, rounds: int) -> None:
    upper, layer, copy = base / "big", base / "big.tar", base / "big.copy"
    upper.mkdir()
    big_file(upper / "file", gib)
    os.sync()

    def clear() -> None:
        layer.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        os.sync()

    ours, theirs = turns(
        rounds,
        (clear, lambda: layerwriter.write(upper, layer, limit=1 << 62)),
        (clear, lambda: (run("cp", "--reflink=never", upper / "file", copy), run("sync", copy))),
    )
    show(f"write one file of {gib:g} GiB, on disk", ours, "cp and sync", theirs, "about 1")


@contextmanager
def xfs(base: Path, gib: float) -> Iterator[Path]:
    image, where = base / "xfs.img", base / "xfs"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(int((2.5 * gib + 1) * (1 << 30)))
    run("mkfs.xfs", "-q", "-m", "reflink=1", image)
    run("mount", "-o", "loop", image, where)
    try:
        yield where
    finally:
        run("umount", where)
        image.unlink()


def shared(base: Path, gib: float, rounds: int) -> None:
    with xfs(base, gib) as disk:
        upper, layer, copy = disk / "upper", disk / "layer.tar", disk / "copy"
        upper.mkdir()
        big_file(upper / "file", gib)
        os.sync()

        def clear() -> None:
            layer.unlink(missing_ok=True)
            copy.unlink(missing_ok=True)
            os.sync()

        still = min(_still(upper, layer) for _ in range(rounds))
        whole, plain, reflink = turns(
            rounds,
            (clear, lambda: layerwriter.write(upper, layer, limit=1 << 62, sync=False)),
            (clear, lambda: run("cp", "--reflink=never", upper / "file", copy)),
            (clear, lambda: run("cp", "--reflink=always", upper / "file", copy)),
        )
        show(f"{gib:g} GiB on xfs, until the container may go on", still, "cp --reflink=never", plain, "at once")
        show("  with the digest", whole, "cp --reflink=never", plain)
        show("  until the container may go on", still, "cp --reflink=always", reflink)
        layerwriter.write(upper, layer, limit=1 << 62)
        target = disk / "target"
        target.mkdir()
        applied = min(
            timed(lambda: layerwriter.apply(layer, target, replace=True, limit=1 << 62)) for _ in range(rounds)
        )
        show("  applied, no digest", applied, "cp --reflink=never", plain)


def memory(base: Path) -> None:
    """Peaks of processes of their own, Python's about 11 MiB included."""
    many, linked, zeros = base / "many", base / "linked", base / "zeros"
    for root, count in ((many, 20_000), (linked, 60_000)):
        (root / "one").mkdir(parents=True)
        (root / "other").mkdir()
        for number in range(count):
            (root / "one" / f"file-{number}").touch()
            if root is linked:
                os.link(root / "one" / f"file-{number}", root / "other" / f"link-{number}")
    zeros.mkdir()
    with (zeros / "file").open("wb") as file:
        for _ in range(512):
            file.write(os.urandom(1 << 19) + bytes(1 << 19))
    for root, what in ((many, "20,000 files in one directory"), (linked, "60,000 hard links"), (zeros, "512 MiB")):
        for compression in ("none", "zstd"):
            layer, target = base / "memory.tar", base / f"memory-{root.name}-{compression}"
            target.mkdir()
            write = f"layerwriter.write({str(root)!r}, {str(layer)!r}, compression={compression!r})"
            try:
                written = _peak(write)
            except subprocess.CalledProcessError:
                print(f"{compression} is not available here")
                continue
            applied = _peak(f"layerwriter.apply({str(layer)!r}, {str(target)!r})")
            print(f"{what}, {compression}: peak {written:.0f} MiB to write, {applied:.0f} MiB to apply (under 64)")


def _peak(code: str) -> float:
    argv = [sys.executable, "-I", "-c", PEAK.format(code), str(TOP)]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout) / 1024


def in_a_node(base: Path, stack: str, rounds: int) -> None:
    """Against containerd's own way to take a container's files along, which compares all of the image."""
    from node import Node, image

    program = "import time\nwhile True: time.sleep(1)"
    archive = base / "large.tar"
    with Node.up(stack_name=stack) as node:
        programs = image.layer_of(image.test_image(node.stack, Path(node.facts["root"])), base / "programs.tar")
        image.synthetic(archive, "bench/layers:1", 200_000, base=programs)
        name = node.import_image(archive)
        node.ctr("run", "-d", "--runtime", "io.containerd.runc.v2", name, "one", "python3", "-c", program, timeout=300)
        pid = next(line.split()[1] for line in node.ctr("tasks", "list").stdout.splitlines() if line.startswith("one"))
        small_files(node.path(f"/proc/{pid}/root") / "files")
        lines = node.path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        options = next(line.split()[-1] for line in lines if line.split()[4] == "/").split(",")
        upper = node.path(next(option for option in options if option.startswith("upperdir="))[9:])

        def checkpoint(*words: str) -> None:
            node.ctr("containers", "checkpoint", "--task", *words, "one", "example.org/one:1", timeout=300)
            node.ctr("images", "rm", "example.org/one:1")

        layer = node.path("/srv/layer.tar")
        dump, both, ours = turns(
            rounds,
            (nothing, checkpoint),
            (nothing, lambda: checkpoint("--rw")),
            (nothing, lambda: layerwriter.write(upper, layer, sync=False)),
        )
        show("write the layer on 200,000 entries", ours, "ctr --rw less the dump", both - dump, "at most 0.02")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of layers with GNU tar, cp and containerd.")
    parser.add_argument("--directory", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--stack", default="sid")
    parser.add_argument("--only", default="small,big,shared,memory")
    options = parser.parse_args()
    wanted = options.only.split(",")
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="fermata-bench-") as name:
        base = Path(name)
        if "small" in wanted:
            small(base, options.rounds)
        if "big" in wanted:
            big(base, options.gib, max(2, options.rounds // 3))
        if "shared" in wanted:
            shared(base, options.gib, max(2, options.rounds // 3))
        if "memory" in wanted:
            memory(base)
        if "node" in wanted:
            in_a_node(base, options.stack, max(2, options.rounds // 3))


if __name__ == "__main__":
    main()
