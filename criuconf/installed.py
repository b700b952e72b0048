"""The CRIU that is installed: its version, its options, and which optional features work with it on this kernel.

Asking takes two processes, 10 to 20 ms together; the answers are kept in a small file and hold for as long as the
binary and the kernel are the same ones.
"""

from __future__ import annotations

import os

from .errors import CriuConfError
from .options import OLDEST, SINCE, UNLISTED, Version, dotted, is_name, listed, with_off_forms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_FORMAT = "criu 1"
_PATIENCE = 20.0  # seconds for one answer of `criu --version`, `--help` or `check --feature`
_LARGEST_CACHE = 64 << 10
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Criu:
    """One CRIU binary.

    path: where it is. version: (4, 1, 1). options: the long options it has, without dashes and without `no-` forms.
    """

    __slots__ = ("_cache", "_features", "_identity", "options", "path", "version")

    def __init__(
        self,
        path: str,
        version: Version,
        options: Iterable[str],
        *,
        features: dict[str, bool] | None = None,
        cache: str | None = None,
        identity: str = "",
    ) -> None:
        self.path = path
        self.version = version
        self.options = frozenset(options)
        self._features = dict(features or {})
        self._cache = cache
        self._identity = identity

    def __repr__(self) -> str:
        return f"Criu({self.path!r}, {dotted(self.version)}, {len(self.options)} options)"

    def names(self) -> frozenset[str]:
        """All that a line of a configuration file may start with: the options and their `no-` forms."""
        return with_off_forms(self.options)

    def has(self, option: str) -> bool:
        """Whether a configuration file given to runc may carry `option`."""
        return option in self.options and self.version >= SINCE.get(option, OLDEST)

    def feature(self, name: str) -> bool:
        """Whether `criu check --feature NAME` says yes. Asked once for a binary and a kernel.

        CriuConfError: CRIU cannot be run. A feature that this CRIU does not know is one it does not have.
        """
        known = self._features.get(name)
        if known is None:
            if not all(c.isalnum() or c in "_-" for c in name):
                raise CriuConfError(f"{name!r} is no name of a CRIU feature")
            status, _ = _ask(self.path, "check", "--feature", name)
            known = self._features[name] = status == 0
            if self._cache is not None:
                _keep(self, self._cache, self._identity)
        return known


def probe(criu: str = "criu", cache_dir: str | None = None) -> Criu:
    """What the CRIU named `criu` (a path, or a name looked up in PATH and the system's folders) is and can do.

    cache_dir: an existing directory of ours where the answer is kept, one file per path of a binary, or None.
    CriuConfError: no such program, it does not run, or it is older than 4.0.
    """
    path = _find(criu)
    identity = _identity(path)
    cache = None if cache_dir is None else f"{cache_dir}/{path.strip('/').replace('/', '-')}.probed"
    if cache is not None:
        kept = _recall(cache, identity, path)
        if kept is not None:
            return kept
    version = _version(path)
    status, text = _ask(path, "--help")
    options = listed(text)
    if status != 0 or "link-remap" not in options:
        raise CriuConfError(f"{path} does not list its options: `{path} --help` says {_short(text)!r}; reinstall criu")
    found = Criu(
        path,
        version,
        options | {name for name, since in UNLISTED.items() if version >= since},
        cache=cache,
        identity=identity,
    )
    if cache is not None:
        _keep(found, cache, identity)
    return found


def _find(criu: str) -> str:
    if "/" in criu:
        candidates = [criu]
    else:
        # runc looks CRIU up in PATH; a daemon's PATH often lacks the sbin folders, where distributions put criu.
        folders = os.environ.get("PATH", "").split(":") + _SYSTEM_FOLDERS.split(":")
        candidates = [f"{folder}/{criu}" for folder in folders if folder.startswith("/")]
    for path in candidates:
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    if "/" in criu and os.path.exists(criu):
        raise CriuConfError(f"{criu} is not a program that can be run; install criu >= {dotted(OLDEST)}")
    where = criu if "/" in criu else f"{criu} in PATH or {_SYSTEM_FOLDERS}"
    raise CriuConfError(f"there is no {where}; install criu >= {dotted(OLDEST)}")


def _identity(path: str) -> str:
    """What changes when another binary is at `path`, or another kernel runs (features depend on both)."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise CriuConfError(f"cannot look at {path}: {error.strerror}") from error
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns} {os.uname().release}"


def _version(path: str) -> Version:
    status, text = _ask(path, "--version")
    for line in text.splitlines():
        # `Version: 4.1.1`, and in a build from git a second line `GitID: v4.1-56-g…`. A release candidate is `4.3-rc1`.
        if line.startswith("Version:"):
            numbers = []
            for part in line[8:].strip().split("-", 1)[0].split("."):
                if not part.isdigit():
                    break
                numbers.append(int(part))
            if numbers:
                version = tuple(numbers)
                if version < OLDEST:
                    raise CriuConfError(
                        f"{path} is version {dotted(version)}, which is too old: install criu >= {dotted(OLDEST)}"
                    )
                return version
    raise CriuConfError(
        f"{path} does not tell its version (exit status {status}: {_short(text)!r}); install criu >= {dotted(OLDEST)}"
    )


def _ask(path: str, *arguments: str) -> tuple[int, str]:
    import subprocess  # 10 ms, and paid only by the first container after CRIU changed

    # Without the node's own /etc/criu/default.conf: a mistake in it would make every question fail.
    command = [path, "--no-default-config", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CriuConfError(f"`{' '.join(command)}` gave no answer within {_PATIENCE:.0f} s") from error
    except OSError as error:
        raise CriuConfError(
            f"{path} cannot be run ({error.strerror}); install criu >= {dotted(OLDEST)} for this machine"
        ) from error
    return done.returncode, done.stdout.decode(errors="replace")


def _short(text: str) -> str:
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= 120 else line[:119] + "…"


def _recall(cache: str, identity: str, path: str) -> Criu | None:
    """The kept answer, or None when there is none, or it is about another binary, or it is not ours."""
    try:
        descriptor = os.open(cache, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        owner = os.fstat(descriptor)
        # What is in here ends up in a file that CRIU obeys as root.
        if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
            return None
        text = os.read(descriptor, _LARGEST_CACHE).decode(errors="replace")
    finally:
        os.close(descriptor)
    lines = text.split("\n")
    # "end" as the last line: a file cut short says nothing.
    if len(lines) != 7 or lines[0] != _FORMAT or lines[1] != identity or lines[2] != path or lines[5] != "end":
        return None
    numbers = lines[3].split(".")
    words = lines[4].split(" ")
    if not all(number.isdigit() for number in numbers):
        return None
    names = []
    features = {}
    for word in words:
        name, equals, answer = word.partition("=")
        if equals:
            features[name] = answer == "yes"
        elif is_name(name):
            names.append(name)
    return Criu(path, tuple(map(int, numbers)), names, features=features, cache=cache, identity=identity)


def _keep(criu: Criu, cache: str, identity: str) -> None:
    words = sorted(criu.options)
    words += [f"{name}={'yes' if answer else 'no'}" for name, answer in sorted(criu._features.items())]
    text = "\n".join((_FORMAT, identity, criu.path, dotted(criu.version), " ".join(words), "end", ""))
    temporary = f"{cache}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        os.rename(temporary, cache)
    except OSError as error:
        raise CriuConfError(f"cannot keep what is known of {criu.path} in {cache}: {error.strerror}") from error
