"""Where a node's containerd, runc and CRIU come from: the host, or a Debian root built with mmdebstrap and kept.

Roots are kept in ``<cache>/node/<stack>-<hash of the recipe>``. The cache is ``.cache`` in the working tree, or what
the environment variable FERMATA_CACHE says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from node.errors import NodeError

PROJECT = Path(__file__).resolve().parent.parent.parent
BUILD_TIMEOUT = 1200
COMMON = (
    "iproute2",
    "nftables",
    "iptables",
    "procps",
    "python3",
    "python3-grpcio",  # the command `fermata` speaks to containerd with it; the shim itself needs no package
    "libisal2",  # gzip for fermata-differ
    "systemd",  # for the tests of its units: see booted.py. A node does without
    "ca-certificates",
    "containerd",
    "containernetworking-plugins",  # pods have a network of their own: see tests/node/test_cri.py
    "checkpointctl",
)


class Recipe(NamedTuple):
    """A Debian root: ``suites`` are apt suites, ``packages`` may name the suite they come from after a slash."""

    stack: str
    suites: tuple[str, ...]
    packages: tuple[str, ...]

    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


RECIPES = {
    "trixie": Recipe("trixie", ("trixie",), (*COMMON, "criu", "runc")),
    # The newest CRIU and runc wait in experimental. libcriu2 has to come from where criu comes from.
    "sid": Recipe(
        "sid",
        ("sid", "experimental"),
        (*COMMON, "criu/experimental", "libcriu2/experimental", "runc/experimental"),
    ),
}
UBUNTU = ("jammy", "noble")
COMPONENTS = {"debian": "main", "ubuntu": "main universe"}
STACKS = ("auto", "host", *RECIPES)


def cache() -> Path:
    return Path(os.environ.get("FERMATA_CACHE") or PROJECT / ".cache")


def choose(stack: str) -> tuple[str, str]:
    """Settle ``auto``: ("host", "") if the host's programs are good enough, else ("trixie", what the host lacks)."""
    if stack not in STACKS:
        raise NodeError(f"there is no stack {stack!r}; known are {', '.join(STACKS)}")
    if stack not in ("auto", "host"):
        return stack, ""
    lacks = host_lacks()
    if not lacks:
        return "host", ""
    if stack == "host":
        raise NodeError(
            f"this machine's own containerd cannot be used: {lacks}. Use --stack trixie, which brings its own"
        )
    return "trixie", lacks


def host_lacks() -> str:
    """What keeps the host's own containerd, runc and CRIU from being used, or an empty string."""
    for program in ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "criu", "nft", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    for argv, least in ((["containerd", "--version"], (1, 7)), (["criu", "--version"], (4, 0))):
        said = _output(argv)
        found = version(said)
        if found < least:
            return f"{argv[0]} says {said.strip()!r}, and {'.'.join(map(str, least))} is needed"
    check = subprocess.run(["criu", "check"], capture_output=True, text=True, timeout=60, check=False)
    if check.returncode != 0:
        last = (check.stdout + check.stderr).strip().splitlines()[-1:] or ["no output"]
        return f"criu check fails: {last[0]}"
    return ""


def version(text: str) -> tuple[int, ...]:
    """The first dotted number in a program's answer to ``--version``."""
    found = re.search(r"(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in found.group(1).split(".")) if found else (0,)


def _output(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def root(stack: str, say: Progress | None = None) -> Path:
    """The directory that holds the stack's root file system, built now if need be. Never written to afterwards."""
    if stack == "host":
        return Path("/")
    if given := os.environ.get("FERMATA_ROOT"):
        return unpacked(Path(given))
    return built(RECIPES[stack], say)


def built(recipe: Recipe, say: Progress | None = None) -> Path:
    """The directory that holds a recipe's root, built now if need be. Raises NodeError when it cannot be."""
    stack = recipe.stack
    path = cache() / "node" / f"{stack}-{recipe.digest()}"
    if path.is_dir():
        return path
    with locked(path.with_name(f"{stack}.lock")):
        if not path.is_dir():
            _remove_strays(path.parent, f"{stack}-")
            if say:
                say(f"building a root for {stack}: about a minute, once")
            _build(recipe, path)
    return path


class Progress:
    """Says on stderr what takes long."""

    def __call__(self, text: str) -> None:
        print(f"node: {text}", file=sys.stderr, flush=True)


def unpacked(archive: Path) -> Path:
    """A prepared root, for machines without a mirror: a directory as it is, a tar file unpacked into the cache."""
    if archive.is_dir():
        return archive
    stat = archive.stat()
    name = hashlib.sha256(f"{archive.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    path = cache() / "node" / f"given-{name}"
    with locked(cache() / "node" / "given.lock"):
        if not path.is_dir():
            part = path.with_suffix(".part")
            remove_tree(part)
            part.mkdir(parents=True)
            _run(["tar", "-C", str(part), "--xattrs", "--xattrs-include=*", "-xf", str(archive)], f"unpack {archive}")
            part.rename(path)
    return path


def _remove_strays(directory: Path, prefix: str) -> None:
    """Roots of former recipes, and what interrupted builds left. Called with the stack's lock held.

    A root that a running node has mounted is in use as an overlay's lower directory: it stays.
    """
    for path in directory.glob(f"{prefix}*"):
        if path.is_dir() and not in_use(path):
            remove_tree(path)


def in_use(path: Path) -> bool:
    needle = f"lowerdir={path},"
    for info in Path("/proc").glob("[0-9]*/mountinfo"):
        # The process may end while we look.
        with contextlib.suppress(OSError):
            if needle in info.read_text():
                return True
    return False


def remove_tree(path: Path) -> None:
    """Remove a root, and never across a mount that somebody left in it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mountpoint = line.split()[4]
        if f"{mountpoint}/".startswith(f"{path}/"):
            raise NodeError(f"{path} cannot be removed: {mountpoint} is mounted in it. Unmount it first")
    if path.exists():
        shutil.rmtree(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive flock(2) on ``path``, which is made if need be and stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(recipe: Recipe, path: Path) -> None:
    need("mmdebstrap", "mmdebstrap")
    distribution = "ubuntu" if recipe.suites[0] in UBUNTU else "debian"
    keyring = Path(f"/usr/share/keyrings/{distribution}-archive-keyring.gpg")
    if not keyring.exists():
        if distribution == "ubuntu":
            raise NodeError(
                f"{keyring} is missing, without which no root of Ubuntu can be made here: install ubuntu-keyring"
            )
        install("debian-archive-keyring")
    part = path.with_suffix(".part")
    remove_tree(part)
    uri = mirror(distribution=distribution)
    argv = [
        "mmdebstrap",
        "--variant=minbase",
        "--mode=root",
        "--format=directory",
        # A mirror may be a copy of some day: its release files are then past their date, and still signed.
        '--aptopt=Acquire::Check-Valid-Until "false"',
        '--aptopt=Acquire::Retries "3"',
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        f"--include={','.join(recipe.packages)}",
        *([] if uri else _more_suites(recipe.suites)),
        recipe.suites[0],
        str(part),
        *(f"deb {uri} {suite} {COMPONENTS[distribution]}" for suite in recipe.suites if uri),
    ]
    try:
        _run(argv, f"build the root {recipe.stack}")
        part.rename(path)
    except BaseException:
        remove_tree(part)
        raise


def _run(argv: list[str], what: str) -> None:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT,
        check=False,
        # A private umask or TMPDIR of the caller must not end up in the root.
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **_proxies()},
        umask=0o022,
    )
    if done.returncode != 0:
        raise NodeError(f"could not {what}; {argv[0]} said:\n{done.stdout[-3000:]}")


def _proxies() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.lower() in ("http_proxy", "https_proxy", "no_proxy")}


def need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        install(package)
    if shutil.which(program) is None:
        raise NodeError(f"{program} is missing, and installing the package {package} did not bring it")


def install(package: str) -> None:
    """apt-get install, with the machine's own sources."""
    if shutil.which("apt-get") is None:
        raise NodeError(f"the package {package} is needed, and this machine has no apt-get: install it by hand")
    # Of two at once, one would find apt's lists locked, and give up.
    with locked(cache() / "apt.lock"):
        _apt_get(package)


def _apt_get(package: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for argv in (["apt-get", "-q", "update"], ["apt-get", "-qy", "--no-install-recommends", "install", package]):
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env=environment,
        )
        said = done.stdout + done.stderr
        if done.returncode != 0 and argv[-1] == package:
            raise NodeError(f"could not install the package {package}; apt-get said:\n{said[-2000:]}")


def _more_suites(suites: tuple[str, ...]) -> list[str]:
    """Have mmdebstrap take further suites from the mirror that it knows itself, which it uses for the first one."""
    hook = 'sed "s/ {0} / {1} /" "$1/etc/apt/sources.list" >"$1/etc/apt/sources.list.d/{1}.list"'
    return [f"--setup-hook={hook.format(suites[0], suite)}" for suite in suites[1:]]


def mirror(etc: Path = Path("/etc"), distribution: str = "debian") -> str | None:
    """The distribution's mirror that this machine itself uses; None where it uses none, and mmdebstrap takes its
    default."""
    release = _os_release(etc)
    if release.get("ID") != distribution:
        return None
    codename = release.get("VERSION_CODENAME", "sid")
    apt = etc / "apt"
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        for uri, suites in _sources(path):
            if codename in suites:
                return uri
    return None


def _os_release(etc: Path) -> dict[str, str]:
    path = etc / "os-release"
    lines = path.read_text().splitlines() if path.exists() else []
    return {key: value.strip("\"'") for key, mark, value in (line.partition("=") for line in lines) if mark}


def _sources(path: Path) -> list[tuple[str, list[str]]]:
    """The (URI, suites) pairs of one sources file, in either of apt's two formats (sources.list(5))."""
    if not path.is_file():
        return []
    text = path.read_text()
    if path.suffix == ".sources":
        return list(_deb822(text))
    if path.suffix != ".list":
        return []
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", line)
        if match:
            found.append((match.group(1), [match.group(2)]))
    return found


def _deb822(text: str) -> Iterator[tuple[str, list[str]]]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", kept):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if not line[:1].isspace():
                name, _, line = line.partition(":")  # noqa: PLW2901 (what follows the name continues like a next line)
            fields.setdefault(name.strip().lower(), []).extend(line.split())
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            for uri in fields.get("uris", []):
                yield uri, fields.get("suites", [])
