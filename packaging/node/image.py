"""OCI images without a registry: a root file system wrapped into an OCI layout tar that ``ctr image import`` takes.

Formats: OCI image specification, image-layout.md, manifest.md and config.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from node import stack
from node.errors import NodeError

TEST_IMAGE = "fermata-test:latest"
# The annotation from which containerd takes a name when it imports an OCI layout.
NAME_KEY = "io.containerd.image.name"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
CONFIG = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/sh"]}
# Of a stack's root, what a container has no use for.
NOT_IN_IMAGE = (
    *("containerd", "runc", "criu", "libcriu2", "iptables", "nftables", "libnftables1", "iproute2"),
    *("containernetworking-plugins", "checkpointctl", "apt", "libapt-pkg*", "perl-base"),
)
NOT_COPIED = ("proc", "sys", "dev", "run", "tmp", "boot", "var/lib/apt", "var/cache", "var/log", "var/lib/dpkg")
# The programs that an image made from the host's own files holds.
HOST_PROGRAMS = (
    *("sh", "true", "false", "cat", "ls", "sleep", "mkdir", "rm", "mv", "cp", "ln", "stat", "id", "env", "touch"),
    *("head", "tail", "wc", "kill", "ps"),
)


def write(layer: Path, out: Path, name: str, config: dict[str, Any] | None = None) -> Path:
    """Wrap ``layer``, an uncompressed tar, into the OCI layout tar ``out``, as image ``name``."""
    digest, size = _digest(layer)
    machine = platform.machine()
    image = _json(
        {
            "architecture": ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {**CONFIG, **(config or {})},
            "rootfs": {"type": "layers", "diff_ids": [digest]},
        }
    )
    prefix = "application/vnd.oci.image"
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{prefix}.manifest.v1+json",
            "config": _descriptor(f"{prefix}.config.v1+json", image),
            "layers": [{"mediaType": f"{prefix}.layer.v1.tar", "digest": digest, "size": size}],
        }
    )
    full = name if "/" in name else f"docker.io/library/{name}"
    entry = {**_descriptor(f"{prefix}.manifest.v1+json", manifest), "annotations": {NAME_KEY: full}}
    part = out.with_name(f"{out.name}.part")
    with tarfile.open(part, "w") as tar:
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (image, manifest):
            _add(tar, _blob(f"sha256:{hashlib.sha256(blob).hexdigest()}"), blob)
        with layer.open("rb") as file:
            header = tarfile.TarInfo(_blob(digest))
            header.size = size
            tar.addfile(header, file)
    part.rename(out)
    return out


def name_in(archive: Path) -> str:
    """The name that an image of an OCI layout tar has once imported."""
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name == "index.json" else None
            if file:
                return str(json.load(file)["manifests"][0]["annotations"][NAME_KEY])
    raise NodeError(f"{archive} is no OCI layout: it has no index.json")


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    tar.addfile(header, io.BytesIO(data))


def _digest(path: Path) -> tuple[str, int]:
    made, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            made.update(block)
            size += len(block)
    return f"sha256:{made.hexdigest()}", size


def from_directory(root: Path, out: Path, name: str, exclude: Sequence[str] = (), config: Any = None) -> Path:
    """Make an image of a directory, without the paths in ``exclude`` (relative to it) and what is below them."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        layer = Path(scratch, "layer.tar")
        pack_directory(root, layer, exclude)
        return write(layer, out, name, config)


def from_tar(layer: Path, out: Path, name: str, config: Any = None) -> Path:
    """Make an image of an uncompressed tar of a root file system."""
    return write(layer, out, name, config)


def pack_directory(root: Path, out: Path, exclude: Sequence[str] = ()) -> None:
    listed = out.with_name("exclude")
    listed.write_text("".join(f"./{path}\n" for path in exclude))
    argv = ["tar", "-C", str(root), "--numeric-owner", "--sort=name", "--xattrs", "--xattrs-include=*"]
    argv += ["--anchored", "--no-wildcards", f"--exclude-from={listed}", "-cf", str(out), "."]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise NodeError(f"could not pack {root}: {done.stderr[-1000:]}")


def test_image(stack_name: str, root: Path) -> Path:
    """The OCI layout tar of ``fermata-test:latest`` for a stack, made once: python3, a shell and the usual programs."""
    key = hashlib.sha256(f"{root} {NOT_IN_IMAGE} {NOT_COPIED} {HOST_PROGRAMS}".encode()).hexdigest()[:12]
    out = stack.cache() / "image" / f"fermata-test-{stack_name}-{key}.tar"
    if out.exists():
        return out
    with stack.locked(out.with_name("image.lock")):
        if out.exists():
            return out
        for old in out.parent.glob(f"fermata-test-{stack_name}-*.tar"):
            old.unlink()
        if stack_name != "host":
            return from_directory(root, out, TEST_IMAGE, list(_not_in_image(root)))
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            copied = Path(scratch, "root")
            _copy_host(copied)
            return from_directory(copied, out, TEST_IMAGE)


def _not_in_image(root: Path) -> Iterator[str]:
    for emptied in NOT_COPIED:
        # The directory stays, as a place to mount on.
        yield from (f"{emptied}/{entry.name}" for entry in (root / emptied).glob("*"))
    info = root / "var/lib/dpkg/info"
    for package in NOT_IN_IMAGE:
        for listed in (*info.glob(f"{package}.list"), *info.glob(f"{package}:*.list")):
            for line in listed.read_text().splitlines():
                path = root / line.lstrip("/")
                if path.is_symlink() or not path.is_dir():
                    yield line.lstrip("/")


def _copy_host(to: Path) -> None:
    """A small root from the host's own files: python3 with its standard library, a few programs, what they link to."""
    for made in ("proc", "sys", "dev", "run", "tmp", "etc", "root", "var/tmp", "usr/bin", "usr/lib"):
        (to / made).mkdir(parents=True, exist_ok=True)
    (to / "tmp").chmod(0o1777)
    for top in ("bin", "lib", "lib64", "sbin"):
        host = Path("/", top)
        if host.is_symlink():
            (to / top).symlink_to(host.readlink())
            (to / "usr" / top).mkdir(parents=True, exist_ok=True)
    (to / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (to / "etc/group").write_text("root:x:0:\n")
    python = Path(shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or "")
    if not python.is_file():
        raise NodeError("this machine has no python3 of its own to put into the test image: use --stack trixie")
    said = subprocess.run(
        [
            str(python),
            "-I",
            "-c",
            "import sysconfig as s; print(s.get_path('stdlib')); print(s.get_path('platstdlib'))",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    linked = [python]
    unwanted = shutil.ignore_patterns("test", "tests", "idlelib", "site-packages", "dist-packages", "config-*")
    for library in {Path(line) for line in said.stdout.splitlines()}:
        shutil.copytree(library, to / str(library).lstrip("/"), symlinks=True, ignore=unwanted, dirs_exist_ok=True)
        linked += library.glob("lib-dynload/*.so")
    linked += [Path(found) for found in map(shutil.which, HOST_PROGRAMS) if found]
    for path in linked:
        _copy_file(path, to)
    listed = subprocess.run(["ldd", *map(str, linked)], capture_output=True, text=True, timeout=60, check=False).stdout
    for found in sorted(set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listed, re.MULTILINE))):
        _copy_file(Path(found), to)


def _copy_file(path: Path, to: Path) -> None:
    """Copy a file to its own name, which may lead through links, so that it is found by that name again."""
    target = to / str(path.parent.resolve()).lstrip("/") / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(path, target)


def synthetic(
    out: Path, name: str, entries: int, *, per_directory: int = 100, size: int = 64, base: Path | None = None
) -> Path:
    """Make an image of ``entries`` generated files and directories, files of ``size`` bytes, for benchmarks.

    ``base`` is an uncompressed tar whose entries come first, such as the test image's layer (see ``layer_of``).
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        layer = Path(scratch, "layer.tar")
        if base:
            shutil.copyfile(base, layer)
        with tarfile.open(layer, "a" if base else "w", format=tarfile.GNU_FORMAT) as tar:
            _generate(tar, entries, per_directory, size)
        return write(layer, out, name)


def _generate(tar: tarfile.TarFile, entries: int, per_directory: int, size: int) -> None:
    header = tarfile.TarInfo("data")
    header.type, header.mode = tarfile.DIRTYPE, 0o755
    tar.addfile(header)
    directory = "data"
    for number in range(entries - 1):
        if number % per_directory == 0:
            directory = f"data/d{number // per_directory:06}"
            header = tarfile.TarInfo(directory)
            header.type, header.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(header)
            continue
        header = tarfile.TarInfo(f"{directory}/f{number:07}")
        header.size = size
        tar.addfile(header, io.BytesIO(str(number).encode().ljust(size, b".")[:size]))


def layer_of(archive: Path, out: Path) -> Path:
    """Take the one layer out of an OCI layout tar made here."""
    with tarfile.open(archive) as tar:
        biggest = max(tar, key=lambda member: member.size)
        source = tar.extractfile(biggest)
        if source is None:
            raise NodeError(f"{archive} holds no layer")
        with source, out.open("wb") as target:
            _copy(source, target)
    return out


def _copy(source: Any, target: BinaryIO) -> None:
    shutil.copyfileobj(source, target, 1 << 20)
