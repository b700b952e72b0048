"""Which directory holds the difference between two sets of mounts, if there is one.

containerd asks for the difference of two lists of mounts: `left`, a view of the parent, and `right`, the snapshot. Its
overlay snapshotter gives (plugins/snapshots/overlay/overlay.go):

    a view of no parent        bind   of the view's own directory, which is empty         ro,rbind
    a view of one layer        bind   of that layer                                       ro,rbind
    a view of more layers      overlay lowerdir=TOP:...:BOTTOM
    a container over layers    overlay workdir=,upperdir=,lowerdir=TOP:...:BOTTOM
    a container over nothing   bind   of its directory                                    rw,rbind

So the difference is one directory exactly when the layers of `left` are those below the topmost of `right`.
"""

from __future__ import annotations

import os

from layerwriter import choose

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from differ.messages import Mount

# What changes nothing about which file is where. choose() looks at the values of those that could.
_HARMLESS = frozenset(
    ("index", "redirect_dir", "metacopy", "nfs_export", "verity", "userxattr", "volatile", "xino", "uuid", "ro", "rw")
)
_BIND = frozenset(("ro", "rw", "bind", "rbind"))
# A directory of containerd's overlay snapshotter, which alone keeps an upper directory by this name.
_OVERLAY_LAYER = ("snapshots", "fs")


class Unsuited(Exception):
    """The difference of these mounts is not what one upper directory holds. The text says why."""


class Upper:
    """The directory that is the difference.

    path          the directory
    xattr_prefix  where the overlay keeps its marks: "trusted." or "user."
    base          nothing is below it, so that no mark in it has a meaning
    """

    __slots__ = ("base", "path", "xattr_prefix")

    def __init__(self, path: str, xattr_prefix: str = "trusted.", base: bool = False) -> None:
        self.path = path
        self.xattr_prefix = xattr_prefix
        self.base = base

    def __repr__(self) -> str:
        return f"Upper({self.path!r}, {self.xattr_prefix!r}, base={self.base})"


class _Chain:
    """What a list of mounts shows: the layers, the topmost first, and the options of the overlay if it is one."""

    __slots__ = ("layers", "options", "writable")

    def __init__(self, layers: list[str], options: list[str], writable: bool) -> None:
        self.layers = layers
        self.options = options
        self.writable = writable


def upper(left: list[Mount], right: list[Mount], parameters: str | None = None) -> Upper:
    """The directory that holds what `right` has changed over `left`. Raises Unsuited.

    `parameters` is the directory of the overlay module's parameters, for tests.
    """
    below, above = _chain("left", left), _chain("right", right)
    if below.writable and below.options:
        raise Unsuited("left is an overlay with an upper directory of its own")
    top, lower = above.layers[0], above.layers[1:]
    if not lower:
        if len(below.layers) != 1 or below.options or not _is_empty(below.layers[0]):
            raise Unsuited("right has no layer below, and left is not an empty directory")
        if tuple(top.rstrip("/").split("/")[-3::2]) != _OVERLAY_LAYER:
            raise Unsuited(f"{top} is not a layer of the overlay snapshotter")
        return Upper(top, base=True)
    if below.layers != lower:
        raise Unsuited("the layers of left are not the ones below right's topmost")
    # A committed layer says nothing of the mount it was written through; the marks in it do, and are looked for.
    options = [*above.options, f"upperdir={top}"]
    choice = choose(options) if parameters is None else choose(options, parameters)
    if choice.made_by != "upperdir":
        raise Unsuited(str(choice.reason))
    return Upper(top, choice.xattr_prefix)


def _chain(which: str, mounts: Iterable[Mount]) -> _Chain:
    listed = list(mounts)
    if len(listed) != 1:
        raise Unsuited(f"{which} is {len(listed)} mounts")
    mount = listed[0]
    if mount.target not in ("", "/") or mount.unknown:
        raise Unsuited(f"{which} is a mount with more than is known here: {mount.target or mount.unknown!r}")
    if mount.type == "bind":
        if not set(mount.options) <= _BIND:
            raise Unsuited(f"{which} has an option that is not known here: {', '.join(mount.options)}")
        return _Chain([_layer(mount.source)], [], "ro" not in mount.options)
    if mount.type != "overlay":
        raise Unsuited(f"{which} is a mount of type {mount.type!r}, and not an overlay")
    upper_directory = ""
    layers: list[str] = []
    options = []
    for option in mount.options:
        key, _, value = option.partition("=")
        if key == "upperdir":
            upper_directory = value
        elif key == "lowerdir":
            layers = [_layer(path) for path in value.split(":")]
        elif key in _HARMLESS:
            options.append(option)
        elif key != "workdir":
            raise Unsuited(f"{which} has an option that is not known here: {option}")
    if not layers:
        raise Unsuited(f"{which} is an overlay without lowerdir=")
    if upper_directory:
        layers.insert(0, _layer(upper_directory))
    return _Chain(layers, [*options, "lowerdir"], bool(upper_directory))


def _layer(path: str) -> str:
    if not path.startswith("/") or "\\" in path:
        raise Unsuited(f"{path!r} is not a plain absolute path")
    return path


def _is_empty(path: str) -> bool:
    try:
        with os.scandir(path) as found:
            return next(found, None) is None
    except OSError as failure:
        raise Unsuited(f"{path} cannot be read: {failure.strerror}") from failure
