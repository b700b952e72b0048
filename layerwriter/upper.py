"""An overlay's upper directory, written as a layer."""

from __future__ import annotations

import os

from layerwriter.layer import DEFAULT_LIMIT, Layer, LayerError, Size, shown
from layerwriter.walk import DIRECTORY, FILE, OTHER, Descent, listing, open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from layerwriter.entries import Entries

    Path = str | os.PathLike[str]


def write(
    upperdir: Path,
    out: Path,
    *,
    compression: str = "none",
    limit: int = DEFAULT_LIMIT,
    xattr_prefix: str = "trusted.",
    sync: bool = True,
) -> Layer:
    """Write every entry of an upper directory to a layer file.

    The tree must not change meanwhile: freeze the container first. `compression` is "none" or "zstd"; `limit` is in
    bytes of uncompressed tar; `xattr_prefix` is "user." for a mount with `userxattr`. `out` appears complete and
    on disk, or not at all; without `sync` it is left to the caller when it has to be on disk. Raises HiddenChange
    where only full_diff() sees the change, and LayerError.
    """
    root = _open_root(upperdir)
    try:
        return save(
            out,
            lambda entries: walk_upper(root, entries),
            compression=compression,
            limit=limit,
            xattr_prefix=xattr_prefix,
            made_by="upperdir",
            sync=sync,
        )
    finally:
        os.close(root)


def walk_upper(root: int, entries: Entries) -> None:
    """Put every entry of the upper directory that is open as `root`."""
    marks = entries.directory(root, b"")
    descent = Descent(root)
    below: list[tuple[Iterator[tuple[str, int]], bytes, bool]] = [(listing(root), b"", marks.whiteouts)]
    path = b""
    try:
        while below:
            names, prefix, whiteouts = below[-1]
            for name, kind in names:
                path = prefix + os.fsencode(name)
                if kind == FILE:
                    entries.file(descent.fd, name, path, whiteouts)
                elif kind == DIRECTORY:
                    fd = descent.enter(name)
                    marks = entries.directory(fd, path)
                    below.append((listing(fd), path + b"/", marks.whiteouts))
                    break
                else:
                    entries.special(descent.fd, name, path)
            else:
                below.pop()
                if below:
                    descent.leave()
    except OSError as failure:
        raise LayerError(f"{shown(path)}: {failure.strerror}") from failure
    finally:
        descent.close()


def measure(upperdir: Path) -> Size:
    """How large the layer of an upper directory will be, without opening a file.

    Extended attributes and names over 100 bytes are not counted, holes are: an estimate that is near for what matters,
    a tree that is far too large for its limit. The container may run: what goes away meanwhile is left out. Raises
    LayerError.
    """
    root = _open_root(upperdir)
    descent = Descent(root)
    below = [listing(root)]
    size, count = 1024, 1
    seen: set[int] = set()
    try:
        while below:
            for name, kind in below[-1]:
                count += 1
                size += 1536
                try:
                    if kind == DIRECTORY:
                        below.append(listing(descent.enter(name)))
                        break
                    if kind == OTHER:
                        continue
                    found = os.stat(name, dir_fd=descent.fd, follow_symlinks=False)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if found.st_nlink == 1 or found.st_ino not in seen:
                    size += min(found.st_size, found.st_blocks * 512)
                if found.st_nlink > 1:
                    seen.add(found.st_ino)
            else:
                below.pop()
                if below:
                    descent.leave()
    except OSError as failure:
        raise LayerError(f"{os.fspath(upperdir)}: {failure.strerror}") from failure
    finally:
        descent.close()
        os.close(root)
    return Size(size, count)


def save(
    out: Path,
    put: Callable[[Entries], None],
    *,
    compression: str,
    limit: int,
    xattr_prefix: str | None,
    made_by: str,
    sync: bool,
    reason: str | None = None,
) -> Layer:
    """Make a layer file of what `put` puts, under a temporary name until it is whole.

    `xattr_prefix` None: the attributes are as a program sees them, and none of them is the overlay's own.
    """
    from layerwriter.entries import Entries
    from layerwriter.header import END
    from layerwriter.sink import Sink, ZstdSink

    if compression not in ("none", "zstd"):
        raise LayerError(f'compression {compression!r} is not known: it is "none" or "zstd"')
    if xattr_prefix not in ("trusted.", "user.", None):
        raise LayerError(f'xattr prefix {xattr_prefix!r} is not known: it is "trusted." or "user."')
    final = os.fspath(out)
    partial = f"{final}.partial"
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        raise LayerError(f"{partial} cannot be written: {failure.strerror}") from failure
    try:
        sink = ZstdSink(fd, limit) if compression == "zstd" else Sink(fd, limit)
        entries = Entries(sink, None if xattr_prefix is None else xattr_prefix.encode("ascii"))
        try:
            put(entries)
            sink.put(END)
            digest, diff_id, size = sink.finish()
        except BaseException:
            sink.abandon()
            raise
        if sync:
            os.fsync(fd)
        os.rename(partial, final)
        if sync:
            _sync_directory(final)
    except BaseException as failure:
        os.unlink(partial)
        if isinstance(failure, OSError):
            raise LayerError(f"{final} cannot be written: {failure.strerror}") from failure
        raise
    finally:
        os.close(fd)
    return Layer(
        path=final,
        digest=digest,
        diff_id=diff_id,
        size=size,
        entries=entries.count,
        made_by=made_by,
        reason=reason,
        notes=entries.notes(),
    )


def _open_root(path: Path) -> int:
    try:
        return open_directory(os.fspath(path))
    except OSError as failure:
        raise LayerError(f"{os.fspath(path)} cannot be read as an upper directory: {failure.strerror}") from failure


def _sync_directory(path: str) -> None:
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
