"""Reading a configuration file as CRIU's own parser does."""

from __future__ import annotations

import pytest

from criuconf.errors import CriuConfError
from criuconf.options import with_off_forms
from criuconf.syntax import Setting, line, parse, unsafe

NAMES = with_off_forms(
    {
        "libdir",
        "link-remap",
        "tcp-close",
        "tcp-established",
        "verbosity",
        "version",
        "ghost-limit",
        "external",
        "log-file",
    }
)


def settings(text: str) -> list[tuple[str, str | None]]:
    return [(each.name, each.value) for each in parse(text, NAMES, "file")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("link-remap", [("link-remap", None)]),
        ("  \t link-remap\n\n# libdir /x\n   # more\n", [("link-remap", None)]),
        ("link-remap   # why", [("link-remap", None)]),
        ("libdir /a # why", [("libdir", "/a")]),
        ("libdir\t/a", [("libdir", "/a")]),
        ("libdir   /a   ", [("libdir", "/a")]),
        ("libdir=/a", [("libdir", "/a")]),
        ('libdir "/a"', [("libdir", "/a")]),
        ('libdir "/a b"', [("libdir", "/a b")]),
        ('libdir ""', [("libdir", "")]),
        (r'log-file "my \"own\" log"', [("log-file", 'my "own" log')]),
        ("libdir /a#b", [("libdir", "/a")]),
        ('libdir "/a#b"', [("libdir", "/a")]),
        ("no-tcp-established", [("no-tcp-established", None)]),
        ("verbosity=4", [("verbosity", "4")]),
        ("libdir /a\nlibdir /b", [("libdir", "/a"), ("libdir", "/b")]),
    ],
)
def test_reads_what_criu_reads(text, expected):
    assert settings(text) == expected


def test_completes_a_name_that_is_cut_short_as_getopt_does():
    assert settings("libd /evil\nghost 5") == [("libdir", "/evil"), ("ghost-limit", "5")]


def test_a_value_that_getopt_ignores_is_dropped_and_noted():
    (setting,) = parse("verbosity 4", NAMES, "its file")
    assert (setting.name, setting.value) == ("verbosity", None)
    assert "its file, line 1" in setting.note
    assert "verbosity=VALUE" in setting.note
    (setting,) = parse("link-remap yes", NAMES, "its file")
    assert (setting.name, setting.value) == ("link-remap", None)
    assert "takes no value" in setting.note


@pytest.mark.parametrize(
    "text",
    [
        "link-remap --libdir=/evil",  # getopt would take the second word for an option
        "libdir",  # and here the next line for the value
        "ver 4",  # verbosity or version
        "tcp",
        'libdir "/a',
        'libdir "',
        r'libdir "\"',
        'libdir "/a" b',
        "libdir /a bc",
        "link-remap=1",
        "--link-remap",
        "link-remap\r",
        "root:$y$j9T$abc:19000:0:99999:7:::",
        "a\0b",
        "x" * (65 << 10),
    ],
)
def test_refuses_what_criu_refuses_or_misreads(text):
    with pytest.raises(CriuConfError):
        settings(text)


def test_an_error_shows_nothing_of_a_file_that_is_no_configuration():
    with pytest.raises(CriuConfError) as refused:
        settings("link-remap\nroot:$y$j9T$abc:19000:0:99999:7:::")
    assert str(refused.value).startswith("file, line 2")
    assert "$y$" not in str(refused.value)


@pytest.mark.parametrize(
    "value", ["a\nlibdir /x", "a\0", "a\rb", "a\tb", 'a"b', "a#b", "a b", "\x7f", "\x1b[2J", "", "a\n"]
)
def test_a_value_that_criu_would_read_otherwise_is_not_written(value):
    assert unsafe(value)
    with pytest.raises(CriuConfError):
        line(Setting("libdir", value))


def test_writes_each_kind_of_option_in_the_form_that_getopt_takes():
    assert line(Setting("link-remap", None)) == "link-remap"
    assert line(Setting("libdir", "/run/x")) == "libdir /run/x"
    assert line(Setting("verbosity", "4")) == "verbosity=4"
    assert line(Setting("manage-cgroups", "ignore")) == "manage-cgroups=ignore"
