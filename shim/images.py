"""CRIU's image files, as far as a person or a check asks about them: processes, open files, mounts.

An image file is two little-endian 32-bit magic numbers, then for each entry its size (32 bits) and a protobuf message.
Field numbers and magic numbers: criu/include/magic.h and images/*.proto of CRIU 4.x; older images of the same format
read the same. Fields that are not declared here are kept and ignored.
"""

from __future__ import annotations

import os

from shim.errors import INVALID_ARGUMENT, ShimError
from shim.wire import Message, WireError, fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeVar

    M = TypeVar("M", bound=Message)

_COMMON, _SERVICE = 0x54564319, 0x55105940
_LIMIT = 256 << 20  # bytes of one image file of messages; those of a large tree have a few MB

# fdinfo.proto, fd_types
KINDS = (
    "unknown",
    "file",
    "pipe",
    "fifo",
    "inet socket",
    "unix socket",
    "eventfd",
    "epoll",
    "inotify",
    "signalfd",
    "packet socket",
    "terminal",
    "fanotify",
    "netlink socket",
    "namespace",
    "tun device",
    "external",
    "timerfd",
    "memfd",
    "bpf map",
    "pidfd",
)
_REG = 1


class PstreeEntry(Message):
    """A process of the tree."""

    FIELDS = {1: ("pid", int), 2: ("ppid", int), 3: ("pgid", int), 4: ("sid", int), 5: ("threads", [int])}
    pid: int
    ppid: int
    threads: list[int]


class KobjIds(Message):
    """Which objects a process shares with others; `files` numbers its table of open files."""

    FIELDS = {1: ("vm", int), 2: ("files", int), 10: ("mnt_ns", int)}
    vm: int
    files: int
    mnt_ns: int


class TaskCore(Message):
    """A process's own core data; `comm` is its name."""

    FIELDS = {6: ("comm", str)}
    comm: str


class CoreEntry(Message):
    """A thread's core image."""

    FIELDS = {3: ("tc", TaskCore), 4: ("ids", KobjIds)}
    tc: TaskCore | None
    ids: KobjIds | None


class FdinfoEntry(Message):
    """One open descriptor: its number, and the file that it refers to."""

    FIELDS = {1: ("id", int), 2: ("flags", int), 3: ("type", int), 4: ("fd", int)}
    id: int
    type: int
    fd: int


class RegFile(Message):
    """A file by path; `size` and `mode` are what it must have again at the restore."""

    FIELDS = {
        1: ("id", int),
        2: ("flags", int),
        6: ("name", str),
        7: ("mnt_id", int),
        8: ("size", int),
        10: ("mode", int),
    }
    id: int
    flags: int
    name: str
    mnt_id: int
    size: int
    mode: int


class InetSocket(Message):
    """A TCP or UDP socket. Addresses are 32-bit words as the kernel keeps them: network byte order in memory."""

    FIELDS = {
        3: ("family", int),
        4: ("type", int),
        5: ("proto", int),
        6: ("state", int),
        7: ("src_port", int),
        8: ("dst_port", int),
    }
    unknown: bytes
    family: int
    type: int
    proto: int
    state: int
    src_port: int
    dst_port: int

    def address(self, number: int) -> str:
        """The source (field 11) or destination (12) address, as text."""
        words: list[int] = []
        for field, _, value, _ in fields(self.unknown):
            if field == number:
                words += _packed(value) if isinstance(value, bytes) else [value]
        import socket  # a person asks; a shim never comes here

        raw = b"".join(word.to_bytes(4, "little") for word in words)
        try:
            return socket.inet_ntop(socket.AF_INET if self.family == socket.AF_INET else socket.AF_INET6, raw)
        except ValueError:
            return raw.hex()


class UnixSocket(Message):
    """A unix socket; `name` is its path, or begins with a zero byte in the abstract name space."""

    FIELDS = {3: ("type", int), 4: ("state", int), 8: ("peer", int), 11: ("name", bytes)}
    type: int
    state: int
    peer: int
    name: bytes


class FileEntry(Message):
    """One file of files.img, of any kind."""

    FIELDS = {1: ("type", int), 2: ("id", int), 3: ("reg", RegFile), 4: ("isk", InetSocket), 16: ("usk", UnixSocket)}
    type: int
    id: int
    reg: RegFile | None
    isk: InetSocket | None
    usk: UnixSocket | None


class MountEntry(Message):
    """A mount of a mount namespace; `mountpoint` as the container sees it, but for a leading dot."""

    FIELDS = {2: ("mnt_id", int), 4: ("parent", int), 5: ("flags", int), 6: ("root", str), 7: ("mountpoint", str)}
    mnt_id: int
    parent: int
    flags: int
    root: str
    mountpoint: str

    @property
    def path(self) -> str:
        """The mount point as an absolute path."""
        return "/" + self.mountpoint.removeprefix(".").lstrip("/")


def _packed(data: bytes) -> list[int]:
    from shim.wire import varint

    words, at = [], 0
    while at < len(data):
        end = at
        while data[end] & 0x80:
            end += 1
        number = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[at : end + 1]))
        words.append(number)
        at += len(varint(number))
    return words


def entries(path: str, kind: type[M]) -> Iterator[M]:
    """The messages of one image file. Raises ShimError when it is not there or damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT)
    except OSError as error:
        raise ShimError(f"cannot read {path}: {error.strerror}", INVALID_ARGUMENT) from error
    at = 8 if int.from_bytes(data[:4], "little") in (_COMMON, _SERVICE) else 4
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        body = data[at + 4 : at + 4 + size]
        if len(body) != size:
            raise ShimError(f"{path} is cut short: copy the snapshot again, whole", INVALID_ARGUMENT)
        try:
            yield kind.decode(body)
        except WireError as error:
            raise ShimError(f"{path} is damaged: {error}; copy the snapshot again", INVALID_ARGUMENT) from error
        at += 4 + size


class OpenFile:
    """An open descriptor of a process, in words; `path` is set for files, `text` always."""

    __slots__ = ("fd", "kind", "path", "text")

    def __init__(self, fd: int, kind: str, text: str, path: str | None = None) -> None:
        self.fd = fd
        self.kind = kind
        self.text = text
        self.path = path


class Process:
    """A process of a snapshot: pid and parent's pid as the container sees them, name, thread count, descriptors."""

    __slots__ = ("files", "memory", "name", "parent", "pid", "threads")

    def __init__(self, pid: int, parent: int, *, name: str, threads: int, files: list[OpenFile], memory: int) -> None:
        self.pid = pid
        self.parent = parent
        self.name = name
        self.threads = threads
        self.files = files
        self.memory = memory


class PagemapEntry(Message):
    """A run of pages in a process's memory. Images of CRIU before 4.0 count them in field 2 only."""

    FIELDS = {2: ("few_pages", int), 3: ("in_parent", bool), 5: ("pages", int)}
    few_pages: int
    in_parent: bool
    pages: int


class Remap(Message):
    """A file that has no name any more, or another one while it is dumped."""

    FIELDS = {1: ("orig_id", int), 2: ("remap_id", int)}
    orig_id: int
    remap_id: int


def processes(directory: str) -> list[Process]:
    """The process tree, parents first. Raises ShimError."""
    by_id = {entry.id: entry for entry in entries(f"{directory}/files.img", FileEntry)}
    tables: dict[int, list[OpenFile]] = {}
    found = []
    for entry in entries(f"{directory}/pstree.img", PstreeEntry):
        core = next(entries(f"{directory}/core-{entry.pid}.img", CoreEntry), None)
        name = core.tc.comm if core and core.tc else "?"
        ids = next(entries(f"{directory}/ids-{entry.pid}.img", KobjIds), None)
        table = ids.files if ids else 0
        if table not in tables:
            tables[table] = [
                _open_file(item, by_id.get(item.id))
                for item in _optional(f"{directory}/fdinfo-{table}.img", FdinfoEntry)
            ]
        found.append(
            Process(
                entry.pid,
                entry.ppid,
                name=name,
                threads=len(entry.threads) or 1,
                files=tables[table],
                memory=_memory(directory, entry.pid),
            )
        )
    return found


def _optional(path: str, kind: type[M]) -> Iterator[M]:
    if os.path.exists(path):
        yield from entries(path, kind)


def _memory(directory: str, pid: int) -> int:
    """Bytes of a process's own memory in the images. The first entry of a pagemap is its head, without pages."""
    pagemap = list(_optional(f"{directory}/pagemap-{pid}.img", PagemapEntry))[1:]
    return 4096 * sum(entry.pages or entry.few_pages for entry in pagemap if not entry.in_parent)


def _open_file(item: FdinfoEntry, entry: FileEntry | None) -> OpenFile:
    kind = KINDS[item.type] if item.type < len(KINDS) else "unknown"
    if entry is None:
        return OpenFile(item.fd, kind, kind)
    if entry.reg is not None:
        path = "/" + entry.reg.name.lstrip("/")
        return OpenFile(item.fd, kind, path, path)
    if entry.isk is not None:
        return OpenFile(item.fd, kind, _inet(entry.isk))
    if entry.usk is not None:
        name = entry.usk.name.rstrip(b"\0")
        shown = "@" + name[1:].decode(errors="replace") if name[:1] == b"\0" else name.decode(errors="replace")
        state = " listening" if entry.usk.state == 10 else ""
        return OpenFile(item.fd, kind, f"unix {shown or '(unnamed)'}{state}")
    return OpenFile(item.fd, kind, kind)


def _inet(sock: InetSocket) -> str:
    # include/net/tcp_states.h: 1 established, 7 closed (also: unconnected), 10 listening
    proto = {6: "tcp", 17: "udp"}.get(sock.proto, f"protocol {sock.proto}")
    text = f"{proto} {sock.address(11)}:{sock.src_port}"
    if sock.state == 10:
        return f"{text} listening"
    return f"{text} -> {sock.address(12)}:{sock.dst_port}" if sock.dst_port else text


def needed_files(directory: str) -> list[tuple[str, str, int, int]]:
    """The regular files that the restore needs again by their names: (mount point, path, size, mode). Sorted by path.

    Whatever a process had open or mapped is here; CRIU compares the mode of each, and the size unless it is 0 here
    (files that are only appended to). Files without a name, which the images carry, are left out. Raises ShimError.
    """
    mounts: dict[int, MountEntry] = {}
    for name in os.listdir(directory):
        if name.startswith("mountpoints-"):
            mounts.update((entry.mnt_id, entry) for entry in entries(f"{directory}/{name}", MountEntry))
    nameless = set()
    for remap in _optional(f"{directory}/remap-fpath.img", Remap):
        nameless |= {remap.orig_id, remap.remap_id}
    found = set()
    for entry in entries(f"{directory}/files.img", FileEntry):
        reg = entry.reg
        if entry.type != _REG or reg is None or reg.id in nameless or reg.mode & 0o170000 != 0o100000:
            continue
        mount = mounts.get(_signed(reg.mnt_id))
        if mount is not None:
            found.add((mount.path, "/" + reg.name.lstrip("/"), reg.size, reg.mode))
    return sorted(found, key=lambda item: item[1])


def _signed(number: int) -> int:
    """protobuf's sint32, zigzag coded."""
    return (number >> 1) ^ -(number & 1)
