"""The steps of a take and a restore, spoken with a real process over its socket."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from pathlib import Path

import pytest

WEIGHTS = """
import hashlib, os, random, threading
import fermata
SIZE = 2 << 20
weights = bytearray(random.Random(1).randbytes(SIZE))
small = bytearray(b"bias" * 25)
fermata.exclude_from_snapshot({"weights": weights, "small": small}, name="model")
def digest():
    with fermata.using():
        return hashlib.sha256(weights + small).hexdigest()
def resident():
    import re
    text = open("/proc/self/smaps_rollup").read()
    return int(re.search(r"^Rss: +([0-9]+)", text, re.M).group(1)) << 10
said = []
fermata.on_prepare(lambda: said.append("prepare"))
fermata.on_restore(lambda: said.append("restore"))
"""
LARGE = WEIGHTS.replace("2 << 20", "40 << 20")


@pytest.mark.parametrize(
    ("write", "read", "direct"),
    [("write", "read", False), ("write", "read", True), ("mmap", "mmap", False)],
    ids=["calls", "direct", "mapped"],
)
def test_weights_are_gone_and_come_back(program, shim, write, read, direct):
    process = program(LARGE)
    before, full = process.ask("digest()"), int(process.ask("resident()"))
    packs, released = shim.take(process, by=write)
    assert [pack["name"] for pack in packs] == ["model"]
    assert released["released"] > (40 << 20) - 8192
    assert released["notes"] == []
    assert int(process.ask("resident()")) < full - (39 << 20)
    assert process.ask("bytes(weights[8192:8200])") == repr(bytes(8))
    answer = shim.restore(process, packs, by=read, direct=direct)
    assert answer["back"] == packs[0]["bytes"], answer
    assert {"alloc", "read", "check", "callbacks", "total"} <= answer["seconds"].keys()
    assert process.ask("digest()") == before
    assert process.ask("said") == "['prepare', 'restore']"


def test_whoever_uses_the_weights_waits_until_they_are_back(program, shim):
    process = program(WEIGHTS)
    before = process.ask("digest()")
    packs, _ = shim.take(process)
    process.tell("digest()")
    shim.restore(process, packs)
    assert process.read() == before


def test_a_take_waits_for_those_who_use_the_weights(program, shim):
    process = program(WEIGHTS)
    process.ask("use = fermata.using()")
    process.ask("use.__enter__()")
    call = process.call()
    call.send({"protocol": 1, "step": "prepare", "seconds": 60})
    assert process.ask("digest()"), "whoever is inside may go in again"
    process.ask("use.__exit__(None, None, None)")
    assert "packs" in call.answer()
    call.close()


def test_the_same_weights_are_asked_for_once(program, shim):
    process = program(WEIGHTS)
    packs, _ = shim.take(process)
    shim.restore(process, packs)
    call = process.call()
    again = shim.prepare(call)
    assert again == packs
    assert shim.write(call, again) == 0
    assert "released" in call.ask({"release": True})
    shim.restore(process, again)


def test_two_programs_with_the_same_weights_share_a_file(program, shim):
    one, two = program(WEIGHTS), program(WEIGHTS)
    before = one.ask("digest()")
    first, _ = shim.take(one)
    second, _ = shim.take(two)
    assert first == second
    assert len(list(shim.store.iterdir())) == 1
    shim.restore(one, first)
    shim.restore(two, second)
    assert one.ask("digest()") == two.ask("digest()") == before


def test_every_registration_is_a_file_of_its_own_with_what_no_other_has(program, shim):
    process = program(WEIGHTS + "fermata.exclude_from_snapshot([bytearray(b'x' * 9000), weights])\n")
    before = process.ask("digest()")
    packs, _ = shim.take(process)
    assert [(pack["name"], pack["bytes"]) for pack in packs] == [("model", (2 << 20) + 4096), ("weights", 12288)]
    assert shim.restore(process, packs)["back"] == (2 << 20) + 4096 + 12288
    assert process.ask("digest()") == before


def test_weights_without_a_name_are_numbered(program, shim):
    process = program("import fermata\nfor _ in range(4): fermata.exclude_from_snapshot(bytearray(9))\n")
    call = process.call()
    assert [pack["name"] for pack in shim.prepare(call)] == ["weights", "weights-2", "weights-3", "weights-4"]
    call.close()


def test_a_program_without_weights_is_prepared_too(program, shim):
    process = program("import fermata\nsaid = []\nfermata.on_prepare(lambda: said.append(1))\n")
    packs, released = shim.take(process)
    assert (packs, released["released"], process.ask("said")) == ([], 0, "[1]")
    assert shim.restore(process, [])["back"] == 0


def test_status_tells_whether_the_program_is_ready_and_the_weights_are_out(program, shim):
    process = program(WEIGHTS)

    def status():
        call = process.call()
        found = call.ask({"protocol": 1, "step": "status"})
        call.close()
        return found

    size = (2 << 20) + 4096
    assert status() == {"ready": False, "out": False, "bytes": size, "packs": 1, "library": "0.1.0"}
    process.ask("fermata.snapshot_ready()")
    assert status()["ready"] is True
    packs, _ = shim.take(process)
    assert status() == {"ready": True, "out": True, "bytes": size, "packs": 1, "library": "0.1.0"}
    shim.restore(process, packs)
    assert status()["out"] is False


def test_registering_twice_is_registering_once(program, shim):
    process = program(WEIGHTS + "again = {'weights': weights}\n")
    for _ in range(2):
        process.ask("fermata.exclude_from_snapshot(again)")
    process.ask("fermata.exclude_from_snapshot(weights)")
    call = process.call()
    assert len(shim.prepare(call)) == 1
    call.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fermata.exclude_from_snapshot(3)", "TypeError('weights is of type int"),
        ("fermata.exclude_from_snapshot(b'x', name='base')", "ValueError('base can only be read"),
        ("fermata.exclude_from_snapshot(bytearray(1), name='a\\n')", "ValueError('name must be"),
    ],
)
def test_what_can_never_work_is_refused_where_it_is_written(program, line, words):
    assert program(WEIGHTS).ask(line).startswith(words)


class TestWhatGoesWrongBeforeTheRelease:
    """The program goes on with its weights, and rebuilds what it gave up."""

    @pytest.fixture
    def process(self, program, until):
        process = program(WEIGHTS)
        before = process.ask("digest()")
        yield process
        assert process.ask("digest()") == before
        assert process.ask("resident() > SIZE") == "True"
        # Nothing holds the buffer any more, so it can grow.
        assert process.ask("weights.append(1)") == "None"

    @staticmethod
    def back(process, until, times=1):
        until(lambda: process.ask("said") == repr(["prepare", "restore"] * times))

    def test_the_shim_goes_after_prepared(self, process, shim, until):
        call = process.call()
        shim.prepare(call)
        call.close()
        self.back(process, until)

    def test_the_shim_goes_after_written(self, process, shim, until):
        call = process.call()
        shim.write(call, shim.prepare(call))
        call.close()
        self.back(process, until)

    def test_the_shim_is_silent_until_the_limit(self, process, shim, until):
        call = process.call()
        shim.prepare(call, seconds=0.5)
        assert "limit" in call.answer()["error"]
        assert call.answer() is None
        self.back(process, until)

    def test_a_callback_fails(self, process, until):
        process.ask("fermata.on_prepare(lambda: 1 / 0)")
        answer = process.call().ask({"protocol": 1, "step": "prepare", "seconds": 60})
        assert "ZeroDivisionError: division by zero" in answer["error"]
        self.back(process, until)

    def test_somebody_uses_the_weights_for_too_long(self, process):
        process.ask("use = fermata.using()")
        process.ask("use.__enter__()")
        answer = process.call().ask({"protocol": 1, "step": "prepare", "seconds": 0.3})
        assert answer == {"error": "1 threads were still using the weights at the limit of this step"}
        process.ask("use.__exit__(None, None, None)")
        assert process.ask("said") == "[]"

    def test_the_weights_are_refused(self, process, until, tmp_path):
        process.ask("import mmap")
        process.ask(f"file = open({str(tmp_path / 'file')!r}, 'wb+')")
        process.ask("file.truncate(8192)")
        process.ask("mapped = mmap.mmap(file.fileno(), 8192)")
        process.ask("fermata.exclude_from_snapshot(mapped)")
        answer = process.call().ask({"protocol": 1, "step": "prepare", "seconds": 60})
        assert "is shared with the file" in answer["error"]
        self.back(process, until)

    def test_the_file_is_too_short(self, process, shim, until):
        call = process.call()
        (pack,) = shim.prepare(call)
        said, descriptors = shim.files([pack])
        os.truncate(shim.path(pack), 4096)
        answer = call.ask({"packs": said}, descriptors)
        assert answer["error"] == f"weights model: the file has 4096 bytes instead of {pack['bytes']}"
        self.back(process, until)

    @pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a small size needs root")
    def test_the_disk_is_full(self, process, shim, until, tmp_path):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "fermata-test", shim.store], check=True)
        try:
            call = process.call()
            said, descriptors = shim.files(shim.prepare(call))
            answer = call.ask({"packs": said}, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        finally:
            subprocess.run(["umount", shim.store], check=True)
        assert "No space left on device" in answer["error"]
        self.back(process, until)

    def test_the_files_are_not_those_asked_for(self, process, shim, until):
        for times, (said, files) in enumerate(
            [
                ([], 0),
                ([{"write": True, "by": "write"}], 0),
                ([{"write": True, "by": "magic"}], 1),
                ([{"write": False}], 2),
                (7, 1),
            ],
            1,
        ):
            call = process.call()
            (pack,) = shim.prepare(call)
            _, descriptors = shim.files([pack, pack, pack])
            answer = call.ask({"packs": said}, descriptors[:files])
            assert answer == {"written": True} if said == [{"write": False}] else "error" in answer
            call.close()
            for descriptor in descriptors:
                os.close(descriptor)
            shim.path(pack).unlink()
            self.back(process, until, times)

    def test_the_shim_speaks_of_something_else(self, process):
        call = process.call()
        assert "speaks protocol 1, not 2" in call.ask({"protocol": 2, "step": "prepare"})["error"]
        assert "knows no step 'dance'" in call.ask({"protocol": 1, "step": "dance"})["error"]
        assert call.ask({"protocol": 1, "step": "restored"})["error"] == "this process has its weights"
        assert call.ask({"protocol": 1, "step": "status"})["out"] is False
        call.close()
        for junk in (b"junk\n", b"[1]\n", b"{", b"\xff\n"):
            call = process.call()
            call.socket.sendall(junk)
            call.socket.shutdown(socket.SHUT_WR)
            assert call.answer() is None
            call.close()
        assert process.ask("said") == "[]"


def test_no_descriptor_and_no_thread_is_left_after_a_take_and_a_restore(program, shim, until):
    process = program(WEIGHTS)

    def counts():
        return (
            len(os.listdir(f"/proc/{process.pid}/fd")),
            len(os.listdir(f"/proc/{process.pid}/task")),
            [line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines() if str(shim.store) in line],
        )

    before = counts()
    # A thread that was joined is in the kernel's list for a moment more.
    packs, _ = shim.take(process, by="mmap")
    until(lambda: counts() == before)
    shim.restore(process, packs, by="mmap")
    until(lambda: counts() == before)


class TestWhatGoesWrongAfterTheRelease:
    """The program ends, with its reason: it never goes on without its weights."""

    @staticmethod
    def ended(process, words):
        status, said = process.ends()
        assert status == 70
        assert said.startswith("fermata: the weights of this process ")
        assert words in said, said

    def test_one_bit_is_another(self, program, shim):
        process = program(WEIGHTS)
        packs, _ = shim.take(process)
        with shim.path(packs[0]).open("r+b") as file:
            file.seek(1 << 20)
            byte = file.read(1)[0]
            file.seek(1 << 20)
            file.write(bytes([byte ^ 4]))
        answer = shim.restore(process, packs)
        assert "weights model: the file is damaged: chunk 0" in answer["error"]
        self.ended(process, answer["error"])

    def test_the_file_is_too_short(self, program, shim):
        process = program(WEIGHTS)
        packs, _ = shim.take(process)
        os.truncate(shim.path(packs[0]), 1 << 20)
        assert f"has {1 << 20} bytes instead of" in shim.restore(process, packs)["error"]
        self.ended(process, "instead of")

    def test_a_file_is_missing(self, program, shim):
        process = program(WEIGHTS)
        packs, _ = shim.take(process)
        assert f"({packs[0]['digest']}) was not handed over" in shim.restore(process, [])["error"]
        self.ended(process, "was not handed over")

    def test_the_shim_goes_before_the_end(self, program, shim):
        process = program(WEIGHTS)
        packs, _ = shim.take(process)
        call = process.call()
        descriptor = os.open(shim.path(packs[0]), os.O_RDONLY)
        said = [{"digest": packs[0]["digest"], "by": "read", "direct": False}]
        message = {"protocol": 1, "step": "restored", "seconds": 60, "new": True, "packs": said}
        assert call.ask(message, (descriptor,)) == {"armed": True}
        os.close(descriptor)
        call.close()
        self.ended(process, "gave up")

    def test_the_gpu_does_not_come_back_in_time(self, program, shim):
        process = program("import fermata\n")
        process.ask("fermata.snapshot_ready()")
        shim.take(process)
        call = process.call()
        message = {"protocol": 1, "step": "restored", "seconds": 0.3, "new": True, "packs": []}
        assert call.ask(message) == {"armed": True}
        self.ended(process, "limit")

    def test_the_reason_reaches_a_shim_that_speaks_at_the_same_time(self, program, shim):
        process = program(WEIGHTS)
        packs, _ = shim.take(process)
        shim.path(packs[0]).write_bytes(bytes(packs[0]["bytes"]))
        call = process.call()
        descriptor = os.open(shim.path(packs[0]), os.O_RDONLY)
        said = [{"digest": packs[0]["digest"], "by": "read", "direct": False}]
        message = {"protocol": 1, "step": "restored", "seconds": 60, "new": True, "packs": said}
        assert call.ask(message, (descriptor,)) == {"armed": True}
        os.close(descriptor)
        call.socket.recv(1, socket.MSG_PEEK)  # the error is there
        assert "is damaged" in call.ask({"go": True})["error"]
        call.close()
        self.ended(process, "is damaged")

    def test_a_callback_fails(self, program, shim):
        process = program(WEIGHTS + "fermata.on_restore(lambda: {}['socket'])\n")
        packs, _ = shim.take(process)
        assert "KeyError: 'socket'" in shim.restore(process, packs)["error"]
        status, said = process.ends()
        assert status == 70
        assert "KeyError" in said

    def test_nobody_comes(self, program, shim):
        process = program(WEIGHTS)
        shim.take(process, silence=2)
        self.ended(process, "(model) are not in its snapshot, and nobody has brought them back for 2 s")

    def test_other_steps_change_nothing(self, program, shim):
        process = program(WEIGHTS)
        before = process.ask("digest()")
        packs, _ = shim.take(process)
        call = process.call()
        assert call.ask({"protocol": 1, "step": "prepare"})["error"] == "the weights are out already"
        assert "protocol" in call.ask({"protocol": 9, "step": "restored", "packs": []})["error"]
        call.close()
        assert shim.restore(process, packs)["back"]
        assert process.ask("digest()") == before


FORK = """
def forked(line):
    "The answer of a child that evaluates the line."
    come, go = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = str(eval(line))
        except Exception as error:
            said = repr(error)
        os.write(go, said.encode())
        os._exit(0)
    os.close(go)
    with open(come) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said
def listens():
    fermata.snapshot_ready()
    return f"{os.getpid()}.sock" in os.listdir(os.environ["FERMATA_GUEST_DIRECTORY"])
def registered():
    from fermata import guest
    return len(guest.current().registrations)
"""


def test_a_fork_has_the_weights_and_none_of_the_registrations(program, shim):
    process = program(WEIGHTS + FORK)
    before = process.ask("digest()")
    assert process.ask("forked('digest()')") == repr(before.strip("'"))
    assert process.ask("forked('registered()')") == "'0'"
    assert process.ask("forked('listens()')") == "'True'"
    packs, _ = shim.take(process)
    shim.restore(process, packs)
    assert process.ask("digest()") == before


def test_a_fork_while_the_weights_are_away_is_told_that_it_has_none(program, shim):
    process = program(WEIGHTS + FORK)
    packs, _ = shim.take(process)
    assert "this process was forked while" in process.ask("forked('digest()')")
    shim.restore(process, packs)


def test_a_fork_inside_the_gate_does_not_keep_it_shut(program, shim):
    process = program(WEIGHTS + FORK)
    process.ask("use = fermata.using()")
    process.ask("use.__enter__()")
    assert process.ask("forked('(use.__exit__(None, None, None), fermata.using().close(1e9))')") == "'(None, 0)'"
    process.ask("use.__exit__(None, None, None)")
    packs, _ = shim.take(process)
    shim.restore(process, packs)


def test_the_socket_of_an_earlier_process_is_replaced(program, shim):
    process = program("import os, socket, fermata\nold = socket.socket(socket.AF_UNIX)\n")
    process.ask("old.bind(os.environ['FERMATA_GUEST_DIRECTORY'] + f'/{os.getpid()}.sock')")
    process.ask("fermata.snapshot_ready()")
    assert process.call().ask({"protocol": 1, "step": "status"})["ready"] is True
    path = process.directory / f"{process.pid}.sock"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def torch_process(lasting_program):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return lasting_program(TestModules.TEXT)


class TestModules:
    """A torch module's forward is inside the gate on its own."""

    TEXT = """
import copy, hashlib, pickle, threading, torch, fermata
torch.manual_seed(1)
torch.set_num_threads(1)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(256, 256)
        self.entered, self.go = [], []
    def forward(self, x, depth=0):
        for one in self.entered: one.set()
        for one in self.go: one.wait()
        if depth: return self(x, depth - 1)
        if x.shape[-1] == 3: raise ValueError("three")
        return self.inner(x)
model = Model()
fermata.exclude_from_snapshot(model)
fermata.exclude_from_snapshot(model)
def answer(depth=0):
    with torch.inference_mode():
        return float(model(torch.ones(256), depth).double().sum())
found = []
def begin():
    model.entered, model.go = [threading.Event()], [threading.Event()]
    thread = threading.Thread(target=lambda: found.append(answer(3)))
    thread.start()
    model.entered[0].wait()
"""

    @pytest.fixture
    def process(self, torch_process):
        return torch_process

    def test_answers_are_the_same_after_a_restore(self, process, shim):
        before = process.ask("answer()")
        packs, released = shim.take(process)
        assert packs[0]["name"] == "Model"
        assert released["released"] > 256 * 256 * 4 - 8192
        process.tell("answer()")
        shim.restore(process, packs)
        assert process.read() == before

    def test_a_take_waits_for_a_forward_that_calls_itself(self, process, shim):
        before = process.ask("answer()")
        process.ask("begin()")
        call = process.call()
        call.send({"protocol": 1, "step": "prepare", "seconds": 60})
        process.ask("model.go[0].set()")
        packs = call.answer()["packs"]
        assert process.ask("found") == f"[{before}]"
        process.ask("model.entered.clear()")
        process.ask("model.go.clear()")
        shim.write(call, packs)
        assert "released" in call.ask({"release": True})
        shim.restore(process, packs)
        assert process.ask("answer(2)") == before

    def test_a_forward_that_raises_has_left(self, process, shim):
        assert "three" in process.ask("model(torch.ones(3))")
        call = process.call()
        assert shim.prepare(call)
        call.close()

    def test_a_model_can_still_be_copied_and_pickled(self, process):
        assert process.ask("copy.deepcopy(model.inner) is model.inner") == "False"
        assert process.ask("float(copy.deepcopy(model)(torch.ones(256)).double().sum())") == process.ask("answer()")
        loaded = "float(pickle.loads(pickle.dumps(model))(torch.ones(256)).double().sum())"
        assert process.ask(loaded) == process.ask("answer()")


def test_the_sockets_of_processes_that_have_ended_are_removed(program, shim):
    first = program(WEIGHTS)
    dead = subprocess.Popen(["true"])
    dead.wait()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{first.directory}/{dead.pid}.sock")
    second = program(WEIGHTS)
    assert {path.name for path in first.directory.iterdir()} == {f"{one.pid}.sock" for one in (first, second)}
