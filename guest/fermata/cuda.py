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

CHECK = 32 << 20
"""The most bytes that one sum covers: each of its 4-byte words has a coefficient of its own."""

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

    def use(self, stream: Any) -> None:
        """What this thread does from here on goes to this stream."""
        self.torch.cuda.set_stream(stream)

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


def coefficients(torch: Any, device: str, count: int) -> Any:
    """`count` odd 64-bit numbers without a pattern, the same everywhere and always."""
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor, shift in ((-7046029254386353131, 32), (-4417276706812531889, 29), (-8796714831421723037, 32)):
        number.mul_(factor)
        number.bitwise_xor_(number >> shift)
    return number.bitwise_or_(1)


class _Checked(NamedTuple):
    """What one sum covers: `length` bytes of a part, as 4-byte words (or, the last three at most, as bytes)."""

    chunk: int
    part: int
    start: int
    length: int
    words: bool


def checked(pack: Pack) -> Iterator[_Checked]:
    """The stretches of a pack that have sums, in order: none is longer than CHECK, and each is of one chunk."""
    for chunk in pack.split(pack.chunk):
        for piece in chunk.pieces:
            for start in range(piece.start, piece.start + piece.length, CHECK):
                length = min(CHECK, piece.start + piece.length - start)
                words = length // 4 * 4
                if words:
                    yield _Checked(chunk.number, piece.part, start, words, True)
                if length > words:
                    yield _Checked(chunk.number, piece.part, start + words, length - words, False)


class Check:
    """Sums of a pack's words times the coefficients, modulo 2^64, made where the words are, at their memory's speed.

    It finds every error in one word for certain, and any other but for one in 2^32. It is against accidents: what
    somebody made on purpose is found by SHA-256, which the shim computes when a file is written.

    Few large sums, made by one thread when all is there: 16 GB take 40 ms. Made by each thread for what it has just
    copied, their calls (and Python's lock) cost more than the copies.
    """

    def __init__(self, torch: Any, pack: Pack) -> None:
        self._torch = torch
        self._pack = pack
        self._stretches = list(checked(pack))

    def sums(self) -> list[int]:
        """All sums, on the current stream; what filled the storages must have been waited for.

        Raises:
            RuntimeError: torch's own, there is no GPU memory left for one.
        """
        torch = self._torch
        device = self._pack.device
        longest = max((one.length for one in self._stretches), default=0) // 4 or 4
        table = coefficients(torch, device, longest)
        room = torch.empty(longest, dtype=torch.int64, device=device)
        found = torch.empty(len(self._stretches), dtype=torch.int64, device=device)
        for slot, one in enumerate(self._stretches):
            storage = self._pack.parts[one.part].storage
            words = bytes_of(torch, storage, one.start, one.length, torch.int32 if one.words else torch.uint8)
            count = words.numel()
            torch.mul(words, table[:count], out=room[:count])
            torch.sum(room[:count], dim=0, out=found[slot])
        sums: list[int] = found.tolist()
        return sums

    def compare(self) -> None:
        """Raises:
        GuestError: a chunk is not what was taken.
        """
        for one, found, taken in zip(self._stretches, self.sums(), self._pack.sums):
            if found != taken:
                raise damaged(self._pack, one.chunk)


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
    """A pack, the device that it is on, and its file where there is one."""

    pack: Pack
    engine: Engine
    file: File | None


class _Lane:
    """One thread's streams and buffers."""

    def __init__(self, options: Options, engines: Sequence[Engine]) -> None:
        self.buffers = _Buffers(engines[0], options)
        self._streams: dict[str, Any] = {}
        self._events: dict[tuple[int, str], Any] = {}
        self._used: Engine | None = None
        self.turns = itertools.cycle(range(options.flight))

    def stream(self, engine: Engine) -> Any:
        if engine.device not in self._streams:
            self._streams[engine.device] = engine.stream()
        return self._streams[engine.device]

    def use(self, engine: Engine) -> Any:
        """The thread's stream on a device, from here on the current one: a context for each copy costs 50 µs."""
        stream = self.stream(engine)
        if self._used is not engine:
            engine.use(stream)
            self._used = engine
        return stream

    def event(self, turn: int, engine: Engine) -> Any:
        """The event of a buffer, used again and again."""
        key = (turn, engine.device)
        if key not in self._events:
            self._events[key] = engine.event()
        return self._events[key]

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
        jobs = []
        for pack, engine in self._packs:
            engine.synchronize()
            pack.sums = Check(engine.torch, pack).sums()
            pack.chunks = [""] * -(-pack.bytes // pack.chunk)
            jobs.append(_Job(pack, engine, None))

        def work(chunks: Iterator[tuple[_Job, Chunk]]) -> None:
            shas: dict[tuple[int, int], Any] = {}
            for job, chunk, stretch, address in self._staged(chunks):
                key = (id(job.pack), chunk.number)
                sha = shas.setdefault(key, hashlib.sha256())
                sha.update(view(address, stretch.length))
                if stretch.offset + stretch.length == chunk.offset + chunk.length:
                    job.pack.chunks[chunk.number] = shas.pop(key).hexdigest()

        crew.run(_chunks(jobs), work, threads=self._options.crew, deadline=self._deadline)

    def write(self, files: Sequence[File | None]) -> None:
        """Write the packs that have a file into it.

        Raises:
            OSError: a write failed.
            GuestError: the deadline passed.
        """
        jobs = [_Job(pack, engine, file) for (pack, engine), file in zip(self._packs, files) if file is not None]

        def work(chunks: Iterator[tuple[_Job, Chunk]]) -> None:
            for job, _, stretch, address in self._staged(chunks):
                assert job.file is not None
                if job.file.map is None:
                    job.file.write([view(address, stretch.length)], stretch.offset)
                else:
                    copy(job.file.map.address + stretch.offset, address, stretch.length)

        if jobs:
            crew.run(_chunks(jobs), work, threads=self._options.crew, deadline=self._deadline)

    def _staged(self, chunks: Iterator[tuple[_Job, Chunk]]) -> Iterator[tuple[_Job, Chunk, Chunk, int]]:
        """Each stretch of each chunk with the address that its bytes are at, until the next one is asked for."""
        lane = _Lane(self._options, [engine for _, engine in self._packs])
        waiting: deque[tuple[_Job, Chunk, Chunk, int, Any]] = deque()
        try:
            with self._packs[0][1].torch.no_grad():
                lane.buffers.pin()
                for job, chunk in chunks:
                    for stretch in _stretches(job, chunk, self._options.buffer):
                        if len(waiting) == self._options.flight:
                            yield self._arrived(waiting.popleft())
                        waiting.append((job, chunk, stretch, *self._fetch(lane, job, stretch)))
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
    def _fetch(lane: _Lane, job: _Job, stretch: Chunk) -> tuple[int, Any]:
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


class _Coming:
    """A pack on its way back: whole-storage tensors of bytes, each from the moment on that it has memory."""

    def __init__(self, pack: Pack, engine: Engine, file: File) -> None:
        self.pack = pack
        self.engine = engine
        self.file = file
        self.check = Check(engine.torch, pack)
        self.targets: list[Any] = [None] * len(pack.parts)


class Load:
    """GPU storages on their way back.

    Construction does what needs no GPU: buffers are mapped and filled with the first stretches. `go` says that the GPU
    is there. `finish` waits for the end.

    Threads share Python's lock, so what they do for a stretch is kept to a few calls: with 17 µs each, 16 GB in pieces
    of 8 MiB would take a third of a second in them alone.
    """

    def __init__(self, packs: Sequence[tuple[Pack, Engine, File]], options: Options, deadline: float) -> None:
        self._torch = packs[0][1].torch
        self._options = options
        self._deadline = deadline
        self._packs = [_Coming(pack, engine, file) for pack, engine, file in packs]
        self._go = threading.Event()
        self._cancelled = False
        self._allocated = threading.Condition()
        self.seconds = {"alloc": 0.0, "read": 0.0, "check": 0.0}
        self._crew = crew.Crew(self._stretches(), self._work, threads=options.crew, deadline=deadline)
        self._went = 0.0

    def _stretches(self) -> Iterator[tuple[_Coming, Chunk]]:
        for coming in self._packs:
            for stretch in coming.pack.split(self._options.buffer):
                yield coming, stretch

    def go(self) -> None:
        """The GPU is there: give the storages memory, in the order in which they are filled, while others fill them.

        Raises:
            RuntimeError: torch's own: there is not enough GPU memory.
        """
        self._went = time.monotonic()
        try:
            with self._torch.no_grad():
                for coming in self._packs:
                    coming.engine.synchronize()
                self._go.set()
                for coming in self._packs:
                    for number, part in enumerate(coming.pack.parts):
                        part.storage.resize_(part.bytes)
                        coming.targets[number] = bytes_of(self._torch, part.storage, 0, part.bytes)
                        if number % 16 == 15:
                            self._tell()
                    self._tell()
        except BaseException:
            self.cancel()
            raise
        self.seconds["alloc"] = time.monotonic() - self._went

    def _tell(self) -> None:
        with self._allocated:
            self._allocated.notify_all()

    def finish(self) -> None:
        """Wait until all is there and checked.

        Raises:
            OSError, GuestError, RuntimeError: what a thread met; the file is damaged; the deadline passed.
        """
        self._crew.join()
        began = time.monotonic()
        self.seconds["read"] = began - (self._went or began)
        with self._torch.no_grad():
            for coming in self._packs:
                coming.engine.synchronize()
                coming.check.compare()
        self.seconds["check"] = time.monotonic() - began

    def cancel(self) -> None:
        """Let the threads end without a GPU."""
        self._cancelled = True
        self._go.set()
        self._tell()

    def _work(self, stretches: Iterator[tuple[_Coming, Chunk]]) -> None:
        lane = _Lane(self._options, [coming.engine for coming in self._packs])
        pending: deque[tuple[int, _Coming, Chunk]] = deque()  # buffers that are filled and not on their way
        flying: dict[int, Any] = {}  # the event of each buffer that is on its way
        try:
            lane.buffers.populate()
            with self._torch.no_grad():
                for coming, stretch in stretches:
                    turn = next(lane.turns)
                    if turn in flying:
                        flying.pop(turn).synchronize()
                    self._fill(lane.buffers.addresses[turn], coming.file, stretch)
                    pending.append((turn, coming, stretch))
                    if len(pending) == self._options.flight or self._go.is_set():
                        self._flush(lane, pending, flying)
                self._flush(lane, pending, flying)
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

    def _target(self, coming: _Coming, part: int) -> Any:
        """A part's storage as bytes, once it has memory."""
        target = coming.targets[part]
        if target is None:
            with self._allocated:
                while (target := coming.targets[part]) is None:
                    self._look()
                    self._allocated.wait(0.01)
        return target

    @staticmethod
    def _fill(address: int, file: File, stretch: Chunk) -> None:
        if file.map is None:
            file.read([view(address, stretch.length)], stretch.offset)
        else:
            copy(address, file.map.address + stretch.offset, stretch.length)

    def _flush(self, lane: _Lane, pending: deque[tuple[int, _Coming, Chunk]], flying: dict[int, Any]) -> None:
        """Send every filled buffer on its way."""
        if not pending:
            return
        self._wait()
        lane.buffers.pin()
        while pending:
            turn, coming, stretch = pending.popleft()
            stream = lane.use(coming.engine)
            source = lane.buffers.tensors[turn]
            for piece in stretch.pieces:
                at = piece.offset - stretch.offset
                target = self._target(coming, piece.part)[piece.start : piece.start + piece.length]
                target.copy_(source[at : at + piece.length], non_blocking=True)
            flying[turn] = lane.event(turn, coming.engine)
            flying[turn].record(stream)
