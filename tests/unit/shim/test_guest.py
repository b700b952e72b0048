"""The channel to programs that keep weights out of snapshots, and the steps of a take and a restore through it."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from node.stack import PROJECT
from shim import guest, weights
from shim.config import Config
from shim.errors import ShimError
from shim.state import State
from shim.task import StateResponse
from shim.ttrpc import Response

from .programs import CHUNK, Program, described, hex_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to hand over files takes a mount, which takes root")

MODEL = os.urandom(CHUNK * 2 + 5000)


class Container:
    """A container of the shim, without one: its root is a directory."""

    def __init__(self, path, name="box"):
        self.root = path / name
        self.sockets = self.root / "run/fermata"
        self.sockets.mkdir(parents=True)
        self.state = State("default", name, run=str(path / "state"), logs=str(path / "log"))
        self.paused = False
        self.calls = []

    def call(self, method, payload):
        self.calls.append(method)
        if method == "State":
            return StateResponse(status=4 if self.paused else 2, pid=1).encode()
        self.paused = method == "Pause"
        return b""


class Takes:
    """Takes of one container."""

    def __init__(self, container, store):
        self.container = container
        self.config = Config()
        self.config.weights_directory = str(store)
        self.config.weights_timeout = 20
        self.logged = []
        self.number = 0

    def log(self, level, message, **fields):
        self.logged.append((level, message, fields))

    def take(self, *, exits=False, during=None, fails=False, dumped=None):
        """One take; its directory gets a fermata.json with the record unless it fails."""
        self.number += 1
        self.directory = self.container.root.parent / f"snapshot-{self.container.state.id}-{self.number}"
        self.directory.mkdir()
        taking = guest.Taking(self.container, self.container.call, self.config, self.log, str(self.directory))

        def dump():
            if during:
                during()
            for pid in dumped if dumped is not None else [process.pid for process in taking._processes]:
                (self.directory / f"mm-{pid}.img").touch()
            return Response.failure(2, "criu failed") if fails else Response()

        with taking:
            response = taking.dump(dump, exits=exits)
            if response.ok:
                data = {"version": {"major": 1}, "guest": taking.record()}
                (self.directory / "fermata.json").write_text(json.dumps(data))
            self.taking = taking
            self.response = taking.checked(response)
        return data["guest"] if response.ok else None

    @property
    def store(self):
        return weights.Store(self.config.weights_directory)


@pytest.fixture
def box(tmp_path, monkeypatch):
    made = Container(tmp_path)
    monkeypatch.setattr(guest, "root_of", lambda name, call: str(made.root))
    return made


@pytest.fixture
def takes(box, tmp_path):
    return Takes(box, tmp_path / "store")


@pytest.fixture
def program(box):
    made = []

    def start(pid=1, data=MODEL, **fails):
        made.append(Program(box.sockets, pid, data, **fails))
        return made[-1]

    yield start
    for one in made:
        one.close()


def inside(takes, outcome="inside"):
    """Take, and the reason why the weights are in the snapshot; nothing of them is in the store."""
    record = takes.take()
    assert (record["outcome"], record["processes"]) == (outcome, [])
    assert [(level, fields["reason"]) for level, _, fields in takes.logged] == [("error", record["reason"])]
    if os.path.isdir(takes.config.weights_directory):
        assert takes.store.digests() == []
        assert list(takes.store.drafts()) == []
    return record["reason"]


# A take ---------------------------------------------------------------------------------------------------------------


def test_weights_are_out_during_the_dump_and_back_after_it(takes, program):
    one = program()
    record = takes.take(during=lambda: one.steps.append("dump"))
    assert one.steps == ["prepare", "write", "release", "dump", "armed", "back"]
    assert one.got == MODEL
    assert one.new is False
    assert record["outcome"] == "out"
    packs = [{"name": "model", "digest": described(MODEL)["digest"], "bytes": len(MODEL)}]
    assert record["processes"] == [{"pid": 1, "packs": packs}]
    assert set(record["seconds"]) == {"prepare", "write", "release", "back"}
    assert takes.store.digests() == [hex_of(MODEL)]
    with open(takes.store.path(hex_of(MODEL)), "rb") as file:
        assert file.read()[: len(MODEL)] == MODEL
    assert list(takes.store.references(hex_of(MODEL)).values()) == [str(takes.directory)]


def test_what_a_program_notes_cannot_change_a_terminal(takes, program):
    program()
    takes.take()
    notes = [fields["note"] for _, _, fields in takes.logged if "note" in fields]
    assert notes == ["trimmed [31m"]


def test_a_program_that_notes_without_end_fills_no_log(takes, program):
    program(release=json.dumps({"released": 1, "notes": ["x"] * 1000}).encode() + b"\n")
    takes.take()
    assert 1 <= sum(message == "of a program" for _, message, _ in takes.logged) <= 30


def test_a_container_that_is_parked_in_its_take_has_its_weights_back_once_it_goes_on(takes, box, program):
    """Its GPU had no room for its state any more: it is frozen, and takes nothing."""
    one = program()

    def park():
        box.paused = True

    box.state.create()
    takes.take(during=park, fails=True)
    assert one.steps == ["prepare", "write", "release"]
    assert takes.store.prune(hex_of(MODEL), packed=True).outcome == "kept"
    box.paused = False
    guest.pay(box.state, str(box.root), takes.config)
    assert one.got == MODEL
    assert takes.store.prune(hex_of(MODEL), packed=False).outcome == "removed"
    one.steps.clear()
    guest.pay(box.state, str(box.root), takes.config)
    assert one.steps == []


def test_a_take_that_ends_the_container_gives_nothing_back(takes, program):
    one = program()
    takes.take(exits=True)
    assert one.steps == ["prepare", "write", "release"]
    assert takes.store.digests() == [hex_of(MODEL)]


def test_the_same_weights_are_written_once(takes, program):
    one = program()
    takes.take()
    before = os.stat(takes.store.path(hex_of(MODEL)))
    takes.take()
    assert one.written == [False]
    assert os.stat(takes.store.path(hex_of(MODEL))).st_ino == before.st_ino
    assert len(takes.store.references(hex_of(MODEL))) == 2


def test_two_programs_of_one_container_with_the_same_weights_write_them_once(takes, program):
    two = [program(1), program(2)]
    record = takes.take()
    assert sorted([*two[0].written, *two[1].written]) == [False, True]
    assert [one.got for one in two] == [MODEL, MODEL]
    assert [process["pid"] for process in record["processes"]] == [1, 2]


def test_weights_in_the_store_that_are_not_right_any_more_are_written_again(takes, program):
    one = program()
    takes.take()
    with open(takes.store.path(hex_of(MODEL)), "r+b") as file:
        file.seek(CHUNK + 7)
        file.write(b"!")
    takes.take()
    assert one.written == [True]
    with open(takes.store.path(hex_of(MODEL)), "rb") as file:
        assert file.read()[: len(MODEL)] == MODEL


def test_a_paused_container_is_resumed_for_the_take_and_paused_again(takes, box, program):
    box.paused = True
    program()
    takes.take(during=lambda: box.calls.append("dump"))
    assert [call for call in box.calls if call != "State"] == ["Resume", "dump", "Pause"]


def test_a_program_without_weights_takes_part(takes, program):
    one = program(data=b"")
    record = takes.take()
    assert record["outcome"] == "out"
    assert one.steps == ["prepare", "write", "release", "armed", "back"]


def test_without_a_program_the_snapshot_says_so(takes):
    assert "no program in the container listens" in inside(takes, "none")


def test_what_a_program_that_ended_has_left_is_no_program(takes, program):
    program().close()
    assert "no program in the container listens" in inside(takes, "none")


@pytest.mark.parametrize("step", ["prepare", "write"])
def test_a_program_that_does_not_answer_keeps_its_weights(takes, program, step, monkeypatch):
    monkeypatch.setattr(guest, "_HANG_UP", 0.2)
    takes.config.weights_timeout = 1
    program(**{step: "wait"})
    assert "does not answer in time ([weights] timeout)" in inside(takes)


def test_a_program_that_does_not_accept_keeps_its_weights(takes, box):
    takes.config.weights_timeout = 1
    listening = socket.socket(socket.AF_UNIX)
    folder = os.open(box.sockets, os.O_PATH)
    listening.bind(f"/proc/self/fd/{folder}/3.sock")
    listening.listen(0)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(f"/proc/self/fd/{folder}/3.sock")
    os.close(folder)
    assert "does not answer: its time is over" in inside(takes)
    listening.close()
    waiting.close()


PACK = described(MODEL)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"hello\n", "no JSON"),
        (b"[1]\n", "no object"),
        (b"[" * 200_000 + b"\n", "no JSON"),
        (b"{}\n", "does not say 'packs'"),
        (b"x" * ((16 << 20) + (1 << 19)), "more than 16 MiB"),
        (b'{"error": "it has\\u001b[31m CUDA graphs"}\n', "process 1 of the container: it has [31m CUDA graphs"),
        (b'{"packs": 5}\n', "at most 250 packs"),
        (json.dumps({"packs": [PACK] * 251}).encode() + b"\n", "at most 250 packs"),
        (b'{"packs": [5]}\n', "makes no sense"),
        *(
            (json.dumps({"packs": [{**PACK, **wrong}]}).encode() + b"\n", "makes no sense")
            for wrong in (
                {"bytes": -1},
                {"bytes": True},
                {"bytes": 1 << 70},
                {"bytes": len(MODEL) * 2},
                {"chunk": 4096},
                {"chunk": CHUNK + 1},
                {"chunks": ["../../etc/passwd"] * 3},
                {"chunks": [7] * 3},
            )
        ),
        (json.dumps({"packs": [{**PACK, "digest": "sha256:" + "0" * 64}]}).encode() + b"\n", "not theirs"),
    ],
)
def test_a_program_that_says_what_makes_no_sense_keeps_its_weights(takes, program, said, reason):
    one = program(prepare=said)
    assert reason in inside(takes)
    wait_for(lambda: one.steps[-1] == "let go" or len(said) > 1 << 20)


def test_what_is_no_text_is_not_shown():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert guest.plain(deep) == guest.plain({"a": "b"}) == "(no text)"
    assert guest.plain("a\x1b[31m") == "a [31m"


def test_programs_that_describe_too_much_together_keep_their_weights(takes, program, monkeypatch):
    monkeypatch.setattr(guest, "_MOST_CHUNKS", 5)  # for each of the two it would do
    program(1)
    program(2)
    assert "together" in inside(takes)


def test_a_line_that_comes_in_pieces_is_searched_once(takes, box, monkeypatch):
    """Or a program that sends single bytes would keep the node busy."""
    ours, theirs = socket.socketpair()
    found = guest.Channel.__new__(guest.Channel)
    found.pid, found._buffer, found._sock = 1, Searched(), ours
    line = json.dumps({"packs": "x" * 2000}).encode() + b"\n"
    done = threading.Thread(target=lambda: [time.sleep(0.0001) or theirs.sendall(bytes([byte])) for byte in line])
    done.start()
    found.receive(time.monotonic() + 20)
    done.join()
    assert found._buffer.searched <= 2 * len(line)
    for one in (ours, theirs):
        one.close()


def test_programs_that_keep_a_connection_open_cost_the_wait_once(takes, program, monkeypatch):
    monkeypatch.setattr(guest, "_HANG_UP", 0.5)
    waits = []
    settled = guest.Channel.hang_up
    monkeypatch.setattr(guest.Channel, "hang_up", lambda self, until=0.0: (waits.append(until), settled(self, until)))
    for pid in range(1, 4):
        program(pid)
    takes.take()
    assert len(waits) >= 3 and len(set(waits[:3])) == 1 and waits[0] > 0


class Searched(bytearray):
    """Counts the bytes that are looked at."""

    searched = 0

    def find(self, what, start=0):
        self.searched += len(self) - start
        return super().find(what, start)


def test_descriptors_that_a_program_sends_are_not_taken(takes, box):
    listening = socket.socket(socket.AF_UNIX)
    folder = os.open(box.sockets, os.O_PATH)
    listening.bind(f"/proc/self/fd/{folder}/3.sock")
    os.close(folder)
    listening.listen()
    answered = threading.Event()

    def serve():
        connection, _ = listening.accept()
        connection.recv(65536)
        given = [os.open("/dev/zero", os.O_RDONLY) for _ in range(200)]
        socket.send_fds(connection, [b'{"packs": 1}\n'], given)
        for fd in given:
            os.close(fd)
        connection.close()
        answered.set()

    threading.Thread(target=serve, daemon=True).start()
    inside(takes)
    answered.wait(10)
    assert not [fd for fd in os.listdir("/proc/self/fd") if target(fd) == "/dev/zero"]
    listening.close()


def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def test_what_is_not_what_the_program_said_never_gets_a_name(takes, program):
    one = program(lie=True)
    assert "has another SHA-256" in inside(takes)
    assert "release" not in one.steps


def test_a_file_that_a_program_keeps_open_or_mapped_is_not_taken(takes, program, monkeypatch):
    monkeypatch.setattr(weights, "_WRITERS_LINGER", 0.2)
    kept = []

    def keep_mapped(fds):
        kept.extend(mmap.mmap(fd, 4096) for fd in fds)
        for fd in fds:
            os.close(fd)

    program(write=keep_mapped)
    assert "keeps a file open" in inside(takes)
    for one in kept:
        one.close()


def test_a_file_that_was_taken_cannot_be_written_any_more(takes, program):
    kept = []

    def keep_for_reading(fds):
        for fd in fds:
            kept.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            os.close(fd)

    one = program(write=keep_for_reading)
    assert takes.take()["outcome"] == "out"
    for fd in kept:
        assert os.pread(fd, 9, 0) == MODEL[:9]
        with pytest.raises(OSError, match="Read-only file system"):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.close(fd)
    assert "could write" not in one.steps


def test_a_file_whose_size_a_program_changes_is_not_taken(takes, program):
    def grow(fds):
        for fd in fds:
            os.ftruncate(fd, 1 << 30)
            os.close(fd)

    program(write=grow)
    assert "has changed the size" in inside(takes)


def test_a_file_whose_owner_and_mode_a_program_changes_is_roots_alone_again(takes, program):
    def give_away(fds):
        for fd in fds:
            os.fchmod(fd, 0o666)
            os.fchown(fd, 1000, 1000)
            os.close(fd)

    program(write=give_away)
    assert takes.take()["outcome"] == "out"
    status = os.stat(takes.store.path(hex_of(MODEL)))
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (0, 0, 0o600)


def test_a_store_that_may_not_hold_as_much_leaves_the_weights_inside(takes, program):
    takes.config.weights_limit = 1 << 20
    program()
    assert "raise [weights] limit" in inside(takes)


def test_a_store_that_takes_no_reference_leaves_the_weights_inside(takes, program):
    one = program()
    with open(f"{takes.store.directory}/refs/{hex_of(MODEL)}", "w"):
        pass  # as good as a file system that is read-only or has no inode left
    record = takes.take()
    assert (record["outcome"], "refs" in record["reason"]) == ("inside", True)
    assert "release" not in one.steps


def test_what_is_inside_after_all_is_referred_to_by_nothing(takes, program):
    program(release=b'{"error": "no"}\n')
    inside(takes)
    assert takes.store.references(hex_of(MODEL)) == {}


def test_a_store_that_others_can_read_leaves_the_weights_inside(takes, program):
    os.makedirs(takes.config.weights_directory)
    os.chmod(takes.config.weights_directory, 0o755)
    program()
    assert "others than root can get at" in takes.take()["reason"]


def test_when_one_of_two_programs_fails_before_the_release_both_keep_their_weights(takes, program):
    good, _ = program(1), program(2, os.urandom(9000), write="hang up")
    inside(takes)
    wait_for(lambda: good.steps[-1] == "let go")
    assert "release" not in good.steps


def test_when_one_of_two_programs_ends_at_its_release_the_other_has_its_weights_back_for_the_dump(takes, program):
    good, _ = program(1), program(2, os.urandom(9000), release="end")
    record = takes.take(during=lambda: good.steps.append("dump"))
    assert record["outcome"] == "inside"
    assert good.steps == ["prepare", "write", "release", "armed", "back", "dump"]
    assert takes.store.digests() == []


def test_a_program_that_ends_between_release_and_dump_is_not_in_the_record(takes, program):
    one, two = program(1), program(2, os.urandom(9000))
    record = takes.take(during=two.close, dumped=[1])
    assert [process["pid"] for process in record["processes"]] == [1]
    assert one.got == MODEL
    assert takes.store.digests() == [hex_of(MODEL)]


def test_a_dump_that_fails_gives_the_weights_back_and_leaves_none_in_the_store(takes, program):
    one = program()
    takes.take(fails=True)
    assert one.steps == ["prepare", "write", "release", "armed", "back"]
    assert takes.store.digests() == []
    assert takes.store.known() == []


def test_a_dump_that_fails_keeps_what_another_snapshot_needs(takes, program):
    program()
    takes.take()
    takes.take(fails=True)
    assert takes.store.digests() == [hex_of(MODEL)]
    assert len(takes.store.references(hex_of(MODEL))) == 1


def test_a_program_that_cannot_have_its_weights_back_fails_the_take_but_not_the_snapshot(takes, program):
    program(back=b'{"error": "chunk 3 is damaged"}\n')
    with pytest.raises(
        ShimError, match=r"snapshot in .* is complete, but its weights could not .*: chunk 3 is damaged"
    ):
        takes.take()
    assert takes.store.digests() == [hex_of(MODEL)]


def test_two_takes_at_once_of_the_same_weights_leave_one_file_with_two_references(takes, tmp_path, monkeypatch):
    boxes = [Container(tmp_path, name) for name in ("one", "two")]
    monkeypatch.setattr(guest, "root_of", lambda name, call: str(tmp_path / name))
    both = threading.Barrier(2)
    started = [
        Program(box.sockets, 1, MODEL, write=lambda fds: [os.close(fd) for fd in fds] and both.wait(10))
        for box in boxes
    ]
    others = [Takes(box, tmp_path / "store") for box in boxes]
    threads = [threading.Thread(target=one.take) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [one.got for one in started] == [MODEL, MODEL]
    assert takes.store.digests() == [hex_of(MODEL)]
    assert len(takes.store.references(hex_of(MODEL))) == 2
    assert list(takes.store.drafts()) == []
    for one in started:
        one.close()


def test_what_containerd_packs_is_referred_to_as_such(takes, program, tmp_path):
    program()
    taking = guest.Taking(
        takes.container, takes.container.call, takes.config, takes.log, str(tmp_path / "ctrd-checkpoint12")
    )
    (tmp_path / "ctrd-checkpoint12").mkdir()
    with taking:
        taking.dump(lambda: (tmp_path / "ctrd-checkpoint12/mm-1.img").touch() or Response(), exits=False)
        taking.record()
        (tmp_path / "ctrd-checkpoint12/fermata.json").touch()
    (name,) = takes.store.references(hex_of(MODEL))
    assert name.startswith("packed-")


def test_a_program_that_cannot_have_its_weights_back_takes_no_other_along(takes, program):
    first, second = program(1, back=b'{"error": "no memory"}\n'), program(2)
    with pytest.raises(ShimError, match="process 1 of the container: no memory"):
        takes.take()
    assert first.steps[-1] == second.steps[-1] == "back"
    assert second.got == MODEL


def test_who_cannot_be_sent_its_weights_is_told_and_the_others_have_them(takes, program, monkeypatch):
    first, second = program(1), program(2)
    send = guest.Returning._send

    def fail(self, channel, digests):
        if channel.pid == 1:
            raise OSError(12, "Cannot allocate memory")
        send(self, channel, digests)

    monkeypatch.setattr(guest.Returning, "_send", fail)
    with pytest.raises(ShimError, match="Cannot allocate memory"):
        takes.take()
    assert second.got == MODEL
    assert "armed" in first.steps  # with no files, for which the library ends the program
    assert first.got is None


def test_a_program_that_has_not_let_go_of_its_weights_after_all_lacks_nothing(takes, program):
    program(armed=b'{"error": "this process has its weights", "whole": true}\n')
    assert takes.take()["outcome"] == "out"


@pytest.mark.parametrize(("answer", "lost"), [(b'{"out": true}\n', True), (b'{"out": false}\n', False), ("end", False)])
def test_a_restored_program_that_nobody_brings_its_weights_is_found(takes, box, program, answer, lost):
    program(3, status=answer)
    found = guest.forgotten(str(box.root), (), takes.log, "box")
    assert (found is not None) == lost
    assert guest.forgotten(str(box.root), {3: []}, takes.log, "box") is None


# Finding them ---------------------------------------------------------------------------------------------------------


def test_only_sockets_in_the_container_are_found(box, tmp_path, program):
    outside = tmp_path / "outside"
    outside.mkdir()
    host = Program(outside, 9, MODEL)
    program(7)
    (box.sockets / "8.sock").symlink_to(outside / "9.sock")
    (box.sockets / "9.sock").write_text("no socket")
    (box.sockets / "notes").write_text("")
    (box.sockets / "x5.sock").write_text("")
    assert guest.sockets(str(box.root)) == [7, 8, 9]
    found = guest.listeners(str(box.root), range(10))
    assert [one.pid for one in found] == [7]
    for one in found:
        one.close()
    host.close()


@pytest.mark.parametrize("link", ["run", "run/fermata"])
def test_a_link_in_the_container_leads_to_what_is_in_the_container(tmp_path, link):
    outside = tmp_path / "outside/fermata"
    outside.mkdir(parents=True)
    host = Program(outside, 9, MODEL)
    root = tmp_path / "root"
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(outside if link.endswith("fermata") else outside.parent)
    assert guest.listeners(str(root), [9]) == []
    inner = root / str(outside).lstrip("/")
    inner.mkdir(parents=True)
    mine = Program(inner, 4, MODEL)
    found = guest.listeners(str(root), [4])
    assert [one.pid for one in found] == [4]
    for one in [*found, mine, host]:
        one.close()


def left_over(box, pids):
    """The sockets of processes that have ended."""
    for pid in pids:
        one = socket.socket(socket.AF_UNIX)
        directory = os.open(box.sockets, os.O_PATH)
        one.bind(f"/proc/self/fd/{directory}/{pid}.sock")
        os.close(directory)
        one.close()


def test_sockets_of_processes_that_have_ended_crowd_out_no_program(takes, box, program):
    left_over(box, range(1000, 1300))
    one = program(2000)
    record = takes.take()
    assert record["outcome"] == "out"
    assert one.steps == ["prepare", "write", "release", "armed", "back"]


def test_more_sockets_than_anybody_needs_are_not_looked_at(box):
    for number in range(1, 4100):
        (box.sockets / f"{number}.sock").touch()
    with pytest.raises(ShimError, match="more than 4096 sockets are in the container's /run/fermata"):
        guest.sockets(str(box.root))


def test_more_programs_than_can_be_asked_are_told_of(box, monkeypatch, program):
    monkeypatch.setattr(guest, "_MOST_LISTENERS", 2)
    for pid in (1, 2, 3):
        program(pid)
    with pytest.raises(ShimError, match="more than 2 programs listen"):
        guest.connect_all(str(box.root), time.monotonic() + 5)


def test_a_process_has_one_socket(box, program):
    """Whatever its number may be written like: who is kept by its number would keep the last one alone."""
    program(7)
    for name in ("07.sock", "0000000007.sock"):
        os.link(box.sockets / "7.sock", box.sockets / name)
    assert guest.sockets(str(box.root)) == [7]


def test_a_root_that_is_gone_has_no_programs(tmp_path):
    assert guest.sockets(str(tmp_path / "gone")) == []
    assert guest.listeners(str(tmp_path / "gone"), [1]) == []


# A restore ------------------------------------------------------------------------------------------------------------


def restoring(takes, record):
    return guest.restoring(record, takes.config, takes.log, "again", str(takes.directory))


def test_a_restore_gives_the_weights_to_each_program_after_the_gpu_state(takes, program, box, monkeypatch):
    one = program()
    record = takes.take(exits=True)
    one.steps.clear()
    back = restoring(takes, record)
    monkeypatch.setattr(guest, "listeners", lambda root, pids, found=guest.listeners: found(str(box.root), pids))
    back.bring_back(os.getpid(), lambda: one.steps.append("gpu"))
    assert sorted(one.steps[:2]) == ["armed", "gpu"] and one.steps[2:] == ["back"]
    assert (one.got, one.new) == (MODEL, True)
    back.close()


@pytest.mark.parametrize(
    "broken",
    [
        ({"armed": "end"}, "has ended, or hung up"),
        ({"back": "hang up"}, "has ended, or hung up"),
        ({"back": b'{"error": "chunk 2 is damaged"}\n'}, "chunk 2 is damaged"),
        ({"armed": "wait"}, "does not answer in time"),
    ],
)
def test_a_restore_says_why_a_program_cannot_have_its_weights(takes, program, box, monkeypatch, broken):
    fails, words = broken
    program(**fails)
    record = takes.take(exits=True)
    takes.config.weights_timeout = 1
    back = restoring(takes, record)
    monkeypatch.setattr(guest, "listeners", lambda root, pids, found=guest.listeners: found(str(box.root), pids))
    with pytest.raises(ShimError, match=words):
        back.bring_back(os.getpid(), lambda: None)
    back.close()


@pytest.mark.parametrize(
    "seconds",
    [
        '"container": 1, "level": 2, "message": 3',
        '"total": 1%s' % ("0" * 400),
        ", ".join(f'"name{number}": 1' for number in range(5000)),
        '"a b=c": 1',
    ],
)
def test_odd_times_of_a_program_are_no_failure(takes, program, box, monkeypatch, seconds):
    program(back=b'{"back": 1, "seconds": {%s, "good": 1.5}}\n' % seconds.encode())
    record = takes.take(exits=True)
    monkeypatch.setattr(guest, "listeners", lambda root, pids, found=guest.listeners: found(str(box.root), pids))
    back = restoring(takes, record)
    back.bring_back(os.getpid(), lambda: None)
    back.close()
    level, message, fields = takes.logged[-1]
    assert (level, message, fields["container"]) == ("info", "weights are back", "again")
    assert len(fields) <= 33 and "a b=c" not in fields


def test_a_restore_whose_program_is_not_there_fails(takes, program, tmp_path):
    program()
    record = takes.take(exits=True)
    back = restoring(takes, record)
    with pytest.raises(ShimError, match="process 1 of the container does not listen"):
        back.bring_back(os.getpid(), lambda: None)
    back.close()


def test_weights_that_are_held_for_a_restore_are_not_removed(takes, program):
    program()
    back = restoring(takes, takes.take(exits=True))
    for name in takes.store.references(hex_of(MODEL)):
        takes.store.drop(hex_of(MODEL), name)
    assert takes.store.remove(hex_of(MODEL)) is None
    back.close()
    assert takes.store.remove(hex_of(MODEL)) == takes.store.rounded(len(MODEL))


def test_a_restore_reads_weights_on_a_disk_ahead(takes, program):
    if takes.store.in_memory:
        pytest.skip("the tests' directory is in memory")
    program()
    record = takes.take(exits=True)
    fd = os.open(takes.store.path(hex_of(MODEL)), os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not guest._is_cached(fd, CHUNK)
    back = restoring(takes, record)
    wait_for(lambda: all(guest._is_cached(fd, at) for at in range(0, len(MODEL), 4096)))
    back.close()
    os.close(fd)


def test_weights_that_are_inside_need_nothing(takes, tmp_path):
    takes.directory = tmp_path
    assert restoring(takes, {"outcome": "inside"}) is None
    assert restoring(takes, None) is None


@pytest.mark.parametrize("read", ["cached", "direct"])
def test_weights_are_read_as_configured(takes, program, read):
    takes.config.weights_read = read
    one = program()
    takes.take()
    assert one.got == MODEL
    assert one.direct == [read == "direct" and not takes.store.in_memory]


# Readiness ------------------------------------------------------------------------------------------------------------


def test_a_container_is_ready_when_one_of_its_programs_is(box, program):
    assert guest.status(str(box.root)).ready is False
    program(1)
    status = guest.status(str(box.root))
    assert (status.ready, status.text) == (True, "process 1 of the container is ready")


# The real library -----------------------------------------------------------------------------------------------------

PROGRAM = """
import hashlib, sys, time
import fermata
model = bytearray(open(sys.argv[1], "rb").read())
fermata.exclude_from_snapshot(model, name="model")
fermata.snapshot_ready()
while True:
    with fermata.using():
        print(hashlib.sha256(model).hexdigest(), flush=True)
    time.sleep(0.02)
"""


def test_a_program_with_the_library_answers_the_same_afterwards(takes, box, tmp_path):
    (tmp_path / "model").write_bytes(os.urandom(40 << 20))
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT / "guest"),
        "FERMATA_GUEST_DIRECTORY": str(box.sockets),
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            first = process.stdout.readline()
            assert wait_for(lambda: guest.status(str(box.root)).ready)
            resident = []
            record = takes.take(during=lambda: resident.append(memory(process.pid)), dumped=[process.pid])
            assert (record["outcome"], record["reason"]) == ("out", None)
            assert resident[0] < memory(process.pid) - (30 << 20)
            assert record["processes"][0]["packs"][0]["bytes"] == 40 << 20
            time.sleep(0.1)
            answers = {process.stdout.readline() for _ in range(5)}
            assert answers == {first}
            takes.take(dumped=[process.pid])
            assert len(takes.store.digests()) == 1
        finally:
            process.kill()


def memory(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) << 10


def wait_for(condition, seconds=10):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found
