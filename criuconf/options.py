"""CRIU's options: which there are, what they take, and since which version they can be in a configuration file.

Source of the facts: `criu --help` of 4.1.1 and 4.3, criu/config.c of 4.0, 4.1.1 and 4.2, and trying them.
Each name here is a long option without its dashes, which is what a line of a configuration file starts with.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

Version = tuple[int, ...]

OLDEST: Version = (4, 0)
"""The oldest CRIU that is supported. Older ones do not start on kernels of today (their vDSO parser stops first)."""

FLAG = "flag"  # no value; `no-NAME` turns it off again
PLAIN = "plain"  # no value, and no `no-` form
VALUE = "value"  # `NAME VALUE`
OPTIONAL = "optional"  # bare, or `NAME=VALUE`: getopt takes the value of such an option only behind an equals sign

# Options that `criu --help` does not list, and the first supported version that has them.
UNLISTED: dict[str, Version] = {
    "close": OLDEST,
    "compress": (4, 3),
    "compress-acceleration": (4, 3),
    "compress-block": (4, 3),
    "decompress-threads": (4, 3),
    "deprecated": OLDEST,
    "enable-external-masters": OLDEST,
    "enable-external-sharing": OLDEST,
    "ext-mount-map": OLDEST,
    "ext-unix-sk": OLDEST,
    "veth-pair": OLDEST,
}

TAKES_VALUE = frozenset(
    (
        "action-script",
        "address",
        "cgroup-dump-controller",
        "cgroup-props",
        "cgroup-props-file",
        "cgroup-root",
        "cgroup-yard",
        "close",
        "compress-acceleration",
        "compress-block",
        "config",
        "decompress-threads",
        "empty-ns",
        "enable-fs",
        "ext-mount-map",
        "external",
        "feature",
        "file-validation",
        # `--help` shows it without an argument; config.c says required_argument.
        "freeze-cgroup",
        "ghost-limit",
        "image-io-mode",
        "images-dir",
        "inherit-fd",
        "irmap-scan-path",
        "join-ns",
        "libdir",
        "log-file",
        "lsm-mount-context",
        "lsm-profile",
        "network-lock",
        "pidfile",
        "plugin-option",
        "port",
        "pre-dump-mode",
        "prev-images-dir",
        "ps-socket",
        "root",
        "skip-mnt",
        "status-fd",
        "timeout",
        "tls-cacert",
        "tls-cacrl",
        "tls-cert",
        "tls-key",
        "tree",
        "veth-pair",
        "work-dir",
    )
)

VALUE_OPTIONAL = frozenset(("cpu-cap", "ext-unix-sk", "manage-cgroups", "verbosity"))

NO_OFF_FORM = frozenset(
    (
        "compress",
        "enable-external-masters",
        "enable-external-sharing",
        "exec-cmd",
        "help",
        "lazy-pages",
        "leave-running",
        "leave-stopped",
        "no-default-config",
        "tls-no-cn-verify",
        "version",
    )
)

# CRIU adds up what these are given; every other option is what the last line says.
REPEATABLE = frozenset(
    (
        "action-script",
        "cgroup-dump-controller",
        "cgroup-root",
        "close",
        "enable-fs",
        "ext-mount-map",
        "external",
        "inherit-fd",
        "irmap-scan-path",
        "join-ns",
        "plugin-option",
        "skip-mnt",
        "veth-pair",
    )
)

# The first version that takes the option in a configuration file which the caller of its RPC names (as runc does).
SINCE: dict[str, Version] = {
    "allow-uprobes": (4, 2),
    "compress": (4, 3),
    "compress-acceleration": (4, 3),
    "compress-block": (4, 3),
    "decompress-threads": (4, 3),
    "image-io-mode": (4, 3),
    # The option is older, but up to 4.2 reading it from the RPC caller's file is a null pointer dereference: argv is
    # NULL there and parse_options() looks for "restore" in it. runc then says `read unixpacket: EOF`, without any log.
    "network-lock": (4, 3),
    "plugin-option": (4, 3),
}

# Options that depend on how CRIU was built or on the kernel: `criu check --feature NAME` says whether they work.
NEEDS_FEATURE = {
    "compress": ("compress", "a CRIU built with LZ4 support"),
    "compress-acceleration": ("compress", "a CRIU built with LZ4 support"),
    "compress-block": ("compress", "a CRIU built with LZ4 support"),
}

# CRIU refuses these in the other operation (`Option --mntns-compat-mode is only valid on restore`).
ONLY_IN = {
    "compress": "dump",
    "compress-acceleration": "dump",
    "compress-block": "dump",
    "decompress-threads": "restore",
    "mntns-compat-mode": "restore",
    "network-lock": "dump",
}

# Decided for each operation by the client, by runc or by the shim: a file that sets one of these would write the
# images elsewhere, dump another process, or end CRIU before it has begun.
DECIDED_ELSEWHERE = frozenset(
    (
        "all",
        "config",
        "daemon",
        "exec-cmd",
        "experimental",
        "extra",
        "feature",
        "help",
        "images-dir",
        "leave-running",
        "leave-stopped",
        "no-default-config",
        "page-server",
        "pidfile",
        "restore-detached",
        "restore-sibling",
        "root",
        "status-fd",
        "tree",
        "unprivileged",
        "version",
    )
)


def kind(name: str) -> str:
    """FLAG, PLAIN, VALUE or OPTIONAL: what the option `name` takes."""
    if name in TAKES_VALUE:
        return VALUE
    if name in VALUE_OPTIONAL:
        return OPTIONAL
    if name in NO_OFF_FORM:
        return PLAIN
    return FLAG


def listed(help_text: str) -> frozenset[str]:
    """The long options that the text of `criu --help` lists.

    An option stands at the start of its line behind spaces, with its short form before it: `  -L|--libdir     path …`,
    `     --pidfile FILE  …`, `  -v[v...]|--verbosity  …`, `  --plugin-option=P.N[=V] …`.
    Options that a description mentions (`specified after '--' on`, `prefixed with --no- to`) stand elsewhere.
    """
    found = set()
    for line in help_text.splitlines():
        text = line.lstrip(" ")
        if not text.startswith("-") or len(line) - len(text) > 8:
            continue
        for form in text.split(None, 1)[0].split("|"):
            if form.startswith("--"):
                name = form[2:].split("=", 1)[0].split("[", 1)[0]
                if is_name(name):
                    found.add(name)
    return frozenset(found)


def is_name(text: str) -> bool:
    """Whether `text` has the form of a long option's name."""
    return 2 <= len(text) <= 64 and text[0].isalpha() and all(c in _NAME_CHARACTERS for c in text)


_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


def with_off_forms(names: Iterable[str]) -> frozenset[str]:
    """`names` and the `no-…` forms that getopt knows for them: all that a line may start with."""
    names = frozenset(names)
    return names | {f"no-{name}" for name in names if kind(name) == FLAG}


def dotted(version: Version) -> str:
    """(4, 1, 1) as people write it: 4.1.1."""
    return ".".join(str(part) for part in version)
