"""fermata-differ under systemd itself: what docs/differ.md tells an operator to do, and what a boot makes of it.

A machine for each stack whose first process is systemd, which starts containerd and the differ's socket.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from node import stack
from node.booted import Booted
from node.containers import wait_for
from node.errors import NodeError
from tests.node.diffs import Diffs, Failed

UNITS = ("fermata-differ.socket", "fermata-differ.service")
SWITCH_ON = """
set -e
systemctl enable --now fermata-differ.socket
mkdir -p /etc/containerd/conf.d
cp /usr/local/share/fermata/fermata-differ-v{version}.toml /etc/containerd/conf.d/
echo 'version = {version}
imports = ["/etc/containerd/conf.d/*.toml"]' >/etc/containerd/config.toml
systemctl restart containerd
"""
GONE = """
set -e
systemctl disable --now fermata-differ.socket fermata-differ.service
rm -r /usr/local/lib/systemd/system/fermata-differ.* /usr/local/bin/fermata-differ /run/fermata-differ
systemctl daemon-reload
systemctl restart containerd
"""


@pytest.fixture(scope="module")
def machine(stack_name, tmp_path_factory):
    if os.geteuid() != 0 or stack_name == "host":
        pytest.skip("systemd as a first process needs root, and a root of its own")
    try:
        booted = Booted(stack.root(stack_name), tmp_path_factory.mktemp("machine"))
    except NodeError as lacks:
        pytest.skip(str(lacks))
    try:
        booted.install()
        booted.on()
        version = 3 if "/v2 " in booted.exec(["containerd", "--version"]).stdout else 2
        booted.exec(["sh", "-c", SWITCH_ON.format(version=version)])
        yield booted
    finally:
        booted.remove()


@pytest.fixture
def diffs(machine):
    machine.exec(["systemctl", "reset-failed", *UNITS], check=False)  # several starts in a short time are what is tried
    program = Diffs(machine)
    yield program
    program.end()


def property_of(machine, unit, name):
    return machine.exec(["systemctl", "show", "--value", "--property", name, unit]).stdout.strip()


def told(machine):
    """What the differ wrote into systemd's journal."""
    return machine.exec(["journalctl", "--unit", "fermata-differ", "--output", "cat", "--no-pager"]).stdout


def doctor(machine):
    said = machine.exec(["fermata", "doctor"], check=False).stdout
    return re.search(r"^(\w+)\s+diffs: (.*)$", said, re.M).groups()


def test_the_socket_is_open_before_containerd_starts_at_every_boot(machine, diffs):
    diffs.layer("making", "os.mkdir('d')", commit="base")
    diffs.layer("changed", "open('d/new', 'w').write('x')", "base")
    made = diffs.diff("changed", "base")
    machine.off()
    machine.on()
    opened = int(property_of(machine, "fermata-differ.socket", "ActiveEnterTimestampMonotonic"))
    started = int(property_of(machine, "containerd.service", "ExecMainStartTimestampMonotonic"))
    assert 0 < opened < started
    assert doctor(machine)[0] == "ok"
    assert machine.exec(["systemctl", "is-failed", *UNITS], check=False).stdout == "active\n" * 2
    machine.exec(["systemd-analyze", "verify", *UNITS])
    again = Diffs(machine)
    assert again.diff("changed", "base") == made
    again.end()
    assert made["digest"] in told(machine)


def test_the_services_rights_are_enough_to_write_a_large_layer_to_containerds_file(machine, diffs):
    diffs.layer("large", "open('large', 'wb').write(os.urandom(12 << 20))", "base")
    made = diffs.diff("large", "base")
    assert f"{made['digest']}, {made['size']} bytes by file" in told(machine)


def test_a_killed_differ_is_back_for_the_next_request(machine, diffs):
    made = diffs.diff("changed", "base")
    for _ in range(2):
        pid = property_of(machine, "fermata-differ.service", "MainPID")
        machine.exec(["systemctl", "kill", "--signal=KILL", "fermata-differ.service"])
        wait_for(
            lambda was=pid: property_of(machine, "fermata-differ.service", "MainPID") not in (was, "0"), "a new one"
        )
        assert diffs.diff("changed", "base") == made


def test_a_socket_that_was_stopped_is_open_again_with_containerd(machine, diffs):
    made = diffs.diff("changed", "base")
    machine.exec(["systemctl", "stop", *UNITS])
    with pytest.raises(Failed, match="UNAVAILABLE"):
        diffs.diff("changed", "base")
    machine.exec(["systemctl", "restart", "containerd"])
    assert property_of(machine, "fermata-differ.socket", "ActiveState") == "active"
    assert diffs.diff("changed", "base") == made


def test_a_restart_loses_no_request(machine, diffs):
    def one(number):
        return machine.exec(["sh", "-c", "ctr snapshots diff changed | tar -tzf -"]).stdout

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(one, number) for number in range(24)]
        for _ in range(2):
            machine.exec(["systemctl", "restart", "fermata-differ.service"])
            time.sleep(0.3)
        assert {each.result() for each in asked} == {"./\nd/\nd/new\n"}


def test_a_request_waits_for_a_service_that_takes_long_to_start(machine, diffs):
    made = diffs.diff("changed", "base")
    module = "/usr/lib/python3/dist-packages/grpc/__init__.py"
    machine.exec(
        ["sh", "-c", f"cp -p {module} /root/kept; (echo 'import time; time.sleep(4)'; cat /root/kept) >{module}"]
    )
    try:
        machine.exec(["systemctl", "stop", "fermata-differ.service"])
        machine.exec(["systemctl", "restart", "containerd"])  # it has no connection yet
        machine.exec(["systemctl", "stop", "fermata-differ.service"])
        assert wait_for(lambda: machine.exec(["ctr", "version"], check=False).returncode == 0, "containerd")
        assert diffs.diff("changed", "base") == made
    finally:
        machine.exec(["mv", "/root/kept", module])
        machine.exec(["systemctl", "restart", "fermata-differ.service"])


def test_a_differ_without_grpc_leaves_everything_to_containerd(machine, diffs):
    made = diffs.diff("changed", "base")
    packages = "/usr/lib/python3/dist-packages"
    machine.exec(["mv", f"{packages}/grpc", f"{packages}/away"])
    try:
        machine.exec(["systemctl", "restart", "fermata-differ.service"])
        walked = diffs.diff("changed", "base")
        assert walked["digest"] != made["digest"]
        diffs.apply("applied", "base", **walked)
        assert diffs.differences("applied", "changed", seconds=True) == []
        assert doctor(machine)[0] == "warning"
        assert "python3-grpcio" in told(machine)
    finally:
        machine.exec(["mv", f"{packages}/away", f"{packages}/grpc"])
    machine.exec(["systemctl", "restart", "fermata-differ.service"])
    assert diffs.diff("changed", "base") == made


def test_gone_altogether_containerd_starts_and_says_what_it_lacks(machine, diffs):
    machine.exec(["sh", "-c", GONE])
    assert property_of(machine, "containerd.service", "ActiveState") == "active"
    with pytest.raises(Failed, match=r"UNAVAILABLE: .*/run/fermata-differ/differ\.sock"):
        diffs.diff("changed", "base")
    level, text = doctor(machine)
    assert level == "problem"
    assert "/run/fermata-differ/differ.sock" in text
    machine.exec(["sh", "-c", "rm /etc/containerd/conf.d/fermata-differ-*.toml; systemctl restart containerd"])
    assert diffs.diff("changed", "base")["digest"], "the walking differ's"
    assert doctor(machine)[0] == "ok"
