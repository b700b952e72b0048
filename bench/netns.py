"""What a network namespace of its own adds to a container's start: ratios, and the difference in milliseconds.

    python3 bench/netns.py [--stack sid] [--node NAME] [--rounds 30]

Three comparisons, each of two things that are done in turn, so that what else the machine does meets both:

- `ctr run --rm … true` under fermata with a namespace of ours, and with `fermata/netns=keep`, where runc makes it;
- the same under fermata with a namespace of ours, and under the stock runtime: all of what fermata costs;
- a fresh Python that does what the shim does, `import shim.netns` and one `create`, against one that does nothing.

Printed are the median and the least of each, and their ratio. The figures are no verdict, and the exit status says
nothing of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "packaging")]

from node import Node  # noqa: E402
from node.containers import IMAGE, OURS, STOCK  # noqa: E402

KEEP = ("--annotation", "fermata/netns=keep")
INSTALLED = "/usr/local/lib/fermata"
NOTHING = "pass"
CREATE = f"""
import sys
sys.path.insert(0, {INSTALLED!r})
from shim import netns
netns.create("bench", "bench")
"""
REMOVE = f"""
import sys
sys.path.insert(0, {INSTALLED!r})
from shim import netns
for path in netns.ours("bench", "bench"):
    netns.remove(path)
"""


def main() -> int:
    options = _options()
    with _node(options) as node:

        def container(runtime: str, *more: str) -> None:
            node.ctr("run", "--rm", "--runtime", runtime, *more, IMAGE, "bench-netns", "true")

        def python(code: str) -> None:
            node.exec(["python3", "-I", "-S", "-c", code])

        rounds = options.rounds
        _compare(rounds, "own namespace", lambda: container(OURS), "kept", lambda: container(OURS, *KEEP))
        _compare(rounds, "fermata, own namespace", lambda: container(OURS), "stock", lambda: container(STOCK))
        try:
            _compare(rounds, "import and create", lambda: python(CREATE), "nothing", lambda: python(NOTHING))
        finally:
            python(REMOVE)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stack", default="sid", help="the stack of a node that is brought up for this (default: sid)")
    parser.add_argument("--node", help="a node that is up already")
    parser.add_argument("--rounds", type=int, default=30)
    return parser.parse_args()


@contextlib.contextmanager
def _node(options: argparse.Namespace) -> Iterator[Node]:
    if options.node:
        yield Node.open(options.node)
        return
    with Node.up(stack_name=options.stack) as node:
        node.import_image()
        yield node


def _compare(rounds: int, one: str, do_one: Callable[[], None], other: str, do_other: Callable[[], None]) -> None:
    do_one()
    do_other()  # what is done once per node is done now
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        began = time.monotonic()
        (do_one, do_other)[number % 2]()
        times[number % 2].append(time.monotonic() - began)
    for measure in (statistics.median, min):
        first, second = (1e3 * measure(each) for each in times)
        print(
            f"{measure.__name__:6} {one} {first:.1f} ms, {other} {second:.1f} ms: "
            f"ratio {first / second:.2f}, {first - second:+.1f} ms"
        )


if __name__ == "__main__":
    sys.exit(main())
