"""A node's root with systemd as its first process, for what depends on how services are started.

It has namespaces of its own for processes, mounts, cgroups, names and network, and a containerd that systemd starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from node import cgroup
from node.errors import NodeError
from node.node import PREFIX, Result
from node.stack import PROJECT

SYSTEMD = "/usr/lib/systemd/systemd"
# Sysctls and what is in /sys are the whole machine's: systemd must not set them.
_BOOT = r"""
set -e
mount --make-rprivate /
mount -t overlay -o "lowerdir=$LOWER,upperdir=$TOP/upper,workdir=$TOP/work" overlay "$TOP/root"
cd "$TOP/root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for name in null zero full random urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p var/lib/containerd .old
mount --bind "$TOP/containerd" var/lib/containerd
pivot_root . .old
umount -l /.old
exec env -i container=node PATH=/usr/sbin:/usr/bin SYSTEMD --unit=multi-user.target --log-target=console --show-status=0
"""
# It ends with whoever switched it on.
_ALONE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--fork", "--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net", "--kill-child"),
)


class Booted:
    """A machine that can be switched on and off. `top` is an empty directory, not on an overlay."""

    def __init__(self, lower: Path, top: Path) -> None:
        if not Path(f"{lower}{SYSTEMD}").exists():
            raise NodeError(f"there is no systemd in {lower}")
        self._lower, self._top = lower, top
        self._cgroup = self._make_cgroup()
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("upper", "work", "root", "containerd"):
            (top / name).mkdir()
        self.pid = 0

    @staticmethod
    def _make_cgroup() -> Path:
        base = next((each for each in cgroup.hierarchies() if each.kind == "cgroup2"), None)
        if base is None:
            raise NodeError("systemd needs cgroups of version 2, and none are mounted here")
        path = Path(base.mountpoint, cgroup.PARENT, f"booted-{secrets.token_hex(4)}")
        path.mkdir(parents=True)
        return path

    def install(self) -> None:
        """Install fermata from this working tree."""
        argv = ["make", "--silent", "--no-print-directory", "-C", str(PROJECT), "install"]
        subprocess.run(
            [*argv, f"DESTDIR={self._top}/upper", f"PREFIX={PREFIX}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=True,
            env={key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))},
        )

    def on(self, timeout: float = 60) -> None:
        """Boot, and wait until every service of the start is up."""
        enter = f"echo $$ >{shlex.quote(str(self._cgroup / 'cgroup.procs'))}; exec {' '.join(_ALONE)} sh -c"
        script = _BOOT.replace("SYSTEMD", SYSTEMD)
        with (self._top / "console").open("ab") as console:
            self._process = subprocess.Popen(
                ["sh", "-c", f'{enter} "$0"', script],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "LOWER": str(self._lower), "TOP": str(self._top)},
                start_new_session=True,
            )
        until = time.monotonic() + timeout
        while True:
            with contextlib.suppress(FileNotFoundError, ValueError):
                outer = self._process.pid
                self.pid = int(Path(f"/proc/{outer}/task/{outer}/children").read_text())
                if Path(f"/proc/{self.pid}/comm").read_text() == "systemd\n" and self._reached():
                    return
            if self._process.poll() is not None or time.monotonic() > until:
                raise NodeError(f"systemd does not come up:\n{(self._top / 'console').read_text()[-3000:]}")
            time.sleep(0.1)

    def _reached(self) -> bool:
        state = self.exec(["systemctl", "is-system-running"], check=False).stdout
        return state in ("running\n", "degraded\n")

    def off(self) -> None:
        """End every process at once, as when the power fails. What is on the disk stays."""
        if self._process is not None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            self._process, self.pid = None, 0
        until = time.monotonic() + 10
        while (self._cgroup / "cgroup.procs").exists() and self._busy() and time.monotonic() < until:
            time.sleep(0.02)
        for path, _, _ in os.walk(self._cgroup, topdown=False):
            if path != str(self._cgroup):
                os.rmdir(path)

    def _busy(self) -> bool:
        return "populated 1" in (self._cgroup / "cgroup.events").read_text()

    def remove(self) -> None:
        """Off, and nothing is left of it but its directory."""
        self.off()
        self._cgroup.rmdir()

    def path(self, inside: str) -> Path:
        """Where the host sees an absolute path of the machine, while it is on."""
        return Path(f"/proc/{self.pid}/root", inside.lstrip("/"))

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen in the machine."""
        options.setdefault("stdin", subprocess.DEVNULL)
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--"]
        path = f"PATH={PREFIX}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.Popen([*enter, "env", "-i", path, "LC_ALL=C.UTF-8", *argv], **options)

    def exec(self, argv: list[str], *, check: bool = True, timeout: float = 60) -> Result:
        """Run a command and wait for it. Raises NodeError when it fails while `check` is set."""
        process = self.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = (text.decode(errors="replace") for text in process.communicate(timeout=timeout))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise NodeError(f"{' '.join(argv)} took longer than {timeout} s") from None
        if check and process.returncode:
            raise NodeError(f"{' '.join(argv)} ended with {process.returncode}\n{out}{err}")
        return Result(process.returncode, out, err)
