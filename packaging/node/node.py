"""A private containerd with its own root, state and socket, beside whatever else this machine runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from node import cgroup, image, stack
from node.errors import NodeError
from node.init import PATH

SOCKET = "/run/containerd/containerd.sock"
DIFFER_SOCKET = "/run/fermata-differ/differ.sock"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
PREFIX = "/usr/local"
# Writes its own pid where the node finds it again, then becomes the command.
ENTER = 'echo $$ >"$1" || exit 125; shift; exec "$@"'


class Result(NamedTuple):
    """How a command in a node ended: its exit status (negative: the signal that killed it) and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Node:
    """A running node. Get one from ``Node.up`` or, if it runs already, ``Node.open``."""

    def __init__(self, directory: Path, facts: dict[str, Any]) -> None:
        self.directory = directory
        self.facts = facts

    # -- its life ----------------------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        name: str | None = None,
        stack_name: str = "auto",
        *,
        directory: Path | None = None,
        cri: bool = False,
        drop_ins: Mapping[str, str] | None = None,
        install: bool = True,
        differ: bool = False,
        say: stack.Progress | None = None,
    ) -> Node:
        """Bring up a node and wait until its containerd answers.

        ``name`` is made up if not given. ``directory`` holds all that the node writes (default: in the cache).
        ``cri`` leaves containerd's CRI plugins on. ``drop_ins`` maps file names to containerd configuration that is
        imported after the node's own. ``install`` installs fermata from this working tree. ``differ`` has containerd
        ask fermata-differ for diffs. Raises NodeError.
        """
        _require_root()
        for program, package in (("nsenter", "util-linux"), ("make", "make")):
            stack.need(program, package)
        chosen, lacks = stack.choose(stack_name)
        if lacks and say:
            say(f"not using this machine's own containerd: {lacks}")
        name = name or f"n{secrets.token_hex(3)}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", name):
            raise NodeError(f"{name!r} is no name for a node: use letters, digits, dots, dashes and underscores")
        directory = (directory or _home() / name).absolute()
        lower = stack.root(chosen, say)
        with _locked(directory):
            existing = cls._read(directory)
            if existing and existing.alive():
                raise NodeError(f"the node {name} is up already; take it down first")
            if existing:
                existing._remove()
            node = cls._prepare(directory, name, chosen, lower)
            try:
                node._start(cri, drop_ins or {})
                if install:
                    node.install()
                if differ:
                    node.use_differ()
                node.start_containerd()
            except BaseException:
                node._remove()
                raise
        return node

    @classmethod
    def open(cls, name: str, directory: Path | None = None) -> Node:
        """The node of that name, which must be up."""
        node = cls._read((directory or _home() / name).absolute())
        if node is None or not node.alive():
            raise NodeError(f"no node {name} is up; start one: python3 packaging/node up {name}")
        return node

    @classmethod
    def known(cls) -> list[Node]:
        """The nodes in the cache, up or left over from a crash."""
        paths = sorted(_home().glob("*/node.json")) if _home().is_dir() else []
        return [node for node in (cls._read(path.parent) for path in paths) if node]

    @classmethod
    def take_down(cls, name: str, directory: Path | None = None) -> bool:
        """Remove the node and all that it left, whatever state it is in. False if there was nothing."""
        _require_root()
        directory = (directory or _home() / name).absolute()
        if not directory.exists():
            return False
        with _locked(directory):
            node = cls._read(directory)
            if node is None:
                stack.remove_tree(directory)
                return True
            node._remove()
        return True

    def down(self) -> None:
        """Stop the node and remove every process, mount, cgroup and file of it. Does nothing the second time."""
        self.take_down(self.name, self.directory)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.down()

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    @property
    def stack(self) -> str:
        return str(self.facts["stack"])

    @property
    def pid(self) -> int:
        """The host's pid of the process that holds the node's namespaces."""
        return int(self.facts["pid"])

    @property
    def logs(self) -> Path:
        """The node's /var/log, readable from the host."""
        return self.directory / "log"

    @property
    def log(self) -> Path:
        """containerd's log, at level debug."""
        return self.logs / "containerd.log"

    def path(self, inside: str) -> Path:
        """Where the host sees the absolute path ``inside`` of the node. (Absolute links in it would lead astray.)"""
        return Path(f"/proc/{self.pid}/root", inside.lstrip("/"))

    def mounts(self) -> list[str]:
        """The mount points in the node, as seen inside."""
        return [line.split()[4] for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()]

    def alive(self) -> bool:
        return self.facts["boot"] == _boot() and self.pid > 0 and _started(self.pid) == self.facts["started"]

    def containerd_version(self) -> tuple[int, ...]:
        return stack.version(self.exec(["containerd", "--version"]).stdout)

    # -- running things ----------------------------------------------------------------------------------------------

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` in the node, started from the host."""
        entry = ["/bin/sh", "-c", ENTER, "node", cgroup.entry_file(self.facts["token"])]
        return [*entry, "nsenter", f"--target={self.pid}", "--mount", "--cgroup", "--", *argv]

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """subprocess.Popen in the node. The pid is the command's own."""
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("start_new_session", True)
        return subprocess.Popen(self.argv(argv), env={**ENVIRONMENT, **(env or {})}, **options)

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60,
        input: str | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command in the node and wait for it, at most ``timeout`` seconds.

        Raises NodeError when it takes longer, or ends with another status than 0 while ``check`` is set. What the
        command starts and leaves behind may keep running: its output is not waited for.
        """
        with _capture() as out, _capture() as err:
            given = subprocess.DEVNULL if input is None else subprocess.PIPE
            process = self.popen(argv, env=env, stdin=given, stdout=out, stderr=err)
            try:
                process.communicate(None if input is None else input.encode(), timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise NodeError(f"{' '.join(argv)} took longer than {timeout} s\n{_text(out)}{_text(err)}") from None
            result = Result(process.returncode, _text(out), _text(err))
        if check and result.returncode != 0:
            raise NodeError(f"{' '.join(argv)} ended with {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def ctr(
        self,
        *args: str,
        namespace: str = "default",
        timeout: float = 60,
        input: str | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """``ctr`` against the node's containerd."""
        argv = ["ctr", "--address", SOCKET, "--namespace", namespace, *args]
        return self.exec(argv, timeout=timeout, input=input, check=check, env=env)

    # -- containerd --------------------------------------------------------------------------------------------------

    def containerd_pid(self) -> int | None:
        try:
            return int(self.path("/run/node/containerd.pid").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None

    def start_containerd(self, timeout: float = 60) -> None:
        """Start containerd unless it runs, and wait until it answers."""
        os.kill(self.pid, signal.SIGUSR1)
        until = time.monotonic() + timeout
        while not self._answers():
            if time.monotonic() > until or not self.alive():
                raise NodeError(f"containerd does not answer; the end of {self.log}:\n{self._tail()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        if self.containerd_pid() is None:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path(SOCKET)))
            except OSError:
                return False
        return self.ctr("version", check=False, timeout=20).returncode == 0

    def stop_containerd(self, *, kill: bool = False, timeout: float = 30) -> None:
        """End containerd by SIGTERM, or by SIGKILL with ``kill``. Containers go on running."""
        pid = self.containerd_pid()
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        until = time.monotonic() + timeout
        while self.containerd_pid() == pid:
            if time.monotonic() > until:
                raise NodeError(f"containerd (pid {pid}) does not end; the end of {self.log}:\n{self._tail()}")
            time.sleep(0.01)

    def restart_containerd(self, *, kill: bool = False) -> None:
        self.stop_containerd(kill=kill)
        self.start_containerd()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else "(there is no log)"

    # -- fermata-differ ----------------------------------------------------------------------------------------------

    def use_differ(self, *options: str) -> None:
        """Start fermata-differ with options, and have containerd use it from its next start on."""
        drop_in = f"fermata-differ-v{3 if self.containerd_version() >= (2,) else 2}.toml"
        text = (stack.PROJECT / "packaging/containerd" / drop_in).read_text()
        self.path("/etc/containerd/conf.d/fermata-differ.toml").write_text(text)
        self.start_differ(*options)

    def differ_pid(self) -> int | None:
        try:
            return int(self.path("/run/node/differ.pid").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None

    def start_differ(self, *options: str, timeout: float = 30) -> None:
        """Start fermata-differ and wait until it takes connections. Its log is ``differ.log`` beside containerd's."""
        with (self.logs / "differ.log").open("ab") as log:
            process = self.popen([f"{PREFIX}/bin/fermata-differ", *options], stdout=log, stderr=log)
        self.path("/run/node/differ.pid").write_text(str(process.pid))
        until = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.path(DIFFER_SOCKET)))
                break
            if process.poll() is not None or time.monotonic() > until:
                raise NodeError(f"fermata-differ does not start:\n{(self.logs / 'differ.log').read_text()[-2000:]}")
            time.sleep(0.02)
        # It outlives this process; nobody is going to wait for it here.
        process.returncode = 0

    def stop_differ(self, *, kill: bool = False, timeout: float = 30) -> None:
        """End fermata-differ by SIGTERM, or by SIGKILL with ``kill``."""
        pid = self.differ_pid()
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        until = time.monotonic() + timeout
        while _running(pid):
            if time.monotonic() > until:
                raise NodeError(f"fermata-differ (pid {pid}) does not end")
            time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self.path("/run/node/differ.pid").unlink()

    # -- contents ----------------------------------------------------------------------------------------------------

    def install(self, source: Path | None = None) -> None:
        """Install fermata from a source tree, this one by default, as an operator would, replacing what is there."""
        source = source or stack.PROJECT
        argv = ["make", "--silent", "--no-print-directory", "-C", str(source), "install"]
        done = subprocess.run(
            [*argv, f"DESTDIR=/proc/{self.pid}/root", f"PREFIX={PREFIX}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            # Called from within make, the outer one's flags would reach the inner.
            env={key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))},
        )
        if done.returncode != 0:
            raise NodeError(f"make install failed:\n{done.stdout}{done.stderr}")
        # Compiled by the python3 that will run it.
        compiler = [f"{PREFIX}/lib/fermata/shim/library.py"]
        if not (source / "shim/library.py").exists():  # an earlier version
            compiler = ["-m", "compileall", "-q", f"{PREFIX}/lib/fermata"]
        self.exec(["/usr/bin/python3", "-I", *compiler], timeout=120)

    def import_image(self, archive: Path | None = None, *, namespace: str = "default", timeout: float = 600) -> str:
        """Import an OCI layout tar (default: the test image) and return the name that the image has."""
        archive = archive or image.test_image(self.stack, Path(self.facts["root"]))
        with archive.open("rb") as file:
            command = ["ctr", "--address", SOCKET, "--namespace", namespace, "image", "import", "--local", "-"]
            if self.containerd_version() < (2,):
                command.remove("--local")
            with _capture() as out, _capture() as err:
                process = self.popen(command, stdin=file, stdout=out, stderr=err)
                try:
                    process.wait(timeout)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    raise NodeError(f"importing {archive} took longer than {timeout} s") from None
                if process.returncode != 0:
                    raise NodeError(f"could not import {archive}: {_text(out)}{_text(err)}")
        return image.name_in(archive)

    # -- making and unmaking -----------------------------------------------------------------------------------------

    @classmethod
    def _read(cls, directory: Path) -> Node | None:
        try:
            return cls(directory, json.loads((directory / "node.json").read_text()))
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        new = self.directory / "node.json.new"
        new.write_text(json.dumps(self.facts, indent=1))
        new.rename(self.directory / "node.json")

    @classmethod
    def _prepare(cls, directory: Path, name: str, chosen: str, lower: Path) -> Node:
        token = f"{name}-{secrets.token_hex(6)}"
        for part in ("root", "private", "log"):
            (directory / part).mkdir(parents=True)
        facts = {"name": name, "token": token, "stack": chosen, "root": str(lower)}
        node = cls(directory, {**facts, "boot": _boot(), "pid": 0, "started": "", "mounts": []})
        # Written before anything exists that would have to be found again.
        node._write()
        return node

    def _start(self, cri: bool, drop_ins: Mapping[str, str]) -> None:
        token = self.facts["token"]
        cgroup.create(token)
        plan = {
            "dir": str(self.directory),
            "lower": self.facts["root"],
            "token": f"fermata-node:{token}",
            "cgroup": token,
            "storage_in_memory": _is_overlay(self.directory),
            "containerd": ["containerd", "--config", "/etc/containerd/config.toml"],
        }
        plan_file = self.directory / "plan.json"
        plan_file.write_text(json.dumps(plan, indent=1))
        init_log = self.directory / "init.log"
        with init_log.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-S", str(Path(__file__).parent), "init", str(plan_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                cwd="/",
                start_new_session=True,
                env={"PATH": PATH, "LANG": "C.UTF-8"},
            )
            self.facts.update(pid=process.pid, started=_started(process.pid))
            self._write()
            assert process.stdout is not None
            with process.stdout:
                if process.stdout.readline() != b"ready\n":
                    process.kill()
                    process.wait()
                    raise NodeError(f"the node did not start:\n{init_log.read_text()[-3000:]}")
        # It outlives this process; nobody is going to wait for it here.
        process.returncode = 0
        self.facts["mounts"] = self.mounts()
        self._write()
        self._configure(cri, drop_ins)

    def _configure(self, cri: bool, drop_ins: Mapping[str, str]) -> None:
        etc = self.path("/etc/containerd")
        (etc / "conf.d").mkdir(parents=True, exist_ok=True)
        new = self.containerd_version() >= (2,)
        (etc / "config.toml").write_text(configuration(3 if new else 2, cri))
        for name, text in drop_ins.items():
            (etc / "conf.d" / name).write_text(text)

    def owns_link(self, name: str) -> None:
        """Have ``down`` remove a network interface, which would outlive the node in the machine's network."""
        self.facts.setdefault("links", []).append(name)
        self._write()

    def _remove(self) -> None:
        self._kill_all()
        for name in self.facts.get("links", ()):
            # There is none before the first pod.
            subprocess.run(["ip", "link", "delete", name], capture_output=True, timeout=10, check=False)
        left = cgroup.remove(self.facts["token"])
        if left:
            raise NodeError(f"the node {self.name} left a cgroup that cannot be removed: {left[0]}")
        stack.remove_tree(self.directory)

    def _kill_all(self) -> None:
        """Kill every process of the node, by id, until there is none."""
        until = time.monotonic() + 30
        while True:
            found = self.processes()
            if not found:
                break
            if time.monotonic() > until:
                raise NodeError(f"processes of the node {self.name} do not end: {sorted(found)}")
            cgroup.thaw(self.facts["token"])
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        # Ours to reap if this very process started the node; PID 1's otherwise.
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def processes(self) -> set[int]:
        """The host's pids of all processes in the node's cgroups or in its mount namespace, but not zombies."""
        found = cgroup.processes(self.facts["token"])
        mark = f" fermata-node:{self.facts['token']} "
        # Most processes share a mount namespace with many others, and its list of mounts is long.
        marked: dict[str, bool] = {}
        for directory in os.listdir("/proc"):
            if not directory.isdigit():
                continue
            # The process may end while we look.
            with contextlib.suppress(OSError):
                space = os.readlink(f"/proc/{directory}/ns/mnt")
                if space not in marked:
                    marked[space] = mark in Path(f"/proc/{directory}/mountinfo").read_text()
                if marked[space]:
                    found.add(int(directory))
        return {pid for pid in found if _running(pid)} - {os.getpid()}


def configuration(version: int, cri: bool) -> str:
    """containerd's configuration for a node; version 3 is 2.x's format, 2 is 1.7's."""
    off = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper"]
    off += ["io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.tracing"]
    if not cri:
        off.append("io.containerd.grpc.v1.cri")
        if version == 3:
            off += ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
    listed = ", ".join(f'"{plugin}"' for plugin in off)
    return f"""version = {version}
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [{listed}]
imports = ["/etc/containerd/conf.d/*.toml"]

[grpc]
  address = "{SOCKET}"

[debug]
  level = "debug"
"""


def _home() -> Path:
    return stack.cache() / "nodes"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One ``up`` or ``down`` of a node at a time. The lock file is beside the directory, which comes and goes."""
    path = directory.with_name(f".{directory.name}.lock")
    with stack.locked(path):
        yield
        if not directory.exists():
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _capture() -> Iterator[Any]:
    """A file for a command's output. A pipe would be held open by what the command leaves running."""
    with tempfile.TemporaryFile() as file:
        yield file


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def _require_root() -> None:
    if os.geteuid() != 0:
        raise NodeError("a node needs root: mounts, namespaces and CRIU are not to be had without")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the third, the state, on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _started(pid: int) -> str:
    """When a process started, which with its pid tells it from a later process of that pid. Empty for a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _running(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _is_overlay(path: Path) -> bool:
    done = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip() == "overlayfs"
