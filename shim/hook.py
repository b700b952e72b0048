"""CRIU's action script at the end of a dump: tells the shim that the tree is dumped and waits for the layer.

CRIU holds the processes until this program ends. Status 0: go on; any other makes CRIU take the dump back and let the
processes go on. CRIU runs it without arguments (its configuration file cannot write any), so the shim's socket is
found by the directory that the images go to. When the shim has died the connection ends, and the dump is taken back.

It is the installed version's, where a shim may be of an earlier one: its name and the two messages stay what they are.
"""

from __future__ import annotations

import os
import sys


def socket_path(images: str) -> str:
    """The socket of the take that writes into the directory `images`. Raises OSError if there is none."""
    status = os.stat(images)
    return f"/run/fermata/hook-{status.st_dev:x}-{status.st_ino:x}.sock"


def main() -> int:
    """Report and wait; 0 when the layer is written."""
    import _socket

    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        sock.connect(socket_path(os.environ["CRTOOLS_IMAGE_DIR"]))
        sock.sendall(b"post-dump\n")
        return 0 if sock.recv(64) == b"ok\n" else 1
    except (OSError, KeyError) as error:
        print(f"fermata: the shim cannot be reached after the dump: {error!r}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
