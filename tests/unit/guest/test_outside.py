"""Outside of a container that was made for it, the library does nothing; and how it knows one."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

GUEST = Path(__file__).resolve().parents[3] / "guest"

EVERYTHING = """
import sys, threading
before = set(sys.modules)
import fermata
fermata.exclude_from_snapshot(object(), name="")
with fermata.using(), fermata.using():
    pass
assert fermata.on_prepare(print) is print
@fermata.on_restore
def again():
    pass
assert callable(again)
fermata.snapshot_ready()
print(threading.active_count())
"""
COSTLY = {"socket", "json", "ctypes", "hashlib"}


def run(text, *prefix):
    environment = {key: value for key, value in os.environ.items() if key != "FERMATA_GUEST_DIRECTORY"}
    return subprocess.run(
        [*prefix, sys.executable, "-c", text],
        env={**environment, "PYTHONPATH": str(GUEST)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_every_call_does_nothing():
    done = run(EVERYTHING + f"print({COSTLY} & (set(sys.modules) - before))")
    assert (done.stdout, done.stderr) == ("1\nset()\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize(
    ("prepare", "threads"),
    [
        ("mkdir /run/fermata && mount -t tmpfs -o mode=1777 t /run/fermata", 2),
        ("mkdir -m 1777 /run/fermata", 1),
        ("mkdir /run/fermata && mount -t tmpfs -o mode=700 t /run/fermata", 1),
        ("mkdir /run/x && mount -t tmpfs -o mode=1777 t /run/x && ln -s /run/x /run/fermata", 1),
    ],
    ids=["the shim's mount", "a directory", "the shim's own state", "a link"],
)
def test_the_shims_mount_is_known_by_what_it_is(prepare, threads):
    text = EVERYTHING.replace('fermata.exclude_from_snapshot(object(), name="")', "")
    shell = f'mount -t tmpfs t /run && {prepare} && exec "$@"'
    done = run(text, "unshare", "--mount", "sh", "-c", shell, "sh")
    assert (done.stdout, done.stderr) == (f"{threads}\n", "")


def test_a_directory_that_takes_no_socket_is_told_and_the_program_goes_on():
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING],
        env={**os.environ, "PYTHONPATH": str(GUEST), "FERMATA_GUEST_DIRECTORY": "/proc/sys"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "1\n"
    assert done.stderr.startswith("fermata: /proc/sys: ")
    assert done.stderr.endswith("weights will be inside of snapshots\n")
    assert done.stderr.count("\n") == 1, "it is told once"


def test_the_wheel_holds_the_package_alone_and_works_without_anything_else(tmp_path):
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", GUEST, source], check=True, timeout=60)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    modules = {f"fermata/{path.name}" for path in (GUEST / "fermata").iterdir() if path.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == modules
    assert "Requires-Dist" not in metadata
    assert "\nName: fermata-guest\n" in metadata
    text = f"import sys; sys.path.insert(0, {str(wheel)!r}); import fermata; print(fermata.__version__)"
    alone = [sys.executable, "-I", "-S", "-c", text]
    said = subprocess.run(alone, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert f"\nVersion: {said}\n" in metadata


def test_the_version_is_one_everywhere():
    import fermata
    from fermata import channel

    assert fermata.__version__ == channel.LIBRARY
    assert f'version = "{fermata.__version__}"' in (GUEST / "pyproject.toml").read_text()
