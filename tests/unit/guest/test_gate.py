"""Who waits for whom at the gate."""

from __future__ import annotations

import threading
import time

import pytest
from fermata.gate import Gate


def later(seconds=60.0):
    return time.monotonic() + seconds


class User(threading.Thread):
    """Enters once or more and leaves when it is told to."""

    def __init__(self, gate, times=1):
        super().__init__(daemon=True)
        self.gate, self.times = gate, times
        self.inside, self.leave = threading.Event(), threading.Event()
        self.again, self.deeper = threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self.gate:
            self.inside.set()
            self.again.wait(60)
            with self.gate:
                self.deeper.set()
            self.leave.wait(60)


def closing(gate):
    """A thread that closes the gate, once it is seen to wait."""
    found = []
    thread = threading.Thread(target=lambda: found.append(gate.close(later())), daemon=True)
    thread.start()
    while not gate.closed:
        time.sleep(0.001)
    return thread, found


def test_closing_waits_for_those_inside():
    gate = Gate()
    user = User(gate)
    user.inside.wait(60)
    thread, found = closing(gate)
    assert thread.is_alive()
    user.again.set()
    user.leave.set()
    thread.join(60)
    assert found == [0]


def test_a_thread_that_is_inside_enters_again_while_somebody_waits_to_close():
    gate = Gate()
    user = User(gate)
    user.inside.wait(60)
    thread, found = closing(gate)
    user.again.set()
    assert user.deeper.wait(60)
    user.leave.set()
    thread.join(60)
    assert found == [0]


def test_a_closed_gate_keeps_others_out_until_it_opens():
    gate = Gate()
    assert gate.close(later()) == 0
    user = User(gate)
    assert not user.inside.wait(0.2)
    gate.open()
    assert user.inside.wait(60)
    user.again.set()
    user.leave.set()


def test_the_gate_is_open_again_when_somebody_stayed_too_long():
    gate = Gate()
    user = User(gate)
    user.inside.wait(60)
    assert gate.close(later(0.05)) == 1
    with gate:
        pass
    user.again.set()
    user.leave.set()
    user.join(60)
    assert gate.close(later()) == 0


def test_the_thread_that_closed_the_gate_may_enter():
    gate = Gate()
    gate.close(later())
    with gate, gate:
        pass
    user = User(gate)
    assert not user.inside.wait(0.1)
    gate.open()
    user.again.set()
    user.leave.set()


def test_leaving_without_having_entered_changes_nothing():
    gate = Gate()
    gate.leave()
    with gate:
        user = User(gate)
        user.inside.wait(60)
    gate.leave()
    thread, _ = closing(gate)
    thread.join(0.1)
    assert thread.is_alive(), "the one inside was counted out by another thread"
    user.again.set()
    user.leave.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_broken_gate_lets_nobody_in_nor_wait():
    gate = Gate()
    gate.close(later())
    found = []

    def enter():
        try:
            gate.enter()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    gate.break_for_good("there are none")
    thread.join(60)
    assert found == ["there are none"]
    other = Gate()
    other.break_for_good("there are none")
    with pytest.raises(RuntimeError, match="there are none"):
        other.enter()
