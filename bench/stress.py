"""Plain lifecycles, several at a time: how many containers a node starts and ends in a second, against the stock
runtime.

Each worker does `ctr run --rm --runtime RUNTIME IMAGE true` again and again. The runtimes take turns of `--seconds`, so
that what else the machine does meets both. Printed are the rates of each turn, their medians and the ratio; it is no
verdict, and the exit status says only whether every container ended with status 0 and nothing was left.

    python3 bench/stress.py [--stack sid] [--node NAME] [--workers 4] [--seconds 10] [--turns 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / "packaging")]

from node import Node  # noqa: E402 (the path comes first)
from node.containers import CTR, IMAGE, OURS, STOCK  # noqa: E402
from node.leftovers import leftovers  # noqa: E402


def turn(node: Node, runtime: str, workers: int, seconds: float) -> tuple[float, list[str]]:
    """(containers a second, what went wrong) of one turn."""
    wrong: list[str] = []
    done = [0] * workers
    began = time.monotonic()

    def work(worker: int) -> None:
        while time.monotonic() - began < seconds:
            words = ["run", "--rm", "--runtime", runtime, IMAGE, f"stress-{worker}-{done[worker]}", "true"]
            result = node.exec([*CTR, *words], check=False)
            if result.returncode:
                wrong.append(result.stderr.strip())
            done[worker] += 1

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - began), wrong


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="Plain lifecycles, several at a time, against the stock runtime.")
    parser.add_argument("--stack", default="sid")
    parser.add_argument("--node", help="a node that is up, instead of one of its own")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    node = Node.open(args.node) if args.node else Node.up(stack_name=args.stack)
    wrong: list[str] = []
    rates: dict[str, list[float]] = {OURS: [], STOCK: []}
    try:
        node.import_image()
        for runtime in rates:
            turn(node, runtime, args.workers, 1)  # fills the caches
        for number in range(args.turns):
            for runtime in (OURS, STOCK) if number % 2 else (STOCK, OURS):
                rate, failed = turn(node, runtime, args.workers, args.seconds)
                rates[runtime].append(rate)
                wrong += failed
                print(f"{runtime:26} {rate:6.2f} containers a second, {len(failed)} failed", flush=True)
        wrong += leftovers(node)
    finally:
        if not args.node:
            node.down()
    ours, stock = (statistics.median(rates[runtime]) for runtime in (OURS, STOCK))
    print(f"median {ours:.2f} : {stock:.2f} containers a second with {args.workers} workers = {ours / stock:.2f}")
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
