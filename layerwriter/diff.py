"""A layer from a comparison of a container's merged tree with the image below it.

This is for mounts whose upper directory does not show every change. It sees what a program sees, so nothing that an
overlay does with its layers can hide a change from it; its cost grows with the image and not with the change.
"""

from __future__ import annotations

import os
import stat

from layerwriter.draft import Draft
from layerwriter.layer import DEFAULT_LIMIT, Layer, LayerError, shown
from layerwriter.walk import DIRECTORY, FILE, Descent, listing, open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from layerwriter.entries import Entries

    Path = str | os.PathLike[str]


def full_diff(
    lowerdirs: list[str],
    merged: Path,
    out: Path,
    *,
    compression: str = "none",
    limit: int = DEFAULT_LIMIT,
    xattr_prefix: str = "trusted.",
    reason: str | None = None,
    sync: bool = True,
) -> Layer:
    """Write what makes a merged tree out of the image below it.

    `lowerdirs` are the image's layers, the topmost first, as in `lowerdir=`. `merged` is where the overlay is mounted;
    what is mounted inside of it is not looked at. `reason` is kept in the Layer. The other arguments and the errors are
    those of write(). Mounts a view of the layers, so CAP_SYS_ADMIN is needed.
    """
    if not lowerdirs:
        raise LayerError("a full comparison needs the layers below: there is no lower directory")
    image = tree = -1
    try:
        image = _image_view(lowerdirs, xattr_prefix)
        tree = _without_mounts(os.fspath(merged))
        return Draft(
            out,
            lambda entries: _Comparison(tree, image, entries).run(),
            compression=compression,
            limit=limit,
            xattr_prefix=None,
            made_by="full-diff",
            reason=reason,
        ).finish(sync=sync)
    except OSError as failure:
        raise LayerError(f"{os.fspath(merged)} cannot be compared with its image: {failure}") from failure
    finally:
        for fd in (image, tree):
            if fd >= 0:
                os.close(fd)


class _Place:
    """A directory of the merged tree that the walk is in. `known` are the image's names there, not met so far."""

    __slots__ = ("in_image", "known", "names", "path", "written")

    def __init__(self, fd: int, path: bytes, image: int | None) -> None:
        self.path = path
        self.in_image = image is not None
        self.names = listing(fd)
        self.known = dict(listing(image)) if image is not None else {}
        self.written = False


class _Comparison:
    """A walk through the merged tree, with one through the image beside it where the image has the directory."""

    def __init__(self, tree: int, image: int, entries: Entries) -> None:
        self._entries = entries
        self._merged = Descent(tree)
        self._image = Descent(image)
        self._places = [_Place(tree, b"", image)]

    def run(self) -> None:
        path = b""
        try:
            self._write_directories()
            while self._places:
                place = self._places[-1]
                for name, kind in place.names:
                    path = place.path + os.fsencode(name)
                    if kind == DIRECTORY:
                        self._enter(place, name, path)
                        break
                    if not self._unchanged(place, name, kind):
                        self._write_directories()
                        if kind == FILE:
                            self._entries.files(self._merged.fd, iter(((name, FILE),)), place.path)
                        else:
                            self._entries.special(self._merged.fd, name, path)
                else:
                    self._leave(place)
        except OSError as failure:
            raise LayerError(f"{shown(path)}: {failure.strerror}") from failure
        finally:
            self._merged.close()
            self._image.close()

    def _unchanged(self, place: _Place, name: str, kind: int) -> bool:
        """Whether something that is no directory is the image's own.

        An overlay shows a file of the image with the image's own times. Every change copies it up first, into a new
        inode with a change time of its own, which no program can set. So contents need not be compared, and what was
        copied up without a change is written too, as a walk of the upper directory would.
        """
        if place.known.pop(name, None) != kind:
            return False
        here = os.stat(name, dir_fd=self._merged.fd, follow_symlinks=False)
        image = os.stat(name, dir_fd=self._image.fd, follow_symlinks=False)
        return _identity(here) == _identity(image)

    def _enter(self, place: _Place, name: str, path: bytes) -> None:
        fd = self._merged.enter(name)
        image = self._image.enter(name) if place.known.pop(name, None) == DIRECTORY else None
        self._places.append(_Place(fd, path + b"/", image))
        if image is None or _identity(os.fstat(fd)) != _identity(os.fstat(image)):
            self._write_directories()

    def _leave(self, place: _Place) -> None:
        for name in place.known:
            self._write_directories()
            self._entries.whiteout(place.path + os.fsencode(name))
        self._places.pop()
        if self._places:
            self._merged.leave()
            if place.in_image:
                self._image.leave()

    def _write_directories(self) -> None:
        """Put the directories on the way here that the layer lacks: a child's parents come before it."""
        missing = []
        for place in reversed(self._places):
            if place.written:
                break
            missing.append(place)
        if not missing:
            return
        chain = [self._merged.fd]
        try:
            for _ in missing[1:]:
                chain.append(open_directory("..", chain[-1]))
            for place, fd in zip(reversed(missing), reversed(chain), strict=True):
                self._entries.directory(fd, place.path[:-1])
                place.written = True
        finally:
            for fd in chain[1:]:
                os.close(fd)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (
        found.st_mode,
        found.st_uid,
        found.st_gid,
        found.st_size if not stat.S_ISDIR(found.st_mode) else 0,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_rdev,
    )


def _image_view(lowerdirs: list[str], xattr_prefix: str) -> int:
    """An open directory that shows the layers as one tree, mounted nowhere and gone when it is closed."""
    opened = []
    try:
        for lower in lowerdirs:
            opened.append(open_directory(lower))
        if len(opened) == 1:
            return opened.pop()
        from layerwriter.syscalls import overlay_view

        return overlay_view([f"/proc/self/fd/{fd}" for fd in opened], userxattr=xattr_prefix == "user.")
    finally:
        for fd in opened:
            os.close(fd)


def _without_mounts(path: str) -> int:
    """An open directory that shows one file system without what is mounted inside of it."""
    from layerwriter.syscalls import clone_tree

    clone = clone_tree(path)
    try:
        return open_directory(".", clone)
    finally:
        os.close(clone)
