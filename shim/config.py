"""The node's configuration, /etc/fermata/config.toml. Every key has a default, so that no file is needed."""

from __future__ import annotations

import os

from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATH = "/etc/fermata/config.toml"


class Setting:
    """One key of the configuration: where it stands, the attribute of Config that holds it, its default and its
    meaning.

    `choices` are the values that it can have; None for any of the default's type (text where there is no default).
    """

    __slots__ = ("attribute", "choices", "default", "key", "kind", "meaning", "section")

    def __init__(
        self,
        section: str,
        key: str,
        attribute: str,
        default: Any,
        meaning: str,
        *,
        choices: tuple[str, ...] | None = None,
    ) -> None:
        self.section = section
        self.key = key
        self.attribute = attribute
        self.default = default
        self.kind: type = str if default is None else type(default)
        self.meaning = meaning
        self.choices = choices


SETTINGS = (
    Setting(
        "shim",
        "stock_shim",
        "stock_shim",
        None,
        "Path of containerd-shim-runc-v2. By default it is looked for beside the containerd binary, then on PATH.",
    ),
    Setting("criu", "path", "criu", "criu", "The CRIU that runc uses, by name or by path."),
    Setting(
        "criu",
        "ghost_limit",
        "ghost_limit",
        1 << 30,
        "Bytes. The largest file without a name that a process holds open and that a snapshot may carry.",
    ),
    Setting(
        "criu",
        "restore_timeout",
        "restore_timeout",
        3600,
        "Seconds after which CRIU is ended when its part of a restore has not come to an end: there are images that it "
        "reads for ever. 0 for no limit.",
    ),
    Setting(
        "criu",
        "options",
        "criu_options",
        {},
        "A table of CRIU's own options by their long names, which win over fermata's: `true` sets an option, "
        "`false` its `no-` form, a number or text is its value, a list gives it once for each element. An option that "
        "the installed CRIU does not have is refused by name. A container's own `org.criu.config` wins over these.",
    ),
    Setting(
        "network",
        "old_address",
        "network_old_address",
        "bind",
        "What a restore does with a socket that is bound to an IP address which the new network namespace lacks, such "
        "as the old pod's: `bind` it all the same, or `refuse` the restore.",
        choices=("bind", "refuse"),
    ),
    Setting(
        "network",
        "outside",
        "network_outside",
        "reset",
        "What a restore does with a TCP connection whose other end is outside the container's network namespace: "
        "`reset` it, so that the program sees an error at once, or `keep` it, for an address that moved along.",
        choices=("reset", "keep"),
    ),
    Setting(
        "layer",
        "limit",
        "layer_limit",
        8 << 30,
        "Bytes of the uncompressed layer. A container whose writable layer has more is refused before it is touched.",
    ),
    Setting(
        "layer",
        "compression",
        "layer_compression",
        "none",
        "Uncompressed, a layer is written at the disk's speed. zstd needs the Python package zstandard (in Python 3.14 "
        "it is built in) and keeps the container frozen for longer.",
        choices=("none", "zstd"),
    ),
    Setting(
        "gpu",
        "libcuda",
        "gpu_libcuda",
        None,
        "Path of the NVIDIA driver's libcuda.so.1. By default it is where the dynamic linker has it, else where driver "
        "containers put it.",
    ),
    Setting(
        "gpu",
        "lock_timeout",
        "gpu_lock_timeout",
        10,
        "Seconds to wait for a process's work on the GPU to come to an end.",
    ),
    Setting(
        "gpu", "move_timeout", "gpu_move_timeout", 600, "Seconds after which a step that moves GPU state has failed."
    ),
    Setting(
        "weights",
        "directory",
        "weights_directory",
        "/var/lib/fermata/weights",
        "Absolute path of the directory for weights that programs keep out of their snapshots. On a disk they outlive "
        "a reboot; a directory on a tmpfs or a hugetlbfs is faster and costs memory: docs/weights.md has the prices.",
    ),
    Setting(
        "weights",
        "limit",
        "weights_limit",
        0,
        "Bytes that the directory may hold; 0 for what its file system holds. A take that would exceed it has the "
        "weights in its snapshot.",
    ),
    Setting(
        "weights",
        "timeout",
        "weights_timeout",
        300,
        "Seconds for a container's programs to bring what they are doing to an end and to write their weights before "
        "a dump, and again to read them after it or at a restore.",
    ),
    Setting(
        "weights",
        "read",
        "weights_read",
        "cached",
        "How weights are read from a disk: through the page cache (`cached`), which the next restore finds warm, or "
        "past it (`direct`), which keeps memory free.",
        choices=("cached", "direct"),
    ),
    Setting(
        "metrics",
        "textfile",
        "metrics_textfile",
        "/run/fermata-metrics/fermata.prom",
        "Path of the file with counts and times in Prometheus' text format, such as "
        "/var/lib/prometheus/node-exporter/fermata.prom, in a directory that is there; an empty text for none.",
    ),
)


class Config:
    """Settings of a node; each attribute is one of SETTINGS, at its default."""

    stock_shim: str | None
    criu: str
    ghost_limit: int
    restore_timeout: int
    criu_options: dict[str, Any]
    network_old_address: str
    network_outside: str
    layer_limit: int
    layer_compression: str
    gpu_libcuda: str | None
    gpu_lock_timeout: int
    gpu_move_timeout: int
    weights_directory: str
    weights_limit: int
    weights_timeout: int
    weights_read: str
    metrics_textfile: str

    def __init__(self) -> None:
        for setting in SETTINGS:
            setattr(self, setting.attribute, setting.default)


def load(path: str = PATH) -> Config:
    """Read the configuration. Raises ShimError that names a key or value which makes no sense."""
    config = Config()
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return config
    except OSError as error:
        raise ShimError(f"cannot read {path}: {error.strerror}", FAILED_PRECONDITION) from error
    known: dict[str, dict[str, Setting]] = {}
    for setting in SETTINGS:
        known.setdefault(setting.section, {})[setting.key] = setting
    for section, keys in _parse(path, data).items():
        if section not in known or not isinstance(keys, dict):
            raise ShimError(f"{path}: unknown section [{section}]; there are {', '.join(known)}", FAILED_PRECONDITION)
        for key, value in keys.items():
            if key not in known[section]:
                there = ", ".join(known[section])
                raise ShimError(f"{path}: unknown key {key} in [{section}]; there are {there}", FAILED_PRECONDITION)
            _check(path, known[section][key], value)
            setattr(config, known[section][key].attribute, value)
    return config


def _check(path: str, setting: Setting, value: Any) -> None:
    where = f"{path}: [{setting.section}] {setting.key} = {value!r}"
    if not isinstance(value, setting.kind) or isinstance(value, bool):
        expected = {str: "a text", int: "a whole number", dict: "a table"}[setting.kind]
        raise ShimError(f"{where}; it must be {expected}", FAILED_PRECONDITION)
    if isinstance(value, int) and value < 0:
        raise ShimError(f"{where}; it cannot be negative", FAILED_PRECONDITION)
    if setting.choices and value not in setting.choices:
        raise ShimError(f"{where}; it can be {' or '.join(setting.choices)}", FAILED_PRECONDITION)


def _parse(path: str, data: bytes) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError as error:
            message = f"{path} cannot be read with this Python: install python3-tomli, or Python 3.11 or newer"
            raise ShimError(message, FAILED_PRECONDITION) from error
    try:
        parsed: dict[str, Any] = tomllib.loads(data.decode())
        return parsed
    except ValueError as error:
        raise ShimError(f"{path}: {error}", FAILED_PRECONDITION) from error


def document() -> str:
    """The text of docs/config.md."""
    import textwrap

    lines = [
        "# Configuration of a node",
        "",
        f"fermata reads `{PATH}` when a container starts. Every key has a default, so no file is needed. A",
        "key or a value that makes no sense is refused by name, and the container with it.",
    ]
    section = ""
    for setting in SETTINGS:
        if setting.section != section:
            section = setting.section
            lines += ["", f"## [{section}]"]
        kind = {str: "text", int: "whole number", dict: "table"}[setting.kind]
        default = {None: "none", "": '""'}.get(setting.default, f"`{setting.default}`") if kind != "table" else "empty"
        values = f" ({' or '.join(f'`{choice}`' for choice in setting.choices)})" if setting.choices else ""
        lines += ["", f"`{setting.key}`: {kind}{values}, default {default}  "]
        lines += textwrap.wrap(setting.meaning, 116, break_long_words=False, break_on_hyphens=False)
    lines += [
        "",
        "## An example",
        "",
        "    [criu]",
        "    ghost_limit = 4294967296",
        "",
        "    [criu.options]",
        '    network-lock = "iptables"',
        "",
        "    [layer]",
        '    compression = "zstd"',
        "",
    ]
    return "\n".join(lines)


def executable(name: str) -> str | None:
    """The path of a program by name or path, or None."""
    if "/" in name:
        return name if os.access(name, os.X_OK) else None
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        if folder and os.access(f"{folder}/{name}", os.X_OK):
            return f"{folder}/{name}"
    return None


if __name__ == "__main__":
    print(document(), end="")
