"""What a layer file is to its users: its identity and size, and the errors of making or applying one."""

from __future__ import annotations

DEFAULT_LIMIT = 8 << 30
"""Bytes of tar (uncompressed) that a layer may have unless the caller says otherwise."""

WRITE = 128 << 10
"""Bytes of one write to a file. For larger ones, newer kernels look for larger pieces of memory, and can spend ten
times as long on making room for those as on the write."""


class LayerError(Exception):
    """A layer could not be written or applied. The text says what stopped it, where, and what to do."""


class HiddenChange(LayerError):
    """The upper directory holds only part of a change, and the rest is in the image below it.

    Raised by write() when it meets a renamed directory (`redirect`), a file without its data (`metacopy`) or an overlay
    attribute that it does not know. full_diff() makes a complete layer of the same container.
    """


class NotPortable(LayerError):
    """A tree that no layer can carry to another OCI tool. Raised by stream(); write() has means of its own for it."""


class Layer:
    """A layer file that was written.

    path      where it is
    digest    "sha256:..." of the file
    diff_id   "sha256:..." of the uncompressed tar; equal to digest for an uncompressed layer
    size      bytes of the file
    entries   entries in the tar, deletions and the root directory included
    made_by   "upperdir" or "full-diff"
    reason    why it was made that way, or None for the ordinary way
    notes     one sentence for each thing that a layer cannot carry
    """

    __slots__ = ("diff_id", "digest", "entries", "made_by", "notes", "path", "reason", "size")

    def __init__(
        self,
        *,
        path: str,
        digest: str,
        diff_id: str,
        size: int,
        entries: int,
        made_by: str,
        reason: str | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.digest = digest
        self.diff_id = diff_id
        self.size = size
        self.entries = entries
        self.made_by = made_by
        self.reason = reason
        self.notes = notes

    def __repr__(self) -> str:
        return f"Layer({self.path!r}, {self.digest}, {self.size} bytes, {self.entries} entries, {self.made_by})"


class Size:
    """An estimate of a layer: entries, and bytes of the uncompressed tar (never less than what write() will make)."""

    __slots__ = ("bytes", "entries")

    def __init__(self, bytes: int, entries: int) -> None:
        self.bytes = bytes
        self.entries = entries

    def __repr__(self) -> str:
        return f"Size({self.bytes} bytes, {self.entries} entries)"


def shown(path: bytes) -> str:
    """A path of any bytes for an error message: readable, on one line, and reversible."""
    text = path.decode("utf-8", "backslashreplace") or "."
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
