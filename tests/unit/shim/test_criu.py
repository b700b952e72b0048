"""CRIU's statistics and logs as the shim reads them."""

from __future__ import annotations

import pytest

from shim import criu, wire

MAGIC = bytes.fromhex("4059105506330957")


def statistics(dump):
    message = wire.delimited(1, dump)
    return MAGIC + len(message).to_bytes(4, "little") + message


def test_the_time_that_processes_stood_still_comes_from_crius_statistics(tmp_path):
    dump = wire.varint(1 << 3) + wire.varint(1151) + wire.varint(2 << 3) + wire.varint(288491)
    (tmp_path / "stats-dump").write_bytes(statistics(dump))
    assert criu.frozen_seconds(str(tmp_path)) == 0.288491


@pytest.mark.parametrize("data", [b"", MAGIC, statistics(b""), statistics(b"\xff"), MAGIC + b"\xff" * 20])
def test_statistics_that_cannot_be_read_are_no_error(tmp_path, data):
    (tmp_path / "stats-dump").write_bytes(data)
    assert criu.frozen_seconds(str(tmp_path)) is None
    assert criu.frozen_seconds(str(tmp_path / "missing")) is None


def test_a_log_that_has_grown_too_large_keeps_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(criu, "LOG_LIMIT", 100)
    log = tmp_path / "dump.log"
    log.write_bytes(b"begin\n" + b"x" * 500 + b"the reason\n")
    criu.trim(str(log))
    kept = log.read_bytes()
    assert kept.startswith(b"(the beginning of this log was cut off)\n")
    assert kept.endswith(b"x" * 89 + b"the reason\n")
    assert len(kept) == 40 + 100
    small = tmp_path / "small.log"
    small.write_bytes(b"y" * 100)
    criu.trim(str(small))
    assert small.read_bytes() == b"y" * 100
    criu.trim(str(tmp_path / "missing"))


def test_a_failure_is_told_by_the_log_and_names_it(tmp_path):
    log = tmp_path / "restore.log"
    log.write_text(
        "(00.1) Error (criu/files-reg.c:2283): Can't open file var/x on restore: No such file or directory\n"
    )
    sentence, cause = criu.explain(str(log), "criu failed: type RESTORE errno 0", "restore of /srv/s failed")
    assert sentence.startswith("restore of /srv/s failed: CRIU: Can't open file var/x on restore")
    assert sentence.endswith(f"; log: {log}")
    assert cause == "file-missing"


def test_without_a_log_the_stock_shims_own_words_are_told(tmp_path):
    told = criu.explain(str(tmp_path / "none.log"), "the moon is full", "snapshot of c failed")
    assert told == ("snapshot of c failed: the moon is full", "runtime")


def test_an_error_that_is_not_listed_has_no_cause(tmp_path):
    log = tmp_path / "dump.log"
    log.write_text("(00.1) Error (criu/new.c:1): Something that nobody has seen before\n")
    assert criu.explain(str(log), "", "snapshot of c failed")[1] == "unknown"
