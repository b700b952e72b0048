"""`python3 graft.py PID SOURCE TARGET [SOURCE TARGET…]`: bind directories of this mount namespace into that of PID.

A plain bind mount cannot cross mount namespaces; a detached copy made here and attached there can (open_tree(2),
move_mount(2)).
"""

from __future__ import annotations

import ctypes
import os
import sys

# asm-generic/unistd.h; the same on every architecture
SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429
AT_FDCWD = -100
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
CLONE_NEWNS = 0x00020000

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def main(pid: str, *paths: str) -> None:
    pairs = list(zip(paths[::2], paths[1::2], strict=True))
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
    trees = [
        check(libc.syscall(SYS_OPEN_TREE, AT_FDCWD, source.encode(), flags), f"open_tree {source}")
        for source, _ in pairs
    ]
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.setns(namespace, CLONE_NEWNS), f"setns of {pid}")
    for tree, (_, target) in zip(trees, pairs, strict=True):
        os.makedirs(target, exist_ok=True)
        check(
            libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH),
            f"move_mount {target}",
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
