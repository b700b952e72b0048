"""What an operation came to: its one line, its counts, and the word for its cause."""

from __future__ import annotations

import errno
import os
import shlex

import pytest

from layerwriter import LayerError
from shim import manifest, metrics, state
from shim.account import RESTORE, TAKE, Account, cause_of, count
from shim.config import Config
from shim.errors import ShimError


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.add, "__kwdefaults__", {"lock": str(tmp_path / "lock"), "patience": 0.25})
    return tmp_path / "fermata.prom"


@pytest.fixture
def config(path):
    made = Config()
    made.metrics_textfile = str(path)
    return made


@pytest.fixture
def log():
    """A log that keeps its lines as (level, message, fields)."""
    lines = []

    def write(level, message, **fields):
        lines.append((level, message, fields))

    write.lines = lines
    return write


def raised(action):
    with pytest.raises(BaseException) as error:
        action()
    return error.value


def test_a_cause_is_one_of_few_words(tmp_path):
    def chained(cause):
        raise ShimError("it failed") from cause

    assert cause_of("runc says no") == "runtime"
    assert cause_of(OSError(errno.ENOSPC, "full")) == "disk-full"
    assert cause_of(raised(lambda: chained(OSError(errno.ENOSPC, "full")))) == "disk-full"
    assert cause_of(raised(lambda: chained(LayerError("too large")))) == "layer"
    assert cause_of(raised(lambda: manifest.read(str(tmp_path)))) == "manifest"
    assert cause_of(raised(lambda: state.check_identifier("container id", "a/b"))) == "state"
    assert cause_of(KeyError("x")) == cause_of(OSError(errno.EIO, "broken")) == "fault"


def test_a_success_is_one_line_and_is_counted(config, log, path):
    account = Account(TAKE, "song", "/srv/s", config, log)
    account.bytes, account.entries, account.made_by, account.frozen = 7, 2, "upperdir", 0.25
    account.steps = {"dump": 0.5}
    account.succeeded()
    [(level, message, fields)] = log.lines
    assert (level, message) == ("info", "snapshot taken")
    assert (fields["operation"], fields["outcome"]) == ("take", "success")
    assert (fields["container"], fields["directory"], fields["bytes"], fields["entries"]) == ("song", "/srv/s", 7, 2)
    assert (fields["frozen"], fields["step_dump"], fields["layer"]) == ("0.250", "0.500", "upperdir")
    text = path.read_text()
    assert 'fermata_takes_total{outcome="success"} 1\n' in text
    assert 'fermata_take_layers_total{made_by="upperdir"} 1\n' in text
    assert 'fermata_take_step_seconds_sum{step="dump"} 0.5\n' in text
    assert "fermata_take_bytes_total 7\n" in text


def test_a_failure_is_one_line_and_is_counted_by_its_cause(config, log, path):
    account = Account(RESTORE, "song", "/srv/s", config, log)
    account.failed(ShimError("it does not fit"))
    [(level, message, fields)] = log.lines
    assert (level, message, fields["outcome"], fields["error"]) == (
        "error",
        "restore failed",
        "failure",
        "it does not fit",
    )
    text = path.read_text()
    assert 'fermata_restores_total{outcome="failure"} 1\n' in text
    assert f'fermata_restore_failures_total{{cause="{fields["cause"]}"}} 1\n' in text
    assert "fermata_restore_seconds_count 0\n" in text


def test_what_is_known_better_than_by_the_error_is_the_cause(config, log):
    account = Account(RESTORE, "song", "/srv/s", config, log)
    account.cause = "killed"
    account.failed("runc was killed")
    assert log.lines[0][2]["cause"] == "killed"


def test_the_clients_own_time_is_not_the_restores(config, log, monkeypatch):
    now = iter([100.0, 101.0, 200.0, 202.0])
    monkeypatch.setattr("shim.account.time.monotonic", lambda: next(now))
    config.metrics_textfile = ""
    account = Account(RESTORE, "song", "/srv/s", config, log)
    account.pause()
    account.resume()
    account.succeeded()
    assert log.lines[0][2]["seconds"] == "3.000"


def test_what_cannot_be_counted_is_a_warning(log, tmp_path, path):
    count(str(tmp_path / "absent/fermata.prom"), [], log)
    path.write_text("no metrics\n")
    count(str(path), [], log)
    assert [level for level, _, _ in log.lines] == ["warning", "warning"]
    assert "absent" in str(log.lines[0][2]["error"])


def test_the_words_of_an_error_cannot_make_a_second_line(config):
    from shim.log import Log

    written = []

    class Kept(Log):
        def __call__(self, level, message, **fields):
            read, write = os.pipe()
            Log(write)(level, message, **fields)
            os.close(write)
            with os.fdopen(read) as file:
                written.append(file.read())

    config.metrics_textfile = ""
    Account(TAKE, "song", "/srv/s", config, Kept(2)).failed('two\nlines level=info operation=take "quoted"')
    [line] = written
    assert line.count("\n") == 1
    words = shlex.split(line)
    assert words.count("operation=take") == 1 and "level=info" not in words
