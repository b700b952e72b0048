"""Weights on a GPU: memory given back and taken again, bytes moved by several threads through pinned buffers.

All that needs a GPU is in `Engine`; the rest works on torch's storages of any device.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import itertools
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Sequence

from . import crew
from .errors import GuestError
from .file import File
from .host import damaged
from .memory import MADV_POPULATE_WRITE, Map, copy, trim_heap, view
from .pack import Chunk, Pack

CHECK = 8 << 20
"""Bytes that one coefficient table covers: each 4-byte word of a stretch has a coefficient of its own."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Engine:
    """What of a GPU is used: torch's streams, events and caches, and pinning of memory that is not torch's."""

    def __init__(self, device: str) -> None:
        self.torch: Any = sys.modules["torch"]
        self.device = device

    def stream(self) -> Any:
        """A new stream."""
        return self.torch.cuda.Stream(device=self.device)

    def event(self) -> Any:
        """A new event."""
        return self.torch.cuda.Event()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What is done inside goes to this stream."""
        context: contextlib.AbstractContextManager[Any] = self.torch.cuda.stream(stream)
        return context

    def register(self, address: int, length: int) -> bool:
        """Pin pages that are mapped already; False where the driver will not."""
        with self.torch.cuda.device(self.device):
            if int(self.torch.cuda.cudart().cudaHostRegister(address, length, _PORTABLE)) == 0:
                return True
            # The runtime keeps the error and the next launch would report it as its own: let a launch of ours have it.
            with contextlib.suppress(RuntimeError):
                self.torch.zeros(1, device=self.device)
            return False

    def unregister(self, address: int) -> None:
        """Unpin what `register` pinned."""
        with self.torch.cuda.device(self.device):
            self.torch.cuda.cudart().cudaHostUnregister(address)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self.torch.cuda.synchronize(self.device)

    def give_back(self) -> list[str]:
        """Let go of what torch keeps without need: cuBLAS workspaces, free GPU memory, free pinned host memory."""
        notes = []
        for owner, name in (
            (self.torch._C, "_cuda_clearCublasWorkspaces"),
            (self.torch.cuda, "empty_cache"),
            (self.torch._C, "_host_emptyCache"),
        ):
            function = getattr(owner, name, None)
            if function is None:
                notes.append(f"this torch has no {name}: what it keeps stays in the snapshot")
                continue
            with self.torch.cuda.device(self.device):
                function()
        return notes

    def kept(self) -> int:
        """Bytes that torch's allocator holds on this device."""
        return int(self.torch.cuda.memory_reserved(self.device))


@dataclass(frozen=True)
class Options:
    """How bytes move. Larger buffers and more of them cost more to set up than they gain.

    Attributes:
        threads: each with a stream and buffers of its own; 0 means as many as there are processors, 16 at most.
        buffer: bytes in one buffer, a multiple of 4096.
        flight: buffers of one thread that are on their way at the same time.
    """

    threads: int = 0
    buffer: int = 8 << 20
    flight: int = 2

    @property
    def crew(self) -> int:
        return self.threads or crew.default_size()


def bytes_of(torch: Any, storage: Any, start: int, length: int, dtype: Any = None) -> Any:
    """A tensor over a stretch of a storage, of bytes or of `dtype`; autograd knows nothing of it."""
    dtype = torch.uint8 if dtype is None else dtype
    size = dtype.itemsize if hasattr(dtype, "itemsize") else torch.empty(0, dtype=dtype).element_size()
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, start // size, (length // size,), (1,))


def host_bytes(torch: Any, address: int, length: int) -> Any:
    """A tensor over host memory by address."""
    return torch.frombuffer(view(address, length), dtype=torch.uint8)


def coefficients(torch: Any, device: str) -> Any:
    """CHECK // 4 odd 64-bit numbers without a pattern, the same everywhere and always."""
    number = torch.arange(1, CHECK // 4 + 1, dtype=torch.int64, device=device)
    for factor, shift in ((-7046029254386353131, 32), (-4417276706812531889, 29), (-8796714831421723037, 32)):
        number.mul_(factor)
        number.bitwise_xor_(number >> shift)
    return number.bitwise_or_(1)


class _Checked(NamedTuple):
    """What one sum covers: `length` bytes of a part, as 4-byte words (or, the last three at most, as bytes)."""

    part: int
    start: int
    length: int
    words: bool


def checked(pack: Pack, chunk: Chunk) -> Iterator[_Checked]:
    """The stretches of a chunk that have sums, in order."""
    for offset in range(chunk.offset, chunk.offset + chunk.length, CHECK):
        length = min(CHECK, chunk.offset + chunk.length - offset)
        for piece in pack.stretch(0, offset, length).pieces:
            words = piece.length // 4 * 4
            if words:
                yield _Checked(piece.part, piece.start, words, True)
            if piece.length > words:
                yield _Checked(piece.part, piece.start + words, piece.length - words, False)


class Table:
    """The coefficients on one device, and room for products, one for each thread.

    It is made on the default stream, not on the threads' own, so that the program can use it again when it is freed.
    """

    def __init__(self, torch: Any, device: str, threads: int) -> None:
        self.coefficients = coefficients(torch, device)
        self.rooms = [torch.empty(CHECK // 4, dtype=torch.int64, device=device) for _ in range(threads)]


class Check:
    """Sums of a pack's words times the coefficients, modulo 2^64, made where the words are, at their memory's speed.

    It finds every error in one word for certain, and any other but for one in 2^32. It is against accidents: what
    somebody made on purpose is found by SHA-256, which the shim computes when a file is written.
    """

    def __init__(self, torch: Any, pack: Pack, table: Table) -> None:
        self._torch = torch
        self._pack = pack
        self._table = table
        self._first: list[int] = []
        self._count: list[int] = []
        total = 0
        for chunk in pack.split(pack.chunk):
            self._first.append(total)
            self._count.append(sum(1 for _ in checked(pack, chunk)))
            total += self._count[-1]
        self._sums = torch.zeros(total, dtype=torch.int64, device=pack.device)

    def add(self, chunk: Chunk, thread: int) -> None:
        """Sum one chunk, on the current stream of the thread with this number."""
        torch = self._torch
        room = self._table.rooms[thread]
        for slot, one in enumerate(checked(self._pack, chunk), self._first[chunk.number]):
            storage = self._pack.parts[one.part].storage
            words = bytes_of(torch, storage, one.start, one.length, torch.int32 if one.words else torch.uint8)
            count = words.numel()
            torch.mul(words, self._table.coefficients[:count], out=room[:count])
            torch.sum(room[:count], dim=0, out=self._sums[slot])

    def sums(self) -> list[int]:
        """All sums. The streams must have been waited for."""
        found: list[int] = self._sums.tolist()
        return found

    def compare(self) -> None:
        """Raises:
        GuestError: a chunk is not what was taken.
        """
        found = self.sums()
        for chunk, (first, count) in enumerate(zip(self._first, self._count)):
            if found[first : first + count] != self._pack.sums[first : first + count]:
                raise damaged(self._pack, chunk)


class _Buffers:
    """The staging buffers of one thread: mapped by ourselves, so that nothing of them is in a snapshot."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine = engine
        self._map = Map(options.buffer * options.flight)
        self._pinned = False
        self.addresses = [self._map.address + options.buffer * turn for turn in range(options.flight)]
        self.tensors = [host_bytes(engine.torch, address, options.buffer) for address in self.addresses]

    def populate(self) -> None:
        self._map.advise(MADV_POPULATE_WRITE)

    def pin(self) -> None:
        """Pin them; where that fails copies are slower and still right."""
        if not self._pinned:
            self._pinned = self._engine.register(self._map.address, self._map.length)

    def close(self) -> None:
        if self._pinned:
            self._engine.unregister(self._map.address)
            self._pinned = False
        self.tensors = []
        self._map.close()


class _Job(NamedTuple):
    """A pack, the device that it is on, its file where there is one, and its check."""

    pack: Pack
    engine: Engine
    file: File | None
    checks: list[Check]  # one, once the table is there


class _Lane:
    """One thread's number, streams and buffers."""

    def __init__(self, number: int, options: Options, engines: Sequence[Engine]) -> None:
        self.number = number
        self.buffers = _Buffers(engines[0], options)
        self._streams: dict[str, Any] = {}
        self.turns = itertools.cycle(range(options.flight))

    def stream(self, engine: Engine) -> Any:
        if engine.device not in self._streams:
            self._streams[engine.device] = engine.stream()
        return self._streams[engine.device]

    def close(self) -> None:
        try:
            for stream in self._streams.values():
                stream.synchronize()  # also what was sent before something failed
        finally:
            self.buffers.close()


def _chunks(jobs: Sequence[_Job]) -> Iterator[tuple[_Job, Chunk]]:
    for job in jobs:
        for chunk in job.pack.split(job.pack.chunk):
            yield job, chunk


def _stretches(job: _Job, chunk: Chunk, size: int) -> Iterator[Chunk]:
    end = chunk.offset + chunk.length
    for index, offset in enumerate(range(chunk.offset, end, size)):
        yield job.pack.stretch(index, offset, min(size, end - offset))


class Take:
    """Bytes of GPU storages on their way to the host: to be hashed, then to be written.

    Args:
        packs: each with the engine of its device.
    """

    def __init__(self, packs: Sequence[tuple[Pack, Engine]], options: Options, deadline: float) -> None:
        self._packs = packs
        self._options = options
        self._deadline = deadline

    def digests(self) -> None:
        """Set every pack's `chunks` and `sums`.

        Raises:
            GuestError: the deadline passed.
            RuntimeError: torch's own, there is no GPU memory left for one.
        """
        threads = self._options.crew
        tables: dict[str, Table] = {}
        jobs = []
        for pack, engine in self._packs:
            if engine.device not in tables:
                tables[engine.device] = Table(engine.torch, engine.device, threads)
            pack.chunks = [""] * -(-pack.bytes // pack.chunk)
            jobs.append(_Job(pack, engine, None, [Check(engine.torch, pack, tables[engine.device])]))
            engine.synchronize()
        numbers = itertools.count()

        def work(chunks: Iterator[tuple[_Job, Chunk]]) -> None:
            shas: dict[tuple[int, int], Any] = {}
            for job, chunk, stretch, address in self._staged(next(numbers), chunks):
                key = (id(job.pack), chunk.number)
                sha = shas.setdefault(key, hashlib.sha256())
                sha.update(view(address, stretch.length))
                if stretch.offset + stretch.length == chunk.offset + chunk.length:
                    job.pack.chunks[chunk.number] = shas.pop(key).hexdigest()

        crew.run(_chunks(jobs), work, threads=threads, deadline=self._deadline)
        for job in jobs:
            job.pack.sums = job.checks[0].sums()

    def write(self, files: Sequence[File | None]) -> None:
        """Write the packs that have a file into it.

        Raises:
            OSError: a write failed.
            GuestError: the deadline passed.
        """
        jobs = [_Job(pack, engine, file, []) for (pack, engine), file in zip(self._packs, files) if file is not None]

        numbers = itertools.count()

        def work(chunks: Iterator[tuple[_Job, Chunk]]) -> None:
            for job, _, stretch, address in self._staged(next(numbers), chunks):
                assert job.file is not None
                if job.file.map is None:
                    job.file.write([view(address, stretch.length)], stretch.offset)
                else:
                    copy(job.file.map.address + stretch.offset, address, stretch.length)

        if jobs:
            crew.run(_chunks(jobs), work, threads=self._options.crew, deadline=self._deadline)

    def _staged(self, number: int, chunks: Iterator[tuple[_Job, Chunk]]) -> Iterator[tuple[_Job, Chunk, Chunk, int]]:
        """Each stretch of each chunk with the address that its bytes are at, until the next one is asked for."""
        lane = _Lane(number, self._options, [engine for _, engine in self._packs])
        waiting: deque[tuple[_Job, Chunk, Chunk, int, Any]] = deque()
        try:
            with self._packs[0][1].torch.no_grad():
                lane.buffers.pin()
                for job, chunk in chunks:
                    for stretch in _stretches(job, chunk, self._options.buffer):
                        if len(waiting) == self._options.flight:
                            yield self._arrived(waiting.popleft())
                        waiting.append((job, chunk, stretch, *self._fetch(lane, job, chunk, stretch)))
                while waiting:
                    yield self._arrived(waiting.popleft())
        finally:
            lane.close()

    @staticmethod
    def _arrived(one: tuple[_Job, Chunk, Chunk, int, Any]) -> tuple[_Job, Chunk, Chunk, int]:
        job, chunk, stretch, address, event = one
        event.synchronize()
        return job, chunk, stretch, address

    @staticmethod
    def _fetch(lane: _Lane, job: _Job, chunk: Chunk, stretch: Chunk) -> tuple[int, Any]:
        turn = next(lane.turns)
        address, buffer = lane.buffers.addresses[turn], lane.buffers.tensors[turn]
        end = 0  # of what is written in the buffer: the rest of it is zeros
        engine = job.engine
        stream = lane.stream(engine)
        with engine.on(stream):
            for piece in stretch.pieces:
                at = piece.offset - stretch.offset
                ctypes.memset(address + end, 0, at - end)
                end = at + piece.length
                source = bytes_of(engine.torch, job.pack.parts[piece.part].storage, piece.start, piece.length)
                buffer[at:end].copy_(source, non_blocking=True)
            ctypes.memset(address + end, 0, stretch.length - end)
            if job.checks and stretch.offset == chunk.offset:
                job.checks[0].add(chunk, lane.number)
            event = engine.event()
            event.record(stream)
        return address, event


def release(packs: Sequence[tuple[Pack, Engine]], notes: list[str]) -> int:
    """Give the storages' memory back to the driver, and what torch keeps besides; returns the storages' bytes."""
    released = 0
    for pack, engine in packs:
        engine.synchronize()
        for part in pack.parts:
            try:
                part.storage.resize_(0)
                released += part.bytes
            except RuntimeError as error:
                notes.append(f"{part.bytes} bytes of {part.what} stay in the snapshot: {error}")
    gc.collect()
    for engine in {engine.device: engine for _, engine in packs}.values():
        try:
            notes.extend(engine.give_back())
        except RuntimeError as error:
            notes.append(f"torch's caches of {engine.device} stay in the snapshot: {error}")
        notes.append(f"torch still holds {engine.kept()} bytes on {engine.device}")
    trim_heap()
    return released


class Load:
    """GPU storages on their way back.

    Construction does what needs no GPU: buffers are mapped and filled with the first stretches. `go` says that the GPU
    is there. `finish` waits for the end.
    """

    def __init__(self, packs: Sequence[tuple[Pack, Engine, File]], options: Options, deadline: float) -> None:
        self._torch = packs[0][1].torch
        self._options = options
        self._deadline = deadline
        self._jobs = [_Job(pack, engine, file, []) for pack, engine, file in packs]
        self._go = threading.Event()
        self._cancelled = False
        self._allocated = threading.Condition()
        self._ready: dict[int, int] = {id(job.pack): 0 for job in self._jobs}
        self._numbers = itertools.count()
        self.seconds = {"alloc": 0.0, "read": 0.0, "check": 0.0}
        self._crew = crew.Crew(_chunks(self._jobs), self._work, threads=options.crew, deadline=deadline)

    def go(self) -> None:
        """The GPU is there: give the storages memory, in the order in which they are filled, while others fill them.

        Raises:
            RuntimeError: torch's own: there is not enough GPU memory.
        """
        began = time.monotonic()
        try:
            with self._torch.no_grad():
                tables: dict[str, Table] = {}
                for job in self._jobs:
                    device = job.engine.device
                    if device not in tables:
                        tables[device] = Table(self._torch, device, self._options.crew)
                    job.checks.append(Check(self._torch, job.pack, tables[device]))
                    job.engine.synchronize()
                self._go.set()
                for job in self._jobs:
                    for number, part in enumerate(job.pack.parts, 1):
                        part.storage.resize_(part.bytes)
                        with self._allocated:
                            self._ready[id(job.pack)] = number
                            self._allocated.notify_all()
        except BaseException:
            self.cancel()
            raise
        self.seconds["alloc"] = time.monotonic() - began

    def finish(self) -> None:
        """Wait until all is there and checked.

        Raises:
            OSError, GuestError, RuntimeError: what a thread met; the file is damaged; the deadline passed.
        """
        self._crew.join()
        self.seconds["read"] = self._crew.seconds
        began = time.monotonic()
        for job in self._jobs:
            job.engine.synchronize()
            job.checks[0].compare()
        self.seconds["check"] = time.monotonic() - began

    def cancel(self) -> None:
        """Let the threads end without a GPU."""
        self._cancelled = True
        self._go.set()
        with self._allocated:
            self._allocated.notify_all()

    def _work(self, chunks: Iterator[tuple[_Job, Chunk]]) -> None:
        lane = _Lane(next(self._numbers), self._options, [job.engine for job in self._jobs])
        pending: deque[tuple[int, _Job, Chunk, Chunk]] = deque()  # buffers that are filled and not on their way
        events: dict[int, Any] = {}  # of buffers that are on their way
        try:
            lane.buffers.populate()
            with self._torch.no_grad():
                for job, chunk in chunks:
                    for stretch in _stretches(job, chunk, self._options.buffer):
                        turn = next(lane.turns)
                        if turn in events:
                            events.pop(turn).synchronize()
                        self._fill(lane.buffers.addresses[turn], job, stretch)
                        pending.append((turn, job, chunk, stretch))
                        if self._go.is_set() or len(pending) == self._options.flight:
                            self._flush(lane, pending, events)
                self._flush(lane, pending, events)
        finally:
            lane.close()

    def _wait(self) -> None:
        if not self._go.wait(max(self._deadline - time.monotonic(), 0)):
            raise GuestError("the GPU was not there before the limit")
        self._look()

    def _look(self) -> None:
        if self._cancelled:
            raise GuestError("the return of the weights was given up")
        if time.monotonic() > self._deadline:
            raise GuestError("the limit passed while weights came back")

    def _storage(self, job: _Job, part: int) -> Any:
        """A part's storage, once it has memory."""
        with self._allocated:
            while self._ready[id(job.pack)] <= part:
                self._look()
                self._allocated.wait(1)
        return job.pack.parts[part].storage

    @staticmethod
    def _fill(address: int, job: _Job, stretch: Chunk) -> None:
        assert job.file is not None
        if job.file.map is None:
            job.file.read([view(address, stretch.length)], stretch.offset)
        else:
            copy(address, job.file.map.address + stretch.offset, stretch.length)

    def _flush(self, lane: _Lane, pending: deque[tuple[int, _Job, Chunk, Chunk]], events: dict[int, Any]) -> None:
        """Send every filled buffer on its way."""
        if not pending:
            return
        self._wait()
        lane.buffers.pin()
        while pending:
            turn, job, chunk, stretch = pending.popleft()
            stream = lane.stream(job.engine)
            with job.engine.on(stream):
                self._send(lane.buffers.tensors[turn], job, stretch)
                if stretch.offset + stretch.length == chunk.offset + chunk.length:
                    job.checks[0].add(chunk, lane.number)
                events[turn] = job.engine.event()
                events[turn].record(stream)

    def _send(self, source: Any, job: _Job, stretch: Chunk) -> None:
        """Copy from host memory that has a stretch into its storages, on the current stream."""
        for piece in stretch.pieces:
            target = bytes_of(self._torch, self._storage(job, piece.part), piece.start, piece.length)
            at = piece.offset - stretch.offset
            target.copy_(source[at : at + piece.length], non_blocking=True)
