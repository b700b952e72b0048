"""An overlay's upper directory, written as a layer."""

from __future__ import annotations

import os

from layerwriter.draft import Draft
from layerwriter.layer import DEFAULT_LIMIT, Layer, LayerError, Size, shown
from layerwriter.walk import DIRECTORY, OTHER, Descent, listing, open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

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
    return begin(upperdir, out, compression=compression, limit=limit, xattr_prefix=xattr_prefix).finish(sync=sync)


def begin(
    upperdir: Path,
    out: Path,
    *,
    compression: str = "none",
    limit: int = DEFAULT_LIMIT,
    xattr_prefix: str = "trusted.",
) -> Draft:
    """Read every entry of an upper directory for a layer file, and leave the rest of the work to Draft.finish().

    The tree must not change until this returns. Where the file system lets two files share extents, large files are not
    read before finish(), so that a container need not stand still for them. Arguments and errors as for write().
    """
    root = _open_root(upperdir)
    try:
        return Draft(
            out,
            lambda entries: walk_upper(root, entries),
            compression=compression,
            limit=limit,
            xattr_prefix=xattr_prefix,
            made_by="upperdir",
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
            path = prefix
            found = entries.files(descent.fd, names, prefix, whiteouts)
            if found is None:
                below.pop()
                if below:
                    descent.leave()
                continue
            path = prefix + os.fsencode(found[0])
            if found[1] == DIRECTORY:
                fd = descent.enter(found[0])
                marks = entries.directory(fd, path)
                below.append((listing(fd), path + b"/", marks.whiteouts))
            else:
                entries.special(descent.fd, found[0], path)
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
                # Of several hard links, one has the data: counted in parts, none has to be remembered.
                size += min(found.st_size, found.st_blocks * 512) // max(found.st_nlink, 1)
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


def _open_root(path: Path) -> int:
    try:
        return open_directory(os.fspath(path))
    except OSError as failure:
        raise LayerError(f"{os.fspath(path)} cannot be read as an upper directory: {failure.strerror}") from failure
