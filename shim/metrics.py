"""Counts and times of takes and restores, in one file in Prometheus' text format, which no daemon has to serve.

Whoever finishes an operation adds it to the file: reads it, writes a new one beside it and renames that, under a lock
that ends with its holder. A reader sees the one or the other, whole. What the file has that this version does not know
stays as it is, so shims of several versions can share it; one that cannot be read is begun anew, which to Prometheus is
a counter's reset. Whatever fails here is a line in the log, and never an operation's failure.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4), without timestamps, as
node_exporter's textfile collector takes it. Units are seconds and bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping
    from typing import Any

    Change = tuple[str, dict[str, str], float]
    """A family, the labels, and what to add; the value itself for a gauge, one observation for a histogram."""

LOCK = "/run/fermata/metrics.lock"
PATIENCE = 0.25
"""Seconds to wait for the lock: with it an operation takes so much longer at most, and is not counted then."""

_LIMIT = 1 << 20  # bytes of a file that is read; it has about 10 KB
_SHORT = ("0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "30", "60")
_LONG = (*_SHORT[1:], "120", "300", "600")
_CAUSES = {"cause": ("disk-full", "fault", "unknown")}  # those that an alert asks for
_OUTCOMES = {"outcome": ("success", "failure")}


class Family:
    """What is declared of one metric: its type, its help, its buckets if it is a histogram, and the labels whose values
    are known before they occur, so that they are there at 0 and their first increase is seen."""

    __slots__ = ("buckets", "help", "kind", "known")

    def __init__(
        self,
        kind: str,
        help: str,
        *,
        buckets: tuple[str, ...] = (),
        known: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.kind = kind
        self.help = help
        self.buckets = buckets
        self.known = known


FAMILIES = {
    "fermata_takes_total": Family("counter", "Snapshots that were asked for, by outcome.", known=_OUTCOMES),
    "fermata_take_failures_total": Family("counter", "Takes that failed, by cause.", known=_CAUSES),
    "fermata_take_lost_containers_total": Family(
        "counter", "Containers that ended with a take that failed and was to leave them running.", known={}
    ),
    "fermata_take_seconds": Family("histogram", "A take, from the call to its answer.", buckets=_LONG, known={}),
    "fermata_take_frozen_seconds": Family(
        "histogram", "How long a take held the container's processes still.", buckets=_SHORT, known={}
    ),
    "fermata_take_step_seconds": Family("summary", "Steps of takes."),
    "fermata_take_bytes_total": Family("counter", "Bytes of the snapshots that were taken.", known={}),
    "fermata_take_layer_entries_total": Family(
        "counter", "Files, directories and other entries in the layers of the snapshots that were taken.", known={}
    ),
    "fermata_take_layers_total": Family(
        "counter",
        "Snapshots by how their layer was made: from the upper directory, by a full comparison, or without one.",
        known={"made_by": ("upperdir", "full-diff", "none")},
    ),
    "fermata_take_last_success_timestamp_seconds": Family("gauge", "When a snapshot was last taken, in Unix time."),
    "fermata_restores_total": Family("counter", "Restores that were asked for, by outcome.", known=_OUTCOMES),
    "fermata_restore_failures_total": Family("counter", "Restores that failed, by cause.", known=_CAUSES),
    "fermata_restore_seconds": Family(
        "histogram", "The work of a restore, without what its client did in between.", buckets=_LONG, known={}
    ),
    "fermata_restore_step_seconds": Family("summary", "Steps of restores."),
    "fermata_restore_bytes_total": Family("counter", "Bytes of the snapshots that were restored.", known={}),
    "fermata_restore_last_success_timestamp_seconds": Family("gauge", "When a restore last succeeded, in Unix time."),
}
"""Every metric by its name."""


class Page:
    """The file's content: the metrics by name, each with its help, its type and its samples in their order."""

    def __init__(self) -> None:
        self.heads: dict[str, tuple[str, str]] = {}
        self.samples: dict[str, dict[str, float]] = {}

    @classmethod
    def parse(cls, text: str) -> Page:
        """Read one that `render` wrote. Raises ValueError."""
        page = cls()
        samples: dict[str, float] | None = None
        for line in text.split("\n"):
            if line.startswith("# HELP "):
                _, _, name, text_ = (*line.split(" ", 3), "")[:4]
                page.heads[name] = ("untyped", text_)
                samples = page.samples.setdefault(name, {})
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                page.heads[name] = (kind, page.heads.get(name, ("", ""))[1])
                samples = page.samples.setdefault(name, {})
            elif line and not line.startswith("#"):
                key, _, value = line.rpartition(" ")
                if samples is None or not key:
                    raise ValueError(f"a line that is none: {line[:80]!r}")
                samples[key] = float(value)
        return page

    def declare(self) -> None:
        """Have every metric of this version, those whose labels are known at 0."""
        for name, family in FAMILIES.items():
            self.heads[name] = (family.kind, family.help)
            samples = self.samples.setdefault(name, {})
            if family.buckets and list(samples) != _keys(name, family, {}):
                samples.clear()  # another version's, with other buckets: both together would be no distribution
            if family.known is not None:
                for labels in _combinations(family.known):
                    for key in _keys(name, family, labels):
                        samples.setdefault(key, 0.0)

    def add(self, name: str, labels: dict[str, str], value: float) -> None:
        """Add to a counter, set a gauge, or add an observation to a histogram or summary."""
        family = FAMILIES[name]
        samples = self.samples[name]
        if family.kind == "gauge":
            samples[sample(name, labels)] = value
        elif family.kind == "counter":
            key = sample(name, labels)
            samples[key] = samples.get(key, 0.0) + value
        else:
            for key in _keys(name, family, labels):
                samples.setdefault(key, 0.0)
            for bucket in family.buckets:
                if value <= float(bucket):
                    samples[sample(f"{name}_bucket", {**labels, "le": bucket})] += 1
            if family.buckets:
                samples[sample(f"{name}_bucket", {**labels, "le": "+Inf"})] += 1
            samples[sample(f"{name}_sum", labels)] += value
            samples[sample(f"{name}_count", labels)] += 1

    def render(self) -> str:
        """The text."""
        lines = []
        for name, samples in self.samples.items():
            kind, text = self.heads[name]
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{key} {_number(value)}" for key, value in samples.items()]
        return "\n".join(lines) + "\n"


def _combinations(known: Mapping[str, tuple[str, ...]]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for label, values in known.items():
        found = [{**each, label: value} for each in found for value in values]
    return found


def _keys(name: str, family: Family, labels: dict[str, str]) -> list[str]:
    """The samples of a family with these labels."""
    if family.kind not in ("histogram", "summary"):
        return [sample(name, labels)]
    buckets = (*family.buckets, "+Inf") if family.buckets else ()
    keys = [sample(f"{name}_bucket", {**labels, "le": bucket}) for bucket in buckets]
    return [*keys, sample(f"{name}_sum", labels), sample(f"{name}_count", labels)]


def sample(name: str, labels: dict[str, str]) -> str:
    """A sample's name with its labels, as it stands in the file."""
    if not labels:
        return name
    escaped = (
        f'{label}="{text}"'
        for label, value in labels.items()
        for text in [value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')]
    )
    return f"{name}{{{','.join(escaped)}}}"


def _number(value: float) -> str:
    return str(int(value)) if abs(value) < 1e15 and value == int(value) else repr(value)


# The file -----------------------------------------------------------------------------------------------------------


def add(path: str, changes: Iterable[Change], *, lock: str = LOCK, patience: float = PATIENCE) -> bool:
    """Add to the file at `path`; without changes, have one. False: what was there could not be read, and is gone.

    Raises OSError, BlockingIOError when others keep the lock for longer than `patience` seconds.
    """
    folder = os.path.dirname(lock)
    if not os.path.isdir(folder):
        from shim.state import make_private

        make_private(folder)
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(held, time.monotonic() + patience)
        try:
            page = _read(path)
            whole = True
        except ValueError:
            page, whole = None, False
        if page is None:
            page = Page()
        page.declare()
        for name, labels, value in changes:
            page.add(name, labels, value)
        _write(path, page.render())
        return whole
    finally:
        os.close(held)


def _lock(fd: int, until: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.003)


def _read(path: str) -> Page | None:
    """The file's content; None when there is none. Raises OSError, and ValueError for one that is not ours.

    The directory may be another user's, node_exporter's mostly: no link is followed there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise OSError(f"{path} is a device, which a file would take the place of: leave [metrics] textfile empty")
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is no regular file")
        data = os.read(fd, _LIMIT)
    finally:
        os.close(fd)
    if not data.endswith(b"\n"):
        raise ValueError(f"{path} was cut off")
    return Page.parse(data.decode())


def _write(path: str, text: str) -> None:
    folder, _, name = path.rpartition("/")
    # node_exporter reads what ends with .prom. The same name for everybody: what a killed writer left is written over.
    new = f"{folder}/.{name}.new"
    data = text.encode()
    try:
        fd = _create(new)
    except FileNotFoundError:
        if os.path.dirname(folder) != "/run":
            raise  # the directory of another program, which is not there
        _make_readable(folder)
        fd = _create(new)
    try:
        try:
            while data:  # a disk that fills up takes the first part and refuses the rest
                data = data[os.write(fd, data) :]
            os.fchmod(fd, 0o644)
        finally:
            os.close(fd)
        os.rename(new, path)
    except BaseException:
        os.unlink(new)
        raise


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o600)


def _make_readable(folder: str) -> None:
    try:
        os.mkdir(folder, 0o755)
    except FileExistsError:
        return
    os.chmod(folder, 0o755)  # whatever the umask


# The command --------------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Add the command `metrics` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "metrics",
        help="print counts and times of takes and restores in Prometheus' text format",
        description="Print counts and times of the takes and restores on this node in Prometheus' text format: what is "
        "in the file that `[metrics] textfile` of the configuration names.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `metrics`. Raises ShimError."""
    from shim import config

    path = config.load().metrics_textfile
    if not path:
        raise ShimError(f"nothing is counted: {config.PATH} has an empty [metrics] textfile", FAILED_PRECONDITION)
    try:
        page = _read(path)
    except (OSError, ValueError) as error:
        raise ShimError(f"cannot read {path}: {error}; the next take or restore begins it anew") from error
    if page is None:
        page = Page()
        page.declare()
    print(page.render(), end="")
    return 0
