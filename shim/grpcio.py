"""gRPC for Python, where it is one that works."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


def load() -> ModuleType:
    """The module grpc. Raises ImportError when there is none, or one that never comes back from its first call."""
    import grpc

    if fault := broken(getattr(grpc, "__version__", ""), sys.version_info[:2]):
        raise ImportError(fault)
    module: ModuleType = grpc
    return module


def broken(version: str, python: tuple[int, ...]) -> str | None:
    """What is wrong with a version of grpcio on a version of Python, if anything.

    python3-grpcio 1.30.2 of Ubuntu 22.04 was compiled into a function that only jumps to itself (seen in its machine
    code: the first channel turns in it for ever). The same version works on Debian 11, with Python 3.9.
    """
    if version == "1.30.2" and python == (3, 10):
        return (
            "grpcio 1.30.2 of Ubuntu 22.04's package never comes back from its first call; put a newer one in its "
            "place: pip install 'grpcio>=1.48'"
        )
    return None
