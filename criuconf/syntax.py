"""The syntax of CRIU's configuration files, as parse_statement() in criu/config.c reads it (CRIU 4.0 to 4.3).

One option per line without its dashes, with its value behind a space. What the manual page does not say, and what
matters when somebody else's file is read:
- the name ends at the first space; only a line without any space is split at a tab;
- `#` ends the line in a value too, also between quotes;
- a `"` starts a quoted value only as its first character; inside, `\"` is a quote and everything else is literal;
- getopt takes the value of an option with an optional one (`verbosity`, `manage-cgroups`, …) only as `verbosity=4`:
  in `verbosity 4` the 4 is ignored;
- getopt takes a name that is cut short if it can mean one option only: `libd` is `libdir`;
- a value behind an option that takes none is passed to getopt as well: `tcp-close --libdir=/x` would set libdir.
"""

from __future__ import annotations

from .errors import CriuConfError
from .options import FLAG, OPTIONAL, VALUE, is_name, kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# isspace() in the C locale.
_SPACES = " \t\n\v\f\r"
_LARGEST = 64 << 10


class Setting:
    """One line: an option by its full name, its value (None: none), the line's number in its file from 1, and
    what CRIU leaves out of it, as a sentence."""

    __slots__ = ("line", "name", "note", "value")

    def __init__(self, name: str, value: str | None, line: int = 0, note: str | None = None) -> None:
        self.name = name
        self.value = value
        self.line = line
        self.note = note

    def __repr__(self) -> str:
        return f"Setting({self.name!r}, {self.value!r}, {self.line})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and (self.name, self.value) == (other.name, other.value)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name} {self.value}"


def parse(text: str, names: frozenset[str], source: str) -> Iterator[Setting]:
    """The settings in a configuration file's text, in order.

    names: what a line may start with (Criu.names()), by which names that are cut short are completed.
    source: what the file is called in errors. Values are not shown in errors: an annotation may name any file.
    CriuConfError: CRIU would refuse the line, or read something else in it than a person does.
    """
    if len(text) > _LARGEST:
        raise CriuConfError(f"{source} has {len(text)} characters; a CRIU configuration has at most {_LARGEST}")
    if "\0" in text:
        raise CriuConfError(f"{source} has a NUL character; it is no CRIU configuration")
    for number, line in enumerate(text.split("\n"), 1):
        statement = line.lstrip(_SPACES)
        if not statement or statement[0] == "#":
            continue
        where = f"{source}, line {number}"
        word, value = _statement(statement, where)
        # getopt also takes NAME=VALUE, which is the only form for an option with an optional value.
        word, equals, attached = word.partition("=")
        if not is_name(word):
            raise CriuConfError(f"{where}: this is no CRIU option; write one option per line, without dashes")
        name = _complete(word, names, where)
        yield _setting(name, value, attached if equals else None, number, where)


def _setting(name: str, value: str | None, attached: str | None, number: int, where: str) -> Setting:
    takes = kind(name)
    if takes == VALUE:
        if attached is not None:
            value = attached
        if value is None:
            # getopt would take the next line for the value.
            raise CriuConfError(f"{where}: {name} needs a value")
        return Setting(name, value, number)
    if value is not None and value.startswith("-"):
        raise CriuConfError(f"{where}: what stands behind {name} would be read as an option of its own")
    if takes == OPTIONAL:
        note = f"{where}: CRIU ignores a value behind {name} and a space; write {name}=VALUE" if value else None
        return Setting(name, attached, number, note)
    if attached is not None:
        raise CriuConfError(f"{where}: {name} takes no value")
    return Setting(name, None, number, f"{where}: {name} takes no value; CRIU ignores it" if value else None)


def _complete(word: str, names: frozenset[str], where: str) -> str:
    """The full name that getopt_long() finds for `word`: itself, else the only one that starts with it."""
    if word in names:
        return word
    candidates = [name for name in names if name.startswith(word)]
    if len(candidates) > 1:
        raise CriuConfError(f"{where}: {word} can mean {' or '.join(sorted(candidates)[:4])}; write it in full")
    return candidates[0] if candidates else word


def _statement(text: str, where: str) -> tuple[str, str | None]:
    """A line that is neither empty nor a comment, split into its first word and its value."""
    end = text.find(" ")
    if end < 0:
        end = text.find("\t")
    if end < 0:
        return text, None
    word = text[:end]
    start = end + 1
    while start < len(text) and text[start] in _SPACES:
        start += 1
    if start == len(text):
        return word, ""
    if text[start] == "#":
        return word, None
    value = _quoted(text, start + 1, where) if text[start] == '"' else _plain(text[start:], where)
    return word, value.split("#", 1)[0]


def _plain(value: str, where: str) -> str:
    first, space, rest = value.partition(" ")
    rest = rest.split("#", 1)[0]
    if space and rest.strip(_SPACES):
        raise CriuConfError(f"{where}: a value with a space in it needs quotes")
    return first.replace('\\"', '"')


def _quoted(text: str, start: int, where: str) -> str:
    end = start
    if text.startswith('"', start):
        return ""
    while True:
        # CRIU's search begins behind the first character, so `"\"` is not closed.
        end = text.find('"', end + 1)
        if end < 0:
            raise CriuConfError(f"{where}: the quote is not closed")
        if text[end - 1] != "\\":
            break
    rest = text[end + 1 :].split("#", 1)[0]
    if rest.strip(_SPACES):
        raise CriuConfError(f"{where}: something stands behind the closing quote")
    return text[start:end].replace('\\"', '"')


def unsafe(value: str) -> str | None:
    """Why `value` cannot be written to a configuration file so that CRIU reads the same value back, or None.

    A newline would start an option of its own; a `#` ends the value even in quotes; for a space CRIU's parser reads
    past the end of its buffer (it looks for more words at an offset that belongs to the line, not to the value).
    """
    for character in value:
        if character < " " or character == "\x7f":
            return "a control character"
        if character in '"#':
            return f"a {character}"
        if character == " ":
            return "a space"
    return "no character at all" if not value else None


def line(setting: Setting) -> str:
    """The line for one setting, without its newline. CriuConfError: the value cannot be written."""
    if setting.value is None:
        return setting.name
    reason = unsafe(setting.value)
    if reason is not None:
        raise CriuConfError(f"the value of the CRIU option {setting.name} has {reason}, which CRIU cannot read back")
    return f"{setting.name}{'=' if kind(setting.name) == OPTIONAL else ' '}{setting.value}"


def opposite(name: str) -> str:
    """`no-NAME` for a flag NAME, and NAME for its `no-` form: what the last of the two lines wins over."""
    if name.startswith("no-") and kind(name[3:]) == FLAG:
        return name[3:]
    return f"no-{name}"
