"""The image of a pod's first container, which holds the pod's namespaces and does nothing: a program of a few bytes.

containerd's CRI plugin runs it for every pod. Real clusters pull it from a registry; a node here has none.
Format: elf(5). The program has no libraries, so it is all that the image holds.
"""

from __future__ import annotations

import platform
import struct
import tempfile
from pathlib import Path

from node import image
from node.errors import NodeError

IMAGE = "fermata-pause:latest"
ADDRESS = 0x400000
HEADERS = 64 + 56  # one ELF header, one program header
# (e_machine, the program): wait for a signal, for ever.
PROGRAMS = {
    # mov eax, 34 (pause); syscall; jmp back
    "x86_64": (62, "b822000000 0f05 ebf7"),
    # mov x8, 73 (ppoll); mov x0..x3, 0; svc 0; b back
    "aarch64": (183, "280980d2 000080d2 010080d2 020080d2 030080d2 010000d4 faffff17"),
}


def program(machine: str) -> bytes:
    """A static executable for that machine. Raises NodeError for one that it has not been written for."""
    if machine not in PROGRAMS:
        raise NodeError(f"there is no pause program for {machine}: there are {', '.join(PROGRAMS)}")
    number, words = PROGRAMS[machine]
    code = bytes.fromhex(words)
    size = HEADERS + len(code)
    identification = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<HHIQQQIHHHHHH", 2, number, 1, ADDRESS + HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, ADDRESS, ADDRESS, size, size, 0x10000)
    return identification + header + segment + code


def write_image(out: Path) -> Path:
    """Write the image as an OCI layout tar."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        root = Path(scratch, "root")
        root.mkdir()
        executable = root / "pause"
        executable.write_bytes(program(platform.machine()))
        executable.chmod(0o755)
        return image.from_directory(root, out, IMAGE, config={"Entrypoint": ["/pause"], "Cmd": []})
