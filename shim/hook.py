"""CRIU's action script at the end of a dump: tells the shim that the tree is dumped, and waits until the layer is
written.

CRIU holds the processes until this program ends. Status 0: go on; any other makes CRIU take the dump back and let the
processes go on. It is run as `python3 -I -S hook.py SOCKET` by CRIU, which is not our child, so the shim is reached
by a socket; when the shim has died the connection ends and the dump is taken back.
"""

from __future__ import annotations

import _socket
import sys

sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    sock.connect(sys.argv[1])
    sock.sendall(b"post-dump\n")
    answer = sock.recv(64)
except OSError as error:
    print(f"fermata: {sys.argv[1]}: {error}", file=sys.stderr)
    answer = b""
sys.exit(0 if answer == b"ok\n" else 1)
