"""Moving the GPU state of processes outside of any container: what works, and each failure made to happen.

Every case is a function without arguments that returns what it measured, and raises AssertionError when the state or
the processes are not as they have to be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holders import Asked, Holder, LooseTree

from shim import gpu
from shim.config import Config
from shim.errors import ShimError

CONFIG = Config()
CONFIG.gpu_libcuda = os.environ.get("FERMATA_LIBCUDA") or None


def silent(level: str, message: str, **fields: object) -> None:
    """A log that nobody reads."""


def open_driver() -> gpu.Helper:
    return gpu.Helper(CONFIG)


def take_out(tree: Any, config: Config = CONFIG) -> gpu.Out:
    out = gpu.take_out(tree, config, silent, open_driver=open_driver)
    assert out is not None
    return out


def bring_back(tree: Any, record: dict[str, Any]) -> dict[str, float]:
    return gpu.bring_back(tree, record, CONFIG, open_driver=open_driver)


def used() -> int:
    """Bytes in use on all GPUs together."""
    driver = open_driver()
    try:
        return sum(found["used"] for found in driver.call("inventory")["gpus"])
    finally:
        driver.end()


def states(pids: list[int], limit: float = 10) -> list[Any]:
    driver = open_driver()
    try:
        results = driver.call("state", pids=pids, limit=limit)["results"]
        return [result.get("value", result.get("error")) for result in results]
    finally:
        driver.end()


@contextmanager
def holding(kind: str, size: float = 1.0) -> Iterator[tuple[Holder, LooseTree]]:
    holder = Holder(kind, size)
    try:
        holder.ready()
        yield holder, LooseTree(holder)
    finally:
        holder.stop()


def refusal(work: Callable[[], object]) -> str:
    """The sentence with which a piece of work is refused."""
    try:
        work()
    except ShimError as error:
        return str(error)
    raise AssertionError("it was not refused")


def driver() -> dict[str, Any]:
    """What asking the driver costs."""
    began = time.monotonic()
    first = open_driver()
    opened = time.monotonic() - began
    try:
        began = time.monotonic()
        gpus = first.call("inventory")["gpus"]
        listed = time.monotonic() - began
        began = time.monotonic()
        other = first.call("state", pids=[os.getpid()])["results"][0]
    finally:
        first.end()
    assert other.get("code") in (1, 3), f"a process without CUDA answers {other}"
    return {
        "open_s": opened,
        "inventory_s": listed,
        "state_s": time.monotonic() - began,
        "gpus": [{key: found[key] for key in ("uuid", "model", "total", "used", "minor")} for found in gpus],
    }


def one_process(size: float = 8.0) -> dict[str, Any]:
    """Out and back, the same bits."""
    with holding("one", size) as (holder, tree):
        before = holder.ask("digest")
        out = take_out(tree)
        empty = used()
        left = [gpu.nvidia_descriptors(pid) for pid in tree.pids()]
        back = bring_back(tree, out.record)
        assert holder.ask("digest") == before
        assert not any(left), f"descriptors left: {left}"
        again = take_out(tree)
        pairs = [[found["uuid"], found["uuid"]] for found in again.record["gpus"]]
        helper = open_driver()
        mapped = helper.call("restore", pids=[user.pid for user in again.holders], pairs=pairs)["results"]
        helper.call("unlock", pids=[user.pid for user in again.holders])
        helper.end()
        assert not any("error" in result for result in mapped), f"with a map of GPU pairs: {mapped}"
        assert holder.ask("digest") == before
        return {
            "bytes": out.bytes,
            "out": out.steps,
            "back": back,
            "used_while_out": empty,
            "out_again": again.steps,
            "back_with_pairs_s": mapped[0]["seconds"],
            "record": out.record,
        }


def four_processes(size: float = 2.0) -> dict[str, Any]:
    """All four at once, against one after the other."""
    with holding("tree", size) as (holder, tree):
        before = holder.ask("digest")
        out = take_out(tree)
        empty = used()
        back = bring_back(tree, out.record)
        assert holder.ask("digest") == before
        assert len(out.holders) == 4
        pids = [user.pid for user in out.holders]
        serial = {}
        helper = open_driver()
        for op in ("lock", "checkpoint", "restore", "unlock"):
            began = time.monotonic()
            for pid in pids:
                result = helper.call(op, pids=[pid], timeout_ms=10000)["results"][0]
                assert "error" not in result, result
            serial[op] = time.monotonic() - began
        helper.end()
        assert holder.ask("digest") == before
        return {
            "bytes": out.bytes,
            "at_once": {**out.steps, **back},
            "one_after_the_other": serial,
            "used_while_out": empty,
        }


def helper_killed(size: float = 6.0) -> dict[str, Any]:
    """The program that moves is killed after the lock, in the middle of moving out, and of moving back."""
    found: dict[str, Any] = {}
    with holding("one", size) as (holder, tree):
        before = holder.ask("digest")
        users = gpu.users(tree.pids())
        for name, ops, after in (
            ("after_lock", ["lock"], 0.0),
            ("in_checkpoint", ["lock", "checkpoint"], 0.5),
            ("late_in_checkpoint", ["lock", "checkpoint"], 1.5),
            ("in_restore", ["lock", "checkpoint", "restore"], 0.3),
        ):
            helper = open_driver()
            for op in ops[:-1] if after else ops:
                helper.call(op, pids=[user.pid for user in users], timeout_ms=10000)
            if after:
                # Ask without waiting for the answer, as a kill comes while the call is on its way.
                asked = threading.Thread(target=lambda: refusal(lambda: helper.call(ops[-1], pids=[users[0].pid])))
                asked.start()
                time.sleep(after)
                os.kill(helper.pid, signal.SIGKILL)
                asked.join()
            helper.kill()
            state = states([users[0].pid])
            began = time.monotonic()
            failed = gpu.put_back(users, open_driver, CONFIG)
            found[name] = {"state_after_kill": state, "put_back_s": time.monotonic() - began, "failed": failed}
            assert not failed, failed
            assert holder.ask("digest") == before, name
    return found


def driver_of_helper_killed() -> dict[str, Any]:
    """When the input of the program ends, what it has locked goes on."""
    with holding("one") as (holder, tree):
        before = holder.ask("digest")
        helper = open_driver()
        users = gpu.users(tree.pids())
        helper.call("lock", pids=[users[0].pid], timeout_ms=10000)
        helper.call("checkpoint", pids=[users[0].pid])
        os.close(helper._in)
        _, status = os.waitpid(helper.pid, 0)
        helper._open = False
        assert holder.ask("digest") == before
        return {"status": status, "states": states([users[0].pid])}


def long_kernel() -> dict[str, Any]:
    """A lock that has to wait too long is given up, and the work goes on."""
    with holding("one") as (holder, tree):
        before = holder.ask("digest")
        holder.ask("long")
        patience = Config()
        patience.gpu_libcuda = CONFIG.gpu_libcuda
        patience.gpu_lock_timeout = 2
        began = time.monotonic()
        sentence = refusal(lambda: take_out(tree, patience))
        seconds = time.monotonic() - began
        assert "did not end in 2 s" in sentence, sentence
        assert holder.ask("wait", 120) == "done"
        assert holder.ask("digest") == before
        return {"sentence": sentence, "seconds": seconds}


def forked_child() -> dict[str, Any]:
    """A forked child of a process that uses the GPU is named, and both go on."""
    with holding("forked") as (holder, tree):
        before = holder.ask("digest")
        began = time.monotonic()
        sentence = refusal(lambda: take_out(tree))
        seconds = time.monotonic() - began
        assert "spawn" in sentence and str(tree.pids()[1]) in sentence, sentence
        assert holder.ask("digest") == before
        return {"sentence": sentence, "seconds": seconds}


def one_of_four_dies(size: float = 2.0) -> dict[str, Any]:
    """One process is killed while all move out: the others go on."""
    found = {}
    for delay in (0.1, 0.6):
        with holding("family", size) as (holder, tree):
            members = [holder, *(Asked(holder.folder / str(number)) for number in (2, 3, 4))]
            before = [member.ask("digest") for member in members]
            victim = holder.ask("pids")[2]
            timer = threading.Timer(delay + 0.3, os.kill, (victim, signal.SIGKILL))
            began = time.monotonic()
            timer.start()
            try:
                out = take_out(tree)
                sentence = "moved before the kill"
                bring_back(tree, out.record)
            except ShimError as error:
                sentence = str(error)
            timer.join()
            seconds = time.monotonic() - began
            del members[2], before[2]
            after = [member.ask("digest") for member in members]
            assert after == before, f"{sentence}: {after}"
            found[f"killed_after_{delay + 0.3:.1f}_s"] = {"sentence": sentence, "seconds": seconds}
    return found


def gpu_too_full(size: float = 4.0) -> dict[str, Any]:
    """State that has no room stays in host memory, and moves back once there is room."""
    with holding("one", size) as (holder, tree):
        before = holder.ask("digest")
        out = take_out(tree)
        with holding("hog", 2.0):
            sentence = refusal(lambda: bring_back(tree, out.record))
            parked = states([user.pid for user in out.holders])
        assert "are missing" in sentence and parked == [2], (sentence, parked)
        bring_back(tree, out.record)
        assert holder.ask("digest") == before
        return {"sentence": sentence}


def shared_memory() -> dict[str, Any]:
    """Processes that share memory on the GPU."""
    with holding("sharing") as (holder, tree):
        before = holder.ask("sum")
        sentence = refusal(lambda: take_out(tree))
        assert "uses GPU memory of" in sentence, sentence
        assert holder.ask("sum") == before
        return {"sentence": sentence}


def shared_memory_without_the_check(size: float = 1.0) -> dict[str, Any]:
    """Why the above is refused: the driver moves such state out and then not back, in either order."""
    found = {}
    for name, order in (("owner_first", (0, 1)), ("user_first", (1, 0))):
        with holding("sharing") as (_, tree):
            pids = [user.pid for user in gpu.users(tree.pids())]
            helper = open_driver()
            helper.call("lock", pids=pids, timeout_ms=5000)
            out = helper.call("checkpoint", pids=pids)["results"]
            back = [helper.call("restore", pids=[pids[at]])["results"][0] for at in order]
            helper.kill()
            found[name] = {"out": [result.get("error", "done") for result in out]}
            found[name]["back"] = [result.get("error", "done") for result in back]
    return found


def huge_pages(size: float = 4.0) -> dict[str, Any]:
    """What the kernel's huge pages do to the speed: the driver allocates ordinary memory in the process."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    before = switch.read_text().partition("[")[2].partition("]")[0]
    found = {}
    try:
        for mode in ("never", "always"):
            switch.write_text(mode)
            with holding("one", size) as (holder, tree):
                digest = holder.ask("digest")
                pid = tree.pids()[0]
                begun = _effort(pid)
                out = take_out(tree)
                moved = _effort(pid)
                back = bring_back(tree, out.record)
                ended = _effort(pid)
                assert holder.ask("digest") == digest
            found[mode] = {
                "bytes": out.bytes,
                "out_s": out.steps["gpu_out"],
                "out_effort": {key: round(moved[key] - begun[key], 2) for key in begun},
                "back_s": back["gpu_back"],
                "back_effort": {key: round(ended[key] - moved[key], 2) for key in begun},
            }
    finally:
        switch.write_text(before)
    return found


def _effort(pid: int) -> dict[str, float]:
    """A process's page faults and processor time in seconds (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return {"page_faults": int(fields[7]), "user_s": int(fields[11]) / tick, "system_s": int(fields[12]) / tick}


def frozen() -> dict[str, Any]:
    """What the driver does with a process in a frozen cgroup (version 2)."""
    freezer = Path("/sys/fs/cgroup/fermata-gpu-test")
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return {"skipped": "no cgroup version 2"}
    with holding("one") as (holder, _):
        before = holder.ask("digest")
        freezer.mkdir(exist_ok=True)
        (freezer / "cgroup.procs").write_text(str(holder.process.pid))
        (freezer / "cgroup.freeze").write_text("1")
        time.sleep(0.2)
        began = time.monotonic()
        state = states([holder.process.pid], 5)
        asked = time.monotonic() - began
        helper = open_driver()
        began = time.monotonic()
        lock = helper.call("lock", pids=[holder.process.pid], timeout_ms=2000, limit=8)["results"][0]
        locked = time.monotonic() - began
        helper.kill()
        (freezer / "cgroup.freeze").write_text("0")
        failed = gpu.put_back(gpu.users([holder.process.pid]), open_driver, CONFIG)
        assert holder.ask("digest") == before and not failed, failed
        found = {"state": state, "state_s": asked, "lock": lock, "lock_s": locked}
    time.sleep(0.2)
    freezer.rmdir()
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        driver,
        one_process,
        four_processes,
        helper_killed,
        driver_of_helper_killed,
        long_kernel,
        forked_child,
        one_of_four_dies,
        gpu_too_full,
        shared_memory,
        shared_memory_without_the_check,
        huge_pages,
        frozen,
    )
}
