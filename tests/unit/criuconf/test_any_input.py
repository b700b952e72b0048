"""Whatever stands in a log or a value: nothing is raised but CriuConfError, and nothing gets out of its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from criuconf import CriuConfError, causes, explain
from criuconf.options import with_off_forms
from criuconf.syntax import Setting, line, parse, unsafe

NAMES = with_off_forms({"libdir", "link-remap", "verbosity", "tcp-close"})

pieces = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            "(00.1) Error (criu/x.c:1): ",
            "pie: 1: ",
            "     1: ",
            "Warn  (criu/x.c:1): ",
            "\n",
            "\r",
            '"',
            'time="a" level=error msg="',
        ]
        + [cause.pattern.replace("\\", "") for cause in causes.CAUSES[:20]]
        + ["Can't fork for 7: File exists", "Restoring FAILED.", "(00.1) Version: 4.3", "\x1b[2J", "\ud800"]
    ),
)


@given(st.lists(pieces, max_size=60).map("".join))
def test_explaining_any_text_gives_bounded_printable_texts_or_nothing(text):
    found = explain(text.encode(errors="surrogatepass"))
    if found is not None:
        assert len(found.sentence.encode()) <= 512
        assert all(each.isprintable() for each in (found.sentence, found.line, found.meaning, found.remedy))


@given(st.binary(max_size=2000))
def test_explaining_any_bytes_raises_nothing(data):
    explain(data)


@given(st.text(max_size=60))
def test_a_value_that_may_be_written_is_read_back_as_it_was(value):
    if unsafe(value) is not None:
        return
    for name in ("libdir", "verbosity"):
        (found,) = parse(line(Setting(name, value)), NAMES, "file")
        assert (found.name, found.value, found.note) == (name, value, None)


@given(st.text(alphabet='libdr-nkem tcos#"\\\t\n=/x', max_size=80))
def test_any_file_is_read_or_refused_in_words(text):
    try:
        found = list(parse(text, NAMES, "file"))
    except CriuConfError as error:
        assert str(error).startswith("file, line ")
        return
    # What was accepted can be written again or is refused, and never turns into two options.
    for setting in found:
        try:
            written = line(setting)
        except CriuConfError:
            continue
        assert "\n" not in written
        assert list(parse(written, NAMES, "again")) == [setting]
