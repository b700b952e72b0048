"""Fuzz the reader of layers: python3 -m tests.fuzz.layers [--seconds N] [--seed N]

Inputs are the corpus, changed at random: bytes, header fields with their checksums made right again, whole blocks, pax
records, compression. What reaches lines of the reader that nothing reached before is changed further, and is kept in
the corpus with --keep. Whatever an input holds,

- apply() returns or raises LayerError, within seconds and within memory;
- on an error the target is as it was, and nothing is beside it; a file outside never changes;
- what was applied can be written, and applied again to the same tree.

An input that breaks this is written to a file and ends the run with status 1. Findings become tests.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import resource
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import layerwriter
from layerwriter import header

CORPUS = Path(__file__).parent / "corpus" / "layers"
FIELDS = [(0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (148, 8), (156, 1), (157, 100), (257, 8),
          (329, 8), (337, 8), (345, 155)]  # fmt: skip
VALUES = [b"", b"0", b"7777777", b"77777777777", b"-1", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\x80" + bytes(11),
          b"..", b"../x", b"/", b"a/../../b", b".wh.", b".wh.a", b".wh..wh..opq", b"a", b"a/b", b"./", b"x" * 100,
          b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"D", b"\0", b" ", b"8"]  # fmt: skip
KEYS = [b"path", b"linkpath", b"size", b"mtime", b"atime", b"uid", b"gid", b"SCHILY.xattr.user.a", b"GNU.sparse.map",
        b"SCHILY.xattr.trusted.overlay.redirect", b"SCHILY.xattr.system.posix_acl_default", b"GNU.sparse.major",
        b"GNU.sparse.minor", b"GNU.sparse.name", b"GNU.sparse.realsize", b"GNU.sparse.size", b"FERMATA.path",
        b"FERMATA.linkpath", b"FERMATA.kind", b"FERMATA.flags", b"RHT.security.selinux", b"comment"]  # fmt: skip
WORDS = [b"", b"0", b"1", b"-1", b"1.5", b"-0.000000001", b"99999999999999999999", b"a", b"..", b"/", b"a/b", b"a\0b",
         b"0,1,5,2", b"socket", b"whiteout", b"iadASD", b"\xff\xfe", b".wh.a", b"4294967295", b"9" * 50]  # fmt: skip
SECONDS = 10.0
MEMORY = 96 << 20


class Finding(Exception):
    """The reader did what it must not do."""


class Coverage:
    """Lines of the reader that some input reached."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.new = False

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        name = frame.f_code.co_filename
        if "layerwriter" not in name:
            return None
        if event == "line":
            line = (name, frame.f_lineno)
            if line not in self.lines:
                self.lines.add(line)
                self.new = True
        return self.trace

    def __enter__(self) -> Coverage:
        self.new = False
        threading.settrace(self.trace)  # type: ignore[arg-type]
        sys.settrace(self.trace)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


class Arena:
    """A target with a file in it, and one outside."""

    def __init__(self, base: Path) -> None:
        self.fs = base / "snapshot/fs"
        self.fs.mkdir(parents=True)
        self.second = base / "second/fs"
        self.second.mkdir(parents=True)
        self.layer = base / "layer"
        self.again = base / "again"
        self.outside = base / "outside"
        self.outside.write_bytes(b"outside")
        layerwriter.apply(self._written(header.encode(b"old", header.REGULAR) + header.END), self.fs)

    def _written(self, data: bytes) -> Path:
        self.layer.write_bytes(data)
        return self.layer

    def attempt(self, data: bytes) -> bool:
        """Apply an input. Returns whether it was taken. Raises Finding."""
        began = time.monotonic()
        layer = self._written(data)
        try:
            applied = layerwriter.apply(layer, self.fs, replace=True, keep_old=True, limit=64 << 20)
        except layerwriter.LayerError as refused:
            if not str(refused).isprintable():
                raise Finding(f"the error is not one printable line: {refused!r}") from refused
            self._check()
            return False
        finally:
            if time.monotonic() - began > SECONDS:
                raise Finding(f"it took {time.monotonic() - began:.1f} s")
        try:
            before = list(layerwriter.record(self.fs))
            self._again(before)
        finally:
            applied.undo()
        self._check()
        return True

    def _again(self, before: list[layerwriter.tree.Item]) -> None:
        try:
            written = layerwriter.write(self.fs, self.again)
        except layerwriter.LayerError as failure:
            raise Finding(f"what was applied cannot be written: {failure}") from failure
        layerwriter.apply(written, self.second, replace=True)
        after = list(layerwriter.record(self.second))
        for item in (*before, *after):
            if item.kind == "character device" and item.device == (0, 0):
                item.mtime = 0  # nobody sees the time of a mark of a deletion
        changed = list(layerwriter.compare(before, after))
        if changed:
            raise Finding(f"it is not the same when it is written and applied again: {changed}")

    def _check(self) -> None:
        if self.outside.read_bytes() != b"outside":
            raise Finding("a file outside of the target changed")
        if os.listdir(self.fs) != ["old"]:
            raise Finding(f"the target changed: {os.listdir(self.fs)}")
        if os.listdir(self.fs.parent) != ["fs"]:
            raise Finding(f"something was left beside the target: {os.listdir(self.fs.parent)}")


def mutated(data: bytes, corpus: list[bytes], chance: random.Random) -> bytes:
    """An input made of another one."""
    tar = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        change = chance.choice((_byte, _field, _field, _record, _move, _drop, _double, _splice, _cut))
        tar = change(tar, corpus, chance)[: 1 << 20]
    result = bytes(tar)
    kind = chance.random()
    if kind < 0.05:
        result = bytes(_byte(bytearray(gzip.compress(result)), corpus, chance))
    elif kind < 0.1:
        result = _frames(result, chance)
    return result


def _block_at(tar: bytearray, chance: random.Random) -> int:
    return chance.randrange(len(tar) // 512 + 1) * 512 if tar else 0


def _byte(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    if tar:
        tar[chance.randrange(len(tar))] = chance.choice((0, 255, 0x30, 0x2F, chance.randrange(256)))
    return tar


def _field(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    at = _block_at(tar, chance)
    block = tar[at : at + 512]
    if len(block) == 512:
        offset, length = chance.choice(FIELDS)
        block[offset : offset + length] = chance.choice(VALUES)[:length].ljust(length, b"\0")
        if chance.random() < 0.9:
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
        tar[at : at + 512] = block
    return tar


def _record(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    records = b"".join(header.record(chance.choice(KEYS), chance.choice(WORDS)) for _ in range(chance.randrange(1, 4)))
    if chance.random() < 0.1:
        records = bytes(_byte(bytearray(records), corpus, chance))
    extra = header.encode(b"x", header.REGULAR, records=records)[:-512]
    at = _block_at(tar, chance)
    return tar[:at] + extra + tar[at:]


def _move(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    at, to, length = _block_at(tar, chance), _block_at(tar, chance), 512 * chance.randrange(1, 5)
    part = tar[at : at + length]
    rest = tar[:at] + tar[at + length :]
    return rest[:to] + part + rest[to:]


def _drop(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    at = _block_at(tar, chance)
    return tar[:at] + tar[at + 512 * chance.randrange(1, 4) :]


def _double(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    at, length = _block_at(tar, chance), 512 * chance.randrange(1, 6)
    return tar[: at + length] + tar[at : at + length] + tar[at + length :]


def _splice(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    other = bytearray(chance.choice(corpus))
    return tar[: _block_at(tar, chance)] + other[_block_at(other, chance) :]


def _cut(tar: bytearray, corpus: list[bytes], chance: random.Random) -> bytearray:
    return tar[: chance.randrange(len(tar) + 1)]


def _frames(data: bytes, chance: random.Random) -> bytes:
    try:
        from layerwriter.compression import compressor

        compress = compressor()
    except layerwriter.LayerError:
        return data
    half = chance.randrange(len(data) + 1)
    frames = bytearray(compress(memoryview(data[:half])) + compress(memoryview(data[half:])))
    return bytes(_byte(frames, [], chance)) if chance.random() < 0.7 else bytes(frames)


def fuzz(seconds: float, seed: int, keep: bool) -> int:
    chance = random.Random(seed)
    corpus = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    coverage = Coverage()
    taken = refused = 0
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fermata-fuzz-") as base:
        arena = Arena(Path(base))
        inputs = list(corpus)
        memory = 0
        while time.monotonic() < until:
            data = inputs.pop() if inputs else mutated(chance.choice(corpus), corpus, chance)
            known = data in corpus
            try:
                with coverage:
                    if arena.attempt(data):
                        taken += 1
                    else:
                        refused += 1
                now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                memory = memory or now
                if now > memory + MEMORY:
                    raise Finding(f"memory went from {memory >> 20} to {now >> 20} MiB")
            except BaseException as failure:
                if isinstance(failure, KeyboardInterrupt):
                    raise
                traceback.print_exc()
                out = Path(f"finding-{seed}-{taken + refused}.tar")
                out.write_bytes(data)
                print(f"the input is in {out}", file=sys.stderr)
                return 1
            if coverage.new and not known and len(data) < 65536:
                corpus.append(data)
                if keep:
                    (CORPUS / f"{seed}-{taken + refused}.tar").write_bytes(data)
    print(
        f"seed {seed}: {taken} layers taken, {refused} refused, {len(coverage.lines)} lines, {len(corpus)} inputs kept"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.layers", description="Fuzz the reader of layers.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--keep", action="store_true", help="keep what reached new lines in the corpus")
    options = parser.parse_args()
    return fuzz(options.seconds, options.seed, options.keep)


if __name__ == "__main__":
    sys.exit(main())
