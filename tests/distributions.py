"""The sdist and the wheel, built as a release is: the sdist from what is tracked, the wheel from the sdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from node.stack import PROJECT


def run(*argv: object, **options: object) -> str:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=240, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked() -> list[str]:
    """The project's files; where there is no git, what an sdist brought."""
    if (PROJECT / ".git").exists():
        names = run("git", "-C", PROJECT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        return [name for name in names if (PROJECT / name).exists()]
    # Of an unpacked sdist, and of any other copy.
    left_out = {".git", ".cache", ".venv", "__pycache__", "build", "dist", "fermata.egg-info", "PKG-INFO", "setup.cfg"}
    names = [path.relative_to(PROJECT) for path in PROJECT.rglob("*") if path.is_file()]
    return [str(name) for name in names if not left_out.intersection(name.parts) and not name.parts[0].startswith(".")]


def sdist(scratch: Path) -> Path:
    """Built from a copy: setuptools leaves its work beside the sources."""
    source = scratch / "source"
    source.mkdir()
    packed = subprocess.run(["tar", "-C", PROJECT, "-cf", "-", *tracked()], check=True, capture_output=True, timeout=60)
    subprocess.run(["tar", "-C", source, "-xf", "-"], input=packed.stdout, check=True, timeout=60)
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(scratch)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (made,) = scratch.glob("*.tar.gz")
    return made


def wheel(sdist: Path, out: Path) -> Path:
    """What pip makes of an sdist before it installs it."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, sdist)
    (made,) = out.glob("*.whl")
    return made
