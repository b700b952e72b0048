"""runc's options in the form that containerd's CRI plugin has for runtimes it does not know: a piece of TOML.

    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.fermata.options]
      SystemdCgroup = true

A runtime named `io.containerd.runc.v2` gets this table as a message; ours gets its text. On a node with systemd every
pod depends on it. The table is flat, so its few lines are read here: tomllib is not in every Python, and costs every
pod's start 15 ms.
"""

from __future__ import annotations

from shim.errors import INVALID_ARGUMENT, ShimError
from shim.task import RuncOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shim.task import GenericOptions

# Of containerd's own names for runc's options, in toml, to ours.
NAMES = {name.replace("_", ""): name for name, _ in RuncOptions.FIELDS.values()}
_OF_THE_FORM = ("typeurl", "configpath")  # keys of the same table that describe it


def read(generic: GenericOptions) -> RuncOptions:
    """The options in the text, or in the file that it names instead. Raises ShimError that names what is wrong."""
    text, where = generic.config_body, "the options of the runtime in containerd's configuration"
    if not text and generic.config_path:
        where = generic.config_path
        try:
            with open(where, "rb") as file:
                text = file.read()
        except OSError as error:
            raise ShimError(
                f"cannot read the runtime options in {where}: {error.strerror}", INVALID_ARGUMENT
            ) from error
    return parse(text.decode(errors="replace"), where)


def parse(text: str, where: str) -> RuncOptions:
    """The options of a flat TOML table; `where` it stands goes into the message of the ShimError."""
    options = RuncOptions()
    for line in text.splitlines():
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in words.partition("="))
        key = key.strip("\"'")
        name = NAMES.get(key.lower())
        if not equals or (name is None and key.lower() not in _OF_THE_FORM):
            known = ", ".join(sorted(NAMES.values())).replace("_", "")
            raise ShimError(f"{where}: {words!r} is no option of runc's; there are {known}", INVALID_ARGUMENT)
        if name is None:
            continue
        kind = type(getattr(options, name))
        found = _value(value)
        if type(found) is not kind:
            kinds = {bool: "true or false", int: "a number", str: "text in quotes"}
            raise ShimError(f"{where}: {key} is {value}, it must be {kinds[kind]}", INVALID_ARGUMENT)
        setattr(options, name, found)
    return options


def _value(text: str) -> bool | int | str | None:
    """A TOML boolean, integer or one-line string, with nothing but a comment behind it; None for anything else."""
    quote = text[:1]
    if quote in ("'", '"') and (end := _end(text)):
        if text[end + 1 :].strip()[:1] not in ("", "#"):
            return None
        inner = text[1:end]
        return inner if quote == "'" else inner.replace('\\"', '"').replace("\\\\", "\\")
    word = text.partition("#")[0].strip()
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word)
    except ValueError:
        return None


def _end(text: str) -> int:
    """Where the string that begins with its quote has the closing one; 0 when it has none."""
    at = 1
    while at < len(text):
        if text[at] == "\\" and text[0] == '"':
            at += 2
            continue
        if text[at] == text[0]:
            return at
        at += 1
    return 0
