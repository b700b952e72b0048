"""Pods, through containerd's own CRI plugin, which is called here as the kubelet calls it.

A node of its own for each stack: the plugin needs a network for pods and a pause image, and containerd is restarted.
containerd 1.7 has no CheckpointContainer; there the snapshots are taken with `fermata checkpoint`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from node import pods as cri
from node.containers import wait_for
from node.leftovers import leftovers
from node.node import NodeError
from node.pods import Failed, Pods
from node.shims import daemons, processes
from tests import documentation

HANDLERS = ["fermata", "fermata-runc"]
CRI = ["-n", "k8s.io"]

# Counts, in memory, in its writable layer and in its output.
COUNT = """
import os, time
n = 0
while True:
    n += 1
    open("/next", "w").write(str(n))
    os.rename("/next", "/count")
    print("count", n, flush=True)
    time.sleep(0.02)
"""

# A server on every address of its pod; answers how often it was asked.
SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 8080))
n = 0
while True:
    client, _ = server.accept()
    n += 1
    client.sendall(str(n).encode())
    client.close()
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 8080), 5).recv(100).decode())"

# Locks of several processes, and memory that they share by a name.
SHARE = """
import mmap, multiprocessing, os, time
file = open("/dev/shm/shared", "w+b")
file.truncate(1 << 20)
shared = mmap.mmap(file.fileno(), 1 << 20)
lock = multiprocessing.get_context("fork").Lock()
child = os.fork()
while True:
    with lock:
        shared[0:8] = (int.from_bytes(shared[0:8], "little") + 1).to_bytes(8, "little")
    time.sleep(0.01)
"""
SHARED = "import sys; print(int.from_bytes(open('/dev/shm/shared', 'rb').read(8), 'little'))"


@pytest.fixture(scope="module")
def cluster(stack_name):
    if os.geteuid() != 0:
        pytest.skip("a node needs root")
    node = Pods.up(stack_name=stack_name)
    with node:
        yield node


@pytest.fixture
def node(cluster):
    yield cluster
    found = leftovers(cluster)
    assert found == []


@pytest.fixture
def pods(node):
    """A client; the pods that a test leaves are removed."""
    talking = Pods(node)
    yield talking
    talking.remove_all()
    talking.close()


@pytest.fixture
def directory(node, request):
    """A name for a snapshot directory."""
    return "/srv/" + re.sub(r"[^a-z0-9]+", "-", request.node.name)


def python(program):
    return ["python3", "-u", "-c", program]


def running(pods, program, name="server", *, pod=None, **options):
    """A pod, and the id of a container in it that runs a Python program."""
    pod = pod or pods.run("first", **options)
    container = pods.create(pod, name, *python(program))
    pods.start(container)
    return pod, container


def counted(pods, container):
    return int(pods.exec(container, "sh", "-c", "[ ! -e /count ] || cat /count") or 0)


def wait_count(pods, container, at_least=3):
    return wait_for(lambda: counted(pods, container) >= at_least and counted(pods, container), "counting")


def take(pods, container, directory):
    pods.node.exec(["fermata", "checkpoint", *CRI, container, directory])
    return directory


def restored(pods, source, program=COUNT, name="server", key="fermata/restore-from", **options):
    pod = pods.run("second", annotations={key: source}, **options)
    return running(pods, program, name, pod=pod)


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_pod_runs_under_either_name_of_the_runtime(node, pods, handler):
    assert pods.call("Version", cri.Message(), cri.VersionResponse).runtime_name == "containerd"
    pod, container = running(pods, COUNT, handler=handler)
    wait_count(pods, container)
    assert pods.state(container) == "RUNNING"
    assert pods.log(pod, "server")[:2] == ["count 1", "count 2"]
    assert pods.exec(container, "python3", "-c", "print(6 * 7)") == "42\n"
    with pytest.raises(NodeError, match="ended with 3"):
        pods.exec(container, "sh", "-c", "exit 3")
    second = running(pods, COUNT, "second", pod=pod)[1]
    assert "runtime class: configured in /etc/containerd/conf.d/fermata.toml" in _doctor(node)
    assert len(daemons(node)) == 1, "the containers of a pod share one shim"
    pods.call("StopContainer", cri.StopContainerRequest(id=second, timeout=0), cri.Message)
    assert (pods.state(second), pods.status(second).exit_code) == ("EXITED", 137)


def _doctor(node):
    return node.exec(["fermata", "doctor"], check=False).stdout


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_new_pod_goes_on_where_the_snapshot_was_taken(node, pods, directory, handler):
    pod, container = running(pods, COUNT, handler=handler)
    wait_count(pods, container)
    take(pods, container, directory)
    went_on = wait_count(pods, container, counted(pods, container) + 2)
    pods.remove(pod)
    other, container = restored(pods, directory, handler=handler)
    assert other.ip != pod.ip
    wait_for(lambda: pods.log(other, "server"), "output")
    first = int(pods.log(other, "server")[0].removeprefix("count "))
    assert 3 < first <= went_on
    wait_count(pods, container, first + 3)
    numbers = [int(line.removeprefix("count ")) for line in pods.log(other, "server")]
    assert numbers == list(range(first, first + len(numbers)))
    assert pods.state(container) == "RUNNING"
    assert pods.exec(container, "cat", "/etc/hostname") == "second\n"
    groups = Path(f"/proc/{_pid(node, container)}/cgroup").read_text()
    assert f"{other.config.linux.cgroup_parent}/{container}\n" in groups
    assert pod.config.linux.cgroup_parent not in groups
    pods.call("ContainerStats", cri.ById(id=container), cri.Message)
    # containerd's restart is the kubelet's business as usual.
    node.restart_containerd()
    wait_for(lambda: _unless_down(lambda: pods.state(container)) == "RUNNING", "the CRI plugin")
    assert counted(pods, container) > first


def _unless_down(do):
    try:
        return do()
    except Failed:
        return None


def test_a_restored_server_answers_at_the_new_pods_address(node, pods, directory):
    criu = tuple(map(int, re.findall(r"\d+", node.exec(["criu", "--version"]).stdout)[:2]))
    if criu < (4, 2) and tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 16):
        pytest.skip("this CRIU can save no socket of the internet on this kernel")
    pod, container = running(pods, SERVE)
    ask = ["python3", "-c", ASK]
    wait_for(lambda: _unless_refused(lambda: pods.exec(container, *ask, pod.ip)), "the server")
    before = int(pods.exec(container, *ask, "127.0.0.1"))
    take(pods, container, directory)
    pods.remove(pod)
    other, container = restored(pods, directory, SERVE)
    client = running(pods, COUNT, "client", pod=pods.run("client"))[1]
    assert other.ip != pod.ip
    assert int(pods.exec(client, *ask, other.ip)) == before + 1
    assert int(pods.exec(container, *ask, "127.0.0.1")) == before + 2


def _unless_refused(do):
    try:
        return do()
    except NodeError:
        return None


@pytest.mark.parametrize("handler", HANDLERS)
def test_the_kubelets_checkpoint_is_a_snapshot_too(node, pods, directory, handler):
    pod, container = running(pods, COUNT, handler=handler)
    wait_count(pods, container)
    archive = f"{directory}.tar"
    if node.containerd_version() < (2,):
        with pytest.raises(Failed, match="UNIMPLEMENTED"):
            pods.checkpoint(container, archive)
        return
    pods.checkpoint(container, archive)
    counted_then = wait_count(pods, container, counted(pods, container) + 1)
    assert pods.state(container) == "RUNNING"
    shown = node.exec(["checkpointctl", "show", archive]).stdout.split()
    assert {"server", "docker.io/library/fermata-test:latest"} < set(shown)
    runtime = {"fermata": "io.containerd.fermata.v1", "fermata-runc": "io.containerd.runc.v2"}
    assert runtime[handler] in shown
    pods.remove(pod)
    node.exec(["mkdir", directory])
    node.exec(["tar", "-C", directory, "-xf", archive])
    if handler == "fermata-runc":  # what the plugin asks for only under this name
        assert node.exec(["ls", f"{directory}/dump.log", f"{directory}/stats-dump"])
        assert "CRIU dump statistics" in node.exec(["checkpointctl", "inspect", "--stats", archive]).stdout
    manifest = json.loads(node.path(f"{directory}/checkpoint/fermata.json").read_text())
    assert manifest["container"]["image"] == "docker.io/library/fermata-test:latest"
    _, container = restored(pods, f"{directory}/checkpoint", handler=handler)
    assert counted(pods, container) >= 3
    assert counted_then > 3


def test_the_commands_and_the_annotation_of_the_documentation_work(node, pods):
    [scenario] = [one for one in documentation.SCENARIOS if one.place == "cluster"]
    make, unpack, take = (one.text for one in scenario.commands())
    annotations = [lines[-1] for section, lines in documentation.blocks(scenario.page) if lines[0] == "metadata:"]
    key, _, value = annotations[0].partition(": ")
    _, container = running(pods, COUNT)
    wait_count(pods, container)
    node.exec(["mkdir", "-p", "/srv/snapshots", "/var/lib/kubelet/checkpoints"])
    try:
        if node.containerd_version() >= (2,):
            pods.checkpoint(container, "/var/lib/kubelet/checkpoints/ARCHIVE.tar")
            for text in (make, unpack):
                node.exec(["sh", "-c", text])
            other, second = restored(pods, f"{value}/checkpoint")
            wait_count(pods, second, 4)
            pods.remove(other)
            node.exec(["rm", "-r", value])
        node.exec(["sh", "-c", scenario.filled(take, CONTAINER_ID=container)])
        _, second = restored(pods, value, key=key)
        wait_count(pods, second, 4)
    finally:
        node.exec(["rm", "-rf", "/srv/snapshots", "/var/lib/kubelet"])


def test_of_two_containers_the_named_one_is_restored(node, pods, directory):
    pod, container = running(pods, COUNT)
    sidecar = running(pods, COUNT, "sidecar", pod=pod)[1]
    at = wait_count(pods, container, 20)
    wait_count(pods, sidecar)
    take(pods, container, directory)
    pods.remove(pod)

    pod, container = restored(pods, directory, key="fermata/restore-from.server")
    sidecar = running(pods, COUNT, "sidecar", pod=pod)[1]
    wait_for(lambda: pods.log(pod, "server") and pods.log(pod, "sidecar"), "output of both")
    assert int(pods.log(pod, "server")[0].removeprefix("count ")) >= at
    assert pods.log(pod, "sidecar")[0] == "count 1"
    # A container that fails is made anew by the kubelet: from the snapshot again.
    os.kill(_pid(node, container), signal.SIGKILL)
    wait_for(lambda: pods.state(container) == "EXITED", "its end")
    again = pods.create(pod, "server", *python(COUNT), attempt=1)
    pods.start(again)
    wait_for(lambda: pods.log(pod, "server", 1), "output")
    assert pods.log(pod, "server", 1)[0] == pods.log(pod, "server")[0]

    pod, container = restored(pods, directory)
    assert pods.state(container) == "RUNNING"
    with pytest.raises(Failed, match=r"'server', while this one is 'sidecar': annotate the pod .*restore-from\.server"):
        running(pods, COUNT, "sidecar", pod=pod)
    assert pods.state(container) == "RUNNING"


def _pid(node, container):
    listed = node.ctr("tasks", "list", namespace="k8s.io").stdout.splitlines()
    return next(int(line.split()[1]) for line in listed if line.startswith(container))


def test_annotations_without_sense_are_refused_before_the_pod_is_there(pods):
    wrong = {"fermata/layer": "some", "fermata/restore-from.server": "snapshots/a", "fermata/restore": "/a"}
    with pytest.raises(Failed) as refused:
        pods.run("first", annotations=wrong)
    assert "annotation fermata/layer is 'some', it can be carry or none" in str(refused.value)
    assert "annotation fermata/restore-from.server is 'snapshots/a', it must be the absolute" in str(refused.value)
    assert "unknown annotation fermata/restore (there are" in str(refused.value)
    pod = pods.run("first", annotations={"fermata/restore-from.server": "/srv/nothing"})
    with pytest.raises(Failed, match="no snapshot at /srv/nothing: the directory does not exist on this node"):
        running(pods, COUNT, pod=pod)
    running(pods, COUNT, "other", pod=pod)


def test_semaphores_and_shared_memory_of_a_pod_come_back(pods, directory):
    pod, container = running(pods, SHARE)

    def shared():
        return _unless_refused(lambda: int(pods.exec(container, "python3", "-c", SHARED)))

    before = wait_for(shared, "shared memory")
    take(pods, container, directory)
    pods.remove(pod)
    _, container = restored(pods, directory, SHARE)
    assert wait_for(lambda: (found := shared()) > before and found, "both processes to go on")


def test_a_pod_may_keep_one_dev_shm_for_all_its_containers(pods):
    for value, seen in (("pod", "both"), ("own", "")):
        pod, container = running(pods, COUNT, annotations={"fermata/shm": value})
        other = running(pods, COUNT, "other", pod=pod)[1]
        pods.exec(container, "sh", "-c", "echo both >/dev/shm/file")
        assert pods.exec(other, "sh", "-c", "cat /dev/shm/file || true").strip() == seen
        pods.remove(pod)


@pytest.fixture
def held_restore(node):
    """Restores stop, with all processes there and none resumed, until the file is removed."""
    script, settings, reached = (node.path(path) for path in ("/srv/hold", "/etc/criu/default.conf", "/srv/reached"))
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-restore ] || exit 0\n'
        "touch /srv/reached\nwhile [ -e /srv/reached ]; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("action-script /srv/hold\n")
    yield reached
    for path in (script, settings, reached):
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("killed", ["criu", "container", "pod"])
def test_a_pod_killed_while_it_is_restored_leaves_nothing(node, pods, directory, held_restore, killed):
    pod, container = running(pods, COUNT)
    wait_count(pods, container)
    take(pods, container, directory)
    pods.remove(pod)
    pod = pods.run("second", annotations={"fermata/restore-from": directory})
    container = pods.create(pod, "server", *python(COUNT))
    said = []

    def start():
        try:
            pods.start(container)
            said.append("started")
        except Failed as error:
            said.append(str(error))

    starting = threading.Thread(target=start)
    starting.start()
    wait_for(held_restore.exists, "the restore's last step")
    if killed == "criu":
        for criu in [found.pid for found in processes(node) if found.words[0].startswith("criu: restore")]:
            os.kill(criu, signal.SIGKILL)
    elif killed == "container":
        node.ctr("tasks", "kill", "-s", "SIGKILL", container, namespace="k8s.io", check=False, timeout=20)
    else:
        pods.call("StopPodSandbox", cri.ById(id=pod.id), cri.Message)
    held_restore.unlink()
    starting.join(60)
    assert said, "StartContainer was answered"
    if killed != "pod":
        assert "restore of" in said[0]
        assert pods.state(container) == "EXITED"
    wait_for(lambda: _done(lambda: pods.remove(pod)), "the pod's end")
    assert leftovers(node, 20) == []
    node.path("/etc/criu/default.conf").unlink()
    # And the snapshot is as good as before.
    _, container = restored(pods, directory)
    assert pods.state(container) == "RUNNING"


def _done(do):
    """Whether the plugin did it: it refuses some things while another call is at work, and the kubelet tries again."""
    try:
        do()
    except Failed:
        return False
    return True
