"""What the memory in a snapshot's images belongs to: `python3 tests/gpu/contents.py SNAPSHOT`.

Field numbers: criu/images/mm.proto, vma.proto and pagemap.proto of CRIU 4.x.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from shim.images import FileEntry, PagemapEntry, entries
from shim.wire import Message

_HEAP, _FILE_PRIVATE, _ANON_SHARED, _ANON_PRIVATE = 1 << 5, 1 << 6, 1 << 8, 1 << 9


class Vma(Message):
    """A mapping."""

    FIELDS = {1: ("start", int), 2: ("end", int), 4: ("shmid", int), 5: ("prot", int), 7: ("status", int)}
    start: int
    end: int
    shmid: int
    prot: int
    status: int


class Mm(Message):
    """An address space."""

    FIELDS = {14: ("vmas", [Vma])}
    vmas: list[Vma]


class Run(Message):
    """A run of pages."""

    FIELDS = {1: ("address", int), **PagemapEntry.FIELDS}
    address: int
    few_pages: int
    in_parent: bool
    pages: int


def kind(vma: Vma, names: dict[int, str]) -> str:
    if vma.status & _HEAP:
        return "heap"
    if vma.status & _FILE_PRIVATE:
        return f"changed pages of {names.get(vma.shmid, 'a file')}"
    return "anonymous" if vma.status & _ANON_PRIVATE else "other"


def contents(directory: Path) -> dict[str, Any]:
    """Bytes of each process's private memory by kind, with its largest mappings; and the shared ones."""
    names = {entry.id: entry.reg.name for entry in entries(f"{directory}/files.img", FileEntry) if entry.reg}
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("pagemap-[0-9]*.img")):
        pid = path.stem.partition("-")[2]
        runs = [run for run in list(entries(str(path), Run))[1:] if not run.in_parent]
        mm = next(entries(f"{directory}/mm-{pid}.img", Mm))
        kinds: dict[str, int] = {}
        largest = []
        at = 0
        for vma in mm.vmas:
            inside = 0
            while at < len(runs) and runs[at].address < vma.end:  # both are in order, and a run may cross mappings
                end = runs[at].address + 4096 * (runs[at].pages or runs[at].few_pages)
                inside += max(0, min(end, vma.end) - max(runs[at].address, vma.start))
                if end > vma.end:
                    break
                at += 1
            if inside:
                what = kind(vma, names)
                kinds[what] = kinds.get(what, 0) + inside
                largest.append((inside, vma.end - vma.start, what, hex(vma.start)))
        largest.sort(reverse=True)
        found[pid] = {
            "bytes": sum(kinds.values()),
            "mappings": len(mm.vmas),
            "anonymous_of_at_most_64_mib": sum(
                inside for inside, size, what, _ in largest if what == "anonymous" and size <= 64 << 20
            ),
            "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])[:6]),
            "largest": [
                {"bytes": inside, "mapped": size, "kind": what, "at": where}
                for inside, size, what, where in largest[:16]
            ],
        }
    shared = {path.name: path.stat().st_size for path in directory.glob("pagemap-shmem-*.img")}
    return {"processes": found, "shared": shared}


if __name__ == "__main__":
    print(json.dumps(contents(Path(sys.argv[1])), indent=1))
