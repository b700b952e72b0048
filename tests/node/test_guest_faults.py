"""A fault at every step of the weights' way out of a snapshot and back, listed from the code (`tests/node/points.py`).

Where a step of a take fails, the weights are in the snapshot, or the take fails; the program goes on with its weights.
Who is killed, what vanishes, and whoever goes away: a program never serves without its weights, its container's end is
told, the same works the next time, and no draft, lock, reference, mount or process stays. `make torture` meets all
steps, half of them on each of the two stacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading

import pytest

from node.containers import CTR, IMAGE, OURS, pid, remove, start, status, wait_for
from node.leftovers import clear, leftovers
from node.shims import CallFailed, Shim
from shim.errors import ShimError
from tests.node.guests import MOUNT, STORE, answers, serve, shared
from tests.node.points import OF_WEIGHTS, Points, named, steps, touches
from tests.node.test_faults import TICK, strike
from tests.node.test_steps import half

TORTURE = "FERMATA_TORTURE" in os.environ
torture = pytest.mark.skipif(not TORTURE, reason="only in make torture")
SIZE = 5 << 20
TAKEN, AGAIN = "/srv/taken", "/srv/again"

# What cannot fail for want of space, descriptors or rights, besides what tests/node/points.py says.
WITHIN = re.compile(
    r"\.append\(|\.add\(|set\(\)|Held\(\)|Tree\(|Returning\(|Restoring\(|close\(|_close_drafts|hang_up|let_go|handed_over"
    r"|c_uint64|c_char_p|basename|rounded|dict\(|list\(|urandom|reference\(self|_timed\(|work\(until\)|self\._prepare"
    r"|self\._give_back|_take_out|between\(\)|_stay_inside|_ATTEMPTS|_AT_ONCE|_MOST|return \{'outcome'"
)
# Steps that no test here comes to, and where they are met: by words of theirs.
ELSEWHERE = (
    "_pause_again",  # of a container that was paused: test_guest.py
    "self._tree.resume()",
    "owe(self._container.state",  # that was parked: tests/unit/shim/test_guest.py
    "a program ended before it had",
    "for note in answer",
    "of a program",
    "O_DIRECT",  # read = "direct": test_guest.py
)


@pytest.fixture(scope="module")
def model(running_node):
    with shared(running_node, SIZE) as path:
        yield path


@pytest.fixture(scope="module")
def stopping(running_node):
    made = Points(running_node, OF_WEIGHTS)
    yield made
    made.close()


@pytest.fixture
def points(node, stopping, model):
    stopping.renew()
    yield stopping
    stopping.go_on()
    clear(node)
    node.exec(["sh", "-c", f"rm -rf {STORE} {STORE}.away {TAKEN} {AGAIN}"])


def step(function, words):
    return named(function, words, OF_WEIGHTS)


def fails(name):
    return touches(name) and not WITHIN.search(name)


def take(node, directory=TAKEN, *, leave_running=True, timeout=40):
    """What it was refused with; None when it succeeded."""
    try:
        Shim(node, "one").checkpoint(directory, leave_running=leave_running, timeout=timeout)
    except (CallFailed, ShimError) as error:
        return str(error)
    return None


def taking(node, *, leave_running=True):
    """A take in a thread, and the list that gets what it was refused with."""
    said = []
    thread = threading.Thread(target=lambda: said.append(take(node, leave_running=leave_running)))
    thread.start()
    return thread, said


def restore(node, name="two", source=TAKEN):
    words = ("--runtime", OURS, "--annotation", f"fermata/restore-from={source}", *MOUNT)
    return node.ctr("run", "--detach", *words, IMAGE, name, "true", check=False, timeout=90)


def record(node, directory=TAKEN):
    """What the snapshot says of its weights; None without one."""
    path = node.path(f"{directory}/fermata.json")
    return json.loads(path.read_text())["guest"] if path.exists() else None


def tidy(node):
    """The store after `fermata prune`, which has nothing to complain about: packs, references and locks; no draft."""
    done = node.exec(["fermata", "prune"], check=False)
    assert (done.returncode, done.stderr) == (0, "")
    store = node.path(STORE)
    files = sorted(path.relative_to(store) for path in store.rglob("*") if not path.is_dir())
    packs = {path.name.removesuffix(".weights") for path in files if path.suffix == ".weights"}
    for path in files:
        assert path.name.removesuffix(".weights") in packs or path.parts[0] == "refs", path
        assert path.parts[0] != "refs" or (path.parts[1] in packs and path.name[0] != "."), path
    return packs


def forget(node, directory):
    """A snapshot goes, and the weights that nobody else needs."""
    if node.path(f"{directory}/fermata.json").exists():
        node.exec(["fermata", "rm", directory])
    node.exec(["rm", "-rf", directory])
    assert tidy(node) == set()


def works(node, first):
    """A take that ends the container, and its restore, as ever."""
    assert take(node, AGAIN, leave_running=False) is None
    assert record(node, AGAIN)["outcome"] == "out"
    remove(node, "one")
    comes_back(node, first, AGAIN)
    forget(node, AGAIN)


def comes_back(node, first, source=TAKEN):
    done = restore(node, source=source)
    assert done.returncode == 0, done.stderr
    assert answers(node, "two")["answer"] == first["answer"]
    remove(node, "two")


def given_up(node, name):
    wait_for(lambda: status(node, name) is None, "the container to be given up")
    node.ctr("containers", "delete", name)
    assert leftovers(node) == []


def ends_without(node, name):
    """The program ends, without its weights, with the library's status."""
    wait_for(lambda: status(node, name) == "STOPPED", "its end", 10)
    said = node.ctr("tasks", "delete", name, check=False)
    assert said.returncode == 70 or "exit code 70" in said.stderr
    node.ctr("containers", "delete", name)


# Which steps there are ------------------------------------------------------------------------------------------------


@torture
def test_every_step_of_the_weights_way_is_met_here(node, points):
    serve(node, "one")
    assert take(node) is None
    assert take(node, AGAIN) is None
    node.exec(["fermata", "rm", TAKEN, AGAIN])
    seen = set(points.seen())
    for function, words in (MOMENTS["while it writes"], MOMENTS["before its release"]):
        points.plan(step(function, words), "fail")
        assert take(node) is None
        assert record(node)["outcome"] == "inside"
        seen.update(points.seen())
        forget(node, TAKEN)
    points.plan(step("guest.Returning._send", "self._files.open("), "fail")
    assert "could not be given back" in take(node)
    seen.update(points.seen())
    ends_without(node, "one")
    forget(node, TAKEN)
    serve(node, "one")
    assert take(node) is None
    seen.update(points.seen())
    assert restore(node).returncode == 0
    seen.update(points.seen())
    remove(node, "one")
    start(node, "one", "python3", "-c", TICK, options=("--annotation", "fermata/guest=on"))
    assert take(node, f"{AGAIN}/none") is None
    seen.update(points.seen())
    missed = [name for name in steps(OF_WEIGHTS) if name not in seen and not any(word in name for word in ELSEWHERE)]
    assert missed == [], "\n".join(missed)


# A step fails ---------------------------------------------------------------------------------------------------------


@torture
def test_a_step_of_a_take_that_fails_leaves_the_program_its_weights(node, points):
    first = serve(node, "one")
    assert take(node) is None
    met = [name for name in points.seen() if fails(name)]
    forget(node, TAKEN)
    lost = []
    for name in half(node, met):
        points.plan(name, "fail")
        said = take(node)
        assert points.reached, name
        assert said is None or "a fault in fermata itself" not in said, (name, said)
        points.go_on()
        # One that was not heard to say that it has them back has them.
        if said is not None and "could not be given back" in said and "expect('back'" not in name:
            ends_without(node, "one")
            lost.append(name)
            serve(node, "one")
        else:
            assert answers(node, "one")["answer"] == first["answer"], (name, said)
        if said is None:
            comes_back(node, first)
        forget(node, TAKEN)
    assert all(
        name.startswith(("guest.Returning", "guest.Taking._give_back", "weights.Files.open")) for name in lost
    ), lost
    works(node, first)


@torture
def test_a_step_of_a_restore_that_fails_leaves_nothing(node, points):
    first = serve(node, "one")
    assert take(node, leave_running=False) is None
    remove(node, "one")
    points.seen()
    comes_back(node, first)
    for name in half(node, [name for name in points.seen() if fails(name)]):
        points.plan(name, "fail")
        done = restore(node)
        assert points.reached, name
        assert "a fault in fermata itself" not in done.stderr, (name, done.stderr)
        points.go_on()
        if done.returncode == 0:
            assert answers(node, "two")["answer"] == first["answer"], name
        else:
            assert status(node, "two") in (None, "STOPPED"), (name, done.stderr)
        clear(node)
        assert leftovers(node) == [], name
        assert len(tidy(node)) == 1, name
    comes_back(node, first)


# The daemon dies ------------------------------------------------------------------------------------------------------


@torture
@pytest.mark.parametrize("leave", [True, False])
def test_the_daemon_dies_at_a_step_of_a_take(node, points, leave):
    first = serve(node, "one")
    points.seen()
    assert take(node, leave_running=leave) is None
    met = points.seen()[leave::2]
    remove(node, "one")
    forget(node, TAKEN)
    for name in half(node, met):
        serve(node, "one")
        points.plan(name, "die")
        assert take(node, leave_running=leave) is not None, name
        assert points.reached, name
        points.go_on()
        given_up(node, "one")
        tidy(node)
        if record(node) is not None:  # then it is whole
            comes_back(node, first)
        forget(node, TAKEN)


MOMENTS = {
    "before it is prepared": ("guest.Taking._prepare", "send("),
    "while it writes": ("guest.Taking._write", "expect('written'"),
    "before its release": ("guest.Taking._release", "send("),
    "before CRIU": ("guest.Taking.dump", "response = dump()"),
    "before they are back": ("guest.Returning.go", "expect('armed'"),
}


@torture
def test_the_daemon_dies_while_the_weights_are_written(node, points):
    first = serve(node, "one")
    points.plan(step(*MOMENTS["while it writes"]), "die")
    assert take(node) is not None
    assert points.reached
    points.go_on()
    given_up(node, "one")
    assert record(node) is None
    forget(node, TAKEN)
    serve(node, "one")
    works(node, first)


@torture
def test_the_daemon_dies_at_a_step_of_a_restore(node, points):
    first = serve(node, "one")
    assert take(node, leave_running=False) is None
    remove(node, "one")
    points.seen()
    comes_back(node, first)
    for name in half(node, points.seen()):
        points.plan(name, "die")
        done = restore(node)
        assert points.reached, name
        assert done.returncode != 0 or status(node, "two") in (None, "UNKNOWN"), name
        points.go_on()
        wait_for(lambda: status(node, "two") is None, "the container to be given up")
        clear(node)
        assert leftovers(node) == [], name
        assert len(tidy(node)) == 1, name
    comes_back(node, first)


# Others die -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS if TORTURE else ("before its release",))
def test_the_program_is_killed_in_a_take(node, points, moment):
    first = serve(node, "one")
    points.plan(step(*MOMENTS[moment]), "wait")
    thread, said = taking(node)
    wait_for(lambda: points.reached, moment)
    os.kill(pid(node, "one"), signal.SIGKILL)
    wait_for(lambda: status(node, "one") in ("STOPPED", None), "its end")
    points.go_on()
    thread.join(60)
    assert not thread.is_alive(), "the take hangs"
    # Killed after the dump, it is in the snapshot all the same.
    assert (said[0] is None or "is complete, but" in said[0]) == (record(node) is not None)
    assert said[0] is None or "a fault in fermata itself" not in said[0]
    assert status(node, "one") == "STOPPED"
    deleted = node.ctr("tasks", "delete", "one", check=False)
    assert deleted.returncode == 137 or "exit code 137" in deleted.stderr
    node.ctr("containers", "delete", "one")
    if record(node) is not None:
        comes_back(node, first)
    forget(node, TAKEN)
    assert leftovers(node) == []
    serve(node, "one")
    works(node, first)


@torture
@pytest.mark.parametrize("leave", [True, False])
def test_criu_is_killed_while_the_weights_are_away(node, points, leave):
    """The container ends or goes on, with its weights."""
    first = serve(node, "one")
    hook = node.path("/usr/local/lib/fermata/shim/hook.sh")
    text = hook.read_text()
    waits = "touch /srv/hooked; while [ -e /srv/hooked ]; do sleep 0.02; done\n"
    hook.write_text(text.replace("#!/bin/sh\n", f"#!/bin/sh\n{waits}", 1))
    try:
        thread, said = taking(node, leave_running=leave)
        wait_for(node.path("/srv/hooked").exists, "CRIU")
        strike(node, "criu")
    finally:
        hook.write_text(text)
        node.path("/srv/hooked").unlink(missing_ok=True)
    thread.join(60)
    assert not thread.is_alive(), "the take hangs"
    assert said[0] is not None and "a fault in fermata itself" not in said[0]
    assert record(node) is None
    if status(node, "one") == "RUNNING":
        assert answers(node, "one")["answer"] == first["answer"]
    else:
        assert status(node, "one") == "STOPPED"
        remove(node, "one")
        serve(node, "one")
    forget(node, TAKEN)
    works(node, first)


AWAY = ("while it writes", "before its release", "before CRIU", "before they are back")


@pytest.mark.parametrize("moment", AWAY if TORTURE else ("before CRIU",))
def test_the_store_vanishes_in_a_take(node, points, moment):
    """It is unmounted, say, or another directory by now."""
    first = serve(node, "one")
    points.plan(step(*MOMENTS[moment]), "wait")
    thread, said = taking(node)
    wait_for(lambda: points.reached, moment)
    node.exec(["mv", STORE, f"{STORE}.away"])
    points.go_on()
    thread.join(60)
    assert not thread.is_alive(), "the take hangs"
    assert said[0] is None or "a fault in fermata itself" not in said[0]
    # What is open stays what it is: the program has its weights back.
    assert answers(node, "one")["answer"] == first["answer"]
    remove(node, "one")
    assert leftovers(node) == []
    found = record(node)
    if found is not None and found["outcome"] == "out":
        done = restore(node)
        assert done.returncode != 0
        assert "if a file system with weights belongs there, mount it" in done.stderr
        clear(node)
    else:
        assert found is not None or "was it unmounted or emptied?" in said[0]
    node.exec(["sh", "-c", f"rm -rf {STORE}; mv {STORE}.away {STORE}"])
    if found is not None:
        comes_back(node, first)
    forget(node, TAKEN)
    serve(node, "one")
    works(node, first)


@torture
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_client_goes_in_a_take(node, points, moment):
    """The take goes on to its end without it."""
    first = serve(node, "one")
    points.plan(step(*MOMENTS[moment]), "wait")
    client = node.popen(["fermata", "checkpoint", "one", TAKEN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: points.reached, moment)
    client.kill()
    client.wait()
    points.go_on()
    wait_for(lambda: record(node), "the snapshot")
    assert answers(node, "one")["answer"] == first["answer"]
    comes_back(node, first)
    remove(node, "one")
    forget(node, TAKEN)
    serve(node, "one")
    works(node, first)


# A restore ------------------------------------------------------------------------------------------------------------


def restoring(node):
    command = ("run", "-d", "--runtime", OURS, "--annotation", f"fermata/restore-from={TAKEN}", *MOUNT, IMAGE, "two")
    return node.popen([*CTR, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@torture
def test_a_file_of_the_store_that_is_removed_while_its_weights_come_back_is_open(node, points):
    first = serve(node, "one")
    assert take(node, leave_running=False) is None
    remove(node, "one")
    points.plan(step("guest.Returning._send", "self._files.open("), "wait")
    client = restoring(node)
    wait_for(lambda: points.reached, "the restore")
    node.exec(["rm", "-r", STORE])
    points.go_on()
    assert client.wait(60) == 0
    assert answers(node, "two")["answer"] == first["answer"]


@torture
@pytest.mark.parametrize("damage", ["truncate -s 4096", "dd conv=notrunc bs=1 count=1 seek=9 if=/dev/zero of="])
def test_a_file_of_the_store_is_damaged_while_its_weights_come_back(node, points, damage):
    """After the check, when nothing but the program itself can see it."""
    first = serve(node, "one")
    assert take(node, leave_running=False) is None
    remove(node, "one")
    (file,) = node.path(STORE).glob("*.weights")
    kept = file.read_bytes()
    points.plan(step("guest.Returning._send", "self._files.open("), "wait")
    client = restoring(node)
    wait_for(lambda: points.reached, "the restore")
    name = f"{STORE}/{file.name}"
    node.exec(["sh", "-c", f"{damage}{name}" if damage.endswith("=") else f"{damage} {name}"])
    points.go_on()
    said = client.communicate(timeout=60)[0].decode()
    assert client.returncode != 0
    assert f"restore of {TAKEN} failed: " in said and "a fault in fermata itself" not in said, said
    assert status(node, "two") in (None, "STOPPED")
    clear(node)
    assert leftovers(node) == []
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    file.touch(0o600)
    file.write_bytes(kept)
    comes_back(node, first)
    forget(node, TAKEN)


# A record that was edited ---------------------------------------------------------------------------------------------


def of_pid(pid):
    return lambda record: record["processes"][0].update(pid=pid)


def of_another(record):
    """Other weights, which the store has: a file that is right in all but what is in it."""
    record["processes"][0]["packs"][0]["digest"] = f"sha256:{'a' * 64}"


EDITED = {
    "inside": (lambda record: record.update(outcome="inside"), "process 1 of the container is without its weights"),
    "nobody's": (lambda record: record.update(processes=[]), "process 1 of the container is without its weights"),
    "another process": (of_pid(2), "process 2 of the container does not listen"),
    "one more": (
        lambda record: record["processes"].append({"pid": 7, "packs": []}),
        "process 7 of the container does not",
    ),
    "no pack": (lambda record: record["processes"][0].update(packs=[]), "process 1 of the container: "),
    "another digest": (of_another, "process 1 of the container: "),
    "unknown outcome": (lambda record: record.update(outcome="x"), "guest.outcome is not one of out, inside and none"),
    "below zero": (of_pid(-1), "guest.processes[0].pid is out of range"),
}
# What a restore does not go by.
UNCHANGED = {
    "seconds": lambda record: record.update(seconds={}),
    "unknown": lambda record: record.update(unknown=[{}]),
    "token": lambda record: record.update(token="\n\u202e/.."),
}


@pytest.mark.parametrize("kinds", [(*EDITED, *UNCHANGED)] if TORTURE else [("inside", "another digest")])
def test_a_record_of_weights_that_was_edited_costs_no_more_than_the_restore(node, points, kinds):
    first = serve(node, "one")
    assert take(node, leave_running=False) is None
    remove(node, "one")
    (file,) = node.path(STORE).glob("*.weights")
    other = file.with_name(f"{'a' * 64}.weights")
    other.touch(0o600)
    other.write_bytes(os.urandom(SIZE))
    path = node.path(f"{TAKEN}/fermata.json")
    text = path.read_text()
    for kind in kinds:
        edit, words = EDITED[kind] if kind in EDITED else (UNCHANGED[kind], "")
        data = json.loads(text)
        edit(data["guest"])
        path.write_text(json.dumps(data))
        done = restore(node)
        if kind in UNCHANGED:
            assert done.returncode == 0, (kind, done.stderr)
            assert answers(node, "two")["answer"] == first["answer"], kind
        else:
            assert done.returncode != 0, kind
            assert words in done.stderr and "a fault in fermata itself" not in done.stderr, (kind, done.stderr)
            assert status(node, "two") in (None, "STOPPED"), kind
        clear(node)
        assert leftovers(node) == [], kind
    path.write_text(text)
    comes_back(node, first)
    other.unlink(missing_ok=True)
    forget(node, TAKEN)
