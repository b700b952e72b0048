"""A program that uses the library, in a process of its own, and the shim's side of the wire."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GUEST = Path(__file__).resolve().parents[3] / "guest"
LIMIT = 60.0


class Program:
    """A process that runs Python text with the library, and then one line of Python after the other as it is told.

    Each line is evaluated in the text's namespace; the answer is the value's repr, or the exception's.
    """

    LOOP = """
import sys as _sys
print("up", flush=True)
for _line in _sys.stdin:
    try:
        _code = compile(_line, "line", "eval")
    except SyntaxError:
        exec(_line)
        print("None", flush=True)
        continue
    try:
        print(repr(eval(_code)), flush=True)
    except Exception as _error:
        print(repr(_error), flush=True)
"""

    def __init__(self, text: str, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", text + self.LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(GUEST), "FERMATA_GUEST_DIRECTORY": str(directory)},
        )
        self.pid = self.process.pid
        assert self.read() == "up", self.process.stderr.read()

    def read(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.read()

    def call(self) -> Call:
        return Call(str(self.directory / f"{self.pid}.sock"))

    def ends(self) -> tuple[int, str]:
        """Its exit status and what it said on standard error, once it has ended on its own."""
        status = self.process.wait(LIMIT)
        return status, self.process.stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Call:
    """A connection to a guest, as the shim has it."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(LIMIT)
        self.socket.connect(path)
        self.lines = self.socket.makefile("rb")

    def send(self, message: dict, descriptors: tuple[int, ...] = ()) -> None:
        data = json.dumps({**message, **({"fds": len(descriptors)} if descriptors else {})}).encode() + b"\n"
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            sent = self.socket.sendmsg([data], rights)
            data = data[sent:]
        if data:
            self.socket.sendall(data)

    def answer(self) -> dict | None:
        try:
            line = self.lines.readline()
        except ConnectionResetError:  # it is gone, and had not read all that was said to it
            return None
        return json.loads(line) if line else None

    def ask(self, message: dict, descriptors: tuple[int, ...] = ()) -> dict | None:
        self.send(message, descriptors)
        return self.answer()

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Shim:
    """Takes a program's weights away and brings them back, with files in a directory."""

    def __init__(self, store: Path) -> None:
        self.store = store
        store.mkdir(exist_ok=True)

    def path(self, pack: dict) -> Path:
        return self.store / pack["digest"].partition(":")[2]

    def prepare(self, call: Call, seconds: float = LIMIT, silence: float = LIMIT) -> list[dict]:
        answer = call.ask({"protocol": 1, "step": "prepare", "seconds": seconds, "silence": silence})
        assert "packs" in answer, answer
        return answer["packs"]

    def files(self, packs: list[dict], by: str = "write") -> tuple[list[dict], tuple[int, ...]]:
        said, descriptors = [], []
        for pack in packs:
            if self.path(pack).exists():
                said.append({"write": False})
                continue
            descriptor = os.open(self.path(pack), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(descriptor, -(-pack["bytes"] // 4096) * 4096)
            descriptors.append(descriptor)
            said.append({"write": True, "by": by})
        return said, tuple(descriptors)

    def write(self, call: Call, packs: list[dict], by: str = "write") -> int:
        """How many files were written."""
        said, descriptors = self.files(packs, by)
        try:
            assert call.ask({"packs": said}, descriptors) == {"written": True}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for pack in packs:
            self.verify(pack)
        return len(descriptors)

    def verify(self, pack: dict) -> None:
        """What is in the file has the digests that the guest said."""
        assert pack["chunk"] == 32 << 20
        with self.path(pack).open("rb") as file:
            digests = [hashlib.sha256(file.read(pack["chunk"])).hexdigest() for _ in pack["chunks"]]
            assert file.read(1) == b""
        assert digests == pack["chunks"]
        text = f"fermata weights 1\n{pack['bytes']}\n{pack['chunk']}\n" + "".join(f"{one}\n" for one in digests)
        assert pack["digest"] == "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def take(self, program: Program, by: str = "write", silence: float = LIMIT) -> tuple[list[dict], dict]:
        """All of it, until the weights are out: the packs, and what the guest said at last."""
        call = program.call()
        packs = self.prepare(call, silence=silence)
        self.write(call, packs, by)
        released = call.ask({"release": True})
        assert call.answer() is None
        call.close()
        return packs, released

    def restore(self, program: Program, packs: list[dict], by: str = "read", direct: bool = False) -> dict | None:
        """Bring the weights back; the guest's last word."""
        call = program.call()
        descriptors = [os.open(self.path(pack), os.O_RDONLY | (os.O_DIRECT if direct else 0)) for pack in packs]
        said = [{"digest": pack["digest"], "by": by, "direct": direct} for pack in packs]
        message = {"protocol": 1, "step": "restored", "seconds": LIMIT, "new": True, "packs": said}
        try:
            answer = call.ask(message, tuple(descriptors))
            if answer == {"armed": True}:
                answer = call.ask({"go": True})
            assert call.answer() is None
            return answer
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            call.close()


@pytest.fixture
def shim(tmp_path):
    return Shim(tmp_path / "store")


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[Callable[[str], Program]]:
    """Start programs that end with the block."""
    programs = []
    directory.mkdir()

    def start(text: str) -> Program:
        programs.append(Program(text, directory))
        return programs[-1]

    try:
        yield start
    finally:
        for one in programs:
            one.close()


@pytest.fixture
def program(tmp_path):
    with starting(tmp_path / "run") as start:
        yield start


@pytest.fixture(scope="module")
def lasting_program(tmp_path_factory):
    """For those that take long to start."""
    with starting(tmp_path_factory.mktemp("lasting") / "run") as start:
        yield start


def until(condition, limit: float = LIMIT) -> None:
    """Wait until something is so."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.01)


@pytest.fixture(name="until")
def waiter():
    return until
