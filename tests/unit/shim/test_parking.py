"""Parking: the record, finding the container's shim, and the order around a dump. The driver is tested in tests/gpu."""

import argparse

import pytest

from shim import gpu, parking
from shim.cleanup import DAEMON
from shim.config import Config
from shim.errors import FAILED_PRECONDITION, ShimError
from shim.state import State
from shim.ttrpc import Response

RECORD = {"driver": "580", "gpus": [], "processes": [{"pid": 1, "bytes": 3 << 20, "by_gpu": {"GPU-a": 3 << 20}}]}


def quiet(level, message, **fields):
    pass


class Box:
    """A container of the shim, and its task's calls."""

    def __init__(self, path):
        self.state = State("default", "box", run=str(path / "run"), logs=str(path / "log"))
        self.state.create()
        self.paused = False
        self.calls = []

    def call(self, method, payload):
        self.calls.append(method)
        if method == "State":
            return parking.task.StateResponse(status=4 if self.paused else 2).encode()
        if method == "Pids":
            return parking.PidsResponse(processes=[parking.ProcessInfo(pid=pid) for pid in (7, 8)]).encode()
        if self.paused == (method == "Pause"):
            raise ShimError(f"cannot {method.lower()}: it is so already")  # as runc does
        self.paused = method == "Pause"
        return b""

    def gpu(self):
        return parking.Gpu(self, self.call, Config(), quiet)


@pytest.fixture
def box(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "CONTROL_DEVICE", "/dev/null")
    monkeypatch.setattr(gpu, "Helper", lambda config: Idle())
    return Box(tmp_path)


class Idle:
    """A program that moves GPU state and is not asked anything."""

    def kill(self):
        pass


def moved(monkeypatch, *, back=None):
    """What was out, and what happens on the way back: an error or nothing."""
    events = []
    user = gpu.User(7, 1, "python", [])

    def take_out(tree, config, log, *, open_driver):
        events.append("out")
        return gpu.Out(RECORD, [user], [user], {"gpu_out": 1.0})

    def bring_back(tree, record, config, *, open_driver):
        events.append(f"back while {'paused' if tree.paused() else 'running'}")
        if back:
            raise back
        return {"gpu_back": 1.0}

    monkeypatch.setattr(gpu, "take_out", take_out)
    monkeypatch.setattr(gpu, "bring_back", bring_back)
    return events


def failure():
    return Response.failure(FAILED_PRECONDITION, "CRIU said no")


def test_the_tree_is_read_through_the_stock_shims_calls(box):
    tree = parking.Tree("box", box.call)
    assert tree.pids() == [7, 8] and not tree.paused()
    tree.pause()
    assert tree.paused()
    tree.resume()
    assert not tree.paused()


def test_without_a_driver_a_dump_makes_no_call(box, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "CONTROL_DEVICE", str(tmp_path / "none"))
    assert box.gpu().dump(Response, exits=False).ok
    assert box.calls == []


def test_state_moves_back_after_a_dump_that_leaves_the_container_running(box, monkeypatch):
    events = moved(monkeypatch)
    state = box.gpu()
    state.dump(lambda: events.append("dump") or Response(), exits=False)
    assert events == ["out", "dump", "back while running"]
    assert state.record == RECORD


def test_state_stays_out_after_a_dump_that_ended_the_container(box, monkeypatch):
    events = moved(monkeypatch)
    box.gpu().dump(lambda: events.append("dump") or Response(), exits=True)
    assert events == ["out", "dump"]


@pytest.mark.parametrize("exits", [True, False])
def test_state_moves_back_after_a_dump_that_failed(box, monkeypatch, exits):
    events = moved(monkeypatch)
    assert not box.gpu().dump(lambda: events.append("dump") or failure(), exits=exits).ok
    assert events == ["out", "dump", "back while running"]


def test_state_moves_back_when_the_stock_shim_goes_away_in_a_dump(box, monkeypatch):
    events = moved(monkeypatch)

    def dump():
        raise ShimError("the stock shim went away")

    with pytest.raises(ShimError, match="went away"):
        box.gpu().dump(dump, exits=True)
    assert events == ["out", "back while running"]


def test_a_paused_container_is_resumed_for_the_way_back_and_paused_after_it(box, monkeypatch):
    events = moved(monkeypatch)
    box.paused = True
    box.gpu().dump(Response, exits=False)
    assert events == ["out", "back while running"] and box.paused


@pytest.mark.parametrize("paused", [False, True])
def test_what_cannot_move_back_is_parked_and_the_error_says_how_to_go_on(box, monkeypatch, paused):
    box.paused = paused
    moved(monkeypatch, back=gpu.NoRoom("9 MiB are missing", 8))
    with pytest.raises(gpu.NoRoom, match=r"9 MiB are missing; the container is parked, .*`fermata unpark box`"):
        box.gpu().dump(Response, exits=False)
    assert box.paused and parking.read_record(box.state) == RECORD


def test_after_a_restore_without_room_the_tree_is_parked_and_unpark_brings_it_back(box, monkeypatch):
    moved(monkeypatch, back=gpu.NoRoom("9 MiB are missing", 8))
    with pytest.raises(gpu.NoRoom):
        box.gpu().after_restore(RECORD)
    assert box.paused
    with pytest.raises(gpu.NoRoom):
        box.gpu().unpark()
    assert box.paused and parking.read_record(box.state) == RECORD
    moved(monkeypatch)
    assert box.gpu().unpark().startswith("box goes on: 3 MiB moved back to the GPU in ")
    assert not box.paused and parking.read_record(box.state) is None


def test_park_and_unpark_do_nothing_the_second_time(box, monkeypatch):
    events = moved(monkeypatch)
    assert box.gpu().park().startswith("box is parked: 3 MiB of 1 process moved to host memory in ")
    assert box.paused
    assert box.gpu().park() == "box is parked already"
    box.gpu().unpark()
    assert not box.paused
    assert box.gpu().unpark() == "box is not parked"
    assert events == ["out", "back while running"]


def test_a_parked_container_is_dumped_as_it_is(box, monkeypatch):
    events = moved(monkeypatch)
    box.gpu().park()
    state = box.gpu()
    state.dump(lambda: events.append("dump") or Response(), exits=False)
    assert events == ["out", "dump"] and state.record == RECORD and box.paused


def test_a_container_without_gpu_state_is_not_parked(box, monkeypatch):
    monkeypatch.setattr(gpu, "take_out", lambda *args, **kwargs: None)
    with pytest.raises(ShimError, match="none of its processes uses a GPU"):
        box.gpu().park()
    assert not box.paused and parking.read_record(box.state) is None


def record_daemon(run, namespace):
    state = State(namespace, "box", run=str(run))
    state.create()
    state.write(DAEMON, f"/run/{namespace}.sock\n1\n2\n")


def test_the_containers_shim_is_found_by_its_id_alone_where_one_namespace_has_it(tmp_path):
    record_daemon(tmp_path, "one")
    (tmp_path / "socket").touch()
    assert parking.daemon_socket("", "box", str(tmp_path)) == "/run/one.sock"
    record_daemon(tmp_path, "two")
    with pytest.raises(ShimError, match=r"several namespaces \(one, two\): say which, -n NAME"):
        parking.daemon_socket("", "box", str(tmp_path))
    assert parking.daemon_socket("two", "box", str(tmp_path)) == "/run/two.sock"


def test_a_container_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ShimError, match="no running container box of fermata's in any namespace"):
        parking.daemon_socket("", "box", str(tmp_path / "none"))


def test_both_commands_are_parsed():
    parser = argparse.ArgumentParser()
    parking.add_parser(parser.add_subparsers())
    assert parser.parse_args(["park", "box"]).method == "Park"
    assert parser.parse_args(["unpark", "-n", "k8s.io", "box"]).namespace == "k8s.io"
