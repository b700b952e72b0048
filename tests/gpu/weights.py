"""Weights kept out of snapshots: a language model server, and one with several models that share tensors.

Snapshots are in a memory file system (/dev/shm), and so is the store of weights unless a case says otherwise. Every
answer must have the tokens of the cold start.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serving as servings
from containers import leftover, manifest
from contents import contents
from machine import PROJECT, Machine
from moving import used
from serving import LAYERS, MEMORY, SERVER, TRIALS, Serving, medians, save, take

GUEST = {"fermata/guest": "on"}
MODELS = "/tests/models.py"
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Apart(Serving):
    """A server whose program has the library for keeping weights out."""

    def __init__(self, machine: Machine, command: list[str] | None = None) -> None:
        super().__init__(machine, make=command is None)
        self.command = command
        self.store_in("/fast/store")

    def store_in(self, directory: str) -> None:
        self.machine.configure(f'{self.machine.settings}[weights]\ndirectory = "{directory}"\n')

    def start(self, name: str, annotations: dict[str, str] | None = None, command: list[str] | None = None) -> float:
        target = self.machine.folder / "programs" / "fermata"
        if not target.exists():
            shutil.copytree(PROJECT / "guest" / "fermata", target, ignore=shutil.ignore_patterns("__pycache__"))
        return super().start(name, annotations, command or self.command)


def taken_apart(apart: Apart, name: str, inside: str, outside: Path) -> dict[str, Any]:
    """Take a snapshot that ends the container, and see that the weights are not in it."""
    found = take(apart, name, inside, outside)
    found["guest"] = {key: value for key, value in manifest(outside)["guest"].items() if key != "processes"}
    found["packs"] = [
        {"name": pack["name"], "bytes": pack["bytes"]}
        for process in manifest(outside)["guest"]["processes"]
        for pack in process["packs"]
    ]
    assert found["guest"]["outcome"] == "out", f"the weights are inside: {found['guest']}; {apart.machine.log_of(name)}"
    found["contents"] = contents(outside)
    log = apart.machine.node.log.read_text(errors="replace").splitlines()
    found["notes"] = [line.partition("note=")[2] for line in log if "of a program" in line and f"={name} " in line]
    return found


def back(
    apart: Apart, inside: str, tokens: list[int], prefix: str, *, before: Callable[[], None] | None = None
) -> dict[str, Any]:
    rows = []
    for turn in range(TRIALS):
        if before:
            before()
        rows += servings.restore(apart, inside, tokens, 1, f"{prefix}-{turn}")
    return {"trials": rows, "medians": medians(rows), "fastest_s": min(row["total_s"] for row in rows)}


def keep_logs(machine: Machine) -> None:
    """CRIU's own account of the last restore, for whoever asked for what is measured on the way."""
    folder = os.environ.get("FERMATA_PARTIAL")
    logs = sorted(
        machine.node.logs.glob("fermata/default/*/*-restore/restore.log"), key=lambda path: path.stat().st_mtime
    )
    if folder and logs:
        shutil.copy(logs[-1], folder)


def forget_pages() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def language_model(machine: Machine) -> dict[str, Any]:
    """Cold starts, then restores with the weights out and in, from memory and from disk."""
    apart = Apart(machine)
    base = used()
    huge = HUGE.read_text()
    found: dict[str, Any] = {"layers": LAYERS, "weights_bytes": apart.weights, "made_s": apart.made_s}
    wanted = os.environ.get("FERMATA_PARTS", "cold out huge disk inside").split()
    try:
        rows, tokens = servings.cold(apart, TRIALS if "cold" in wanted else 1, GUEST)
        found["cold"] = {"trials": rows, "medians": medians(rows)}
        found["tokens"] = tokens
        last = f"cold-{len(rows) - 1}"
        if "out" in wanted:
            found["take_out"] = taken_apart(apart, last, "/fast/out", MEMORY / "out")
            machine.remove(last)
            found["used_mib_between"] = leftover(machine, base)
            found["out_from_memory"] = back(apart, "/fast/out", tokens, "memory")
            shutil.rmtree(MEMORY / "out")
            save(found)
        if "huge" in wanted or "disk" in wanted:
            huge_pages(apart, tokens, wanted, found)
        if "inside" in wanted:
            apart.start("inside")
            apart.answer("inside")
            found["take_in"] = take(apart, "inside", "/fast/in", MEMORY / "in")
            machine.remove("inside")
            found["in_from_memory"] = back(apart, "/fast/in", tokens, "inside")
    except Exception as error:
        found["error"] = str(error)[-3000:]
        save(found)
        raise
    finally:
        keep_logs(machine)
        HUGE.write_text(huge.partition("[")[2].partition("]")[0])
        servings.clear()
    return found


def huge_pages(apart: Apart, tokens: list[int], wanted: list[str], found: dict[str, Any]) -> None:
    """The same with huge pages for the process and for the memory file system, and from page cache and disk."""
    machine = apart.machine
    shutil.rmtree(MEMORY / "store", ignore_errors=True)
    HUGE.write_text("always")
    subprocess.run(["mount", "-o", "remount,huge=always", "/dev/shm"], check=True, timeout=30)
    try:
        apart.start("huge", GUEST)
        apart.answer("huge")
        found["take_out_huge"] = taken_apart(apart, "huge", "/fast/huge", MEMORY / "huge")
        machine.remove("huge")
        found["out_from_memory_huge"] = back(apart, "/fast/huge", tokens, "huge")
        before = [(path.name, path.stat().st_mtime_ns) for path in (MEMORY / "store").glob("*.weights")]
        found["out_left_running"] = left_running(apart, "/fast/huge", tokens)
        after = [(path.name, path.stat().st_mtime_ns) for path in (MEMORY / "store").glob("*.weights")]
        assert len(before) == 1 and before == after, f"the same weights were written again: {before}, {after}"
        save(found)
        if "disk" in wanted:
            shutil.copytree(MEMORY / "store", machine.folder / "store", symlinks=True)
            apart.store_in("/srv/store")
            found["out_from_page_cache_huge"] = back(apart, "/fast/huge", tokens, "cached")
            found["out_from_disk_huge"] = back(apart, "/fast/huge", tokens, "disk", before=forget_pages)
            apart.store_in("/fast/store")
            save(found)
    finally:
        HUGE.write_text("madvise")
        subprocess.run(["mount", "-o", "remount,huge=never", "/dev/shm"], check=True, timeout=30)
        shutil.rmtree(MEMORY / "huge", ignore_errors=True)


def left_running(apart: Apart, inside: str, tokens: list[int]) -> dict[str, Any]:
    """A take that leaves the server running, and answers before and after it."""
    machine = apart.machine
    apart.start("stays", {"fermata/restore-from": inside, **GUEST})
    try:
        assert apart.answer("stays")["tokens"] == tokens
        began = time.monotonic()
        machine.node.ctr("task", "checkpoint", "--image-path", "/fast/stays", "stays", timeout=400)
        taken = time.monotonic() - began
        answer = apart.answer("stays")
        total = time.monotonic() - began
        assert answer["tokens"] == tokens, "other tokens after a take that left the server running"
        assert manifest(MEMORY / "stays")["guest"]["outcome"] == "out"
        return {"taken_s": taken, "until_answer_s": total, "steps": manifest(MEMORY / "stays")["steps"]}
    finally:
        machine.remove("stays")
        shutil.rmtree(MEMORY / "stays", ignore_errors=True)


def several_models(machine: Machine) -> dict[str, Any]:
    """Three models with shared tensors in one process: each storage once, all tokens the same."""
    layers = max(2, LAYERS // 4 // 2 * 2)
    apart = Apart(machine, [SERVER, "several", str(layers)])
    found: dict[str, Any] = {"layers": layers}
    try:
        rows, tokens = servings.cold(apart, 1, GUEST)
        found["cold"] = rows
        found["take"] = taken_apart(apart, "cold-0", "/fast/several", MEMORY / "several")
        machine.remove("cold-0")
        found["restores"] = back(apart, "/fast/several", tokens, "several")
        found["bytes"] = sum(pack["bytes"] for pack in found["take"]["packs"])
        found["until_answer_s"] = statistics.median(row["total_s"] for row in found["restores"]["trials"])
    finally:
        servings.clear()
    return found


def other_programs(machine: Machine) -> dict[str, Any]:
    """Networks of other kinds, with the same answer from weights that were out."""
    found: dict[str, Any] = {}
    for kind in ("images", "translation", "loops"):
        apart = Apart(machine, [MODELS, kind])
        try:
            rows, tokens = servings.cold(apart, 1, GUEST)
            take_out = taken_apart(apart, "cold-0", f"/fast/{kind}", MEMORY / kind)
            machine.remove("cold-0")
            restored = servings.restore(apart, f"/fast/{kind}", tokens, 2, kind)
            found[kind] = {"cold": rows, "take": take_out, "restores": restored}
        finally:
            machine.remove("cold-0")
            servings.clear()
    return found


def kept_inside(machine: Machine) -> dict[str, Any]:
    """Programs that know their weights by address: these stay inside, the reason is told, and nothing else changes."""
    found: dict[str, Any] = {}
    for kind, reason in (("graph", "CUDA graph"), ("compiled", "torch.compile")):
        apart = Apart(machine, [MODELS, kind])
        try:
            rows, tokens = servings.cold(apart, 1, GUEST)
            machine.node.ctr("task", "checkpoint", "--image-path", "/fast/stays", "cold-0", timeout=400)
            assert apart.answer("cold-0")["tokens"] == tokens, f"{kind}: another answer after a take"
            taken = take(apart, "cold-0", f"/fast/{kind}", MEMORY / kind)
            machine.remove("cold-0")
            guest = manifest(MEMORY / kind)["guest"]
            assert guest["outcome"] == "inside" and reason in guest["reason"], guest
            restored = servings.restore(apart, f"/fast/{kind}", tokens, 2, kind)
            found[kind] = {"cold": rows, "take": taken, "reason": guest["reason"], "restores": restored}
        finally:
            machine.remove("cold-0")
            servings.clear()
    return found


CASES: dict[str, Callable[[Machine], dict[str, Any]]] = {
    "language_model": language_model,
    "several_models": several_models,
    "other_programs": other_programs,
    "kept_inside": kept_inside,
}
