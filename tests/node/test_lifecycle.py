"""A container's life without snapshots is the stock runtime's, seen through `ctr` on the same node."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path

import pytest

from node.containers import CTR, OURS, STOCK, pid, remove, start, status, wait_for
from node.shims import STOCK_NAME, Shim, daemons, recorded_address, serving
from shim import task

BY_PATH = "/usr/local/bin/containerd-shim-fermata-v1"


def same(observe):
    """What is observed under our runtime, having checked that it is what is observed under the stock runtime."""
    stock, ours = observe(STOCK), observe(OURS)
    assert ours == stock
    return ours


class Terminal:
    """`ctr` at a terminal."""

    def __init__(self, node, *words, rows=33, columns=101):
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.process = node.popen([*CTR, *words], stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.seen = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text.encode())

    def read_until(self, text, timeout=20):
        until = time.monotonic() + timeout
        os.set_blocking(self.master, False)
        while text not in self.seen:
            assert time.monotonic() < until, f"waited in vain for {text!r}, saw {self.seen!r}"
            try:
                data = os.read(self.master, 4096)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            except OSError:  # the other end is closed
                data = b""
            assert data or text in self.seen, f"the terminal ended before {text!r}, saw {self.seen!r}"
            self.seen += data.decode()
        return self.seen

    def end(self):
        code = self.process.wait(20)
        os.close(self.master)
        return code

    def abandon(self):
        """End `ctr` alone, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.master)


# Input, output, exit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("naming", [OURS, BY_PATH], ids=["by name", "by path"])
def test_output_and_exit_status_come_back(node, image, naming):
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(37)"
    done = node.ctr("run", "--rm", "--runtime", naming, image, "one", "python3", "-c", script, check=False)
    assert (done.returncode, done.stdout) == (37, "out\n")
    assert "err\n" in done.stderr


def test_a_death_by_signal_is_reported_as_under_the_stock_runtime(node, image):
    def observe(runtime):
        command = ["python3", "-c", "import os; os.abort()"]
        return node.ctr("run", "--rm", "--runtime", runtime, image, "one", *command, check=False)[:2]

    # abort(3) of a first process, which no signal of its own can kill, goes on to an instruction that faults.
    assert same(observe) == (128 + signal.SIGSEGV, "")


def test_input_reaches_the_container_to_its_end(node, image):
    text = "".join(f"line {number} of the input\n" for number in range(20000))
    done = node.ctr("run", "--rm", "--runtime", OURS, image, "one", "cat", input=text)
    assert done.stdout == text


def test_a_command_that_cannot_be_run_is_refused_in_the_stock_runtimes_words(node, image):
    def observe(runtime):
        done = node.ctr("run", "--rm", "--runtime", runtime, image, "one", "/no/such/program", check=False)
        return done.returncode, re.sub(r"(?m)^time=.*\n", "", done.stderr)

    code, said = same(observe)
    assert code == 1
    assert "/no/such/program" in said


def test_a_terminal_has_a_size_that_follows_and_passes_what_is_typed(node, image):
    terminal = Terminal(node, "run", "--rm", "--tty", "--runtime", OURS, image, "one", "sh")
    try:
        # The first size is a call of its own as well, made when the container runs.
        terminal.type("until stty size | grep '^33 101'; do sleep 0.05; done; tty\n")
        terminal.read_until("/dev/pts/0")
        terminal.resize(44, 122)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        # The resize is a call of its own beside what is typed, so what is typed asks again until it is there.
        terminal.type("until stty size | grep '^44 122'; do sleep 0.05; done; exit 9\n")
        assert terminal.end() == 9
    finally:
        terminal.abandon()


def test_output_goes_to_a_log_file(node):
    def observe(runtime):
        log = node.path("/srv/one.log")
        start(node, "one", "sh", "-c", "echo to a file", runtime=runtime, options=["--log-uri", f"file://{log}"])
        wait_for(lambda: status(node, "one") == "STOPPED", "the container's end")
        remove(node, "one")
        text = log.read_text()
        log.unlink()
        return text

    # The shim lives in the node's mount namespace, where this path of the host's leads to the same place.
    assert same(observe) == "to a file\n"


LOGGER = """#!/usr/bin/python3
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent at the container's end, beside the end of its output
os.close(5)  # ready
with os.fdopen(3) as stdout, open("/srv/logger.out", "w") as out:
    out.write(os.environ["CONTAINER_NAMESPACE"] + " " + os.environ["CONTAINER_ID"] + " " + stdout.read())
os.rename("/srv/logger.out", "/srv/logged")
"""


def test_output_goes_to_a_logging_program(node):
    logger, logged = node.path("/srv/logger"), node.path("/srv/logged")
    logger.write_text(LOGGER)
    logger.chmod(0o755)

    def observe(runtime):
        options = ["--log-uri", "binary:///srv/logger"]
        start(node, "one", "sh", "-c", "echo to a program", runtime=runtime, options=options)
        wait_for(lambda: status(node, "one") == "STOPPED", "the container's end")
        remove(node, "one")
        wait_for(logged.exists, "the logging program to end")
        text = logged.read_text()
        logged.unlink()
        return text

    try:
        assert same(observe) == "default one to a program\n"
    finally:
        logger.unlink()


def test_a_client_attaches_to_what_runs(node, image):
    first = Terminal(node, "run", "--rm", "--tty", "--runtime", OURS, image, "one", "sh")
    second = None
    try:
        first.type("echo be''gun\n")
        first.read_until("begun")
        first.abandon()
        second = Terminal(node, "tasks", "attach", "one")
        # Its output may have had another reader's eyes on it until just now.
        second.type("echo at''tached\n")
        second.read_until("attached")
        second.type("exit 5\n")
        assert second.end() == 5
    finally:
        first.abandon()
        if second:
            second.abandon()


def test_more_processes_run_in_a_container(node):
    start(node, "one")
    run = ["tasks", "exec", "--exec-id", "more"]
    done = node.ctr(*run, "one", "sh", "-c", "cat; echo err >&2; exit 21", input="in", check=False)
    assert done[:2] == (21, "in")
    assert "err\n" in done.stderr
    terminal = Terminal(node, *run, "--tty", "one", "sh")
    try:
        terminal.type("until stty size | grep '^33 101'; do sleep 0.05; done; exit 22\n")
        assert terminal.end() == 22
    finally:
        terminal.abandon()
    refused = node.ctr(*run, "one", "/no/such/program", check=False)
    assert refused.returncode != 0
    assert "/no/such/program" in refused.stderr
    assert status(node, "one") == "RUNNING"


# Control ------------------------------------------------------------------------------------------------------------

TICK = "import time\nwhile True: print(time.monotonic_ns(), flush=True); time.sleep(0.01)"


def test_a_paused_container_stands_still_and_goes_on(node):
    log = node.path("/srv/tick.log")
    start(node, "one", "python3", "-c", TICK, options=["--log-uri", "file:///srv/tick.log"])
    try:
        wait_for(lambda: log.exists() and log.stat().st_size, "the container to run")
        node.ctr("tasks", "pause", "one")
        assert status(node, "one") == "PAUSED"
        before = log.stat().st_size
        refused = node.ctr("tasks", "exec", "--exec-id", "more", "one", "true", check=False)
        assert refused.returncode != 0
        assert log.stat().st_size == before
        node.ctr("tasks", "resume", "one")
        wait_for(lambda: log.stat().st_size > before, "the container to go on")
        assert status(node, "one") == "RUNNING"
    finally:
        log.unlink()


def test_signals_reach_the_first_process_and_another(node, image):
    trap = "trap 'exit 3' USR1; trap 'exit 4' TERM; echo ready; while :; do sleep 0.02; done"
    first = node.popen([*CTR, "run", "--rm", "--runtime", OURS, image, "one", "sh", "-c", trap], stdout=subprocess.PIPE)
    with first:
        assert first.stdout.readline() == b"ready\n"
        run = [*CTR, "tasks", "exec", "--exec-id", "more", "one", "sh", "-c", trap]
        with node.popen(run, stdout=subprocess.PIPE) as second:
            assert second.stdout.readline() == b"ready\n"
            node.ctr("tasks", "kill", "--exec-id", "more", "--signal", "SIGUSR1", "one")
            assert second.wait(20) == 3
        node.ctr("tasks", "kill", "one")
        assert first.wait(20) == 4


def test_all_processes_are_killed_together(node):
    start(node, "one", "sh", "-c", "sleep 1000 & sleep 1000 & wait")
    wait_for(lambda: len(node.ctr("tasks", "ps", "one").stdout.splitlines()) == 4, "the container's processes")
    node.ctr("tasks", "kill", "--all", "--signal", "SIGKILL", "one")
    wait_for(lambda: status(node, "one") == "STOPPED", "the container's end")


def test_processes_and_metrics_are_told_as_by_the_stock_runtime(node):
    def observe(runtime):
        start(node, "one", "sh", "-c", "sleep 1000 & sleep 1000", runtime=runtime)
        listed = wait_for(
            lambda: (found := node.ctr("tasks", "ps", "one").stdout.splitlines()[1:])[2:] and found, "the processes"
        )
        assert str(pid(node, "one")) in {line.split()[0] for line in listed}
        more = node.popen([*CTR, "tasks", "exec", "--exec-id", "more", "one", "sleep", "1000"])
        listed = wait_for(
            lambda: (found := node.ctr("tasks", "ps", "one").stdout.splitlines()[1:])[3:] and found, "one more"
        )
        metrics = json.loads(node.ctr("tasks", "metrics", "--format", "json", "one").stdout)
        remove(node, "one")
        more.wait(20)
        return sorted(line.split(None, 1)[1] for line in listed), metrics["pids"]["current"], sorted(metrics)

    listed, processes, sections = same(observe)
    assert len(listed) == processes == 4
    assert "more" in "".join(listed)
    assert {"memory", "cpu"} <= set(sections)


EATER = "block = []\nwhile True: block.append(bytes(1 << 20))"


def test_the_same_events_in_the_same_order_as_under_the_stock_runtime(node, events):
    def live(runtime):
        kind = runtime.split(".")[2]
        name = f"life-{kind}"
        # The stock shim may lose the last event before its own end, so another container keeps it there.
        grouped = ["--annotation", f"io.containerd.runc.v2.group=other-{kind}"]
        start(node, f"other-{kind}", runtime=runtime, options=grouped)
        start(node, name, runtime=runtime, options=grouped)
        assert node.ctr("tasks", "exec", "--exec-id", "more", name, "false", check=False).returncode == 1
        events.wait(name, "/tasks/exit")
        node.ctr("tasks", "pause", name)
        node.ctr("tasks", "resume", name)
        node.ctr("tasks", "kill", "--signal", "SIGKILL", name)
        events.wait(name, "/tasks/exit", 2)
        node.ctr("tasks", "delete", name, check=False)
        # The shim reports it on a way of its own, so what containerd does next may overtake it.
        events.wait(name, "/tasks/delete")
        node.ctr("containers", "delete", name)
        events.wait(name, "/containers/delete")
        events.wait(name, "/snapshot/remove")
        remove(node, f"other-{kind}")
        for _, fields in (seen := events.of(name)):
            if "runtime" in fields:
                fields["runtime"] = "given"
        return seen

    topics = [topic for topic, _ in same(live)]
    assert topics[:11] == [
        *("/snapshot/prepare", "/containers/create", "/tasks/create", "/tasks/start"),
        *("/tasks/exec-added", "/tasks/exec-started", "/tasks/exit"),
        *("/tasks/paused", "/tasks/resumed", "/tasks/exit", "/tasks/delete"),
    ]
    assert sorted(topics[11:]) == ["/containers/delete", "/snapshot/remove"]


def test_a_kill_for_want_of_memory_is_reported(node, events):
    def observe(runtime):
        name = f"eater-{runtime.split('.')[2]}"
        limit = ["--memory-limit", str(32 << 20)]
        start(node, name, "python3", "-c", EATER, runtime=runtime, options=limit)
        events.wait(name, "/tasks/exit")
        events.wait(name, "/tasks/oom")
        exit_status = [fields["exit_status"] for topic, fields in events.of(name) if topic == "/tasks/exit"]
        remove(node, name)
        return exit_status

    assert same(observe) == [137]


# Many ---------------------------------------------------------------------------------------------------------------


def test_the_containers_of_a_pod_share_a_shim_and_go_one_by_one(node):
    grouped = ["--annotation", "io.containerd.runc.v2.group=pod"]
    for name in ("pod", "two", "three"):
        start(node, name, options=grouped)
    start(node, "apart")
    names = ("pod", "two", "three", "apart")
    addresses = {name: recorded_address(node, name) for name in names}
    assert len({addresses[name] for name in names[:3]}) == 1
    assert addresses["apart"] != addresses["pod"]
    assert len(daemons(node)) == len(daemons(node, STOCK_NAME)) == 2
    # The first, whose start made the shim, may go before the others.
    remove(node, "pod")
    assert status(node, "two") == status(node, "three") == "RUNNING"
    assert node.ctr("tasks", "exec", "--exec-id", "more", "three", "echo", "here").stdout == "here\n"
    start(node, "pod", options=grouped)
    assert recorded_address(node, "pod") == addresses["two"]
    for name in names:
        remove(node, name)


def test_twenty_containers_start_at_once(node, image):
    names = [f"many-{number}" for number in range(20)]
    command = [*CTR, "run", "--rm", "--runtime", OURS, image]
    running = [
        node.popen([*command, name, "sh", "-c", f"echo {name}; exit 3"], stdout=subprocess.PIPE) for name in names
    ]
    said = {}

    def read(name, process):
        said[name] = (process.stdout.read().decode(), process.wait(60))

    readers = [threading.Thread(target=read, args=pair) for pair in zip(names, running, strict=True)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for process in running:
        process.stdout.close()
    assert said == {name: (f"{name}\n", 3) for name in names}


def test_a_container_has_a_user_namespace_where_the_stock_runtime_gives_one(node, image):
    def observe(runtime):
        mapped = ["--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"]
        command = ["cat", "/proc/self/uid_map", "/proc/self/gid_map"]
        done = node.ctr("run", "--rm", *mapped, "--runtime", runtime, image, "one", *command, check=False)
        return done.returncode, done.stdout.split(), done.stderr

    # containerd copies the whole image for each, with other owners: the stock runtime is asked only if need be.
    ours = observe(OURS)
    assert ours == (0, ["0", "100000", "65536"] * 2, "") or ours == observe(STOCK)


# The shim itself ----------------------------------------------------------------------------------------------------


def test_containerd_keeps_our_address_and_not_the_stock_shims(node):
    start(node, "one")
    address = recorded_address(node, "one")
    assert serving(node, Path(address).name) in daemons(node)


def test_calls_of_services_that_are_not_ours_are_the_stock_shims(node):
    start(node, "one")
    ours, stock = Shim(node, "one"), Shim(node, "one", stock=True)

    def answer(shim, service, method):
        found = shim.raw(service, method)
        return found.status and (found.status.code, found.status.message), found.payload

    for service, method in (
        ("containerd.task.v3.Task", "NoSuchMethod"),
        ("containerd.task.v2.Task", "Pids"),
        ("containerd.runtime.sandbox.v1.Sandbox", "SandboxStatus"),
        ("no.such.Service", "Call"),
    ):
        assert answer(ours, service, method) == answer(stock, service, method)
    assert answer(ours, "no.such.Service", "Call")[0]


def test_the_shims_processes_are_gone_with_their_container(node):
    start(node, "one")
    shim = Shim(node, "one")
    served_by = shim.pid
    assert shim.state().status == task.RUNNING
    assert [served_by] == daemons(node)
    remove(node, "one")
    wait_for(lambda: not Path(f"/proc/{served_by}").exists(), "the daemon's end")
    assert daemons(node, STOCK_NAME) == []
