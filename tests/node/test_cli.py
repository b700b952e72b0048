"""The operator's commands against a real containerd: take, look at, restore, on this node and on another one."""

from __future__ import annotations

import json
import os
import pty
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from node import Node
from node.containers import OURS, STOCK, pid, remove, start, status, wait_for
from node.node import SOCKET

IMAGE = "docker.io/library/fermata-test:latest"
TOP = "/srv/cli"
COUNTER = """
import os, time
note = open("/root/note", "w+")
note.write("kept in the layer")
note.flush()
n = 0
while True:
    n += 1
    note.seek(0)
    print(n, note.read(), os.environ.get("ADDED", "-"), flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def top(node):
    path = node.path(TOP)
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


def fermata(node, *words, check=True):
    return node.exec(["fermata", *map(str, words)], check=check)


def count(node, name, log):
    start(node, name, "python3", "-c", COUNTER, options=["--log-uri", f"file://{TOP}/{log}"])
    seen = node.path(f"{TOP}/{log}")
    wait_for(lambda: seen.exists() and len(seen.read_text().splitlines()) > 3, "the counter")
    return seen


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def stored(node) -> tuple[str, str]:
    """What containerd's content store and image list hold; ages aside."""
    return node.ctr("content", "list", "-q").stdout, node.ctr("images", "list", "-q").stdout


# checkpoint -------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_a_directory_and_the_container_goes_on(node, top):
    log = count(node, "one", "one.log")
    before = stored(node)
    done = fermata(node, "checkpoint", "one", f"{TOP}/s")
    assert done.stderr == ""
    assert done.stdout.startswith(f"{TOP}/s: ")
    assert stored(node) == before, "containerd packed something"
    assert (top / "s").stat().st_mode & 0o777 == 0o700
    assert {"fermata.json", "inventory.img", "layer.tar", "pages-1.img"} <= {
        path.name for path in (top / "s").iterdir()
    }
    reached = len(lines(log))
    wait_for(lambda: len(lines(log)) > reached, "the container to go on")
    data = json.loads((top / "s/fermata.json").read_text())
    assert data["container"]["image"] == IMAGE
    assert data["container"]["image_digest"] in node.ctr("images", "list").stdout
    assert data["container"]["runtime"] == OURS
    assert data["node"]["containerd"] in node.exec(["containerd", "--version"]).stdout
    assert data["spec"]["process"]["args"][:2] == ["python3", "-c"]
    assert sum(data["files"].values()) == sum(
        path.stat().st_size for path in (top / "s").iterdir() if path.name != "fermata.json"
    )
    schema = json.loads(Path(__file__).parents[2].joinpath("docs/fermata.schema.json").read_text())
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(data, schema)
    # The same content again: containerd 1.7 meets blobs that it has already packed.
    fermata(node, "checkpoint", "one", f"{TOP}/again")
    assert stored(node) == before


def test_exit_ends_the_container_and_json_is_for_programs(node, top):
    count(node, "two", "two.log")
    answer = json.loads(fermata(node, "checkpoint", "--exit", "--json", "two", f"{TOP}/s").stdout)
    assert answer["directory"] == f"{TOP}/s"
    assert answer["bytes"] > 1_000_000
    assert answer["container"]["left_running"] is False
    assert set(answer["steps"]) >= {"dump", "layer", "total"}
    wait_for(lambda: status(node, "two") == "STOPPED", "its end")


def test_a_terminal_sees_step_bytes_and_seconds(node, top):
    start(node, "three", "python3", "-c", "import time; keep = b'x' * (300 << 20); time.sleep(1000)")
    wait_for(lambda: memory(pid(node, "three")) > 300 << 20, "its memory")
    master, slave = pty.openpty()
    process = node.popen(["fermata", "checkpoint", "three", f"{TOP}/s"], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    said = b""
    while chunk := read(master):
        said += chunk
    os.close(master)
    assert process.wait(60) == 0
    *progress, last = said.decode().split("\r\x1b[K")
    assert any(line.startswith("dumping the processes  ") and line.endswith(" s") for line in progress)
    assert last.startswith(f"{TOP}/s: 30")


def memory(process: int) -> int:
    text = Path(f"/proc/{process}/statm").read_text() if process else "0 0"
    return int(text.split()[1]) * 4096


def read(master: int) -> bytes:
    try:
        return os.read(master, 4096)
    except OSError:  # the other side has closed
        return b""


def test_what_cannot_be_taken_is_said(node, top):
    start(node, "stock", runtime=STOCK)
    done = fermata(node, "checkpoint", "--exit", "stock", f"{TOP}/s", check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"fermata: no shim of fermata's serves the container stock, whose runtime is {STOCK}: start it, under {OURS}\n"
    )
    assert status(node, "stock") == "RUNNING"
    assert not (top / "s").exists()
    start(node, "ours")
    (top / "full").mkdir()
    (top / "full/letter").touch()
    done = fermata(node, "checkpoint", "ours", f"{TOP}/full", check=False)
    assert done.stderr == f"fermata: snapshot directory {TOP}/full is not empty: name a new one\n"
    assert [path.name for path in (top / "full").iterdir()] == ["letter"]
    done = fermata(node, "checkpoint", "--address", "/nowhere.sock", "ours", f"{TOP}/s2", check=False)
    assert done.stderr == (
        "fermata: containerd does not answer at /nowhere.sock: start it, or name its socket with --address\n"
    )


def test_a_container_that_does_not_run_cannot_be_taken(node, top):
    node.ctr("containers", "create", "--runtime", OURS, IMAGE, "idle")
    done = fermata(node, "checkpoint", "idle", f"{TOP}/s", check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "fermata: the container idle does not run, so there is nothing to take: `ctr -n default tasks start idle` "
        "starts it\n",
    )
    assert not (top / "s").exists()
    done = fermata(node, "park", "idle", check=False)
    assert done.stderr == "fermata: no running container idle of fermata's in any namespace on this node\n"
    node.ctr("containers", "delete", "idle")
    start(node, "ended", "true")
    wait_for(lambda: status(node, "ended") == "STOPPED", "its end")
    done = fermata(node, "checkpoint", "ended", f"{TOP}/s", check=False)
    assert (done.returncode, done.stderr.startswith("fermata: snapshot of ended failed: ")) == (1, True)
    assert "stopped" in done.stderr


def test_what_is_not_parked_needs_no_unparking(node, top):
    start(node, "plain")
    done = fermata(node, "unpark", "plain", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain is not parked\n", "")
    done = fermata(node, "park", "plain", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fermata: plain has no GPU state: ")
    assert status(node, "plain") == "RUNNING"


# restore ----------------------------------------------------------------------------------------------------------


def test_a_new_container_goes_on_where_the_snapshot_was_taken(node, top):
    log = count(node, "from", "from.log")
    (top / "mounted").mkdir()
    fermata(node, "checkpoint", "--exit", "from", f"{TOP}/s")
    reached = int(lines(log)[-1].split()[0])
    remove(node, "from")
    words = ["--label", "a=b", "--env", "ADDED=1", "--log-uri", f"file://{TOP}/to.log"]
    done = fermata(node, "restore", *words, f"{TOP}/s", "to")
    assert done.stdout.startswith(f"to: restored from {TOP}/s in ")
    assert done.stdout.endswith(f", process {pid(node, 'to')}\n")
    wait_for(lambda: len(lines(top / "to.log")) > 3, "the counter")
    first = lines(top / "to.log")[0].split(maxsplit=1)
    assert int(first[0]) in range(reached, reached + 3)
    assert first[1] == "kept in the layer -"
    record = json.loads(node.ctr("containers", "info", "to").stdout)
    assert record["Labels"] == {"a": "b"}
    assert record["Image"] == IMAGE
    assert record["Runtime"]["Name"] == OURS
    executed = node.ctr("tasks", "exec", "--exec-id", "e", "to", "sh", "-c", "echo $ADDED; cat /root/note").stdout
    assert executed == "1\nkept in the layer"
    again = fermata(node, "restore", f"{TOP}/s", "to", check=False)
    assert again.stderr == (
        "fermata: there is a container or a file system snapshot to in the namespace default already: choose another "
        "id, or remove it\n"
    )
    assert status(node, "to") == "RUNNING"


def test_a_restore_that_fails_leaves_nothing_and_can_be_mended_or_forced(node, top):
    (top / "data").mkdir()
    mount = ["--mount", f"type=bind,src={TOP}/data,dst=/data,options=rbind:ro"]
    start(node, "a", options=mount)
    fermata(node, "checkpoint", "--exit", "a", f"{TOP}/s")
    remove(node, "a")
    (top / "data").rename(top / "moved")
    before = node.ctr("snapshots", "list").stdout
    done = fermata(node, "restore", f"{TOP}/s", "b", check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"fermata: snapshot {TOP}/s cannot be restored here: the source {TOP}/data of "
        "the mount /data does not exist on this node: make it, or mount another\n"
    )
    assert node.ctr("snapshots", "list").stdout == before
    assert node.ctr("containers", "list", "-q").stdout == ""
    assert not node.path("/run/fermata/default/b").exists()
    fermata(node, "restore", "--mount", f"src={TOP}/moved,dst=/data,options=rbind:ro", f"{TOP}/s", "b")
    assert status(node, "b") == "RUNNING"
    change(top / "s", "requires", architecture="vax")
    done = fermata(node, "restore", "--mount", f"src={TOP}/moved,dst=/data", f"{TOP}/s", "c", check=False)
    assert "it was taken on vax" in done.stderr
    fermata(node, "restore", "--force", "--mount", f"src={TOP}/moved,dst=/data", f"{TOP}/s", "c")
    assert status(node, "c") == "RUNNING"


def change(snapshot: Path, part: str, **changes: object) -> None:
    path = snapshot / "fermata.json"
    data = json.loads(path.read_text())
    data[part].update(changes)
    path.write_text(json.dumps(data))


def test_an_image_that_is_missing_or_another_one_is_said_at_once(node, top):
    start(node, "a")
    fermata(node, "checkpoint", "--exit", "a", f"{TOP}/s")
    remove(node, "a")
    digest = json.loads((top / "s/fermata.json").read_text())["container"]["image_digest"]
    other = f"sha256:{'0' * 64}"
    change(top / "s", "container", image_digest=other)
    done = fermata(node, "restore", f"{TOP}/s", "b", check=False)
    assert done.stderr == (
        f"fermata: the image {IMAGE} is another one on this node, {digest}, and was {other}: pull that one, name it "
        "with --image, or try this one with --force\n"
    )
    change(top / "s", "container", image="docker.io/library/gone:1")
    done = fermata(node, "restore", f"{TOP}/s", "b", check=False)
    assert done.stderr == (
        "fermata: the image docker.io/library/gone:1 is not on this node: `ctr -n default images pull "
        f"docker.io/library/gone:1@{other}`\n"
    )
    change(top / "s", "container", image=None, image_digest="")
    done = fermata(node, "restore", f"{TOP}/s", "b", check=False)
    assert done.stderr == (
        f"fermata: snapshot {TOP}/s does not say which image it was taken from (`fermata checkpoint` and the kubelet "
        "tell, others do not): name it with --image\n"
    )
    fermata(node, "restore", "--image", IMAGE, f"{TOP}/s", "b")
    assert status(node, "b") == "RUNNING"


def test_of_a_snapshot_that_ctr_took_the_image_is_asked_for_and_suggested(node, top):
    start(node, "a")
    node.ctr("tasks", "checkpoint", "--image-path", f"{TOP}/s", "a", check=False)
    if not (top / "s/fermata.json").exists():
        pytest.skip("this ctr writes a directory for the stock runtime's name only")
    assert "image      (not recorded)" in fermata(node, "inspect", f"{TOP}/s").stdout
    done = fermata(node, "restore", f"{TOP}/s", "b", check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"fermata: snapshot {TOP}/s does not say which image it was taken from (`fermata checkpoint` and the kubelet "
        f"tell, others do not): name it with --image; a container a is here, of the image {IMAGE}\n",
    )
    fermata(node, "restore", "--image", IMAGE, f"{TOP}/s", "b")
    assert status(node, "b") == "RUNNING"


def test_a_copied_directory_is_restored_on_another_node(node, top):
    log = count(node, "moving", "moving.log")
    fermata(node, "checkpoint", "--exit", "moving", f"{TOP}/s")
    reached = int(lines(log)[-1].split()[0])
    with Node.up(stack_name=node.stack) as other:
        shutil.copytree(top / "s", other.path("/srv/s"))
        done = fermata(other, "restore", "/srv/s", "arrived", check=False)
        assert "is not on this node: `ctr -n default images pull " in done.stderr
        other.import_image()
        done = fermata(other, "restore", "--log-uri", "file:///srv/out.log", "/srv/s", "arrived")
        assert done.returncode == 0
        out = other.path("/srv/out.log")
        wait_for(lambda: len(lines(out)) > 3, "the counter")
        assert int(lines(out)[0].split()[0]) in range(reached, reached + 3)
        assert "kept in the layer" in lines(out)[0]


# inspect, ls, rm ----------------------------------------------------------------------------------------------------


def test_a_snapshot_is_looked_at_listed_and_removed(node, top):
    program = 'import os, time; f = open("/root/x", "w"); os.fork(); time.sleep(1000)'
    start(node, "seen", "python3", "-c", program)
    fermata(node, "checkpoint", "--exit", "seen", f"{TOP}/s")
    remove(node, "seen")
    for name in ("first", "second"):
        fermata(node, "restore", f"{TOP}/s", name)
    page = fermata(node, "inspect", "--plot", f"{TOP}/t.svg", f"{TOP}/s").stdout
    assert f"image      {IMAGE} sha256:" in page
    assert "into first: check " in page
    assert "into second: check " in page
    found = json.loads(fermata(node, "inspect", "--json", f"{TOP}/s").stdout)
    parent, child = found["processes"]
    assert (parent["name"], child["name"]) == ("python3", "python3")
    assert (parent["pid"], child["parent"]) == (1, 1)
    assert "/root/x" in [file["what"] for file in parent["files"]]
    assert parent["memory"] > 1_000_000
    assert [record["container"] for record in found["restores"]] == ["first", "second"]
    assert set(found["restores"][0]["steps"]) == {"check", "layer", "criu"}
    texts = [element.text for element in ElementTree.parse(top / "t.svg").getroot().iter() if element.text]
    assert {"take of seen", "restore of first", "restore of second"} <= set(texts)
    assert [line.split()[0] for line in fermata(node, "ls", TOP).stdout.splitlines()] == ["s"]
    assert fermata(node, "rm", TOP, check=False).returncode == 1
    fermata(node, "rm", f"{TOP}/s")
    assert not (top / "s").exists()


def test_the_socket_and_the_namespace_may_come_from_the_environment(node, top):
    start(node, "here")
    environment = {"CONTAINERD_ADDRESS": f"unix://{SOCKET}", "CONTAINERD_NAMESPACE": "elsewhere"}
    done = node.exec(["fermata", "checkpoint", "here", f"{TOP}/s"], env=environment, check=False)
    assert done.stderr.startswith("fermata: no container here in containerd's namespace elsewhere: ")
    node.exec(["fermata", "checkpoint", "-n", "default", "here", f"{TOP}/s"], env=environment)
    done = fermata(node, "checkpoint", "--address", "/other.sock", "here", f"{TOP}/t", check=False)
    assert "does not answer at /other.sock" in done.stderr
