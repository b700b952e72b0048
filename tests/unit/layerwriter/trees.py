"""Trees with every kind of entry and of change that a container can make."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
"""security.capability, revision 2: cap_net_bind_service, effective and permitted."""


def acl(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX ACL as its xattr has it: version 2, then (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NO_ID = 0xFFFFFFFF
ACCESS = acl((1, 6, NO_ID), (2, 4, 1000), (4, 4, NO_ID), (16, 6, NO_ID), (32, 4, NO_ID))
DEFAULT = acl((1, 7, NO_ID), (2, 7, 1000), (4, 5, NO_ID), (16, 7, NO_ID), (32, 0, NO_ID))


def image(root: Path) -> None:
    """What the image has: things for the container to change, replace and delete."""
    for name in ("kept", "gone", "opaque/deep/er", "replaced-by-file", "own-change", "moved/inside"):
        (root / name).mkdir(parents=True)
    for name in ("kept/file", "gone/file", "opaque/one", "opaque/deep/er/two", "replaced-by-file/x", "moved/inside/f"):
        (root / name).write_bytes(name.encode())
    (root / "replaced-by-directory").write_bytes(b"file")
    (root / "deleted").write_bytes(b"x")
    (root / "chmodded").write_bytes(b"data " * 1000)
    (root / "linked-a").write_bytes(b"both")
    os.link(root / "linked-a", root / "linked-b")


def changes(root: Path) -> None:
    """Every kind of change, made in the merged tree."""
    os.unlink(root / "deleted")
    remove(root / "gone")
    remove(root / "opaque")
    (root / "opaque/deep").mkdir(parents=True)
    (root / "opaque/new").write_bytes(b"new")
    remove(root / "replaced-by-file")
    (root / "replaced-by-file").write_bytes(b"now a file")
    os.unlink(root / "replaced-by-directory")
    (root / "replaced-by-directory").mkdir()
    (root / "replaced-by-directory/child").write_bytes(b"")
    os.chmod(root / "chmodded", 0o4711)
    os.chown(root / "own-change", 12, 34)
    os.unlink(root / "linked-b")
    everything(root / "new")


def remove(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            remove(child)
        else:
            child.unlink()
    path.rmdir()


def everything(root: Path, *, escaped: bool = False) -> None:
    """One entry of every kind, with every attribute that a file system here can keep.

    `escaped`: in an upper directory, where an overlay keeps a container's `trusted.overlay.` under a longer name.
    """
    root.mkdir()
    base = os.fsencode(root)
    (root / "empty").write_bytes(b"")
    (root / "file").write_bytes(b"content")
    (root / "block").write_bytes(b"b" * 512)
    (root / "block and one").write_bytes(b"b" * 513)
    (root / "large").write_bytes(os.urandom(1 << 20) + b"tail")
    for mode in (0o4755, 0o2755, 0o1777, 0o6711, 0o000, 0o777):
        (root / f"mode-{mode:o}").write_bytes(b"m")
        os.chmod(root / f"mode-{mode:o}", mode)
    for number in (1, 65534, 2_097_151, 2_097_152, 4_294_967_294):
        (root / f"owner-{number}").write_bytes(b"o")
        os.chown(root / f"owner-{number}", number, number - 1)
    (root / "empty-directory").mkdir()
    (root / "sticky").mkdir()
    os.chmod(root / "sticky", 0o1777)
    (root / "setgid").mkdir()
    os.chown(root / "setgid", 5, 6)
    os.chmod(root / "setgid", 0o2775)
    (root / "setgid/child").write_bytes(b"c")
    (root / "setgid/foreign").write_bytes(b"c")
    os.chown(root / "setgid/foreign", 0, 0)
    os.link(root / "file", root / "hard-link")
    os.link(root / "file", root / "sticky/hard-link")
    os.symlink("file", root / "symlink")
    os.symlink("/nowhere/at all", root / "dangling")
    os.symlink(b"t" * 101, root / "symlink-101")
    os.symlink(b"t" * 1000 + b"\xff\n", root / "symlink-long")
    os.lchown(root / "symlink-101", 3_000_000, 7)
    os.link(root / "symlink", root / "symlink-link", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", 0o020666, os.makedev(1, 3))
    os.chmod(root / "null", 0o666)
    os.mknod(root / "disk", 0o060660, os.makedev(259, 70000))
    with socket.socket(socket.AF_UNIX) as bound:
        # A socket's address holds 107 bytes.
        where = os.open(root, os.O_PATH)
        bound.bind(f"/proc/self/fd/{where}/socket")
        os.close(where)
    os.chmod(root / "socket", 0o700)
    for raw in (b"\xff\xfe not utf-8", "höflich".encode(), b"new\nline", b"back\\slash", b"*", b"-rf", b" ", b"a=b"):
        Path(os.fsdecode(base + b"/" + raw)).write_bytes(raw)
    for length in (99, 100, 101, 255):
        (root / ("n" * length)).write_bytes(b"n")
        (root / ("d" * length)).mkdir()
    Path(os.fsdecode(base + b"/" + b"\xe9" * 255)).write_bytes(b"n")
    deep = root
    for _ in range(12):
        deep /= "p" * 200
        deep.mkdir()
    (deep / "bottom").write_bytes(b"deep")
    times(root)
    attributes(root, "trusted.overlay.overlay." if escaped else "trusted.overlay.")
    holes(root)


def times(root: Path) -> None:
    (root / "time").mkdir()
    for name, moment in (
        ("fraction", 1_700_000_000_123_456_789),
        ("whole", 1_700_000_000_000_000_000),
        ("one", 1),
        ("zero", 0),
        ("before", -1),
        ("before-1", -1_000_000_000),
        ("before-1.5", -1_500_000_000),
        ("1902", -2_145_000_000_123_456_789),
        ("2106", 4_300_000_000_000_000_001),
        ("2400", 13_574_000_000_987_654_321),
    ):
        (root / "time" / name).write_bytes(b"t")
        os.utime(root / "time" / name, ns=(moment, moment))
        os.symlink("x", root / "time" / f"link-{name}")
        os.utime(root / "time" / f"link-{name}", ns=(5, moment), follow_symlinks=False)
        (root / "time" / f"directory-{name}").mkdir()
        (root / "time" / f"directory-{name}" / "child").write_bytes(b"")
        os.utime(root / "time" / f"directory-{name}", ns=(moment, moment))
    os.utime(root / "time", ns=(7, 1_600_000_000_000_000_001))


def attributes(root: Path, overlays: str) -> None:
    where = root / "attributes"
    where.mkdir()
    for name in ("file", "capable", "acl"):
        (where / name).write_bytes(b"a")
    (where / "directory").mkdir()
    os.symlink("file", where / "symlink")
    os.mkfifo(where / "fifo")
    os.chown(where / "capable", 4, 4)
    os.chmod(where / "capable", 0o755)
    os.setxattr(where / "capable", "security.capability", CAPABILITY)
    os.setxattr(where / "acl", "system.posix_acl_access", ACCESS)
    os.setxattr(where / "directory", "system.posix_acl_default", DEFAULT)
    (where / "directory/inherits").write_bytes(b"i")
    (where / "directory/does-not").write_bytes(b"i")
    os.removexattr(where / "directory/does-not", "system.posix_acl_access")
    os.chmod(where / "directory/does-not", 0o604)
    (where / "directory/inherits-too").mkdir()
    for name, value in (
        ("user.plain", b"value"),
        ("user.empty", b""),
        ("user.binary", b"\0\xff\n=\0"),
        ("user.a=b", b"equals"),
        ("user.50%", b"percent"),
        ("user.%25=%3D", b"escapes"),
        ("user.%25", b"looks escaped"),
        ("trusted.plain", b"t"),
        (overlays + "opaque", b"y"),
        (overlays + "redirect", b"/etc"),
        ("user.overlay.opaque", b"y"),
        ("security.fermata", b"s"),
        ("user." + "n" * 100, b"long name"),
    ):
        os.setxattr(where / "file", name, value)
        os.setxattr(where / "directory", name, value)
    os.setxattr(where / "symlink", "trusted.on-a-link", b"1", follow_symlinks=False)
    os.setxattr(where / "symlink", "security.on-a-link", b"2", follow_symlinks=False)
    os.setxattr(where / "fifo", "trusted.on-a-fifo", b"3", follow_symlinks=False)


def holes(root: Path) -> None:
    where = root / "holes"
    where.mkdir()
    with (where / "only").open("wb") as file:
        file.truncate(1 << 20)
    with (where / "small").open("wb") as file:
        file.truncate(100)
    with (where / "first").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"data")
    with (where / "last").open("wb") as file:
        file.write(b"data" * 1024)
        file.truncate(1 << 21)
    with (where / "many").open("wb") as file:
        for at in range(0, 1 << 20, 16384):
            file.seek(at)
            file.write(b"x" * 4096)
        file.truncate(1 << 20)
    with (where / "beyond-8-GiB").open("wb") as file:
        file.seek(9 << 30)
        file.write(b"far")
    with (where / "zeros").open("wb") as file:
        file.write(bytes(1 << 16))
