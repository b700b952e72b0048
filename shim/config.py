"""The node's configuration, /etc/fermata/config.toml. Every key has a default, so that no file is needed."""

from __future__ import annotations

import os

from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATH = "/etc/fermata/config.toml"


class Config:
    """Settings of a node."""

    def __init__(self) -> None:
        self.stock_shim: str | None = None
        """[shim] stock_shim: path of containerd-shim-runc-v2; by default beside containerd, else on PATH."""
        self.criu: str = "criu"
        """[criu] path: the CRIU that runc uses."""
        self.ghost_limit: int = 1 << 30
        """[criu] ghost_limit: bytes; the largest unlinked open file that a snapshot may carry."""
        self.criu_options: dict[str, Any] = {}
        """[criu.options]: more of CRIU's own options, by their long names; they win over fermata's."""
        self.layer_limit: int = 8 << 30
        """[layer] limit: bytes; a writable layer above it is refused before the container is touched."""
        self.layer_compression: str = "none"
        """[layer] compression: "none" or "zstd"."""
        self.gpu_libcuda: str | None = None
        """[gpu] libcuda: path of the NVIDIA driver's libcuda.so.1; by default where the dynamic linker has it, then
        where driver containers put it."""
        self.gpu_lock_timeout: int = 10
        """[gpu] lock_timeout: seconds to wait for a process's work on the GPU to end."""
        self.gpu_move_timeout: int = 600
        """[gpu] move_timeout: seconds after which a step that moves GPU state has failed."""


_KEYS: dict[str, dict[str, tuple[str, type]]] = {
    "shim": {"stock_shim": ("stock_shim", str)},
    "criu": {"path": ("criu", str), "ghost_limit": ("ghost_limit", int), "options": ("criu_options", dict)},
    "layer": {"limit": ("layer_limit", int), "compression": ("layer_compression", str)},
    "gpu": {
        "libcuda": ("gpu_libcuda", str),
        "lock_timeout": ("gpu_lock_timeout", int),
        "move_timeout": ("gpu_move_timeout", int),
    },
}


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
    for section, keys in _parse(path, data).items():
        if section not in _KEYS or not isinstance(keys, dict):
            raise ShimError(f"{path}: unknown section [{section}]; there are {', '.join(_KEYS)}", FAILED_PRECONDITION)
        for key, value in keys.items():
            if key not in _KEYS[section]:
                known = ", ".join(_KEYS[section])
                raise ShimError(f"{path}: unknown key {key} in [{section}]; there are {known}", FAILED_PRECONDITION)
            attribute, kind = _KEYS[section][key]
            if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
                raise ShimError(f"{path}: [{section}] {key} = {value!r} is no {kind.__name__}", FAILED_PRECONDITION)
            setattr(config, attribute, value)
    if config.layer_compression not in ("none", "zstd"):
        raise ShimError(
            f"{path}: [layer] compression = {config.layer_compression!r}; it can be none or zstd", FAILED_PRECONDITION
        )
    return config


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


def executable(name: str) -> str | None:
    """The path of a program by name or path, or None."""
    if "/" in name:
        return name if os.access(name, os.X_OK) else None
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        if folder and os.access(f"{folder}/{name}", os.X_OK):
            return f"{folder}/{name}"
    return None
