"""A snapshot directory without CRIU: a few image files with messages in them, and a fermata.json."""

from __future__ import annotations

import copy
import struct
from pathlib import Path

from shim import images
from shim.manifest import Manifest
from shim.wire import delimited, varint

PYTHON = {"path": "/usr/bin/python3", "mount": "/", "size": 11, "mode": 0o755}
MODEL = {"path": "/models/weights", "mount": "/models", "size": 5, "mode": 0o644}

SPEC = {
    "process": {"env": ["PATH=/bin", "A=1"]},
    "annotations": {"fermata/layer": "carry"},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/models", "type": "bind", "source": "/srv/models", "options": ["rbind", "ro"]},
    ],
    "linux": {
        "cgroupsPath": "/default/c1",
        "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "mount"}],
        "devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}],
    },
}

DATA = {
    "version": {"major": 1, "minor": 0},
    "taken": "2026-01-02T03:04:05Z",
    "container": {"id": "c1", "namespace": "default", "image": "docker.io/library/a:1", "left_running": True},
    "requires": {
        "architecture": "x86_64",
        "kernel": "6.1.0",
        "criu": "4.1.1",
        "terminal": False,
        "namespaces": ["mount", "network", "pid"],
        "mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/models", "type": "bind", "source": "/srv/models", "file": False},
        ],
        "devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}],
        "files": [PYTHON, MODEL],
    },
    "layer": {"file": "layer.tar", "digest": "sha256:0", "size": 3, "entries": 2, "made_by": "upperdir"},
    "gpu": None,
    "steps": {"layer": 0.5, "dump": 1.0, "total": 2.0},
    "frozen": 1.2,
    "spec": SPEC,
}


def image(path: Path, *messages: bytes) -> None:
    """An image file of CRIU's: two magic numbers and messages with their sizes."""
    body = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    path.write_bytes(struct.pack("<II", 0x54564319, 0x50273030) + body)


def file(number: int, name: str, *, size: int = 0, mode: int = 0o100644, mount: int = 7) -> bytes:
    # mnt_id is a sint32, zigzag coded
    reg = images.RegFile(id=number, name=name, mnt_id=mount * 2, size=size, mode=mode)
    return images.FileEntry(type=1, id=number, reg=reg).encode()


def make(directory: Path, **changes: object) -> Path:
    """A snapshot of two processes, the second a child of the first."""
    directory.mkdir(parents=True)
    image(directory / "inventory.img", b"\x08\x02")
    image(
        directory / "pstree.img",
        images.PstreeEntry(pid=1, threads=[1, 2]).encode(),
        images.PstreeEntry(pid=9, ppid=1, threads=[9]).encode(),
    )
    tcp = images.InetSocket(family=2, type=1, proto=6, state=10, src_port=8000)
    tcp.unknown = delimited(11, varint(0x1100007F))  # packed; as the kernel has 127.0.0.17 in memory
    named = images.UnixSocket(type=1, state=10, name=b"\0hidden")
    image(
        directory / "files.img",
        file(1, "/usr/bin/python3", size=11, mode=0o100755),
        file(2, "/root/data", size=3),
        file(3, "/models/weights", size=5, mount=8),
        file(6, "/root/gone", size=9),
        images.FileEntry(type=4, id=4, isk=tcp).encode(),
        images.FileEntry(type=5, id=5, usk=named).encode(),
        images.FileEntry(type=2, id=8).encode(),
    )
    image(directory / "remap-fpath.img", images.Remap(orig_id=6, remap_id=7).encode())
    image(
        directory / "mountpoints-3.img",
        images.MountEntry(mnt_id=7, mountpoint="/").encode(),
        images.MountEntry(mnt_id=8, mountpoint="./models").encode(),
    )
    for pid, name in ((1, "server"), (9, "worker")):
        image(directory / f"core-{pid}.img", images.CoreEntry(tc=images.TaskCore(comm=name)).encode())
        image(directory / f"ids-{pid}.img", images.KobjIds(files=pid).encode())
        image(directory / f"pagemap-{pid}.img", b"\x08\x01", images.PagemapEntry(pages=pid).encode())
    descriptors = [(0, 8, 2), (3, 2, 1), (4, 4, 4), (5, 5, 5)]
    image(
        directory / "fdinfo-1.img",
        *(images.FdinfoEntry(fd=fd, id=number, type=kind).encode() for fd, number, kind in descriptors),
    )
    (directory / "pages-1.img").write_bytes(b"p" * 4096)
    (directory / "layer.tar").write_bytes(b"tar")
    data = {**copy.deepcopy(DATA), **changes}
    Manifest(data).write(str(directory))
    return directory
