"""A language model server: cold start against restore, until the first answer.

The model has Qwen3-8B's shape with 36 layers; FERMATA_LAYERS makes it smaller for a try. Weights and snapshots are in a
memory file system (/dev/shm) unless a case says otherwise, the page cache is warm, and Python's bytecode is there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from containers import leftover, manifest, size_of
from machine import HERE, Machine
from moving import used

LAYERS = int(os.environ.get("FERMATA_LAYERS", "36"))
TRIALS = int(os.environ.get("FERMATA_TRIALS", "5"))
MEMORY = Path("/dev/shm/fermata-gpu")
SERVER = "/tests/server.py"


class Serving:
    """The weights, and containers that serve them."""

    def __init__(self, machine: Machine, *, make: bool = True) -> None:
        self.machine = machine
        self.folder = MEMORY
        clear()
        (MEMORY / "io").mkdir(parents=True)
        (MEMORY / "weights").mkdir()
        began = time.monotonic()
        if make:
            subprocess.run(
                [sys.executable, str(HERE / "programs" / "server.py"), "make", str(MEMORY / "weights"), str(LAYERS)],
                check=True,
                timeout=300,
                stdout=subprocess.DEVNULL,
            )
        self.made_s = time.monotonic() - began
        if not machine.node.path("/fast/io").exists():
            machine.graft(str(MEMORY), "/fast")
        self.weights = sum(path.stat().st_size for path in (MEMORY / "weights").iterdir())

    def start(self, name: str, annotations: dict[str, str] | None = None, command: list[str] | None = None) -> float:
        """Start a container, new or restored; seconds until `ctr run` is back."""
        machine = self.machine
        machine.programs()
        words = machine.create_arguments("/fast/io")
        words += ["--mount", "type=bind,src=/fast/weights,dst=/weights,options=bind:ro"]
        for key, value in (annotations or {}).items():
            words += ["--annotation", f"{key}={value}"]
        restored = "fermata/restore-from" in (annotations or {})
        began = time.monotonic()
        machine.run(name, words, [] if restored else command or [SERVER, "serve", "/weights"])
        return time.monotonic() - began

    def answer(self, name: str) -> dict[str, Any]:
        """Ask until there is an answer, from a process of the container's network namespace.

        It is a fork of this one, so that no interpreter's start is measured.
        """
        pid = self.machine.pid(name)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                with open(f"/proc/{pid}/ns/net", "rb") as namespace:
                    os.setns(namespace.fileno(), os.CLONE_NEWNET)
                os.write(write, ask(120))
                status = 0
            except BaseException as error:
                os.write(write, repr(error).encode())
            finally:
                os._exit(status)
        os.close(write)
        with open(read, "rb") as file:
            data = file.read()
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise AssertionError(f"no answer: {data.decode()}; it said {self.machine.output(name)}")
        found: dict[str, Any] = json.loads(data)
        return found

    def steps_of_restore(self, name: str) -> dict[str, float]:
        """Where a restore's time went: the shim's own account and log, and CRIU's log."""
        found: dict[str, float] = {}
        folder = sorted((self.machine.node.logs / "fermata" / "default" / name).glob("*-restore"))[-1]
        for path in folder.glob("*.json"):
            steps = json.loads(path.read_text()).get("steps", {})
            found.update({f"shim_{key}": value for key, value in steps.items()})
        stamps = re.findall(r"^\(([0-9.]+)\)", (folder / "restore.log").read_text(errors="replace"), re.MULTILINE)
        found["criu_log_s"] = float(stamps[-1])
        for line in self.machine.node.log.read_text(errors="replace").splitlines():
            if f"container={name} " in f"{line} " and ("restored" in line or "GPU state moved back" in line):
                for key, value in re.findall(r"(\w+)=([0-9.]+)(?= |$)", line):
                    found[key] = float(value)
        return found


def ask(seconds: float) -> bytes:
    """The server's answer, as soon as there is one. Raises OSError when there is none until then."""
    until = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(("127.0.0.1", 8000), timeout=120) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                data = b""
                while chunk := connection.recv(65536):
                    data += chunk
            head, _, body = data.partition(b"\r\n\r\n")
            if b" 200 " in head.partition(b"\r\n")[0]:
                return body
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.002)


def clear() -> None:
    """Empty the folder in memory. It stays itself, since the node has it mounted."""
    if MEMORY.exists():
        for path in MEMORY.iterdir():
            shutil.rmtree(path)


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = [key for key, value in rows[0].items() if isinstance(value, float)]
    return {key: round(statistics.median(row[key] for row in rows if key in row), 3) for key in keys}


def cold(
    serving: Serving, trials: int, annotations: dict[str, str] | None = None
) -> tuple[list[dict[str, Any]], list[int]]:
    """Cold starts; the last one is left running, after its second answer."""
    rows: list[dict[str, Any]] = []
    tokens: list[int] = []
    for turn in range(trials):
        name = f"cold-{turn}"
        began = time.monotonic()
        serving.start(name, annotations)
        answer = serving.answer(name)
        total = time.monotonic() - began
        assert not tokens or answer["tokens"] == tokens, "another cold start gave other tokens"
        tokens = answer["tokens"]
        again = serving.answer(name)
        rows.append(
            {
                "total_s": total,
                "weights_s": answer["loaded_s"],
                "first_answer_s": answer["seconds"],
                "warm_answer_s": again["seconds"],
            }
        )
        if turn < trials - 1:
            serving.machine.remove(name)
    return rows, tokens


def take(serving: Serving, name: str, inside: str, outside: Path) -> dict[str, Any]:
    began = time.monotonic()
    serving.machine.node.ctr("task", "checkpoint", "--exit", "--image-path", inside, name, timeout=400)
    total = time.monotonic() - began
    return {
        "total_s": total,
        "steps": manifest(outside)["steps"],
        "size": size_of(outside),
        "gpu_bytes": sum(process["bytes"] for process in manifest(outside)["gpu"]["processes"]),
    }


def restore(serving: Serving, inside: str, tokens: list[int], trials: int, prefix: str) -> list[dict[str, Any]]:
    rows = []
    for turn in range(trials):
        name = f"{prefix}-{turn}"
        began = time.monotonic()
        try:
            run = serving.start(name, {"fermata/restore-from": inside})
            asked = time.monotonic()
            answer = serving.answer(name)
            total = time.monotonic() - began
        except Exception as error:
            raise AssertionError(f"{error}; {serving.machine.log_of(name)}") from error
        assert answer["tokens"] == tokens, f"{name} gave other tokens: {answer['tokens']} instead of {tokens}"
        steps = serving.steps_of_restore(name)
        rows.append(
            {
                "total_s": total,
                "run_s": run,
                "request_s": total - (asked - began),
                "answer_s": answer["seconds"],
                **steps,
            }
        )
        serving.machine.remove(name)
    return rows


def model_server(machine: Machine) -> dict[str, Any]:
    """Cold starts, then a snapshot in memory and restores from it, then one on disk and restores from that."""
    serving = Serving(machine)
    base = used()
    found: dict[str, Any] = {"layers": LAYERS, "weights_bytes": serving.weights, "made_s": serving.made_s}
    try:
        rows, tokens = cold(serving, TRIALS)
        found["cold"] = {"trials": rows, "medians": medians(rows)}
        found["tokens"] = tokens
        last = f"cold-{TRIALS - 1}"
        found["take_to_memory"] = take(serving, last, "/fast/snapshot", MEMORY / "snapshot")
        machine.remove(last)
        found["used_mib_between"] = leftover(machine, base)
        rows = restore(serving, "/fast/snapshot", tokens, TRIALS, "memory")
        found["from_memory"] = {"trials": rows, "medians": medians(rows)}
        save(found)
        shutil.rmtree(MEMORY / "snapshot")
        if os.environ.get("FERMATA_DISK") == "0":
            return found
        serving.start("again")
        serving.answer("again")
        found["take_to_disk"] = take(serving, "again", "/srv/snapshot", machine.folder / "snapshot")
        machine.remove("again")
        rows = restore(serving, "/srv/snapshot", tokens, 2, "cached")
        found["from_disk_in_page_cache"] = {"trials": rows, "medians": medians(rows)}
        Path("/proc/sys/vm/drop_caches").write_text("1")
        found["from_disk"] = {"trials": restore(serving, "/srv/snapshot", tokens, 1, "disk")}
    except Exception as error:
        found["error"] = str(error)[-3000:]
        save(found)
        raise
    finally:
        clear()
    return found


def save(found: dict[str, Any]) -> None:
    """What is measured so far, for a run that does not reach its end."""
    folder = os.environ.get("FERMATA_PARTIAL")
    if folder:
        Path(folder, "model_server.partial.json").write_text(json.dumps(found, indent=1))


CASES: dict[str, Callable[[Machine], dict[str, Any]]] = {"model_server": model_server}
