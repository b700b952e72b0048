"""This node, as far as a restore depends on it: processor, kernel, control groups, runc, memory."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Extensions of the instruction set that user space sees, among the flags of /proc/cpuinfo. The C library and numeric
# libraries choose their routines at a program's start by what the processor has, so all of them count as used.
_X86 = [
    "3dnow",
    "adx",
    "aes",
    "amx",
    "avx",
    "bmi",
    "cldemote",
    "clflushopt",
    "clwb",
    "clzero",
    "cmov",
    "cmpccxadd",
    "cx16",
    "cx8",
    "enqcmd",
    "erms",
    "f16c",
    "fma",
    "fsgsbase",
    "fsrm",
    "fxsr",
    "gfni",
    "kl",
    "lzcnt",
    "abm",
    "mmx",
    "movbe",
    "movdir64b",
    "movdiri",
    "mpx",
    "pclmulqdq",
    "pku",
    "ospke",
    "popcnt",
    "prefetchi",
    "rdpid",
    "rdrand",
    "rdseed",
    "rtm",
    "serialize",
    "sha",
    "sm3",
    "sm4",
    "sse",
    "ssse3",
    "syscall",
    "rdtscp",
    "tsxldtrk",
    "umip",
    "vaes",
    "vpclmulqdq",
    "waitpkg",
    "wbnoinvd",
    "widekl",
    "xop",
    "xsave",
    "xsavec",
    "xsaveopt",
    "xgetbv1",
]
_X86_FAMILIES = ("amx_", "avx", "sse", "sha", "fma", "bmi", "kl", "aes")


def cpu_features(cpuinfo: str = "/proc/cpuinfo") -> list[str]:
    """The processor's features that a program may have come to rely on, sorted."""
    with open(cpuinfo, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            name = name.strip()
            if name == "Features":  # arm64: all of them are instruction set extensions
                return sorted(set(value.split()))
            if name == "flags":
                return sorted(flag for flag in set(value.split()) if flag in _X86 or flag.startswith(_X86_FAMILIES))
    return []


def machine() -> str:
    """The processor's architecture, such as x86_64."""
    return os.uname().machine


def kernel() -> str:
    """The kernel's release."""
    return os.uname().release


def cgroup_version() -> int:
    """1 or 2: which control groups this node's containers live in."""
    return 2 if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else 1


def memory_available() -> int:
    """Bytes that programs can still take without swapping (MemAvailable)."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def room(path: str) -> tuple[int, int]:
    """(bytes, inodes) that the file system of `path` still has; inodes are -1 where it does not count them."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else -1


def program_version(name: str, *, cache: str = "/run/fermata") -> str | None:
    """The version that a program (runc, containerd) tells, or None when there is none that answers.

    Kept by the binary's identity, since asking takes 15 to 40 ms.
    """
    from shim.config import executable

    path = executable(name)
    if path is None:
        return None
    status = os.stat(path)
    identity = f"{status.st_dev:x}-{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    kept = f"{cache}/version-{os.path.basename(path)}-{identity}"
    try:
        with open(kept, encoding="utf-8") as file:
            return file.read() or None
    except OSError:
        pass
    version = _ask(path)
    if version is not None:
        try:
            os.makedirs(cache, mode=0o700, exist_ok=True)
            with open(f"{kept}.{os.getpid()}", "w", encoding="utf-8") as file:
                file.write(version)
            os.rename(f"{kept}.{os.getpid()}", kept)
        except OSError:
            pass  # asked again the next time
    return version


def _ask(path: str) -> str | None:
    import subprocess

    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((word for word in done.stdout.split() if word.lstrip("v")[:1].isdigit() and "." in word), None)


def numbers(version: str) -> tuple[int, ...]:
    """The leading dotted numbers of a version, such as (6, 18, 44) of 6.18.44-generic."""
    out: list[int] = []
    for part in version.split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        out.append(int(digits))
        if digits != part:
            break
    return tuple(out)


def older(here: str, there: str, places: int = 3) -> bool:
    """Whether version `here` is older than `there`, by so many of its numbers; unknown ones are not."""
    ours, theirs = numbers(here)[:places], numbers(there)[:places]
    return bool(ours and theirs) and ours < theirs


def size(count: float) -> str:
    """Bytes for a person: 512 B, 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def listed(words: Iterable[str], limit: int = 8) -> str:
    """Words joined by commas, the first few of many."""
    found = list(words)
    more = len(found) - limit
    return ", ".join(found[:limit]) + (f" and {more} more" if more > 0 else "")
