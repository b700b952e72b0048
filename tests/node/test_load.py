"""Many containers at once, started, snapshotted and restored with overlap: none loses its state, and nothing grows.

Runs only in `make torture`, for FERMATA_LOAD_SECONDS (default 60) with FERMATA_LOAD_CONTAINERS (default 30).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from node.containers import IMAGE, OURS, pid, wait_for
from node.shims import Shim

pytestmark = pytest.mark.skipif("FERMATA_TORTURE" not in os.environ, reason="only in make torture")

SECONDS = float(os.environ.get("FERMATA_LOAD_SECONDS", "60"))
AT_ONCE = int(os.environ.get("FERMATA_LOAD_CONTAINERS", "30"))
WORKERS = 6

# Says in memory and in a file who it is, and what it has counted.
COUNTER = """
import os, sys, time
token, count = sys.argv[1], 0
while True:
    with open("/state.new", "w") as file: file.write(f"{token} {count}")
    os.rename("/state.new", "/state")
    count += 1
    time.sleep(0.1)
"""


def state(node, name):
    with contextlib.suppress(OSError, ValueError):
        token, count = Path(f"/proc/{pid(node, name)}/root/state").read_text().split()
        return token, int(count)
    return None


def goes_on(node, name, token, least):
    """Wait until the container is seen to count on from at least what it had; what it has then."""
    found = wait_for(lambda: (now := state(node, name)) and now[1] > least and now, f"{name} to go on", 60)
    assert found[0] == token
    return found[1]


def remove(node, name):
    node.ctr("tasks", "delete", "--force", name)
    node.ctr("containers", "delete", name)


def test_containers_that_start_and_are_taken_and_restored_all_the_time_lose_nothing(node):
    end = time.monotonic() + SECONDS
    failures, rounds, kept = [], [], []
    for number in range(AT_ONCE - 2 * WORKERS):  # those that stand by
        node.ctr("run", "-d", "--runtime", OURS, IMAGE, f"by-{number}", "python3", "-c", COUNTER, f"by-{number}")
    first = Shim(node, "by-0")

    def work(worker):
        number = 0
        try:
            while time.monotonic() < end:
                number += 1
                name, after, directory = f"w{worker}-{number}", f"w{worker}-{number}-r", f"/srv/load/{worker}-{number}"
                node.ctr("run", "-d", "--runtime", OURS, IMAGE, name, "python3", "-c", COUNTER, name)
                taken = count = goes_on(node, name, name, 2)
                Shim(node, name).checkpoint(directory, leave_running=bool(number % 2))
                if number % 2:
                    count = goes_on(node, name, name, count)
                options = ("--annotation", f"fermata/restore-from={directory}")
                node.ctr("run", "-d", "--runtime", OURS, *options, IMAGE, after, "true")
                goes_on(node, after, name, taken)
                remove(node, name)
                remove(node, after)
                node.exec(["rm", "-r", directory])
                rounds.append(name)
        except Exception as error:
            failures.append(f"worker {worker}, round {number}: {error}")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        first.checkpoint(f"/srv/load/by-{len(kept)}")
        node.exec(["rm", "-r", f"/srv/load/by-{len(kept)}"])
        kept.append(held(first.pid))
        time.sleep(1)
    print(
        f"{len(rounds)} containers started, taken, restored and removed, {AT_ONCE} at once at most; {len(kept)} takes "
        f"of one more; its shim had {kept[2]} after the third and {kept[-1]} at the end"
    )
    assert failures == []
    assert len(rounds) >= WORKERS
    # What is made once has been by the third take.
    assert kept[-1]["descriptors"] <= kept[2]["descriptors"]
    assert kept[-1]["kilobytes"] <= kept[2]["kilobytes"] * 1.1 + 1024
    for number in range(AT_ONCE - 2 * WORKERS):
        goes_on(node, f"by-{number}", f"by-{number}", 2)
    node.exec(["rm", "-rf", "/srv/load"])


def held(process):
    status = Path(f"/proc/{process}/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {"descriptors": len(os.listdir(f"/proc/{process}/fd")), "kilobytes": kilobytes}
