"""This process as a guest: what it registered, and the steps that take its weights away and bring them back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import traceback
from typing import Any, Callable, Sequence

from . import crew, cuda, host, weights
from .errors import GuestError
from .file import File
from .gate import Gate
from .memory import trim_heap
from .pack import Pack

Callback = Callable[[], Any]


class Guest:
    """Registrations, callbacks, the gate, and where the weights are.

    `prepare`, `write` and `release` take the weights away, in this order; `undo` goes back from the first two. `arm`
    and `back` bring them back. One thread calls these, one at a time.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.ready = False
        self.out = False
        self.registrations: list[weights.Registration] = []
        self.on_prepare: list[Callback] = []
        self.on_restore: list[Callback] = []
        self.options = cuda.Options()
        self.packs: list[Pack] = []
        self._engines: dict[str, cuda.Engine] = {}
        self._called = False
        self._lock = threading.Lock()

    def register(self, thing: Any, name: str | None) -> None:
        """Add something to what is kept out of snapshots; a second time does nothing.

        Raises:
            TypeError, ValueError: it can never be kept out; names what of it.
        """
        with self._lock:
            if not any(registration.thing is thing for registration in self.registrations):
                self._register(thing, name)

    def _register(self, thing: Any, name: str | None) -> None:
        if name is None:
            kind = type(thing).__name__ if weights.is_module(thing) else "weights"
            others = {registration.name for registration in self.registrations}
            numbered = (f"{kind}-{number}" for number in itertools.count(2))
            name = next(one for one in itertools.chain([kind], numbered) if one not in others)
        elif not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isprintable():
            raise ValueError("name must be 1 to 100 printable characters")
        for _ in weights.find(thing, name):
            pass
        self.registrations.append(weights.Registration(thing, name))
        if weights.is_module(thing):
            thing.register_forward_pre_hook(_enter, prepend=True)
            thing.register_forward_hook(_leave, always_call=True)

    def status(self) -> dict[str, Any]:
        """What the step `status` answers."""
        packs = self.packs
        if not self.out:
            try:
                packs = weights.collect(self.registrations)
            except (GuestError, RuntimeError):  # the program is changing them right now, or `prepare` will say why
                packs = []
        return {"ready": self.ready, "out": self.out, "bytes": sum(pack.bytes for pack in packs), "packs": len(packs)}

    def prepare(self, deadline: float) -> list[Pack]:
        """Close the gate, let the program prepare itself, and hash the weights.

        Raises:
            GuestError: it cannot be done; everything is as it was.
        """
        inside = self.gate.close(deadline)
        if inside:
            raise GuestError(f"{inside} threads were still using the weights at the limit of this step")
        try:
            self._prepare(deadline)
            return self.packs
        except Exception as error:
            sentence = words(error)
        # Out here the error is gone, whose frames hold the weights' buffers: the program may resize them again.
        self.undo()
        raise GuestError(sentence)

    def _prepare(self, deadline: float) -> None:
        self._called = True
        for callback in self.on_prepare:
            _call(callback)
            if time.monotonic() > deadline:
                raise GuestError("the limit of this step passed in the program's callbacks")
        self.packs = weights.collect(self.registrations)
        weights.check(self.registrations, self.packs)
        for pack in self.packs:
            if pack.device == "cpu":
                host.take_digests(pack, threads=crew.default_size(), deadline=deadline)
            elif pack.device not in self._engines:
                self._engines[pack.device] = cuda.Engine(pack.device)
        if self._on_gpu():
            cuda.Take(self._on_gpu(), self.options, deadline).digests()

    def write(self, files: Sequence[File | None], deadline: float) -> None:
        """Write the packs that have a file into it, and close the files.

        Raises:
            GuestError: it cannot be done. The gate is still closed: call `undo`.
        """
        try:
            for pack, file in zip(self.packs, files):
                if file is not None:
                    file.open(pack)
                    if pack.device == "cpu":
                        host.write(pack, file, threads=crew.default_size(), deadline=deadline)
            if self._on_gpu():
                gpu = [file for pack, file in zip(self.packs, files) if pack.device != "cpu"]
                cuda.Take(self._on_gpu(), self.options, deadline).write(gpu)
        except OSError as error:
            raise GuestError(f"the weights could not be written: {error}") from error
        finally:
            for file in files:
                if file is not None:
                    file.close()

    def undo(self) -> None:
        """Go on with the weights where they are: callbacks, then the gate opens."""
        self._drop()
        if self._called:
            self._called = False
            for callback in self.on_restore:
                try:
                    callback()
                except Exception:
                    # The program goes on with all its weights; what it cannot make again is for its log.
                    traceback.print_exc()
        self.gate.open()

    def release(self) -> tuple[int, list[str]]:
        """Give the weights' memory back; returns its bytes, and notes on what stays in the snapshot. Never fails."""
        self.out = True
        notes: list[str] = []
        released = 0
        try:
            if self._on_gpu():
                released += cuda.release(self._on_gpu(), notes)
            for pack in self.packs:
                if pack.device == "cpu":
                    released += host.release(pack, notes)
            gc.collect()
            trim_heap()
        except Exception as error:
            notes.append(f"some memory stays in the snapshot: {words(error)}")
        return released, notes

    def arm(self, files: dict[str, File], deadline: float) -> Return:
        """Begin the return of the weights with what needs no GPU. `files` are by digest, and closed by the Return.

        Raises:
            GuestError: a file is not there, or not whole.
        """
        jobs = []
        for pack in self.packs:
            file = files.get(pack.digest)
            if file is None:
                raise GuestError(f"weights {pack.name}: their file ({pack.digest}) was not handed over")
            if file.map is None:
                file.open(pack)
            jobs.append((pack, file))
        gpu = [(pack, self._engines[pack.device], file) for pack, file in jobs if pack.device != "cpu"]
        return Return(
            [job for job in jobs if job[0].device == "cpu"],
            cuda.Load(gpu, self.options, deadline) if gpu else None,
            list(files.values()),
            deadline,
        )

    def back(self, seconds: dict[str, float]) -> int:
        """After the Return: callbacks, then the gate opens; returns the weights' bytes.

        Raises:
            GuestError: a callback failed.
        """
        began = time.monotonic()
        for callback in self.on_restore:
            _call(callback)
        seconds["callbacks"] = time.monotonic() - began
        size = sum(pack.bytes for pack in self.packs)
        self._drop()
        self._called = False
        self.out = False
        self.gate.open()
        return size

    def _drop(self) -> None:
        """Hold none of the program's memory any more."""
        for pack in self.packs:
            pack.parts = []
        self.packs = []
        self._engines = {}

    def _on_gpu(self) -> list[tuple[Pack, cuda.Engine]]:
        return [(pack, self._engines[pack.device]) for pack in self.packs if pack.device != "cpu"]


class Return:
    """Weights on their way back. `close` closes their files."""

    def __init__(
        self, jobs: list[tuple[Pack, File]], load: cuda.Load | None, files: list[File], deadline: float
    ) -> None:
        self._jobs = jobs
        self._load = load
        self._files = files
        self._deadline = deadline
        self.seconds = {"alloc": 0.0, "read": 0.0, "check": 0.0}

    def host(self) -> None:
        """Bring back what is in the process's own memory, which needs no GPU.

        Raises:
            GuestError: a file is damaged, or the deadline passed.
            OSError: a read failed.
        """
        began = time.monotonic()
        for pack, file in self._jobs:
            host.load(pack, file, threads=crew.default_size(), deadline=self._deadline)
        self.seconds["read"] += time.monotonic() - began

    def gpu(self) -> None:
        """Bring back what is on GPUs, which are there now.

        Raises:
            GuestError, OSError: as `host`.
            RuntimeError: torch's own, for want of GPU memory for one.
        """
        if self._load is not None:
            self._load.go()
            self._load.finish()
            for key, value in self._load.seconds.items():
                self.seconds[key] += value
            self._load = None

    def close(self) -> None:
        """Close the files. What was not brought back stays away."""
        if self._load is not None:
            self._load.cancel()
            with contextlib.suppress(Exception):
                self._load.finish()
        for file in self._files:
            file.close()


def _call(callback: Callback) -> None:
    try:
        callback()
    except Exception as error:
        traceback.print_exc()
        name = getattr(callback, "__qualname__", None) or type(callback).__name__
        raise GuestError(f"the program's callback {name} failed: {words(error)}") from error


def words(error: BaseException) -> str:
    """An error as one line: its sentence, or its type and its first line."""
    if isinstance(error, GuestError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def current() -> Guest:
    """This process's guest. After a fork the child has another one."""
    return _process[0]


def forget() -> Guest:
    """A new guest for this process: after a fork, the parent's registrations are not the child's."""
    gone = _process[0]
    _process[0] = Guest()
    if gone.out:
        _process[0].gate.break_for_good(
            "this process was forked while its parent's weights were out of memory for a snapshot: it has none"
        )
    return gone


# Functions of the module, so that a module with these hooks can still be copied and pickled.
def _enter(module: Any, arguments: Any) -> None:
    current().gate.enter()


def _leave(module: Any, arguments: Any, output: Any) -> None:
    current().gate.leave()


_process = [Guest()]
