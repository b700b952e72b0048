"""Why a dump or a restore failed, from CRIU's log.

CRIU goes on logging after the error that ends an operation: every caller says that its callee failed, helpers die,
locks are taken back. And before it, harmless errors are logged by operations that succeed. So neither the first nor the
last error line is the cause. What is looked for here is the first error of the last group of errors that is neither a
consequence nor harmless, with a preference for lines whose meaning is known.

A log holds names that the container's processes chose (files, sockets, commands). What is taken from it is escaped and
bounded, and only lines in the form of CRIU's own log count.
"""

from __future__ import annotations

import re

from .causes import CAUSES, CONSEQUENCES, ERROR, HARMLESS, TEXT, Cause
from .errors import CriuConfError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SENTENCE = 512  # bytes; containerd passes an error on in one gRPC status, and clients show one line of it
_MESSAGE = 200  # bytes of CRIU's own message in the sentence
_VALUE = 96  # bytes of one value taken from the log
_TAIL = 16 << 20  # bytes of a log that are read, from its end
_LINE = 4096  # bytes of one line that are looked at
_GROUP = 500  # lines within which two errors belong to one failure; the tasks of a large tree log between each other

# `(00.016492)   1: Error (criu/sk-unix.c:893): unix: …`. Without a time at low verbosity; behind `pie: 1:` from inside
# a process; behind a line number and logrus' prefix where runc quotes the log.
_LOGGED = re.compile(
    r"(?:time=\"[^\"]*\" level=\w+ msg=\")?(?:\d+:)?(?:\(\d+\.\d+\)\s*)?(?:pie: (?:\d+: )?)?(?:\s*(?P<task>\d+):\s+)?"
    r"(?P<level>Error|Warn ) \((?P<where>[\w./-]+:\d+)\): (?P<message>.*)"
)
_SUCCESS = re.compile(r"(?:\(\d+\.\d+\)\s*)?(?:Dumping|Pre-dumping|Restore) finished successfully")
_BEGUN = re.compile(r"\(\d+\.\d+\)\s*(?:CRIU run id|Version:|Dumping processes|Reading image tree)")
# A line of the log itself, in which a name that a process chose may stand for anything.
_OF_THE_LOG = re.compile(r"(?:time=\"[^\"]*\" level=\w+ msg=\"\d+:)?(?:\d+:)?(?:\(\d+\.\d+\)|pie: |\s*\d+: )")
_CONSEQUENCE = re.compile("|".join(f"(?:{pattern})" for pattern in CONSEQUENCES))
_HARMLESS = re.compile("|".join(f"(?:{pattern})" for pattern in HARMLESS))


class Explanation:
    """What ended an operation.

    line: the line of the log. where: the place in CRIU's source, or "". message: what CRIU said there.
    cause: the name of the row in causes.CAUSES, or None for an error that is not in the table.
    meaning, remedy: what that means and what to do; empty where the cause is not in the table.
    All texts are escaped: no control characters, no line breaks.
    """

    __slots__ = ("cause", "line", "meaning", "message", "remedy", "where")

    def __init__(
        self, line: str, where: str, message: str, *, cause: str | None, meaning: str = "", remedy: str = ""
    ) -> None:
        self.line = line
        self.where = where
        self.message = message
        self.cause = cause
        self.meaning = meaning
        self.remedy = remedy

    def __repr__(self) -> str:
        return f"Explanation({self.cause!r}, {self.message!r})"

    @property
    def sentence(self) -> str:
        """Message, meaning and remedy in one line of at most 512 bytes of UTF-8."""
        message = _shortened(self.message, _MESSAGE)
        if not self.meaning:
            return f"CRIU: {message}"
        return _shortened(f"CRIU: {message}: {self.meaning}; {self.remedy}", SENTENCE)


class _Record:
    __slots__ = ("cause", "groups", "level", "message", "number", "raw", "where")

    def __init__(self, number: int, level: str, where: str, message: str, raw: str) -> None:
        self.number = number
        self.level = level
        self.where = where
        self.message = message
        self.raw = raw
        self.cause: Cause | None = None
        self.groups: dict[str, str | None] = {}


def explain(log: str | bytes) -> Explanation | None:
    """The cause of a failure, from a log: its text as bytes or with line breaks, else the path of a log file.

    None: the log tells of success, or is of no operation at all. CriuConfError: the file cannot be read.
    """
    if isinstance(log, bytes):
        lines: Iterable[bytes] = log[-_TAIL:].split(b"\n")
    elif "\n" in log or not log:
        lines = log.encode(errors="surrogateescape")[-_TAIL:].split(b"\n")
    else:
        lines = _tail(log)
    return _explained(lines)


def _tail(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            while True:
                # A line of many megabytes, which no log has, comes in pieces.
                line = file.readline(1 << 16)
                if not line:
                    return
                yield line
    except OSError as error:
        raise CriuConfError(f"cannot read the log {path}: {error.strerror}") from error


def _explained(lines: Iterable[bytes]) -> Explanation | None:
    candidates: list[_Record] = []
    others: list[_Record] = []
    begun = False
    last = ""
    for number, each in enumerate(lines):
        line = each[:_LINE].rstrip(b"\r\n").decode(errors="backslashreplace")
        if line.strip():
            last = line
        if _SUCCESS.match(line):
            # What was logged before was survived.
            candidates.clear()
            others.clear()
            begun = False
            continue
        begun = begun or _BEGUN.match(line) is not None
        record = _record(number, line)
        if record is None:
            continue
        if record.level == ERROR and not _HARMLESS.match(record.message) and not _consequence(record):
            candidates.append(record)
        else:
            others.append(record)
    chosen = _chosen(candidates) or _symptom(others)
    if chosen is not None:
        return _worded(chosen)
    return _unfinished(last) if begun else None


def _record(number: int, line: str) -> _Record | None:
    if "Error (" in line or "Warn  (" in line:
        found = _LOGGED.match(line)
        if found is not None:
            record = _Record(number, found["level"].strip(), found["where"], _unquoted(line, found["message"]), line)
            _identify(record)
            return record
    if _OF_THE_LOG.match(line):
        return None
    for cause in CAUSES:
        if cause.level == TEXT:
            matched = _compiled(cause).search(line)
            if matched is not None:
                record = _Record(number, ERROR, "", line[matched.start() :], line)
                record.cause, record.groups = cause, matched.groupdict()
                return record
    return None


def _unquoted(line: str, message: str) -> str:
    # runc quotes the log into a message of its own, which ends with a quote.
    return message[:-1] if line.startswith("time=") and message.endswith('"') else message


def _identify(record: _Record) -> None:
    for cause in CAUSES:
        if cause.level == record.level:
            found = _compiled(cause).match(record.message)
            if found is not None:
                record.cause, record.groups = cause, found.groupdict()
                return


_COMPILED: dict[str, re.Pattern[str]] = {}


def _compiled(cause: Cause) -> re.Pattern[str]:
    pattern = _COMPILED.get(cause.name)
    if pattern is None:
        # Some messages have the subsystem before them in some versions only.
        prefix = "" if cause.level == TEXT else r"(?:sk )?(?:[\w-]+: ?){0,2}?"
        pattern = _COMPILED[cause.name] = re.compile(f"{prefix}{cause.pattern}")
    return pattern


def _consequence(record: _Record) -> bool:
    return (record.cause is None or record.cause.vague) and _CONSEQUENCE.match(record.message) is not None


def _chosen(candidates: list[_Record]) -> _Record | None:
    """The first error of the last failure; one that is known, if there is one."""
    if not candidates:
        return None
    last = candidates[-1].number
    group = [record for record in candidates if last - record.number <= _GROUP]
    known = [record for record in group if record.cause is not None]
    named = [record for record in known if record.cause is not None and not record.cause.vague]
    return (named or known or group)[0]


def _symptom(others: list[_Record]) -> _Record | None:
    """Where only consequences and harmless errors are left: a known warning, a vague symptom, the first of the rest."""
    if not any(record.level == ERROR for record in others):
        return None
    known = [record for record in others if record.cause is not None]
    named = [record for record in known if record.cause is not None and not record.cause.vague]
    if named or known:
        return (named or known)[-1]
    return next((record for record in others if record.level == ERROR and not _HARMLESS.match(record.message)), None)


def _worded(record: _Record) -> Explanation:
    values = {name: _value(value) for name, value in record.groups.items()}
    cause = record.cause
    return Explanation(
        line=_escaped(record.raw),
        where=record.where,
        message=_escaped(record.message.strip()),
        cause=None if cause is None else cause.name,
        meaning="" if cause is None else cause.meaning.format_map(values),
        remedy="" if cause is None else cause.remedy.format_map(values),
    )


def _unfinished(last: str) -> Explanation:
    return Explanation(
        line=_escaped(last),
        where="",
        message="the log ends in the middle",
        cause="unfinished",
        meaning="CRIU was killed or crashed before it could say why, or the disk with its log is full",
        remedy="look for criu in `dmesg` and for space where the snapshot is written",
    )


def _value(value: str | None) -> str:
    if value is None or value == "(null)":
        return "unnamed"
    return _shortened(_escaped(value.strip()), _VALUE)


def _escaped(text: str) -> str:
    """`text` with everything that is no printable character written out: a name in a log may hold terminal codes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def _shortened(text: str, limit: int) -> str:
    """`text`, with its middle left out where it is longer than `limit` bytes: a path's end says more than that."""
    whole = text.encode(errors="backslashreplace")
    if len(whole) <= limit:
        return whole.decode()
    mark = "…"
    keep = limit - len(mark.encode())
    head = whole[: keep // 2].decode(errors="ignore")
    tail = whole[len(whole) - (keep - len(head.encode())) :].decode(errors="ignore")
    return f"{head}{mark}{tail}"
