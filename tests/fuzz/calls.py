"""ttrpc frames that nobody should send, at a shim's socket: damaged, enormous, out of order, cut off, and well-formed
calls with damaged messages.

None of them may name a container that is there in a call that ends it; what the shim answers is of no concern, only
that it is there afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from shim import task, ttrpc
from shim.task import SERVICES
from shim.wire import Message

METHODS = (
    "Create",
    "Start",
    "Checkpoint",
    "State",
    "Resume",
    "Pids",
    "Wait",
    "Exec",
    "Stats",
    "Connect",
    "Park",
    "",
    "é",
)
NAMES = (*SERVICES, "fermata.v1.Gpu", "fermata.v1.Guest", "", "grpc.health.v1.Health")
# None is the name of a container that is there.
IDS = ("none", "", ".", "..", "../../etc", "a/b", "a\nb", "a\0b", "é", "n" * 76, "n" * 77, "n" * 5000, "-", "none ")
PATHS = (
    "",
    "/",
    "/none",
    "relative",
    "/srv/fuzzed/\0",
    "/srv/fuzzed/\n",
    "/proc/self/mem",
    "/dev/null",
    "/" + "d/" * 3000,
)
MESSAGES: dict[str, type[Message]] = {
    "Create": task.CreateTaskRequest,
    "Checkpoint": task.CheckpointTaskRequest,
    "Kill": task.KillRequest,
    "Start": task.ExecRequest,
    "Delete": task.ExecRequest,
    "State": task.ExecRequest,
    "Resume": task.IdRequest,
    "Park": task.IdRequest,
}
OPTIONS = (task.RUNC_OPTIONS, task.CHECKPOINT_OPTIONS, task.GENERIC_OPTIONS, task.LEGACY_RUNC_OPTIONS, "", "none", "\0")


def attack(connect: Callable[[], Any], *, seconds: float, seed: int) -> int:
    """Send for so many seconds, on one connection after the other. Returns how many frames went out."""
    chance = random.Random(seed)
    count = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        client = connect()
        with client:
            sock = client._sock
            sock.settimeout(0.05)
            try:
                for _ in range(chance.randrange(1, 20)):
                    sock.sendall(frame(chance))
                    count += 1
                    if chance.random() < 0.3:
                        sock.recv(65536)
            except OSError:
                continue  # it has closed the connection, or has nothing to say
    return count


def frame(chance: random.Random) -> bytes:
    """One frame, or what is none."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200))
    stream = chance.choice((1, 3, 5, 7, 0, 2, 2**32 - 1, chance.randrange(2**32)))
    if kind == 1:  # a length that never comes, or more than may be
        return chance.choice((2**32 - 1, 5 << 20, 100)).to_bytes(4, "big") + stream.to_bytes(4, "big") + b"\1\0abc"
    data = request(chance)
    if kind == 2:
        data = damaged(chance, data)
    # No data frames: one for a call that takes none makes the stock shim's server panic, with or without us.
    return ttrpc.Frame(stream, chance.choice((1, 1, 1, 1, 2, 0, 255)), chance.randrange(256), data).encode()


def request(chance: random.Random) -> bytes:
    """A call, with a message of random bytes or one that names a container which is not there."""
    method = chance.choice(METHODS)
    if chance.random() < 0.5:
        method = chance.choice(tuple(MESSAGES))
        payload = message(chance, MESSAGES[method]).encode()
    else:
        payload = b"\x0a\x04none" + chance.randbytes(chance.randrange(40)) if chance.random() < 0.7 else b""
    return ttrpc.Request(
        service=chance.choice(NAMES),
        method=method,
        payload=payload,
        timeout_nano=chance.choice((0, 1, -1, 10**9)),
    ).encode()


def message(chance: random.Random, kind: type[Message]) -> Message:
    """A message of a kind, some of its fields set to values that make little sense."""
    values: dict[str, Any] = {"id": chance.choice(IDS)}
    for name, field in kind.FIELDS.values():
        if name == "id" or chance.random() < 0.3:
            continue
        if field is bool:
            values[name] = chance.random() < 0.5
        elif field is int:
            values[name] = chance.choice((0, 1, 9, 65, 2**31, 2**32 - 1))
        elif field is str:
            values[name] = chance.choice(PATHS)
        elif field == [task.Mount]:
            given = [f"{key}={chance.choice(PATHS)}" for key in ("upperdir", "lowerdir", "workdir")]
            values[name] = [task.Mount(type=chance.choice(("overlay", "bind", "")), options=given)] * chance.randrange(
                3
            )
        elif field is ttrpc.AnyMessage:
            value = chance.randbytes(chance.randrange(60))
            values[name] = ttrpc.AnyMessage(type_url=chance.choice(OPTIONS), value=value)
    return kind(**values)


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The same with some bytes changed, or cut off."""
    broken = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        if broken:
            broken[chance.randrange(len(broken))] = chance.randrange(256)
    return bytes(broken[: chance.randrange(len(broken) + 1)])
