"""Counts and times in one file: what Prometheus reads is what happened, whoever wrote, died or ran out of room."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import resource
import signal
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from node.stack import PROJECT
from shim import metrics
from shim.metrics import FAMILIES, Page, add

STEPS = (("criu", 0.5), ("layer", 0.25))
TAKEN = ("fermata_takes_total", {"outcome": "success"}, 1)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "fermata.prom")


@pytest.fixture
def lock(tmp_path):
    return str(tmp_path / "lock")


def families(text):
    """As a real parser reads them: name -> (type, {(sample, labels): value}), counters without their `_total`."""
    found = {}
    for family in text_string_to_metric_families(text):
        samples = {(it.name, tuple(sorted(it.labels.items()))): it.value for it in family.samples}
        found[family.name] = (family.type, family.documentation, samples)
    return found


def read(path):
    with open(path, encoding="utf-8") as file:
        return families(file.read())


def value(found, sample, **labels):
    name = next(it for it in sorted(found, key=len, reverse=True) if sample.startswith(it))
    return found[name][2].get((sample, tuple(sorted(labels.items()))))


def test_every_metric_is_read_by_prometheus_with_its_type_and_help(path, lock):
    add(path, [], lock=lock)
    found = read(path)
    for name, family in FAMILIES.items():
        kind, text, _ = found[name.removesuffix("_total") if family.kind == "counter" else name]
        assert (kind, text) == (family.kind, family.help)
    assert len(found) == len(FAMILIES)


def test_names_are_as_prometheus_asks_for():
    for name, family in FAMILIES.items():
        assert name.startswith("fermata_")
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert any(unit in name for unit in ("_seconds", "_bytes", "_total")), name
        assert family.help.endswith(".") and "\n" not in family.help and "\\" not in family.help


def test_what_is_known_beforehand_is_there_at_zero(path, lock):
    add(path, [], lock=lock)
    found = read(path)
    for operation in ("take", "restore"):
        for outcome in ("success", "failure"):
            assert value(found, f"fermata_{operation}s_total", outcome=outcome) == 0
        assert value(found, f"fermata_{operation}_seconds_count") == 0
    assert value(found, "fermata_take_lost_containers_total") == 0


def test_counters_add_up_over_writers(path, lock):
    for _ in range(3):
        add(path, [TAKEN, ("fermata_take_bytes_total", {}, 5.0)], lock=lock)
    found = read(path)
    assert value(found, "fermata_takes_total", outcome="success") == 3
    assert value(found, "fermata_takes_total", outcome="failure") == 0
    assert value(found, "fermata_take_bytes_total") == 15


@given(st.lists(st.one_of(st.floats(0, 1000), st.sampled_from([0.05, 0.1, 60, 600]))))
def test_a_histogram_counts_what_is_at_most_each_bound(observed):
    page = Page()
    page.declare()
    for seconds in observed:
        page.add("fermata_take_frozen_seconds", {}, seconds)
    found = families(page.render())
    buckets = [*FAMILIES["fermata_take_frozen_seconds"].buckets, "+Inf"]
    for bound in buckets:
        counted = value(found, "fermata_take_frozen_seconds_bucket", le=bound)
        assert counted == sum(seconds <= float(bound) for seconds in observed)
    assert value(found, "fermata_take_frozen_seconds_count") == len(observed)
    assert math.isclose(value(found, "fermata_take_frozen_seconds_sum"), sum(observed), abs_tol=1e-9)
    assert sorted(map(float, buckets)) == list(map(float, buckets))


def test_a_summary_has_a_sum_and_a_count_for_each_label(path, lock):
    changes = [
        ("fermata_restore_step_seconds", {"step": step}, took) for step, took in (("criu", 0.5), ("layer", 0.25))
    ]
    add(path, [*changes, changes[0]], lock=lock)
    found = read(path)
    assert value(found, "fermata_restore_step_seconds_sum", step="criu") == 1.0
    assert value(found, "fermata_restore_step_seconds_count", step="criu") == 2
    assert value(found, "fermata_restore_step_seconds_count", step="layer") == 1


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r")))
def test_any_label_is_read_as_it_was_given(label):
    page = Page()
    page.declare()
    page.add("fermata_take_failures_total", {"cause": label}, 1)
    text = page.render()
    assert value(families(text), "fermata_take_failures_total", cause=label) == 1
    again = Page.parse(text)
    again.add("fermata_take_failures_total", {"cause": label}, 1)
    assert value(families(again.render()), "fermata_take_failures_total", cause=label) == 2


@given(st.floats(allow_nan=False))
def test_a_number_is_read_as_it_was_given(number):
    page = Page()
    page.declare()
    page.add("fermata_take_last_success_timestamp_seconds", {}, number)
    text = page.render()
    assert value(families(text), "fermata_take_last_success_timestamp_seconds") == number
    assert Page.parse(text).render() == text


def test_what_another_version_wrote_stays(path, lock):
    other = (
        '# HELP fermata_new_total Of a later version.\n# TYPE fermata_new_total counter\nfermata_new_total{a="b c"} 7\n'
    )
    with open(path, "w") as file:
        file.write(other)
    assert add(path, [TAKEN], lock=lock)
    found = read(path)
    assert value(found, "fermata_new_total", a="b c") == 7
    assert value(found, "fermata_takes_total", outcome="success") == 1


def test_a_histogram_with_another_versions_bounds_begins_anew(path, lock):
    add(path, [("fermata_take_seconds", {}, 0.3)] * 2, lock=lock)
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace('fermata_take_seconds_bucket{le="0.5"}', 'fermata_take_seconds_bucket{le="0.7"}'))
    add(path, [("fermata_take_seconds", {}, 0.3)], lock=lock)
    found = read(path)
    assert value(found, "fermata_take_seconds_count") == 1
    assert value(found, "fermata_take_seconds_bucket", le="0.7") is None


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\0" * 4096, b"fermata_takes_total 5\n", b"# TYPE a counter\na x\n", b"# TYPE a counter\na 1", b"\xff\n"],
)
def test_a_file_that_cannot_be_read_is_begun_anew_and_that_is_said(path, lock, damaged):
    with open(path, "wb") as file:
        file.write(damaged)
    assert not add(path, [TAKEN], lock=lock)
    assert value(read(path), "fermata_takes_total", outcome="success") == 1
    assert add(path, [], lock=lock)


WRITER = (
    f"import sys; sys.path.insert(0, {str(PROJECT)!r})\nfrom shim import metrics\npath, lock, times = sys.argv[1:]\n"
)


def writer(path, lock, times, before=""):
    program = f"{WRITER}{before}\n"
    program += (
        "for _ in range(int(times)): "
        "metrics.add(path, [('fermata_takes_total', {'outcome': 'success'}, 1)], lock=lock, patience=60)\nprint('done')"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, path, lock, str(times)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_writers_at_once_lose_nothing_and_a_reader_sees_a_whole_file_at_any_time(path, lock):
    add(path, [], lock=lock)
    writers = [writer(path, lock, 50) for _ in range(6)]
    last = 0
    while any(each.poll() is None for each in writers):
        found = read(path)
        assert len(found) == len(FAMILIES)
        seen = value(found, "fermata_takes_total", outcome="success")
        assert seen >= last
        last = seen
    for each in writers:
        assert each.communicate()[0] == "done\n"
    assert value(read(path), "fermata_takes_total", outcome="success") == 300


@pytest.mark.parametrize("moment", ["write", "rename", "fchmod"])
def test_a_writer_that_is_killed_leaves_the_file_as_it_was_and_nobody_waiting(path, lock, moment):
    add(path, [TAKEN], lock=lock)
    before = read(path)
    kill = f"import os, signal\nos.{moment} = lambda *given: os.kill(os.getpid(), signal.SIGKILL)"
    killed = writer(path, lock, 1, kill)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert read(path) == before
    add(path, [TAKEN], lock=lock)
    assert value(read(path), "fermata_takes_total", outcome="success") == 2
    assert sorted(os.listdir(os.path.dirname(path))) == ["fermata.prom", "lock"]


def test_a_full_disk_leaves_the_file_as_it_was(path, lock):
    add(path, [TAKEN], lock=lock)
    before = read(path)
    # A file may have 100 bytes, and then no more: as a disk that fills up, but with EFBIG.
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    failed = writer(path, lock, 1, limit)
    said = failed.communicate(timeout=60)[1]
    assert os.strerror(errno.EFBIG) in said
    assert read(path) == before
    assert sorted(os.listdir(os.path.dirname(path))) == ["fermata.prom", "lock"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100


def test_a_lock_that_somebody_keeps_is_not_waited_for_for_long(path, lock):
    add(path, [], lock=lock)
    held = os.open(lock, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        add(path, [], lock=lock, patience=0.01)
    os.close(held)
    assert add(path, [], lock=lock, patience=0.01)


def test_everybody_may_read_it_whatever_the_umask_is(path, lock):
    old = os.umask(0o077)
    try:
        add(path, [], lock=lock)
    finally:
        os.umask(old)
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert os.stat(lock).st_mode & 0o777 == 0o600


def test_no_link_that_another_user_put_there_is_followed(path, lock, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine\n")
    os.symlink(secret, path)
    os.symlink(secret, tmp_path / ".fermata.prom.new")
    add(path, [TAKEN], lock=lock)
    assert secret.read_text() == "mine\n"
    assert not os.path.islink(path)
    assert value(read(path), "fermata_takes_total", outcome="success") == 1


def test_a_fifo_in_its_place_keeps_nobody_waiting(path, lock):
    os.mkfifo(path)
    assert not add(path, [], lock=lock)
    assert value(read(path), "fermata_takes_total", outcome="success") == 0


def test_the_directory_of_another_program_is_not_made(tmp_path, lock):
    with pytest.raises(FileNotFoundError):
        add(str(tmp_path / "absent/fermata.prom"), [], lock=lock)
    assert not (tmp_path / "absent").exists()


def test_the_file_stays_small_with_every_cause_that_there_is(path, lock):
    from criuconf.causes import CAUSES

    for operation in ("take", "restore"):
        add(path, [(f"fermata_{operation}_failures_total", {"cause": each.name}, 1) for each in CAUSES], lock=lock)
    assert os.path.getsize(path) < metrics._LIMIT / 32


@pytest.mark.skipif(os.geteuid() != 0, reason="to make a device takes root")
def test_a_device_is_left_alone(tmp_path):
    """Somebody who wants no metrics may write /dev/null into the configuration."""
    path = str(tmp_path / "null")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with pytest.raises(OSError, match="is a device"):
        metrics.add(path, [], lock=str(tmp_path / "lock"))
    assert stat.S_ISCHR(os.stat(path).st_mode)
