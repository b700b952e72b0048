"""fermata's containerd shim: snapshots of running containers, restored into new ones.

Everything that a plain container's life touches is imported at the shim's start and is kept to built-in and cheap
modules: `python3 -I -S` starts in 9 ms, and `import typing` (15 ms), `dataclasses` (23 ms) or protobuf (20 ms) would
each be felt at every container's start. What only a snapshot needs is imported by the function that needs it.
"""

from __future__ import annotations

__version__ = "0.1.0"

RUNTIME = "io.containerd.fermata.v1"
"""The runtime's name; containerd makes the binary's name, `containerd-shim-fermata-v1`, from it."""
