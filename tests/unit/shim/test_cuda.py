"""The program that talks to the driver, as far as it is ours: many at once, the dead, retries, being left alone."""

import subprocess
import sys
import threading

import pytest

from shim import cuda


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_all_are_worked_on_at_once():
    barrier = threading.Barrier(4, timeout=10)
    results = cuda.each([1, 2, 3, 4], lambda pid: barrier.wait() >= 0, 20)
    assert [(result["pid"], result["value"]) for result in results] == [(pid, True) for pid in (1, 2, 3, 4)]


def test_each_result_is_that_of_its_process():
    def work(pid):
        if pid == 1:
            raise cuda.CudaError("CUDA_ERROR_NOT_READY", 600)
        return pid

    first, second = cuda.each([1, 2], work, 20)
    assert first["error"] == "CUDA_ERROR_NOT_READY" and first["code"] == 600
    assert second["value"] == 2


def test_a_call_that_does_not_end_is_given_up_after_the_limit(sleeper):
    never = threading.Event()
    first, second = cuda.each([sleeper.pid, 1], lambda pid: pid == 1 or never.wait(), 0.3)
    never.set()
    assert first["error"] == "no answer from the driver in 0 s"
    assert second["value"] is True


def test_a_call_for_a_process_that_died_is_given_up_without_waiting_for_the_limit(sleeper, monkeypatch):
    monkeypatch.setattr(cuda, "_DEAD_AFTER", 0.1)
    never = threading.Event()
    sleeper.kill()
    sleeper.wait()
    (result,) = cuda.each([sleeper.pid], lambda pid: never.wait(), 1000)
    never.set()
    assert result["error"] == "the process died meanwhile"


class Model:
    """The driver's states of one process; `busy` calls answer that the driver is not ready."""

    def __init__(self, state, busy=0):
        self.now = state
        self.busy = busy
        self.calls = []

    def initialise(self):
        pass

    def state(self, pid):
        return self.now

    def restore(self, pid, pairs):
        self.calls.append("restore")
        if self.busy:
            self.busy -= 1
            raise cuda.CudaError("CUDA_ERROR_ILLEGAL_STATE", cuda.ILLEGAL_STATE)
        self.now = cuda.LOCKED

    def unlock(self, pid):
        self.calls.append("unlock")
        self.now = cuda.RUNNING


@pytest.mark.parametrize(
    "state, calls",
    [(cuda.RUNNING, []), (cuda.LOCKED, ["unlock"]), (cuda.CHECKPOINTED, ["restore", "unlock"])],
)
def test_from_every_state_a_process_is_brought_back_to_running(state, calls):
    model = Model(state)
    assert cuda.bring_to_running(model, 1, [], 10) == state
    assert model.calls == calls and model.now == cuda.RUNNING


def test_what_the_driver_is_still_busy_with_is_tried_again():
    model = Model(cuda.CHECKPOINTED, busy=2)
    cuda.bring_to_running(model, 1, [], 10)
    assert model.now == cuda.RUNNING


def test_a_lost_state_is_said():
    with pytest.raises(cuda.CudaError, match="lost"):
        cuda.bring_to_running(Model(cuda.FAILED), 1, [], 10)


def test_a_session_that_is_left_alone_brings_back_what_it_holds(sleeper):
    class One(Model):
        def lock(self, pid, milliseconds):
            self.now = cuda.LOCKED

    model = One(cuda.RUNNING)
    session = cuda.Session(model, None)
    session.answer({"op": "lock", "pids": [sleeper.pid], "timeout_ms": 1})
    assert model.now == cuda.LOCKED
    session.abandon()
    assert model.now == cuda.RUNNING


def test_a_session_that_has_given_back_holds_nothing(sleeper):
    model = Model(cuda.LOCKED)
    session = cuda.Session(model, None)
    session.answer({"op": "unlock", "pids": [sleeper.pid]})
    model.now = cuda.CHECKPOINTED  # by somebody else since
    session.abandon()
    assert model.now == cuda.CHECKPOINTED


def test_a_gpus_name_is_sixteen_bytes_to_the_driver():
    assert cuda._uuid_bytes("GPU-d3e2a227-289b-2012-d608-fa6bfa0d7b3b").hex() == "d3e2a227289b2012d608fa6bfa0d7b3b"


def test_the_daemon_does_not_load_the_program():
    script = "import shim.gpu, shim.parking, sys; sys.exit('ctypes' in sys.modules or 'shim.cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", script], check=False).returncode == 0
