"""Changes to a container's specification that make it possible to take a snapshot of it.

Each can be switched off by an annotation, and what was done is listed, so that `fermata inspect` can show it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GUEST = "fermata/guest"
IO_URING = "fermata/io-uring"
VLLM_WORKERS = "fermata/vllm-workers"
SHM = "fermata/shm"

VALUES: dict[str, tuple[str, ...]] = {
    IO_URING: ("refuse", "allow"),
    VLLM_WORKERS: ("spawn", "keep"),
    SHM: ("own", "pod"),
    GUEST: ("off", "on"),
}
"""The annotations that switch the edits, with the values that they may have; the first is the default."""

CHANNEL = "/run/fermata"
"""In a container with GUEST on: the directory for the sockets of its programs, a tmpfs of its own."""

_CRI_TYPE = "io.kubernetes.cri.container-type"
_SHM_PATH = "/dev/shm"

_IO_URING_CALLS = ("io_uring_setup", "io_uring_enter", "io_uring_register")
# The answer of a kernel without io_uring. Programs and libraries that use it (libuv, liburing's users, databases) meet
# that in the field and go on with epoll or aio, while some take EPERM for a mistake of the operator and stop.
_ENOSYS = 38

# Actions of seccomp that let a system call happen. What refuses it already (ERRNO, KILL, TRAP) or asks somebody else
# (TRACE, NOTIFY) is the profile's own decision and stays.
_LETS_HAPPEN = frozenset(("SCMP_ACT_ALLOW", "SCMP_ACT_LOG"))

# The architectures whose system calls a machine takes. libseccomp kills on a call of one that is not in the profile, so
# a profile for one alone would end 32 bit programs.
_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
    "ppc64le": ["SCMP_ARCH_PPC64LE"],
    "riscv64": ["SCMP_ARCH_RISCV64"],
    "s390x": ["SCMP_ARCH_S390X", "SCMP_ARCH_S390"],
}


class Edit:
    """One change: the name of the annotation that switches it, and what was done, for a person."""

    __slots__ = ("annotation", "text")

    def __init__(self, annotation: str, text: str) -> None:
        self.annotation = annotation
        self.text = text

    def __repr__(self) -> str:
        return f"Edit({self.annotation!r}, {self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and (self.annotation, self.text) == (other.annotation, other.text)

    __hash__ = None  # type: ignore[assignment]


def apply(spec: dict[str, Any], *, machine: str | None = None) -> list[Edit]:
    """Change the OCI runtime specification `spec` in place. Returns what was changed; nothing the second time.

    machine: the machine's architecture as uname(2) has it, by default this one's.
    """
    annotations = spec.get("annotations") or {}
    edits = []
    if annotations.get(IO_URING, "refuse") == "refuse":
        text = _refuse_io_uring(spec, machine or os.uname().machine)
        if text is not None:
            edits.append(Edit(IO_URING, text))
    if annotations.get(VLLM_WORKERS, "spawn") == "spawn":
        text = _spawn_vllm_workers(spec)
        if text is not None:
            edits.append(Edit(VLLM_WORKERS, text))
    if annotations.get(SHM, "own") == "own" and annotations.get(_CRI_TYPE) == "container":
        text = _own_shared_memory(spec)
        if text is not None:
            edits.append(Edit(SHM, text))
    if annotations.get(GUEST, "off") == "on":
        text = add_channel(spec)
        if text is not None:
            edits.append(Edit(GUEST, text))
    return edits


def mounts_as_given(original: dict[str, Any], edited: dict[str, Any]) -> list[dict[str, Any]]:
    """The mounts of a specification as the client gave them, but those whose type `apply` has changed since, and with
    what it has added at the end."""
    before, after = original.get("mounts") or [], edited.get("mounts") or []
    given = [new if new.get("type") != old.get("type") else old for old, new in zip(before, after, strict=False)]
    return [*given, *after[len(before) :]]


def add_channel(spec: dict[str, Any]) -> str | None:
    """Mount the directory for the sockets of the container's programs; None when it is there already.

    Small, so that what a container puts there costs the node nothing. Raises ShimError when the place is taken.
    """
    mounts = spec.get("mounts") or []
    for mount in mounts:
        if os.path.normpath(str(mount.get("destination"))) == CHANNEL:
            if mount.get("type") == "tmpfs":
                return None
            from shim.errors import INVALID_ARGUMENT, ShimError

            raise ShimError(
                f"the annotation {GUEST} needs {CHANNEL} in the container for itself, and {mount.get('source')} is "
                "mounted there: mount that somewhere else",
                INVALID_ARGUMENT,
            )
    options = ["nosuid", "noexec", "nodev", "mode=1777", "size=1m", "nr_inodes=1024"]
    mount = {"destination": CHANNEL, "type": "tmpfs", "source": "fermata", "options": options}
    spec["mounts"] = [*mounts, mount]
    return f"{CHANNEL} is a tmpfs for the sockets of programs that keep their weights out of a snapshot"


def _own_shared_memory(spec: dict[str, Any]) -> str | None:
    """A container of a pod gets a /dev/shm of its own, of the size of the pod's.

    The pod's is a tmpfs that its first container holds, bind-mounted: to CRIU a file system of somebody else's, whose
    files it expects to find again. They end with the pod, and with them every POSIX semaphore and shared tensor. A
    tmpfs of the container's own is dumped with it. An emptyDir in memory, which is how a pod gets a larger one, is the
    same.
    """
    for mount in spec.get("mounts") or []:
        source = str(mount.get("source"))
        # The node's own (hostIPC) is shared with processes outside the pod on purpose.
        if mount.get("destination") != _SHM_PATH or mount.get("type") != "bind" or source == _SHM_PATH:
            continue
        size = _size_of_tmpfs(source)
        if size is None:
            return None
        mount.update(type="tmpfs", source="shm", options=["nosuid", "noexec", "nodev", "mode=1777", f"size={size}k"])
        return f"{_SHM_PATH} is the container's own, not the pod's"
    return None


def _size_of_tmpfs(path: str) -> int | None:
    """The size in KiB of the tmpfs that `path` is the root of; None when it is no such thing."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            # proc_pid_mountinfo(5): field 5 is the mount point; the type comes after a hyphen.
            kinds = [line.partition(" - ")[2].split()[0] for line in file if line.split()[4] == os.path.realpath(path)]
        if kinds[-1:] != ["tmpfs"]:
            return None
        status = os.statvfs(path)
    except OSError:
        return None  # runc says what it thinks of such a source
    return status.f_blocks * status.f_frsize >> 10


def _refuse_io_uring(spec: dict[str, Any], machine: str) -> str | None:
    """io_uring is refused: CRIU can save neither its rings nor even take over its descriptors."""
    linux = spec.get("linux")
    if not isinstance(linux, dict):
        return None
    rule = {"names": list(_IO_URING_CALLS), "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS}
    profile = linux.get("seccomp")
    if not profile:
        architectures = _ARCHITECTURES.get(machine)
        if architectures is None:
            return None
        linux["seccomp"] = {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": list(architectures),
            "syscalls": [rule],
        }
        return "io_uring answers ENOSYS, by a seccomp profile that allows all else"
    return _refuse_in_profile(profile, rule)


def _refuse_in_profile(profile: dict[str, Any], rule: dict[str, Any]) -> str | None:
    """Put a rule for the calls that the profile lets happen before all others.

    With runc and libseccomp, of two rules without conditions for one call the first one counts, and one without
    conditions counts over every one that has some (tried with runc 1.1 and 1.4). So nothing of the profile is taken
    out.
    """
    names = [name for name in rule["names"] if _happens(profile, name)]
    if not names:
        return None
    profile["syscalls"] = [{**rule, "names": names}, *(profile.get("syscalls") or [])]
    return "io_uring answers ENOSYS, by a rule in the container's seccomp profile"


def _happens(profile: dict[str, Any], name: str) -> bool:
    """Whether the profile lets the system call `name` happen, be it for some arguments only."""
    rules = [rule for rule in profile.get("syscalls") or [] if name in (rule.get("names") or [])]
    for rule in rules:
        if not rule.get("args"):
            return rule.get("action") in _LETS_HAPPEN
    actions = [rule.get("action") for rule in rules]
    return any(action in _LETS_HAPPEN for action in (*actions, profile.get("defaultAction")))


def _spawn_vllm_workers(spec: dict[str, Any]) -> str | None:
    """vLLM forks its workers unless told otherwise, and a forked CUDA process keeps /dev/nvidiactl open."""
    process = spec.get("process")
    if not isinstance(process, dict):
        return None
    environment = process.get("env") or []
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    if any(str(each).split("=", 1)[0] == name for each in environment):
        return None
    process["env"] = [*environment, f"{name}=spawn"]
    return f"{name}=spawn in the environment"
