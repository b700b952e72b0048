"""A layer file while it is made, under a temporary name beside its own."""

from __future__ import annotations

import os

from layerwriter.entries import Entries
from layerwriter.header import END
from layerwriter.layer import Layer, LayerError
from layerwriter.sink import Sink, ZstdSink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Path = str | os.PathLike[str]


class Draft:
    """A layer file of which every entry was read, but not all is written, hashed and synced.

    From here on it needs nothing of the tree that it was made of: a container may run on. One of finish() and discard()
    has to be called. `out` appears complete, by the one, or not at all.
    """

    def __init__(
        self,
        out: Path,
        put: Callable[[Entries], None],
        *,
        compression: str,
        limit: int,
        xattr_prefix: str | None,
        made_by: str,
        reason: str | None = None,
    ) -> None:
        """Make a layer of what `put` puts. Arguments as for write(), and `made_by` and `reason` as in a Layer.

        `xattr_prefix` None: the attributes are as a program sees them, and none of them is the overlay's own.
        """
        if compression not in ("none", "zstd"):
            raise LayerError(f'compression {compression!r} is not known: it is "none" or "zstd"')
        if xattr_prefix not in ("trusted.", "user.", None):
            raise LayerError(f'xattr prefix {xattr_prefix!r} is not known: it is "trusted." or "user."')
        self._path = os.fspath(out)
        self._partial = f"{self._path}.partial"
        self._made_by = made_by
        self._reason = reason
        try:
            self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as failure:
            raise LayerError(f"{self._partial} cannot be written: {failure.strerror}") from failure
        self._sink: Sink | None = None
        try:
            self._sink = ZstdSink(self._fd, limit) if compression == "zstd" else Sink(self._fd, limit)
            self._entries = Entries(self._sink, None if xattr_prefix is None else xattr_prefix.encode("ascii"))
            put(self._entries)
            self._sink.put(END)
        except BaseException as failure:
            self.discard()
            self._raise(failure)

    def finish(self, *, sync: bool = True) -> Layer:
        """Complete the file: write and hash what is left, and give it its name. Raises LayerError.

        Without `sync` it is left to the caller when it has to be on disk.
        """
        if self._sink is None:
            raise LayerError(f"{self._path} was finished or discarded before")
        try:
            digest, diff_id, size = self._sink.finish()
            if sync:
                os.fsync(self._fd)
            os.rename(self._partial, self._path)
            if sync:
                _sync_directory(self._path)
        except BaseException as failure:
            self.discard()
            self._raise(failure)
        os.close(self._fd)
        self._fd = -1
        self._sink = None
        return Layer(
            path=self._path,
            digest=digest,
            diff_id=diff_id,
            size=size,
            entries=self._entries.count,
            made_by=self._made_by,
            reason=self._reason,
            notes=self._entries.notes(),
        )

    def discard(self) -> None:
        """Stop, and leave nothing of the layer. Does nothing after finish()."""
        if self._fd < 0:
            return
        if self._sink is not None:
            self._sink.abandon()
            self._sink = None
        os.close(self._fd)
        self._fd = -1
        try:
            os.unlink(self._partial)
        except FileNotFoundError:  # it has its own name already, and only syncing that failed
            pass

    def _raise(self, failure: BaseException) -> None:
        if isinstance(failure, OSError):
            raise LayerError(f"{self._path} cannot be written: {failure.strerror}") from failure
        raise failure


def _sync_directory(path: str) -> None:
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
