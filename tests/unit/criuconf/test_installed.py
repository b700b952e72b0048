"""Asking the installed CRIU what it is and what it has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from criuconf import CriuConfError, probe
from criuconf.options import listed

HELP = """
Usage:
  criu dump|pre-dump -t PID [<options>]
  criu check [--feature FEAT]

Most options can be prefixed with --no- to negate them (example: --no-display-stats).
  -t|--tree PID         a process tree
     --pidfile FILE     write a pid
                        specified after '--' on success
                        --lazy-pages and another
  --link-remap          link
  -L|--libdir           path
  --skip-file-rwx-check
\t\t\t--tabbed text
  --plugin-option=P.N[=V] pass it
  -v[v...]|--verbosity  more
  -vNUM|--verbosity=NUM set
                          -v1 - only errors
  -V|--version          show
"""


def stand_in(folder, version="Version: 4.1.1", *, help_text=HELP, name="criu"):
    """A program that answers as a CRIU of some version would, and counts how often it was asked."""
    path = folder / name
    text = folder / "help"
    text.write_text(help_text)
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {folder}/asked\n'
        'case "$*" in\n'
        f"*--version) echo '{version}';;\n"
        f"*--help) cat {text};;\n"
        "*'check --feature has_it') exit 0;;\n"
        "*) exit 1;;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return path


def asked(folder):
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_the_option_list_is_what_stands_where_options_stand():
    assert listed(HELP) == {
        "tree",
        "pidfile",
        "link-remap",
        "libdir",
        "skip-file-rwx-check",
        "plugin-option",
        "verbosity",
        "version",
    }


def test_version_options_and_what_the_help_leaves_out(tmp_path):
    criu = probe(str(stand_in(tmp_path)))
    assert criu.version == (4, 1, 1)
    assert {"libdir", "ext-unix-sk", "ext-mount-map"} <= criu.options
    assert "compress" not in criu.options
    assert "no-link-remap" in criu.names()
    assert "no-libdir" not in criu.names()


@pytest.mark.parametrize(
    ("said", "version"),
    [("Version: 4.3", (4, 3)), ("Version: 4.2-rc1", (4, 2)), ("Version: 10.0.1\nGitID: v10.0.1-2-g1", (10, 0, 1))],
)
def test_each_form_of_a_version(tmp_path, said, version):
    assert probe(str(stand_in(tmp_path, said))).version == version


def test_a_newer_criu_has_its_unlisted_options(tmp_path):
    assert "compress" in probe(str(stand_in(tmp_path, "Version: 4.3"))).options


def test_asked_once_for_one_binary(tmp_path):
    path = stand_in(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    first = probe(str(path), str(cache))
    questions = asked(tmp_path)
    second = probe(str(path), str(cache))
    assert asked(tmp_path) == questions
    assert (second.version, second.options, second.path) == (first.version, first.options, first.path)


def test_asked_again_when_the_binary_is_another_one(tmp_path):
    path = stand_in(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    probe(str(path), str(cache))
    path.unlink()
    assert probe(str(stand_in(tmp_path, "Version: 4.3")), str(cache)).version == (4, 3)


@pytest.mark.parametrize("harm", ["cut", "writable", "link"])
def test_a_kept_answer_that_may_not_be_ours_is_not_believed(tmp_path, harm):
    path = stand_in(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    probe(str(path), str(cache))
    (kept,) = cache.iterdir()
    text = kept.read_text().replace("4.1.1", "9.9")
    if harm == "cut":
        kept.write_text(text[: text.index("end")])
    elif harm == "writable":
        kept.write_text(text)
        kept.chmod(0o666)
    else:
        kept.rename(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_text(text)
        kept.symlink_to(tmp_path / "elsewhere")
    assert probe(str(path), str(cache)).version == (4, 1, 1)


def test_a_feature_is_asked_when_wanted_and_once(tmp_path):
    path = stand_in(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    criu = probe(str(path), str(cache))
    assert not any("check" in line for line in asked(tmp_path))
    assert criu.feature("has_it") is True
    assert criu.feature("lacks_it") is False
    questions = asked(tmp_path)
    again = probe(str(path), str(cache))
    assert again.feature("has_it") is True
    assert again.feature("lacks_it") is False
    assert asked(tmp_path) == questions


def test_found_in_path(tmp_path, monkeypatch):
    path = stand_in(tmp_path, name="criu-of-mine")
    monkeypatch.setenv("PATH", f"/nonexistent:{tmp_path}:/usr/bin:/bin")
    assert probe("criu-of-mine").path == str(path)


def test_no_criu_is_a_sentence_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CriuConfError, match=r"there is no criu-nowhere in PATH .*; install criu >= 4\.0"):
        probe("criu-nowhere")
    with pytest.raises(CriuConfError, match=r"there is no /nowhere/criu; install criu >= 4\.0"):
        probe("/nowhere/criu")


def test_a_criu_that_cannot_be_run_is_named(tmp_path):
    path = tmp_path / "criu"
    path.write_text("text")
    with pytest.raises(CriuConfError, match="not a program that can be run"):
        probe(str(path))
    path.write_bytes(b"\x7fELF but of no machine")
    path.chmod(0o755)
    with pytest.raises(CriuConfError, match="cannot be run"):
        probe(str(path))


def test_a_criu_that_says_something_else_is_named(tmp_path):
    with pytest.raises(CriuConfError, match=r"does not tell its version.*libprotobuf"):
        probe(str(stand_in(tmp_path, "error while loading shared libraries: libprotobuf-c.so.1")))
    with pytest.raises(CriuConfError, match="does not list its options"):
        probe(str(stand_in(tmp_path, help_text="nothing")))


def test_an_old_criu_is_refused_with_the_version_needed(tmp_path):
    with pytest.raises(CriuConfError, match=r"version 3\.17\.1, which is too old: install criu >= 4\.0"):
        probe(str(stand_in(tmp_path, "Version: 3.17.1")))


def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import criuconf; print(*sorted(set(sys.modules) - before))"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["__future__", "criuconf"]


def test_rendering_imports_nothing_costly():
    code = (
        "import sys; before = set(sys.modules); import criuconf; criuconf.render; criuconf.probe;"
        "costly = {'re', 'dataclasses', 'typing', 'enum', 'json', 'subprocess', 'collections'};"
        "print(*(set(sys.modules) - before) & costly)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []
