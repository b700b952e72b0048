"""Snapshots of containers that compute on the GPU: the whole path, and its failures.

A case gets the machine and returns what it measured; it raises AssertionError when anything is not as it has to be.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holders import Asked
from machine import Machine
from moving import holding, used

PROGRAM = "/tests/holder.py"
MIB = 1 << 20


@contextmanager
def container(machine: Machine, name: str, kind: str, size: float) -> Iterator[tuple[Asked, Path]]:
    """A container that runs a program of programs/holder.py; gone at the end, as are others of its folder."""
    io = machine.share("io", name)
    asked = Asked(io)
    try:
        machine.start(name, io, PROGRAM, kind, "/io", str(size))
        try:
            asked.ready()
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the program said: {machine.output(name)}") from error
        yield asked, io
    finally:
        machine.remove(name)
        shutil.rmtree(io)


def timed(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "fermata.json").read_text())
    return found


def fresh(machine: Machine, name: str) -> Path:
    """Where a case's snapshot goes; what an earlier, failed case left there is gone."""
    path = machine.folder / name
    shutil.rmtree(path, ignore_errors=True)
    return path


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def leftover(machine: Machine, base: int) -> int:
    """MiB on the GPU beyond `base`, once the driver has cleaned up after processes that have just died."""
    until = time.monotonic() + 5
    while (more := (used() - base) // MIB) > 0 and time.monotonic() < until:
        time.sleep(0.1)
    return more


def by_annotation(machine: Machine, kind: str, size: float, *, exits: bool) -> dict[str, Any]:
    """`ctr task checkpoint` into a directory, and a new container with the annotation."""
    base = used()
    name, new = f"{kind}-a", f"{kind}-b"
    snapshot = fresh(machine, f"snapshot-{kind}")
    with container(machine, name, kind, size) as (asked, io):
        before = asked.ask("digest")
        words = ["--exit"] if exits else []
        found: dict[str, Any] = {
            "take_s": timed(
                lambda: machine.node.ctr(
                    "task", "checkpoint", *words, "--image-path", machine.inside(snapshot), name, timeout=300
                )
            )
        }
        if exits:
            found["used_mib_after_take"] = leftover(machine, base)
        else:
            assert asked.ask("digest") == before, "the container that was left running computes something else"
            assert machine.task(name) == "RUNNING"
        machine.remove(name)
        found["used_mib_between"] = leftover(machine, base)
        assert found["used_mib_between"] == 0, found
        found["steps"] = manifest(snapshot)["steps"]
        found["bytes"] = [process["bytes"] for process in manifest(snapshot)["gpu"]["processes"]]
        found["size"] = size_of(snapshot)
        annotations = {"fermata/restore-from": machine.inside(snapshot)}
        try:
            found["restore_s"] = timed(lambda: machine.start(new, io, annotations=annotations))
            found["first_answer_s"] = timed(lambda: check(asked.ask("digest"), before))
        except Exception as error:
            raise AssertionError(f"{error}; {machine.log_of(new)}") from error
        finally:
            machine.remove(new)
    shutil.rmtree(snapshot)
    return found


def check(found: object, expected: object) -> None:
    assert found == expected, f"{found} instead of {expected}"


def by_client(machine: Machine, kind: str, size: float) -> dict[str, Any]:
    """`ctr container checkpoint` and `ctr container restore`, through containerd's own content store."""
    base = used()
    name, new, reference = f"{kind}-c", f"{kind}-d", f"snapshot-of-{kind}"
    with container(machine, name, kind, size) as (asked, _):
        before = asked.ask("digest")
        found: dict[str, Any] = {
            "take_s": timed(lambda: machine.node.ctr("container", "checkpoint", "--task", name, reference, timeout=300))
        }
        assert asked.ask("digest") == before, "the container that was left running computes something else"
        assert machine.task(name) == "RUNNING"
        machine.remove(name)
        found["used_mib_between"] = leftover(machine, base)
        assert found["used_mib_between"] == 0, found
        try:
            found["restore_s"] = timed(
                lambda: machine.node.ctr("container", "restore", "--live", new, reference, timeout=300)
            )
            found["first_answer_s"] = timed(lambda: check(asked.ask("digest"), before))
        except Exception as error:
            raise AssertionError(f"{error}; {machine.log_of(new)}") from error
        finally:
            machine.remove(new)
            machine.node.ctr("image", "remove", reference, check=False)
    return found


def one_exits(machine: Machine) -> dict[str, Any]:
    return by_annotation(machine, "one", 2.0, exits=True)


def one_left_running(machine: Machine) -> dict[str, Any]:
    return by_annotation(machine, "one", 2.0, exits=False)


def four_left_running(machine: Machine) -> dict[str, Any]:
    return by_annotation(machine, "tree", 0.5, exits=False)


def four_exit(machine: Machine) -> dict[str, Any]:
    return by_annotation(machine, "tree", 0.5, exits=True)


def one_through_ctr(machine: Machine) -> dict[str, Any]:
    return by_client(machine, "one", 1.0)


def four_through_ctr(machine: Machine) -> dict[str, Any]:
    return by_client(machine, "tree", 0.25)


def paused_by_client(machine: Machine) -> dict[str, Any]:
    """A paused container is paused after its snapshot was taken, and goes on when it is resumed."""
    snapshot = fresh(machine, "snapshot-paused")
    with container(machine, "paused", "one", 0.5) as (asked, _):
        before = asked.ask("digest")
        machine.node.ctr("task", "pause", "paused")
        machine.node.ctr("task", "checkpoint", "--image-path", machine.inside(snapshot), "paused", timeout=120)
        check(machine.task("paused"), "PAUSED")
        machine.node.ctr("task", "resume", "paused")
        check(asked.ask("digest"), before)
        steps = manifest(snapshot)["steps"]
    shutil.rmtree(snapshot)
    return {"steps": steps}


def park(machine: Machine) -> dict[str, Any]:
    """Parked, the GPU is free; twice is as good as once; resumed by a client, it comes back as well."""
    base = used()
    with container(machine, "parked", "one", 2.0) as (asked, _):
        before = asked.ask("digest")
        said = [machine.node.exec(["fermata", "park", "parked"]).stdout for _ in range(2)]
        check(machine.task("parked"), "PAUSED")
        mib = (used() - base) // MIB
        check(mib, 0)
        said += [machine.node.exec(["fermata", "unpark", "parked"]).stdout for _ in range(2)]
        check(asked.ask("digest"), before)
        said.append(machine.node.exec(["fermata", "park", "parked"]).stdout)
        snapshot = fresh(machine, "snapshot-parked")
        machine.node.ctr("task", "checkpoint", "--image-path", machine.inside(snapshot), "parked", timeout=120)
        check(machine.task("parked"), "PAUSED")
        check((used() - base) // MIB, 0)
        recorded = manifest(snapshot)["gpu"]["processes"]
        machine.node.ctr("task", "resume", "parked")
        check(asked.ask("digest"), before)
        shutil.rmtree(snapshot)
    return {"said": said, "used_mib_while_parked": mib, "recorded": recorded}


def too_full_at_restore(machine: Machine) -> dict[str, Any]:
    """A restore without room says how much is missing and stays parked; `fermata unpark` tries again."""
    snapshot = fresh(machine, "snapshot-full")
    with container(machine, "full-a", "one", 2.0) as (asked, io):
        before = asked.ask("digest")
        machine.node.ctr(
            "task", "checkpoint", "--exit", "--image-path", machine.inside(snapshot), "full-a", timeout=120
        )
        machine.remove("full-a")
        annotations = {"fermata/restore-from": machine.inside(snapshot)}
        try:
            with holding("hog", 1.5):
                try:
                    machine.start("full-b", io, annotations=annotations)
                    raise AssertionError("it was restored without room")
                except Exception as error:
                    sentence = str(error).strip().splitlines()[-1]
                state = machine.task("full-b")
                again = machine.node.exec(["fermata", "unpark", "full-b"], check=False)
            assert "are missing" in sentence, sentence
            assert again.returncode == 1 and "are missing" in again.stderr, again
            said = machine.node.exec(["fermata", "unpark", "full-b"]).stdout
            check(asked.ask("digest"), before)
            running = machine.task("full-b")
        finally:
            machine.remove("full-b")
    shutil.rmtree(snapshot)
    return {"sentence": sentence, "state": state, "said": said, "state_after": running}


def forked_child(machine: Machine) -> dict[str, Any]:
    """Refused by name, and the container computes on."""
    snapshot = fresh(machine, "snapshot-forked")
    with container(machine, "forked", "forked", 0.5) as (asked, _):
        before = asked.ask("digest")
        done = machine.node.ctr(
            "task", "checkpoint", "--image-path", machine.inside(snapshot), "forked", check=False, timeout=120
        )
        assert done.returncode != 0 and "spawn" in done.stderr, done
        assert not (snapshot / "fermata.json").exists()
        check(asked.ask("digest"), before)
        check(machine.task("forked"), "RUNNING")
    return {"sentence": done.stderr.strip()}


def no_gpu_at_restore(machine: Machine) -> dict[str, Any]:
    """A container without a GPU is refused before anything is restored."""
    snapshot = fresh(machine, "snapshot-none")
    with container(machine, "none-a", "one", 0.5) as (_, io):
        machine.node.ctr("task", "checkpoint", "--image-path", machine.inside(snapshot), "none-a", timeout=120)
        words = machine.create_arguments(machine.inside(io))
        at = [index for index, word in enumerate(words) if word == "--device"]
        kept = [word for index, word in enumerate(words) if index not in at and index - 1 not in at]
        annotation = ["--annotation", f"fermata/restore-from={machine.inside(snapshot)}"]
        done = machine.node.ctr("run", "-d", "--null-io", *kept, *annotation, machine.image, "none-b", check=False)
        machine.remove("none-b")
        assert done.returncode != 0 and "this container has none" in done.stderr, done
    shutil.rmtree(snapshot)
    return {"sentence": done.stderr.strip()}


def twenty_cycles(machine: Machine) -> dict[str, Any]:
    """Take, end, restore into a new container, twenty times: nothing grows."""
    rows = []
    base = used()
    snapshot = fresh(machine, "snapshot-cycle")
    with container(machine, "cycle-0", "one", 0.25) as (asked, io):
        before = asked.ask("digest")
        try:
            for turn in range(20):
                name, new = f"cycle-{turn}", f"cycle-{turn + 1}"
                path = machine.inside(snapshot)
                take = timed(
                    lambda name=name, path=path: machine.node.ctr(
                        "task", "checkpoint", "--exit", "--image-path", path, name, timeout=120
                    )
                )
                machine.remove(name)
                free = leftover(machine, base)
                annotations = {"fermata/restore-from": path}
                back = timed(lambda new=new, annotations=annotations: machine.start(new, io, annotations=annotations))
                check(asked.ask("digest"), before)
                pid = machine.pid(new)
                status = Path(f"/proc/{pid}/status").read_text()
                rows.append(
                    {
                        "take_s": round(take, 3),
                        "restore_s": round(back, 3),
                        "snapshot": size_of(snapshot),
                        "gpu_mib_between": free,
                        "gpu_mib": (used() - base) // MIB,
                        "rss_kib": int(status.partition("VmRSS:")[2].split()[0]),
                        "vm_kib": int(status.partition("VmSize:")[2].split()[0]),
                        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                        "threads": int(status.partition("Threads:")[2].split()[0]),
                    }
                )
                shutil.rmtree(snapshot)
        finally:
            for turn in range(1, 21):
                if machine.task(f"cycle-{turn}"):
                    machine.remove(f"cycle-{turn}")
    return {"rows": rows}


CASES: dict[str, Callable[[Machine], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        one_exits,
        one_left_running,
        four_left_running,
        four_exit,
        one_through_ctr,
        four_through_ctr,
        paused_by_client,
        park,
        too_full_at_restore,
        forked_child,
        no_gpu_at_restore,
        twenty_cycles,
    )
}
