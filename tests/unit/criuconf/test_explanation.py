"""Finding the cause of a failure in CRIU's logs.

The logs beside this file were seen in the wild or made by letting the failure happen; each says where it comes from.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from criuconf import CriuConfError, causes, explain

LOGS = sorted((pathlib.Path(__file__).parent / "logs").glob("*.log"))
ROOT = pathlib.Path(__file__).parents[3]


def header(path, key):
    for line in path.read_text(errors="backslashreplace").splitlines():
        if line.startswith(f"# {key}: "):
            return line[len(key) + 4 :]
    return None


def samples(cause):
    return [path for path in LOGS if header(path, "cause") == cause]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_the_cause_of_each_kept_log_is_found(path):
    wanted = header(path, "cause")
    found = explain(str(path))
    if wanted == "none":
        assert found is None
        return
    assert found is not None
    assert found.cause == (None if wanted == "unknown" else wanted)
    says = header(path, "says")
    if says is not None:
        assert says in found.sentence
    if wanted not in ("unknown", "unfinished"):
        assert found.meaning
        assert found.remedy
        assert "{" not in found.meaning + found.remedy
    assert len(found.sentence.encode()) <= 512
    assert found.sentence.isprintable()


def test_every_row_of_the_table_has_a_log():
    assert [cause.name for cause in causes.CAUSES if not samples(cause.name)] == []
    assert len(causes.CAUSES) >= 25
    assert len({cause.name for cause in causes.CAUSES}) == len(causes.CAUSES)


@pytest.mark.parametrize("path", [path for path in LOGS if header(path, "cause") != "none"], ids=lambda path: path.stem)
def test_every_log_says_where_it_comes_from(path):
    source = header(path, "source")
    assert source.startswith(("https://github.com/", "made here with "))


def test_an_earlier_error_that_was_survived_is_not_the_cause():
    log = (
        "(00.000100) Version: 4.3\n"
        "(00.010000) Error (criu/util.c:1625): Unable to create the binfmt_misc file system: Operation not permitted\n"
        "(00.020000) Error (criu/files-reg.c:1122): Can't create link remap for /dev/shm/x. Use link-remap option.\n"
        "(00.030000) Error (criu/cr-dump.c:2005): Dumping FAILED.\n"
    )
    assert explain(log).cause == "link-remap"


def test_an_error_that_the_table_lacks_is_shown_as_it_is():
    found = explain(
        "(00.1) Version: 4.3\n"
        "(00.020000) Error (criu/util.c:1625): Unable to create the binfmt_misc file system: Operation not permitted\n"
        "(00.030000) Error (criu/new.c:7): The moon is full\n"
        "(00.030001) Error (criu/cr-dump.c:1550): Dump files (pid: 7) failed with -1\n"
        "(00.040000) Error (criu/cr-dump.c:2005): Dumping FAILED.\n"
    )
    assert (found.cause, found.message, found.where) == (None, "The moon is full", "criu/new.c:7")
    assert found.sentence == "CRIU: The moon is full"


def test_the_cause_is_the_last_failure_of_a_log_with_two():
    far = "(00.5) nothing\n" * 600
    found = explain(
        "(00.1) Error (criu/files-reg.c:2175): File a has bad size 1 (expect 2)\n"
        "(00.2) Error (criu/cr-restore.c:2424): Restoring FAILED.\n"
        f"{far}"
        "(00.1) Error (criu/cr-restore.c:1245): Can't fork for 7: File exists\n"
        "(00.2) Error (criu/cr-restore.c:2424): Restoring FAILED.\n"
    )
    assert found.cause == "pid-taken"


def test_errors_before_a_success_are_none():
    assert (
        explain(
            "(00.1) Error (criu/files-reg.c:2175): File a has bad size 1 (expect 2)\n"
            "(00.2) Restore finished successfully. Tasks resumed.\n"
        )
        is None
    )


def test_a_name_in_the_log_cannot_pass_for_an_error():
    found = explain(
        "(00.1) Dumping path for 0 fd via self 18 [/tmp/Error (criu/x.c:1): File /etc/x has bad size 5 (expect 6)]\n"
        "(00.1) Dumping path for 0 fd via self 18 [/tmp/criu: unrecognized option '--x']\n"
        "(00.1) Dumping path for 0 fd via self 18 [/tmp/Dumping finished successfully]\n"
        "(00.2) Error (criu/cr-restore.c:1245): Can't fork for 7: File exists\n"
        "(00.3) Unlink [/tmp/Restore finished successfully]\n"
        "(00.2) Error (criu/cr-restore.c:2424): Restoring FAILED.\n"
    )
    assert found.cause == "pid-taken"


def test_what_comes_from_the_log_is_escaped_and_bounded():
    name = "/x/\x1b[2J\x07\u202e\r" + "a" * 5000 + "/end"
    log = f"(00.1) Error (criu/files-reg.c:2175): File {name} has bad size 1 (expect 2)\n".encode()
    found = explain(log)
    assert found.cause is None or found.cause == "file-size"
    for text in (found.sentence, found.line, found.message, found.meaning, found.remedy):
        assert text.isprintable()
    assert len(found.sentence.encode()) <= 512
    shorter = explain("(00.1) Error (criu/files-reg.c:1): File /\x1b[2J\u202e/b has bad size 1 (expect 2)\n")
    assert "\\x1b[2J\\u202e" in shorter.sentence


def test_bytes_that_are_no_text_are_escaped():
    found = explain(b"(00.1) Error (criu/files-reg.c:1): File /\xff\xfe has bad size 1 (expect 2)\n")
    assert "\\xff\\xfe" in found.sentence


def test_a_sentence_with_long_names_keeps_the_remedy():
    name = "/very/long" * 400
    found = explain(f"(00.1) Error (criu/files-reg.c:1): File {name[:3000]} has bad size 1 (expect 2)\n")
    assert found.cause == "file-size"
    assert found.sentence.endswith(found.remedy)


@pytest.mark.parametrize("cause", causes.CAUSES, ids=lambda cause: cause.name)
def test_every_row_fits_into_a_sentence_with_any_names(cause):
    class Longest(dict):
        def __missing__(self, key):
            return "x" * 96

    placeholders = cause.meaning.count("{") + cause.remedy.count("{")
    texts = cause.meaning.format_map(Longest()) + cause.remedy.format_map(Longest())
    # 200 of the message, and at most one path or two numbers beside the wording
    assert len(texts.encode()) - 96 * max(0, placeholders - 1) <= 512 - 200 - 12


def test_a_huge_log_is_read_from_its_end(tmp_path):
    path = tmp_path / "dump.log"
    with path.open("wb") as file:
        file.write(b"(00.1) Error (criu/files-reg.c:1): File a has bad size 1 (expect 2)\n")
        file.seek(3 << 30)
        file.write(b"\n(00.2) Error (criu/cr-restore.c:1245): Can't fork for 7: File exists\n")
    assert explain(str(path)).cause == "pid-taken"


def test_a_log_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CriuConfError, match="No such file or directory"):
        explain(str(tmp_path / "none.log"))


def test_an_empty_log_tells_of_nothing():
    assert explain("") is None
    assert explain(b"") is None


def run(*arguments, stdin=b""):
    return subprocess.run(
        [sys.executable, "-m", "criuconf", *arguments], input=stdin, capture_output=True, cwd=ROOT, check=False
    )


def test_the_command_prints_the_cause():
    done = run("explain", str(samples("ghost-too-large")[0]))
    assert done.returncode == 0
    text = done.stdout.decode()
    assert text.startswith("cause:   ghost-too-large\nline:    (")
    assert "\nremedy:  set a larger ghost_limit" in text


def test_the_command_reads_standard_input_and_tells_success_and_errors_apart():
    assert run("explain", "-", stdin=samples("file-size")[0].read_bytes()).returncode == 0
    assert run("explain", str(samples("none")[0])).returncode == 1
    missing = run("explain", "/nowhere")
    assert missing.returncode == 2
    assert missing.stderr.startswith(b"criuconf: cannot read the log /nowhere")
    assert run().returncode == 2


def test_the_document_lists_every_row():
    text = (ROOT / "docs" / "criu-errors.md").read_text()
    for cause in causes.CAUSES:
        for part in (f"### {cause.name}", cause.meaning, cause.remedy):
            assert part in text
