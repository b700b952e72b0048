"""Whatever is done inside an overlay, its merged view comes back from a layer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import layerwriter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="overlays are mounted by root")

NAMES = ["a", "b", "c", ".wh.a", os.fsdecode(b"\xff"), "n" * 120]
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
IDS = st.sampled_from([0, 1, 1000, 2_097_152, 4_294_967_294])
MODES = st.sampled_from([0o644, 0o755, 0o4755, 0o2775, 0o1777, 0, 0o7777])
TIMES = st.integers(-(2**31) * 10**9, 2**33 * 10**9)
SIZES = st.sampled_from([0, 1, 511, 512, 513, 4096, 70_000, 1_100_000])
XATTRS = st.sampled_from(["user.a", "user.=", "trusted.b", "trusted.overlay.opaque", "trusted.overlay.redirect",
                          "user.overlay.whiteout", "security.c"])  # fmt: skip

OPERATIONS = st.one_of(
    st.tuples(st.just("write"), PATHS, SIZES),
    st.tuples(st.just("mkdir"), PATHS),
    st.tuples(st.just("symlink"), PATHS, PATHS),
    st.tuples(st.just("fifo"), PATHS),
    st.tuples(st.just("socket"), PATHS),
    st.tuples(st.just("device"), PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("chmod"), PATHS, MODES),
    st.tuples(st.just("chown"), PATHS, IDS, IDS),
    st.tuples(st.just("utime"), PATHS, TIMES),
    st.tuples(st.just("setxattr"), PATHS, XATTRS, st.binary(max_size=20)),
    st.tuples(st.just("removexattr"), PATHS, XATTRS),
    st.tuples(st.just("truncate"), PATHS, SIZES),
    st.tuples(st.just("punch"), PATHS, SIZES, SIZES),
    st.tuples(st.just("remove"), PATHS),
    st.tuples(st.just("replace"), PATHS),
)

libc = ctypes.CDLL(None, use_errno=True)


def perform(root: Path, operation: tuple) -> None:
    """Do one thing, if the tree allows it."""
    kind, first, *rest = operation
    path = root / first
    # Parts of a path may be missing, files, or full of children: then nothing happens, as for a program.
    with contextlib.suppress(OSError, ValueError):
        if kind == "write":
            path.write_bytes(b"x" * rest[0])
        elif kind == "mkdir":
            path.mkdir()
        elif kind == "symlink":
            path.symlink_to(rest[0])
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        elif kind == "device":
            os.mknod(path, 0o020600, os.makedev(1, 7))
        elif kind == "rename":
            path.rename(root / rest[0])
        elif kind == "link":
            os.link(path, root / rest[0], follow_symlinks=False)
        elif kind == "chmod":
            if not path.is_symlink():
                path.chmod(rest[0])
        elif kind == "chown":
            os.lchown(path, *rest)
        elif kind == "utime":
            os.utime(path, ns=(0, rest[0]), follow_symlinks=False)
        elif kind == "setxattr":
            os.setxattr(path, *rest, follow_symlinks=False)
        elif kind == "removexattr":
            os.removexattr(path, rest[0], follow_symlinks=False)
        elif kind == "truncate":
            if path.is_file() and not path.is_symlink():
                os.truncate(path, rest[0])
        elif kind == "punch":
            if path.is_file() and not path.is_symlink():
                fd = os.open(path, os.O_RDWR)
                keep_size, punch_hole = 1, 2
                offset, length = (ctypes.c_longlong(number) for number in rest)
                libc.fallocate(fd, keep_size | punch_hole, offset, length)
                os.close(fd)
        elif kind == "remove":
            remove(path)
        elif kind == "replace":
            was_directory = path.is_dir() and not path.is_symlink()
            remove(path)
            path.write_bytes(b"instead") if was_directory else path.mkdir()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class Mounts:
    """An overlay in a directory of its own, whose upper directory can be changed."""

    def __init__(self, base: Path, options: str) -> None:
        self.base, self.options = base, options
        self.lower = [base / "image2", base / "image1"]
        self.merged = base / "merged"
        for path in (*self.lower, self.merged):
            path.mkdir()

    @contextlib.contextmanager
    def mounted(self, name: str):
        upper, work = self.base / f"upper-{name}", self.base / f"work-{name}"
        upper.mkdir(exist_ok=True)
        work.mkdir()
        lower = ":".join(map(str, self.lower))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}{self.options}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.merged], check=True)
        try:
            yield upper
        finally:
            subprocess.run(["umount", self.merged], check=True)


def make_image(mounts: Mounts, operations: list) -> None:
    """Two layers: one plain, and one that a layer of this project made."""
    for index, name in enumerate(NAMES[:3]):
        (mounts.lower[1] / name / "b").mkdir(parents=True)
        (mounts.lower[1] / name / "b/a").write_bytes(b"of the image" * index)
        os.link(mounts.lower[1] / name / "b/a", mounts.lower[1] / name / "c")
    for operation in operations:
        perform(mounts.lower[0], operation)


SETTINGS = settings(
    max_examples=int(os.environ.get("FERMATA_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="FERMATA_EXAMPLES" not in os.environ,
)


@SETTINGS
@given(st.lists(OPERATIONS, max_size=4), st.lists(OPERATIONS, min_size=1, max_size=25))
@example([], [("remove", "a"), ("mkdir", "a"), ("write", "a/b", 513)])
@example([], [("link", "a/c", "b/a"), ("remove", "a/c"), ("chmod", "b/a", 0o4755)])
@example([], [("remove", "a/b"), ("link", "b/c", "a/b"), ("punch", "b/c", 1, 4096)])
def test_a_random_tree_comes_back_from_its_upper_directory(image, operations):
    with tempfile.TemporaryDirectory(prefix="fermata-random-") as base:
        mounts = Mounts(Path(base), ",index=off")
        make_image(mounts, image)
        with mounts.mounted("one") as upper:
            for operation in operations:
                perform(mounts.merged, operation)
            before = list(layerwriter.record(mounts.merged))
            layer = layerwriter.write(upper, f"{base}/layer.tar")
            full = layerwriter.full_diff(list(map(str, mounts.lower)), mounts.merged, f"{base}/full.tar")
        for made in (layer, full):
            (Path(base) / f"upper-{made.made_by}").mkdir()
            layerwriter.apply(made, f"{base}/upper-{made.made_by}")
            with mounts.mounted(made.made_by):
                assert list(layerwriter.compare(before, mounts.merged)) == [], made.made_by


@SETTINGS
@given(st.lists(OPERATIONS, min_size=1, max_size=25))
@example([("rename", "a", "n"), ("rename", "n/b", "b/n")])
@example([("chmod", "a/c", 0o600), ("rename", "a/b", "a/n")])
@example([("link", "a/c", "a/n"), ("write", "a/b/a", 513)])
def test_a_random_tree_comes_back_where_the_overlay_hides_changes(operations):
    with tempfile.TemporaryDirectory(prefix="fermata-random-") as base:
        mounts = Mounts(Path(base), ",redirect_dir=on,metacopy=on,index=on")
        make_image(mounts, [])
        with mounts.mounted("one"):
            for operation in operations:
                perform(mounts.merged, operation)
            before = list(layerwriter.record(mounts.merged))
            full = layerwriter.full_diff(list(map(str, mounts.lower)), mounts.merged, f"{base}/full.tar")
        (Path(base) / "upper-two").mkdir()
        layerwriter.apply(full, f"{base}/upper-two")
        mounts.options = ",index=off"
        with mounts.mounted("two"):
            assert list(layerwriter.compare(before, mounts.merged, ignore=("links",))) == []
