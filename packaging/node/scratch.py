"""A distribution's root with an overlay of its own on it: to try a package in, without a containerd that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from node.errors import NodeError

# Mounts and processes end with the command; what it wrote is in the overlay's upper directory.
_ENTER = """
set -e
top=$1 lower=$2
shift 2
mount -t overlay -o "lowerdir=$lower,upperdir=$top/upper,workdir=$top/work" overlay "$top/root"
mount -t proc proc "$top/root/proc"
mount --rbind /sys "$top/root/sys"
mount --rbind /dev "$top/root/dev"
mount -t tmpfs -o mode=755 tmpfs "$top/root/run"
exec chroot "$top/root" "$@"
"""


class Scratch:
    """A root that may be written to; `lower` is not changed. `top` is an empty directory, not on an overlay."""

    def __init__(self, lower: Path, top: Path) -> None:
        self._lower, self._top = lower, top
        for name in ("upper", "work", "root"):
            (top / name).mkdir()

    def put(self, source: Path, name: str) -> str:
        """Copy a file into the root's /srv; its path there."""
        target = self._top / "upper/srv" / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
        return f"/srv/{name}"

    def run(
        self, *argv: str, check: bool = True, timeout: float = 120, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the root's first process; /run is empty. Raises NodeError when it fails."""
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        done = subprocess.run(
            [*alone, "sh", "-c", _ENTER, "scratch", str(self._top), str(self._lower), *argv],
            input=stdin,
            capture_output=True,
            timeout=timeout,
            check=False,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )
        out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        if check and done.returncode:
            raise NodeError(f"{' '.join(argv)} ended with {done.returncode} in the root {self._lower}:\n{out}{err}")
        return subprocess.CompletedProcess(argv, done.returncode, out, err)

    def files(self) -> set[str]:
        """Every file but records of what happened: path, mode, owner, and (not of a directory) size and target."""
        kinds = ["-type", "d", "-printf", "%p %m %u\\n", "-o", "-printf", "%p %m %u %s %l\\n"]
        listed = self.run("find", "/", "-xdev", *kinds).stdout.splitlines()
        return {line for line in listed if not line.startswith(("/var/lib/dpkg/", "/var/log/", "/var/cache/", "/srv"))}
