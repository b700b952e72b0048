"""The configuration file of one dump or one restore.

runc hands the file to CRIU by name (annotation `org.criu.config`), and CRIU applies it last: what stands in it wins
over what runc asked for. An option that CRIU does not know makes the whole operation fail without a log, so nothing is
written that the installed CRIU lacks.
"""

from __future__ import annotations

from .errors import CriuConfError
from .options import (
    DECIDED_ELSEWHERE,
    FLAG,
    NEEDS_FEATURE,
    OLDEST,
    ONLY_IN,
    OPTIONAL,
    PLAIN,
    REPEATABLE,
    SINCE,
    UNLISTED,
    dotted,
    is_name,
    kind,
)
from .syntax import Setting, line, opposite, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .installed import Criu

    Value = bool | int | str | Sequence[str | int]

GHOST_LIMIT = 1 << 30
"""Bytes. CRIU's own limit of 1 MiB stops the dump of any program that holds a larger file open after unlinking it."""

OPERATIONS = ("dump", "restore")
TCP = ("established", "close", "none")


class Request:
    """What one operation needs of CRIU's configuration.

    operation: "dump" or "restore".
    libdir: an empty directory, given to CRIU as its plugin directory.
    log_file: the log's name in CRIU's work directory, or None for the name that runc gives (dump.log, restore.log).
    verbosity: 0 to 4; 4 is everything.
    action_script: a program that CRIU runs at each of its hooks and waits for, or None.
    ghost_limit: bytes of one unlinked open file that may be kept in the images.
    tcp: "established" (kept), "close" (closed on restore), "none" (a live connection stops the dump).
    skip_in_flight: leave out TCP connections that are not accepted yet, instead of refusing the dump.
    ext_unix_sk: allow unix sockets whose other end is outside the container. file_locks: keep file locks.
    extra: the operator's options by name: True (the option), False (its `no-` form), a number or a text (its value),
        a list (once for each element). They win over the defaults.
    container_text: the text of the configuration file that the container brings itself, or None. Its settings win over
        all others. container_source: how to call that file in messages.
    """

    __slots__ = (
        "action_script",
        "container_source",
        "container_text",
        "ext_unix_sk",
        "extra",
        "file_locks",
        "ghost_limit",
        "libdir",
        "log_file",
        "operation",
        "skip_in_flight",
        "tcp",
        "verbosity",
    )

    def __init__(
        self,
        operation: str,
        libdir: str,
        *,
        log_file: str | None = None,
        verbosity: int = 4,
        action_script: str | None = None,
        ghost_limit: int = GHOST_LIMIT,
        tcp: str = "established",
        skip_in_flight: bool = False,
        ext_unix_sk: bool = False,
        file_locks: bool = True,
        extra: Mapping[str, Value] | None = None,
        container_text: str | None = None,
        container_source: str = "the container's org.criu.config",
    ) -> None:
        if operation not in OPERATIONS:
            raise CriuConfError(f"{operation!r} is no operation of CRIU here: dump and restore are")
        if tcp not in TCP:
            raise CriuConfError(f"tcp is {tcp!r}; it can be {', '.join(TCP)}")
        if not 0 <= verbosity <= 4:
            raise CriuConfError(f"verbosity is {verbosity}; it can be 0 to 4")
        # CRIU's parser takes the number with atol() and does not look at its sign.
        if not 0 <= ghost_limit < 1 << 63:
            raise CriuConfError(f"ghost-limit is {ghost_limit}; it is a number of bytes, at least 0")
        if not libdir.startswith("/"):
            raise CriuConfError(f"the plugin directory {libdir!r} is no absolute path")
        self.operation = operation
        self.libdir = libdir
        self.log_file = log_file
        self.verbosity = verbosity
        self.action_script = action_script
        self.ghost_limit = ghost_limit
        self.tcp = tcp
        self.skip_in_flight = skip_in_flight
        self.ext_unix_sk = ext_unix_sk
        self.file_locks = file_locks
        self.extra = dict(extra or {})
        self.container_text = container_text
        self.container_source = container_source


class Conflict:
    """An option that the container's own file sets otherwise. The container's setting is the one written."""

    __slots__ = ("name", "ours", "theirs")

    def __init__(self, name: str, ours: str, theirs: str) -> None:
        self.name = name
        self.ours = ours
        self.theirs = theirs

    def __repr__(self) -> str:
        return f"Conflict({self.name!r}, {self.ours!r}, {self.theirs!r})"

    def __str__(self) -> str:
        return f"{self.name}: the container's own {self.theirs!r} is used instead of {self.ours!r}"


class Rendered:
    """A configuration file: its text, what in it the container decided against us, and remarks for the shim's log."""

    __slots__ = ("conflicts", "notes", "settings", "text")

    def __init__(
        self, text: str, conflicts: tuple[Conflict, ...], notes: tuple[str, ...], settings: tuple[Setting, ...]
    ) -> None:
        self.text = text
        self.conflicts = conflicts
        self.notes = notes
        self.settings = settings

    def value(self, name: str) -> str | None:
        """The value that the file gives to `name`: "" for an option without one, None where it is not in the file."""
        found = [setting for setting in self.settings if setting.name == name]
        return (found[-1].value or "") if found else None


def render(criu: Criu, request: Request) -> Rendered:
    """The configuration file for `request`, as the CRIU `criu` can read it.

    CriuConfError: this CRIU lacks an option that is needed (the message names the version that has it), or a value or a
    line of the container's file cannot be used.
    """
    ours = _Merged()
    for setting in _defaults(criu, request):
        ours.add(setting)
    for name, value in request.extra.items():
        for setting in _from_operator(criu, request.operation, name, value):
            ours.replace(setting)
    merged = ours.copy()
    conflicts: list[Conflict] = []
    notes: list[str] = []
    if request.container_text is not None:
        for setting in parse(request.container_text, criu.names(), request.container_source):
            _require(criu, setting.name, request.container_source)
            if setting.note is not None:
                notes.append(setting.note)
            if _used(setting.name, request.operation):
                conflicts += _against(ours, setting)
                merged.replace(setting)
    settings = tuple(merged.settings)
    text = "".join(f"{line(setting)}\n" for setting in settings)
    return Rendered(
        f"# Written by fermata for one {request.operation}.\n{text}", tuple(conflicts), tuple(notes), settings
    )


def _defaults(criu: Criu, request: Request) -> list[Setting]:
    settings: list[Setting] = []

    def need(name: str, value: str | None = None) -> None:
        _require(criu, name, "fermata")
        if _used(name, request.operation):
            settings.append(Setting(name, value))

    # CRIU loads every shared object of its plugin directory, wanted or not; the one for CUDA pauses GPU processes by
    # its own rules, and the one for AMD GPUs refuses to start without its devices.
    need("libdir", request.libdir)
    # The whole log: what stopped an operation is often explained by a debug line before the error. With an equals sign,
    # without which CRIU ignores the number.
    need("verbosity", str(request.verbosity))
    if request.log_file is not None:
        need("log-file", request.log_file)
    if request.operation == "dump":
        # A file that was unlinked while it is open and has another name left (POSIX semaphores of multiprocessing are
        # made so) gets a temporary name for the dump. Without it the dump is refused.
        need("link-remap")
        # An unlinked open file without any name left goes into the images, up to this size.
        need("ghost-limit", str(request.ghost_limit))
    # The stock shim passes TCP, lock and unix socket options with a dump when the client asks, and none at all with a
    # restore: only this file can say the same to both.
    if request.tcp != "none":
        need(f"tcp-{request.tcp}")
    if request.skip_in_flight:
        need("skip-in-flight")
    if request.file_locks:
        # A lock whose holder and file are both in the container is the container's own; CRIU cannot know that a tree of
        # processes is a whole container, so it wants to be told.
        need("file-locks")
    if request.ext_unix_sk:
        need("ext-unix-sk")
    if request.action_script is not None:
        need("action-script", request.action_script)
    if (
        request.operation == "dump"
        and "network-lock" not in request.extra
        and criu.has("network-lock")
        and criu.feature("network_lock_nftables")
    ):
        # One nftables table with a name of its own, deleted whole, in place of chains in tables that others use too.
        # A restore unlocks by the method that the images name.
        need("network-lock", "nftables")
    if request.operation == "restore" and criu.has("skip-file-rwx-check"):
        # CRIU compares the mode of every open file with that of the dump. Another mode (a key file that an entry point
        # tightens on a volume, a file system that cannot keep modes) would end the restore, although a process that
        # holds a descriptor has no need of the mode any more.
        need("skip-file-rwx-check")
    # Not here: image-io-mode direct. It helps where images come from a fast disk and hurts where they are in the page
    # cache; the operator knows which.
    return settings


def _from_operator(criu: Criu, operation: str, name: str, value: Value) -> list[Setting]:
    source = f"config.toml, [criu.options] {name}"
    if not is_name(name):
        raise CriuConfError(f"{source}: this is no name of a CRIU option")
    if value is False:
        if kind(name) != FLAG:
            raise CriuConfError(f"{source}: this option cannot be switched off; remove the line")
        name, value = opposite(name), True
    _require(criu, name, source)
    if not _used(name, operation):
        return []
    takes = kind(name)
    if value is True:
        if takes not in (FLAG, PLAIN, OPTIONAL):
            raise CriuConfError(f"{source}: this option needs a value")
        return [Setting(name, None)]
    if takes in (FLAG, PLAIN):
        raise CriuConfError(f"{source}: this option takes true or false, not {value!r}")
    if isinstance(value, (str, int)):
        return [Setting(name, str(value))]
    if name not in REPEATABLE:
        raise CriuConfError(f"{source}: this option takes one value, not a list")
    return [Setting(name, str(each)) for each in value]


def _used(name: str, operation: str) -> bool:
    return ONLY_IN.get(name, operation) == operation


def _require(criu: Criu, name: str, source: str) -> None:
    """Refuse `name` unless a file for this CRIU may carry it."""
    plain = opposite(name) if name.startswith("no-") and kind(name[3:]) == FLAG else name
    if plain in DECIDED_ELSEWHERE:
        raise CriuConfError(f"{source}: {name} is decided for each operation and cannot be set in a configuration")
    since = max(SINCE.get(plain, OLDEST), UNLISTED.get(plain, OLDEST))
    if criu.version < since:
        raise CriuConfError(
            f"{source}: {plain} in a configuration file needs criu >= {dotted(since)}; "
            f"{criu.path} is {dotted(criu.version)}"
        )
    if plain not in criu.options:
        raise CriuConfError(f"{source}: {criu.path} (CRIU {dotted(criu.version)}) has no option {plain}")
    needed = NEEDS_FEATURE.get(plain)
    if needed is not None and not criu.feature(needed[0]):
        raise CriuConfError(f"{source}: {plain} needs {needed[1]}, which {criu.path} is not")


class _Merged:
    """Settings in the order of a file, in which a later one takes the place of what it overrules."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []

    def copy(self) -> _Merged:
        other = _Merged()
        other.settings = list(self.settings)
        return other

    def add(self, setting: Setting) -> None:
        self.settings.append(setting)

    def overruled(self, setting: Setting) -> list[Setting]:
        """What of this says something else about the subject of `setting`."""
        if setting.name in REPEATABLE:
            return []
        names = {setting.name, opposite(setting.name)}
        # For CRIU a closed connection is no longer an established one, whatever the other option says.
        if setting.name == "tcp-close":
            names.add("tcp-established")
        elif setting.name == "tcp-established":
            names.add("tcp-close")
        return [each for each in self.settings if each.name in names]

    def replace(self, setting: Setting) -> None:
        gone = self.overruled(setting)
        self.settings = [each for each in self.settings if not any(each is other for other in gone)]
        self.settings.append(setting)


def _against(ours: _Merged, setting: Setting) -> list[Conflict]:
    return [Conflict(setting.name, str(each), str(setting)) for each in ours.overruled(setting) if each != setting]
