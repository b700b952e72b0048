"""What overlayfs keeps in an upper directory: whiteouts, opaque marks and its extended attributes.

Sources: Documentation/filesystems/overlayfs.rst and fs/overlayfs/ of Linux 6.x.
"""

from __future__ import annotations

from layerwriter.layer import HiddenChange, shown

BOOKKEEPING = frozenset((b"origin", b"impure", b"nlink", b"upper", b"uuid"))
"""Attributes by which the overlay finds its way back to the lower layers of this one mount. Never part of a layer."""

HIDING = {
    b"redirect": "it is a directory that was renamed without copying its contents (redirect_dir)",
    b"metacopy": "it is a file whose data is still in the image below (metacopy)",
    b"verity": "it is a file whose data is still in the image below (metacopy with fs-verity)",
}

PARAMETERS = "/sys/module/overlay/parameters"


class Marks:
    """The overlay's own marks on one entry of an upper directory.

    opaque     nothing of the layers below shows in this directory
    whiteouts  the directory may hold whiteouts of the attribute kind
    whiteout   the file is one, if its directory says `whiteouts`
    protected  letters of the inode flags that overlayfs keeps in an attribute: `a` append-only, `i` immutable
    """

    __slots__ = ("opaque", "protected", "whiteout", "whiteouts")

    def __init__(self) -> None:
        self.opaque = False
        self.whiteouts = False
        self.whiteout = False
        self.protected = b""


def split_xattrs(
    found: list[tuple[bytes, bytes]], prefix: bytes, path: bytes
) -> tuple[list[tuple[bytes, bytes]], Marks]:
    """Part the attributes of an upper directory's entry into what the container sees and the overlay's own marks.

    A container that sets `trusted.overlay.x` on its merged tree gets `trusted.overlay.overlay.x` in the upper directory
    (Linux 6.7 and newer escape it so), and is given back the shorter name here. `prefix` is b"trusted." or, for a mount
    with `userxattr`, b"user.". Raises HiddenChange for a mark that says part of the change is elsewhere.
    """
    own = prefix + b"overlay."
    visible = []
    marks = Marks()
    for name, value in found:
        if not name.startswith(own):
            visible.append((name, value))
            continue
        mark = name[len(own) :]
        if mark.startswith(b"overlay."):
            visible.append((prefix + mark, value))
        elif mark == b"opaque":
            marks.opaque = value == b"y"
            marks.whiteouts = value == b"x"
        elif mark == b"whiteout":
            marks.whiteout = True
        elif mark == b"protattr":
            marks.protected = value
        elif mark not in BOOKKEEPING:
            reason = HIDING.get(mark, f"its attribute {shown(name)} is not known here and may hide a change")
            raise HiddenChange(f"{shown(path)}: the upper directory alone does not show this change: {reason}")
    return visible, marks


def escape_xattr(name: bytes, prefix: bytes) -> bytes:
    """The name that carries a container's attribute in an upper directory.

    What would otherwise be one of the overlay's own marks is escaped as the kernel does it, so that no layer can plant
    a redirect, a metacopy or an opaque mark.
    """
    own = prefix + b"overlay."
    return own + b"overlay." + name[len(own) :] if name.startswith(own) else name


class Choice:
    """How a layer has to be made: made_by ("upperdir" or "full-diff"), reason (None for "upperdir"), xattr_prefix."""

    __slots__ = ("made_by", "reason", "xattr_prefix")

    def __init__(self, made_by: str, reason: str | None, xattr_prefix: str) -> None:
        self.made_by = made_by
        self.reason = reason
        self.xattr_prefix = xattr_prefix

    def __repr__(self) -> str:
        return f"Choice({self.made_by!r}, {self.reason!r}, {self.xattr_prefix!r})"


def choose(mount_options: list[str], parameters: str = PARAMETERS) -> Choice:
    """Whether the upper directory of a mount shows every change, from its options and the kernel's defaults.

    `mount_options` are those of the overlay mount ("upperdir=...", "index=off", ...), one option each; where one is
    given twice, the last one counts, as for the kernel. `parameters` is the directory of the overlay module's
    parameters, which decide what an absent option means.
    """
    options: dict[str, str] = {}
    for option in mount_options:
        key, _, value = option.partition("=")
        options[key] = value
    prefix = "user." if "userxattr" in options else "trusted."
    if "upperdir" not in options:
        return Choice("full-diff", "the root file system is not an overlay with an upper directory", prefix)
    for name, effect in (
        ("redirect_dir", "a renamed directory is in the upper directory without its contents"),
        ("metacopy", "a file whose owner or mode changed is in the upper directory without its data"),
        ("index", "a change to a file with several hard links is under one of its names only"),
        ("nfs_export", "it turns on index, and a change to a file with several hard links is under one name only"),
    ):
        if name in options:
            value, source = options[name], f"the mount option {name}={options[name]}"
        elif prefix == "user." and name in ("redirect_dir", "metacopy"):
            continue  # the kernel's defaults for these two do not reach a mount with userxattr
        else:
            value, source = _parameter(parameters, name), f"the overlay module's parameter {name}"
        # redirect_dir=follow, nofollow and off make no new redirects, and write() still looks for old ones.
        if value in ("on", "Y", "y", "1"):
            return Choice("full-diff", f"{source} is on: {effect}", prefix)
    if options.get("verity", "off") != "off":
        return Choice("full-diff", f"the mount option verity={options['verity']} turns on metacopy", prefix)
    return Choice("upperdir", None, prefix)


def _parameter(directory: str, name: str) -> str:
    try:
        with open(f"{directory}/{name}") as file:
            return file.read().strip()
    except FileNotFoundError:
        return "N"  # a kernel without this feature
