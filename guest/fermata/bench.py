"""Measure how fast weights go out and come back on this machine: `python3 -m fermata.bench FILE`.

FILE is written with made-up weights (again with every call), and read back for each combination of the options that
take several values, separated by commas. Each line printed is a JSON object; rates are in 10^9 bytes a second.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import time
from typing import Any, Callable, Iterator

from . import crew, cuda, host
from .file import File
from .memory import Map, round_up
from .pack import CudaPart, HostPart, Pack

_LIMIT = 600.0  # seconds for one measurement


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m fermata.bench", description=__doc__)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu")
    parser.add_argument("--gib", type=float, default=4, help="size of the weights (default 4)")
    parser.add_argument("--tensor-mib", type=int, default=64, help="size of one tensor (default 64)")
    parser.add_argument("--threads", type=_numbers, default=[crew.default_size()])
    parser.add_argument("--buffer-mib", type=_numbers, default=[cuda.Options.buffer >> 20])
    parser.add_argument("--flight", type=_numbers, default=[cuda.Options.flight])
    parser.add_argument("--by", default="read", help="read, direct (O_DIRECT) or mmap")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--drop", action="store_true", help="drop FILE from the page cache before each trial")
    return parser.parse_args()


def _pack(arguments: argparse.Namespace) -> Pack:
    size, one = int(arguments.gib * (1 << 30)), arguments.tensor_mib << 20
    sizes = [min(one, size - start) for start in range(0, size, one)]
    if arguments.device == "cpu":
        maps = [Map(size) for size in sizes]
        return Pack("bench", "cpu", [HostPart(one.address, one.length, one, "bench") for one in maps])
    torch: Any = importlib.import_module("torch")
    made = torch.Generator(device=arguments.device).manual_seed(1)
    parts = []
    for size in sizes:
        tensor = torch.empty(size // 8, dtype=torch.int64, device=arguments.device)
        parts.append(CudaPart(tensor.random_(generator=made).untyped_storage(), tensor.numel() * 8, "bench"))
    return Pack("bench", arguments.device, parts)


def _timed(pack: Pack, what: dict[str, Any], work: Callable[[float], dict[str, float]]) -> None:
    began = time.monotonic()
    more = work(began + _LIMIT)
    seconds = time.monotonic() - began
    told = {key: round(value, 4) for key, value in more.items()}
    print(
        json.dumps({**what, "seconds": round(seconds, 4), "rate": round(pack.bytes / seconds / 1e9, 2), **told}),
        flush=True,
    )


class _Host:
    """Weights in the process's memory."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def digests(self, deadline: float) -> dict[str, float]:
        host.take_digests(self.pack, threads=crew.default_size(), deadline=deadline)
        return {}

    def write(self, file: File, deadline: float) -> dict[str, float]:
        host.write(self.pack, file, threads=crew.default_size(), deadline=deadline)
        return {}

    def release(self, deadline: float) -> dict[str, float]:
        host.release(self.pack, [])
        return {}

    def load(self, file: File, options: cuda.Options, deadline: float) -> dict[str, float]:
        host.load(self.pack, file, threads=options.crew, deadline=deadline)
        return {}


class _Gpu:
    """Weights on a GPU."""

    def __init__(self, pack: Pack) -> None:
        self.pairs = [(pack, cuda.Engine(pack.device))]

    def digests(self, deadline: float) -> dict[str, float]:
        cuda.Take(self.pairs, cuda.Options(), deadline).digests()
        return {}

    def write(self, file: File, deadline: float) -> dict[str, float]:
        cuda.Take(self.pairs, cuda.Options(), deadline).write([file])
        return {}

    def release(self, deadline: float) -> dict[str, float]:
        cuda.release(self.pairs, [])
        return {}

    def load(self, file: File, options: cuda.Options, deadline: float) -> dict[str, float]:
        load = cuda.Load([(*self.pairs[0], file)], options, deadline)
        load.go()
        load.finish()
        return load.seconds


def _options(arguments: argparse.Namespace) -> Iterator[tuple[str, cuda.Options]]:
    sizes = itertools.product(arguments.by.split(","), arguments.threads, arguments.buffer_mib, arguments.flight)
    for by, threads, buffer, flight in sizes:
        yield by, cuda.Options(threads=threads, buffer=buffer << 20, flight=flight)


def main() -> None:
    """Measure as the command line says."""
    arguments = _arguments()
    pack = _pack(arguments)
    one = _Host(pack) if arguments.device == "cpu" else _Gpu(pack)
    _timed(pack, {"step": "first digests"}, one.digests)
    _timed(pack, {"step": "digests"}, one.digests)
    descriptor = os.open(arguments.file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.ftruncate(descriptor, round_up(pack.bytes))
    file = File(descriptor, by="write", writable=True)
    file.open(pack)
    _timed(pack, {"step": "write"}, lambda deadline: one.write(file, deadline))
    os.fsync(descriptor)
    file.close()
    for by, options in _options(arguments):
        for _ in range(arguments.trials):
            _timed(pack, {"step": "release"}, one.release)
            descriptor = os.open(arguments.file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if by == "direct" else 0))
            if arguments.drop:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            source = File(descriptor, by="mmap" if by == "mmap" else "read", direct=by == "direct")
            source.open(pack)
            what = {
                "step": "load",
                "by": by,
                "threads": options.crew,
                "buffer": options.buffer,
                "flight": options.flight,
            }
            _timed(pack, what, lambda deadline: one.load(source, options, deadline))  # noqa: B023 called at once
            source.close()


if __name__ == "__main__":
    main()
