"""What operations came to is counted for Prometheus, and is in one line of the log each."""

from __future__ import annotations

import re
import shlex

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.containers import IMAGE, OURS, pid, remove, start, status, wait_for
from node.shims import CallFailed, Shim

TICK = "import time; rounds = 0\nwhile True: rounds += 1; open('/ticks', 'w').write(str(rounds)); time.sleep(0.02)"
# CRIU saves no stream whose other end is another container's, or the node's.
OUTSIDE = f"import socket; held = socket.socket(socket.AF_UNIX); held.connect('/outside/containerd.sock')\n{TICK}"
FILE = "/run/fermata-metrics/fermata.prom"


def samples(node):
    """Every sample's value by its name and labels, from the command, which a real parser has to understand."""
    found = {}
    for family in text_string_to_metric_families(node.exec(["fermata", "metrics"]).stdout):
        for it in family.samples:
            found[(it.name, *sorted(it.labels.items()))] = it.value
    return found


def lines(node, mark):
    """The log's lines of operations since `mark` was its length, as fields."""
    text = node.log.read_bytes()[mark:].decode(errors="replace")
    found = []
    for line in text.splitlines():
        if " operation=" in line:
            found.append(dict(word.split("=", 1) for word in shlex.split(line) if "=" in word))
    return found


@pytest.fixture
def counted(node):
    """How much more each sample has than at the test's beginning; only what has changed."""
    start(node, "first")  # has the file made, with zeros
    remove(node, "first")
    before = samples(node)
    assert before["fermata_takes_total", ("outcome", "failure")] >= 0

    def changes():
        after = samples(node)
        return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)}

    yield changes
    node.exec(["rm", "-rf", "/srv/m"])


@pytest.fixture
def mark(node):
    return node.log.stat().st_size


def test_a_take_and_a_restore_are_counted_and_logged(node, counted, mark):
    start(node, "one", "python3", "-c", TICK)
    wait_for(lambda: node.ctr("tasks", "exec", "--exec-id", "x", "one", "ls", "/ticks", check=False).stdout, "a file")
    Shim(node, "one").checkpoint("/srv/m")
    start(node, "two", options=["--annotation", "fermata/restore-from=/srv/m"])
    now = counted()
    sizes = node.exec(["sh", "-c", "stat -c %s /srv/m/*"]).stdout.split()
    whole = sum(map(int, sizes)) - int(node.exec(["stat", "-c", "%s", "/srv/m/fermata.json"]).stdout)
    assert now["fermata_takes_total", ("outcome", "success")] == 1
    assert now["fermata_restores_total", ("outcome", "success")] == 1
    assert now["fermata_take_bytes_total",] == now["fermata_restore_bytes_total",] == whole
    assert now["fermata_take_layer_entries_total",] >= 2
    assert now["fermata_take_layers_total", ("made_by", "upperdir")] == 1
    for name in ("fermata_take_seconds", "fermata_take_frozen_seconds", "fermata_restore_seconds"):
        assert now[f"{name}_count",] == now[f"{name}_bucket", ("le", "+Inf")] == 1
        assert 0 < now[f"{name}_sum",] < 60
    assert now["fermata_take_frozen_seconds_sum",] < now["fermata_take_seconds_sum",]
    steps = {key[1][1] for key in now if key[0] == "fermata_take_step_seconds_count"}
    assert steps == {"layer", "dump"}
    assert {key[1][1] for key in now if key[0] == "fermata_restore_step_seconds_count"} == {"check", "layer", "criu"}
    assert not [key for key in now if "failure" in str(key) or "lost" in key[0]]

    take, restore = lines(node, mark)
    assert (take["operation"], take["outcome"], take["container"]) == ("take", "success", "one")
    assert (restore["operation"], restore["outcome"], restore["container"]) == ("restore", "success", "two")
    for line in (take, restore):
        assert line["level"] == "info"
        assert line["directory"] == "/srv/m"
        assert int(line["bytes"]) == whole
        assert int(line["entries"]) >= 2
        assert 0 < float(line["seconds"]) < 60
    assert 0 < float(take["frozen"]) < float(take["seconds"])
    remove(node, "one")
    remove(node, "two")


def test_what_fails_is_counted_by_its_cause_and_logged_once(node, counted, mark):
    outside = ["--mount", "type=bind,src=/run/containerd,dst=/outside,options=rbind"]
    start(node, "one", "python3", "-c", OUTSIDE, options=outside)
    wait_for(lambda: node.ctr("tasks", "exec", "--exec-id", "x", "one", "ls", "/ticks", check=False).stdout, "a file")
    with pytest.raises(CallFailed, match="outside the container") as by_criu:
        Shim(node, "one").checkpoint("/srv/m")
    assert status(node, "one") == "RUNNING"
    node.exec(["mkdir", "-p", "/srv/m"])
    node.exec(["touch", "/srv/m/there"])
    with pytest.raises(CallFailed, match="not empty") as by_us:
        Shim(node, "one").checkpoint("/srv/m")
    again = ["run", "-d", "--runtime", OURS, "--annotation", "fermata/restore-from=/srv/m", IMAGE, "two"]
    refused = node.ctr(*again, check=False)
    assert refused.returncode
    now = counted()
    assert now["fermata_takes_total", ("outcome", "failure")] == 2
    assert now["fermata_restores_total", ("outcome", "failure")] == 1
    causes = {key: value for key, value in now.items() if "_failures_total" in key[0]}
    assert causes == {
        ("fermata_take_failures_total", ("cause", "unix-socket-outside")): 1,
        ("fermata_take_failures_total", ("cause", "take")): 1,
        ("fermata_restore_failures_total", ("cause", "manifest")): 1,
    }
    assert not [key for key in now if "success" in str(key) or "lost" in key[0] or "bytes" in key[0]]

    found = lines(node, mark)
    assert [line["outcome"] for line in found] == ["failure"] * 3
    assert [line["cause"] for line in found] == ["unix-socket-outside", "take", "manifest"]
    assert [line["operation"] for line in found] == ["take", "take", "restore"]
    assert [line["error"] for line in found[:2]] == [str(by_criu.value), str(by_us.value)]
    assert found[2]["error"] in refused.stderr
    log = node.log.read_bytes()[mark:].decode()
    errors = [line for line in log.splitlines() if "runtime=fermata" in line and "level=error" in line]
    assert len(errors) == 3
    remove(node, "one")
    node.ctr("containers", "delete", "two")


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "kept"])
def test_a_container_that_ends_with_a_take_that_fails_is_counted_as_lost(node, counted, mark, lost):
    hook = node.path("/usr/local/lib/fermata/shim/hook.sh")
    text = hook.read_text()
    start(node, "one", "python3", "-c", TICK)
    kill = f"kill -9 {pid(node, 'one')}; " if lost else ""
    try:
        hook.write_text(text.replace("\n", f'\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || {{ {kill}exit 1; }}\n', 1))
        with pytest.raises(CallFailed):
            Shim(node, "one").checkpoint("/srv/m")
    finally:
        hook.write_text(text)
    now = counted()
    assert now["fermata_takes_total", ("outcome", "failure")] == 1
    assert now.get(("fermata_take_lost_containers_total",), 0) == lost
    (line,) = lines(node, mark)
    assert line.get("lost") == ("True" if lost else None)
    remove(node, "one")


def test_operations_go_on_where_nothing_can_be_counted(node, counted, mark):
    before = node.path(FILE).read_bytes()
    node.exec(["mount", "-t", "tmpfs", "-o", "size=4k", "none", "/run/fermata-metrics"])
    try:
        node.exec(["sh", "-c", f"cp /dev/null {FILE}; head -c 4096 /dev/zero >/run/fermata-metrics/full"], check=False)
        start(node, "one", "python3", "-c", TICK)
        Shim(node, "one").checkpoint("/srv/m")
        start(node, "two", options=["--annotation", "fermata/restore-from=/srv/m"])
    finally:
        node.exec(["umount", "/run/fermata-metrics"])
    assert status(node, "two") == "RUNNING"
    assert [line["outcome"] for line in lines(node, mark)] == ["success", "success"]
    log = node.log.read_bytes()[mark:].decode()
    assert len(re.findall(r'level=warning msg="an operation is not in the metrics".*No space left', log)) >= 2
    assert node.path(FILE).read_bytes() == before
    remove(node, "one")
    remove(node, "two")


def test_the_file_can_be_where_the_operator_wants_it_or_nowhere(node, counted):
    config = node.path("/etc/fermata/config.toml")
    config.parent.mkdir(exist_ok=True)
    try:
        config.write_text('[metrics]\ntextfile = "/srv/node.prom"\n')
        start(node, "one")
        Shim(node, "one").checkpoint("/srv/m/1")
        assert 'fermata_takes_total{outcome="success"} 1\n' in node.path("/srv/node.prom").read_text()
        assert node.exec(["fermata", "metrics"]).stdout == node.path("/srv/node.prom").read_text()
        remove(node, "one")
        config.write_text('[metrics]\ntextfile = ""\n')
        start(node, "two")
        Shim(node, "two").checkpoint("/srv/m/2")
        said = node.exec(["fermata", "metrics"], check=False)
        assert (said.returncode, "textfile" in said.stderr) == (1, True)
        remove(node, "two")
    finally:
        config.unlink()
        node.exec(["rm", "-f", "/srv/node.prom"])
    assert counted() == {}


def test_another_user_can_read_it_and_nothing_else_of_ours(node, counted):
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    assert "fermata_takes_total" in node.exec([*nobody, "cat", FILE]).stdout
    assert node.exec([*nobody, "sh", "-c", f"echo x >{FILE} || echo x >{FILE}.x"], check=False).returncode
    assert node.exec([*nobody, "ls", "/run/fermata"], check=False).returncode
