"""`fermata doctor`: what a node needs to take and restore snapshots, each line with the command that mends it."""

from __future__ import annotations

import glob
import os
import sys

from shim import RUNTIME, host
from shim import config as configuration
from shim.errors import ShimError
from shim.gpu import node_has_driver
from shim.host import size

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from shim.config import Config

SHIM = "containerd-shim-fermata-v1"
OLDEST_RUNC = "1.1"
OLDEST_CONTAINERD = "1.7"
_PARAMETERS = "/sys/module/overlay/parameters"
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_LOW_DISK = 1 << 30  # bytes


class Line:
    """One line of the answer.

    level   "ok", "warning" (it works, with a drawback) or "problem" (something does not work)
    name    what was looked at
    text    what was found
    fix     the command or the step that mends it; None where nothing is to be done
    mend    does what `fix` says, for `--fix`; None where that is not for a program to do
    """

    __slots__ = ("fix", "level", "mend", "name", "text")

    def __init__(
        self, level: str, name: str, text: str, fix: str | None = None, *, mend: Callable[[], None] | None = None
    ) -> None:
        self.level = level
        self.name = name
        self.text = text
        self.fix = fix
        self.mend = mend

    def __repr__(self) -> str:
        return f"Line({self.level!r}, {self.name!r}, {self.text!r}, {self.fix!r})"


def add_parser(subparsers: Any) -> None:
    """Add the command `doctor` to argparse's subparsers."""
    from shim import containerd

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="say what this node needs to take and restore snapshots",
        description="Look at everything that snapshots need on this node. Each line is ok, a warning or a problem, "
        "with the command that mends it. Nothing is changed without --fix. Exit status: 0 without a problem, else 1.",
    )
    parser.add_argument("--fix", action="store_true", help="mend what a program can mend, and say what was done")
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    parser.add_argument(
        "--dir", metavar="DIR", action="append", default=[], help="where snapshots go: its room is looked at as well"
    )
    containerd.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `doctor`."""
    lines = list(examine(args.address, args.dir))
    fixed: list[str] = []
    if args.fix:
        for line in lines:
            if line.mend is not None:
                try:
                    line.mend()
                except (OSError, ShimError) as error:
                    print(f"fermata: {line.name}: `{line.fix}` failed: {error}", file=sys.stderr)
                    continue
                fixed.append(f"{line.name}: {line.fix}")
        if fixed:
            lines = list(examine(args.address, args.dir))
    problems = [line for line in lines if line.level == "problem"]
    if args.json:
        import json

        listing = [{"level": it.level, "name": it.name, "text": it.text, "fix": it.fix} for it in lines]
        print(json.dumps({"healthy": not problems, "lines": listing, "fixed": fixed}))
        return 1 if problems else 0
    for text in fixed:
        print(f"fixed    {text}")
    for line in lines:
        print(f"{line.level:<8} {line.name}: {line.text}")
        if line.fix:
            print(f"         -> {line.fix}")
    warnings = sum(line.level == "warning" for line in lines)
    print(f"{len(lines)} lines, {len(problems)} problems, {warnings} warnings.")
    return 1 if problems else 0


def examine(address: str, directories: list[str]) -> Iterator[Line]:
    """All lines. A look that fails in a way nobody thought of becomes a problem of its own, and the others go on."""
    try:
        config = configuration.load()
        yield Line("ok", "configuration", f"{configuration.PATH} {_present(configuration.PATH)}")
    except ShimError as error:
        config = configuration.Config()
        yield Line("problem", "configuration", str(error), f"edit {configuration.PATH}")
    daemon = Containerd.find(address)
    looks: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("containerd", lambda: _containerd(daemon, address)),
        ("runtime", lambda: _runtime(daemon)),
        ("stock shim", lambda: _stock_shim(daemon, config)),
        ("diffs", lambda: _diffs(daemon)),
        ("runc", _runc),
        ("CRIU", lambda: _criu(config)),
        ("kernel", _kernel),
        ("overlay", _overlay),
        ("huge pages", _huge_pages),
        ("io_uring", _io_uring),
        ("GPU", lambda: _gpu(config)),
        ("weights", lambda: _weights(config)),
        ("room", lambda: _room(daemon, directories)),
        ("lock rules", _lock_rules),
        ("network namespaces", _network_namespaces),
        ("running shims", _running_shims),
        ("operator's command", _library),
    ]
    for name, look in looks:
        try:
            yield from look()
        except (OSError, ShimError, ValueError) as error:
            yield Line("problem", name, f"could not be looked at: {error}")


def _present(path: str) -> str:
    return "is in order" if os.path.exists(path) else "is not there: every setting has its default"


# containerd -------------------------------------------------------------------------------------------------------


class Containerd:
    """A running containerd: its pid, its program, its search path for shims, its configuration file."""

    def __init__(self, pid: int, program: str, path: str, config: str) -> None:
        self.pid = pid
        self.program = program
        self.path = path
        self.config = config

    @classmethod
    def find(cls, address: str) -> Containerd | None:
        """The containerd that listens at `address`, or None when there is none."""
        import _socket
        import struct

        from shim.client import connect

        try:
            sock = connect(address)
        except OSError:
            return None
        try:
            # socket(7), SO_PEERCRED of a listener: who called listen(2)
            pid = struct.unpack("iII", sock.getsockopt(_socket.SOL_SOCKET, 17, 12))[0]
        finally:
            sock.close()
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
            program = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            return None
        return cls(pid, program, environment.get(b"PATH", b"").decode() or os.defpath, _config_file(words))

    def executable(self, name: str) -> str | None:
        """A program where this containerd looks for it."""
        for folder in self.path.split(":"):
            if folder and os.access(f"{folder}/{name}", os.X_OK):
                return f"{folder}/{name}"
        return None


def _config_file(words: list[str]) -> str:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("-c", "--config", "-config"):
            return value if equals else words[at + 1]
    return "/etc/containerd/config.toml"


def _containerd(daemon: Containerd | None, address: str) -> Iterator[Line]:
    if daemon is None:
        import shutil

        start = "systemctl start containerd"
        if shutil.which("containerd") is None:
            start = f"install containerd {OLDEST_CONTAINERD} or newer (there is none on PATH)"
        yield Line("problem", "containerd", f"none listens at {address}", f"{start}, or name its socket with --address")
        return
    version = host.program_version(daemon.program) or "of unknown version"
    if host.older(version, OLDEST_CONTAINERD, 2):
        fix = f"install containerd {OLDEST_CONTAINERD} or newer"
        yield Line("problem", "containerd", f"{version} is too old for a shim of this kind", fix)
    else:
        yield Line("ok", "containerd", f"{version}, process {daemon.pid}, listens at {address}")


def _runtime(daemon: Containerd | None) -> Iterator[Line]:
    if daemon is None:
        return
    shim = daemon.executable(SHIM)
    if shim is None:
        fix = "make install, or put a link to it into one of them"
        yield Line("problem", "runtime", f"{SHIM} is not on containerd's PATH ({daemon.path})", fix)
    else:
        yield Line("ok", "runtime", f"{RUNTIME} is {shim}")
    configured = _dumped(daemon)
    if configured is None:
        yield Line("warning", "containerd's configuration", "`containerd config dump` fails, so it cannot be looked at")
        return
    if "io.containerd.grpc.v1.cri" in _disabled(configured) or "io.containerd.cri.v1.runtime" in _disabled(configured):
        yield Line("ok", "runtime class", "the CRI plugin is disabled: ctr and nerdctl name the runtime themselves")
    elif RUNTIME not in configured:
        version = 3 if "io.containerd.cri.v1.runtime" in configured else 2
        yield Line(
            "warning",
            "runtime class",
            "containerd's configuration names no runtime of fermata's, so the kubelet cannot use it",
            f"add what packaging/containerd/fermata-v{version}.toml has to {daemon.config}, then systemctl restart "
            "containerd",
        )
    elif "fermata/" not in configured:
        yield Line(
            "warning",
            "runtime class",
            "containerd lets no annotation of a pod through to fermata, so a pod cannot be restored by one",
            "set pod_annotations and container_annotations of the runtime to ['fermata/*'], then systemctl restart "
            "containerd",
        )
    else:
        where = _files_naming_the_runtime(daemon.config)
        yield Line("ok", "runtime class", f"configured in {', '.join(where) or daemon.config}")
        yield from _cgroup_driver(configured)


def _cgroup_driver(configured: str) -> Iterator[Line]:
    """Whether our runtimes make control groups as the node's default one does, which is as the kubelet does."""
    runtimes = _runtimes(configured)
    default = runtimes.get("runc", {}).get("SystemdCgroup", "false")
    for name, keys in runtimes.items():
        ours = keys.get("runtime_type") == RUNTIME or keys.get("runtime_path", "").endswith(f"/{SHIM}")
        if ours and keys.get("SystemdCgroup", "false") != default:
            yield Line(
                "problem",
                "cgroup driver",
                f"the runtime {name} has SystemdCgroup = {keys.get('SystemdCgroup', 'false')}, the runtime runc has "
                f"{default}: the pods' limits would not hold",
                f"set SystemdCgroup = {default} in the options of the runtime {name}, then systemctl restart "
                "containerd",
            )


def _runtimes(configured: str) -> dict[str, dict[str, str]]:
    """The CRI plugin's runtimes in containerd's whole configuration, each with its keys and those of its options."""
    import re

    found: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for line in configured.splitlines():
        if line.lstrip().startswith("["):
            table = re.search(r"\.containerd\.runtimes\.['\"]?([\w-]+)['\"]?(?:\.options)?\]", line)
            keys = found.setdefault(table[1], {}) if table else {}
        key, equals, value = line.partition("=")
        if equals:
            keys[key.strip()] = value.strip().strip("'\"")
    return found


def _dumped(daemon: Containerd) -> str | None:
    """containerd's configuration with all its imports. None when it does not tell."""
    import subprocess

    command = [daemon.program, "--config", daemon.config, "config", "dump"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _diffs(daemon: Containerd | None) -> Iterator[Line]:
    from differ.check import check

    found = check(_dumped(daemon) if daemon else None)
    yield Line(found.level, "diffs", found.text, found.fix)


def _disabled(configured: str) -> str:
    _, found, rest = configured.partition("disabled_plugins")
    return rest.partition("]")[0] if found else ""


def _files_naming_the_runtime(config: str) -> list[str]:
    found = []
    folder = os.path.dirname(config)
    for path in (config, *sorted(glob.glob(f"{folder}/conf.d/*.toml")), *sorted(glob.glob(f"{folder}/*.d/*.toml"))):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                if RUNTIME in file.read() and path not in found:
                    found.append(path)
        except OSError:
            continue
    return found


def _stock_shim(daemon: Containerd | None, config: Config) -> Iterator[Line]:
    from shim import stock

    os.environ.setdefault("PATH", os.defpath)
    try:
        path = stock.find(config.stock_shim, daemon.program if daemon else None)
    except ShimError as error:
        yield Line("problem", "stock shim", str(error))
    else:
        yield Line("ok", "stock shim", path)


# What runs and dumps ----------------------------------------------------------------------------------------------


def _runc() -> Iterator[Line]:
    version = host.program_version("runc")
    if version is None:
        yield Line("problem", "runc", "there is none on PATH", "install the package runc")
    elif host.older(version, OLDEST_RUNC, 2):
        fix = f"install runc {OLDEST_RUNC} or newer"
        yield Line("problem", "runc", f"{version} passes no configuration on to CRIU", fix)
    else:
        yield Line("ok", "runc", version)


def _criu(config: Config) -> Iterator[Line]:
    import subprocess

    from shim import criu

    try:
        installed = criu.installed(config)
    except ShimError as error:
        # Whoever installs one now should not have to install a newer one next.
        fix = "install CRIU 4.2 or newer: an older one cannot dump an internet socket on this kernel"
        enough = dumps_internet_sockets((4, 0), os.uname().release)
        yield Line("problem", "CRIU", str(error), None if enough else fix)
        return
    version = ".".join(map(str, installed.version))
    try:
        done = subprocess.run([installed.path, "check"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        yield Line("problem", "CRIU", f"`{installed.path} check` gave no answer in 60 s")
        return
    said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    if done.returncode == 0 and not dumps_internet_sockets(installed.version, os.uname().release):
        # `criu check` looks at the kernel's features, and this is a change of one that it does not ask for.
        told = f"{version} cannot dump an internet socket on Linux {os.uname().release}, a listening server's say"
        yield Line("warning", "CRIU", told, "install CRIU 4.2 or newer")
    elif done.returncode == 0:
        yield Line("ok", "CRIU", f"{version}; `criu check`: {said[-1]}")
    else:
        errors = [line for line in said if "Error" in line] or said[-1:]
        fix = "install a newer CRIU, or a kernel with what it misses"
        yield Line("problem", "CRIU", f"{version}; `criu check` fails: {errors[0]}", fix)


def dumps_internet_sockets(criu: Sequence[int], kernel: str) -> bool:
    """Whether a CRIU can dump an internet socket: Linux 6.16 refuses options of it that CRIU before 4.2 asks for."""
    numbers = [int(word) for word in kernel.split("-", maxsplit=1)[0].split(".")[:2] if word.isdigit()]
    return numbers < [6, 16] or tuple(criu) >= (4, 2)


def _kernel() -> Iterator[Line]:
    with open("/proc/filesystems") as file:
        known = file.read().split()
    if "overlay" in known:
        yield Line("ok", "kernel", f"{host.kernel()} on {host.machine()}, cgroup v{host.cgroup_version()}")
    else:
        yield Line("problem", "kernel", f"{host.kernel()} has no overlayfs now", "modprobe overlay")


def _overlay(parameters: str = _PARAMETERS) -> Iterator[Line]:
    import layerwriter

    choice = layerwriter.choose(["upperdir=/", "workdir=/", "lowerdir=/"], parameters)
    if choice.made_by == "upperdir":
        yield Line("ok", "overlay", "the upper directory shows every change: layers are written from it alone")
        return
    wrong = [name for name in ("redirect_dir", "metacopy", "index", "nfs_export") if _is_on(f"{parameters}/{name}")]
    values = " ".join(f"{name}=N" for name in wrong)
    commands = "; ".join(f"echo N >{parameters}/{name}" for name in wrong)

    def mend() -> None:
        for name in wrong:
            _write(f"{parameters}/{name}", "N")

    yield Line(
        "warning",
        "overlay",
        f"layers are made by a comparison with the whole image: {choice.reason}",
        f"{commands} (for containers created from then on; to keep it: `options overlay {values}` in "
        "/etc/modprobe.d/overlay.conf)",
        mend=mend,
    )


def _is_on(path: str) -> bool:
    try:
        with open(path) as file:
            return file.read().strip() in ("Y", "y", "1")
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _huge_pages(path: str = _HUGE_PAGES, driver: Callable[[], bool] = node_has_driver) -> Iterator[Line]:
    try:
        with open(path) as file:
            chosen = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        yield Line("ok", "huge pages", "this kernel has no transparent ones")
        return
    if driver():
        # It moves GPU state into plain memory of the process, and page faults take most of that time (docs/gpu.md).
        if chosen == "always":
            yield Line("ok", "huge pages", "transparent ones are at `always`, which is best for GPU state")
            return
        yield Line(
            "warning",
            "huge pages",
            f"transparent ones are at `{chosen}`: moving GPU state takes 1.5 times as long as with `always`",
            f"echo always >{path}",
            mend=lambda: _write(path, "always"),
        )
        return
    if chosen != "always":
        yield Line("ok", "huge pages", f"transparent ones are at `{chosen}`")
        return
    yield Line(
        "warning",
        "huge pages",
        "transparent ones are at `always`: a restored process is filled in pages of 4 KiB and then collapsed again",
        f"echo madvise >{path}",
        mend=lambda: _write(path, "madvise"),
    )


def _io_uring(path: str = "/proc/sys/kernel/io_uring_disabled") -> Iterator[Line]:
    try:
        with open(path) as file:
            off = file.read().strip() == "2"
    except OSError:
        off = False  # kernels before 6.6 have no switch
    text = "is off on this node" if off else "is refused to containers of this runtime, since CRIU cannot dump it"
    yield Line("ok", "io_uring", f"{text} (annotation fermata/io-uring)")


def _gpu(config: Config) -> Iterator[Line]:
    from shim import gpu

    if not gpu.node_has_driver():
        yield Line("ok", "GPU", "no NVIDIA driver is loaded: there is no GPU state to move")
        return
    driver = gpu.Helper(config, initialise=False)
    try:
        if driver.missing:
            yield Line(
                "problem",
                "GPU",
                f"the NVIDIA driver {driver.version} lacks {', '.join(driver.missing)}",
                f"install driver {gpu.FIRST_DRIVER} or newer",
            )
            return
        models = [str(entry.get("model")) for entry in driver.call("inventory")["gpus"]]
        yield Line("ok", "GPU", f"{', '.join(models) or 'no GPU'}; driver {driver.version} can move their state")
    except ShimError as error:
        yield Line("problem", "GPU", str(error))
    finally:
        driver.end()


def _weights(config: Config) -> Iterator[Line]:
    """What is in the store of weights, if this node has one."""
    from shim import weights

    if not os.path.isdir(config.weights_directory):
        return
    store = weights.Store(config.weights_directory)
    sizes = {digest: store.size(digest) or 0 for digest in store.digests()}
    text = f"{weights.in_files([*sizes.values()])} in {store.directory}, on {store.kind or 'a disk'}"
    idle = [one for one in sizes if not store.references(one).keys() - store.stale(one, packed=False).keys()]
    left = [*(sizes[digest] for digest in idle), *(bytes_ for _, bytes_ in store.drafts())]
    if left:
        yield Line("warning", "weights", f"{text}; {size(sum(left))} of it no snapshot needs", "fermata prune")
    else:
        yield Line("ok", "weights", text)


# Room and leftovers -----------------------------------------------------------------------------------------------


def _room(daemon: Containerd | None, directories: list[str]) -> Iterator[Line]:
    places = [(path, "snapshots") for path in directories]
    places += [("/var/lib/containerd", "writable layers"), ("/var/log", "logs"), ("/run", "state")]
    for path, what in places:
        present = path
        while not os.path.exists(present):
            present = os.path.dirname(present) or "/"
        free, inodes = host.room(present)
        level = "ok" if free >= _LOW_DISK or what == "state" else "warning"
        fix = None if level == "ok" else f"make room on the file system of {present}"
        yield Line(level, "room", f"{size(free)} free for {what} in {path}", fix)
        if 0 <= inodes < 10000:
            yield Line("warning", "room", f"{inodes} inodes free for {what} in {path}", "remove files there")
    yield Line("ok", "memory", f"{size(host.memory_available())} available")


def _lock_rules() -> Iterator[Line]:
    from shim import lockrules

    found = []
    for path in lockrules.namespaces().values():
        try:
            found += lockrules.flush(path, dry_run=True).removed
        except ShimError as error:
            if os.path.exists(path):  # else it ended meanwhile, with whatever was in it
                yield Line("warning", "lock rules", f"{path} could not be searched: {error}")
    if not found:
        yield Line("ok", "lock rules", "none was left behind by a CRIU that died")
        return

    def mend() -> None:
        for path in lockrules.namespaces().values():
            try:
                lockrules.flush(path)
            except ShimError:
                if os.path.exists(path):
                    raise

    yield Line(
        "problem",
        "lock rules",
        f"a CRIU that died left {len(found)} behind, which drop what they lock: {host.listed(found, 3)}",
        "fermata flush-locks --all",
        mend=mend,
    )


def _network_namespaces() -> Iterator[Line]:
    from shim import netns

    kept = {path for namespace, name in _containers() for path in netns.ours(namespace, name)}
    stale = [path for path in netns.ours() if path not in kept]
    if not stale:
        yield Line("ok", "network namespaces", "none was left behind by a container that is gone")
        return

    def mend() -> None:
        for path in stale:
            netns.remove(path)

    yield Line(
        "warning",
        "network namespaces",
        f"{len(stale)} belong to no container any more: {host.listed(stale, 3)}",
        "fermata doctor --fix",
        mend=mend,
    )


def _containers() -> list[tuple[str, str]]:
    """(namespace, id) of each container that has a state directory here."""
    from shim.state import RUN

    found = []
    for path in glob.glob(f"{RUN}/*/*/"):
        namespace, name = path.rstrip("/").split("/")[-2:]
        found.append((namespace, name))
    return found


def _running_shims(proc: str = "/proc") -> Iterator[Line]:
    """How many shims run, and of which version: each keeps the library that it holds open, replaced or not."""
    running = former = 0
    for folder in glob.glob(f"{proc}/[0-9]*"):
        try:
            with open(f"{folder}/cmdline", "rb") as file:
                words = file.read().split(b"\0")[:4]
            if not any(word.endswith(f"/shim/{SHIM}".encode()) for word in words):
                continue
            held = [os.readlink(link) for link in glob.glob(f"{folder}/fd/*")]
        except OSError:  # it has ended
            continue
        running += 1
        former += any("/__pycache__/library." in target and target.endswith(" (deleted)") for target in held)
    if running:
        more = f", {former} of them of an earlier version, which their containers keep until they end" if former else ""
        yield Line("ok", "running shims", f"{running}{more}")


def _library() -> Iterator[Line]:
    from shim import grpcio

    try:
        grpcio.load()
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        yield Line(
            "warning",
            "operator's command",
            f"{'grpcio is not installed' if missing else error}: `fermata checkpoint`, `restore` and "
            "`check --container` need it, nothing else does",
            "install the package python3-grpcio, or pip install fermata[cli]"
            if missing
            else "pip install fermata[cli]",
        )
        return
    yield Line("ok", "operator's command", "grpcio is installed")
