"""The program that talks to the NVIDIA driver: moves the GPU state of processes to host memory and back, by pid.

It is a program of its own, run as `python3 -I -S cuda.py` for the length of one operation: the driver's libraries are
large, keep descriptors and threads, and can hang, none of which belongs into a daemon that lives as long
as a container. Nothing of the project is imported.

Protocol: one JSON object a line. The first line in, `{"libcuda": [paths], "nvml": [paths], "initialise": bool}`, is
answered by what the driver is. Every further line, `{"op": …, "pids": [...], …}`, is answered by one line. `end` ends
the program and leaves the processes as they are. When the input ends without it, because whoever drove this program was
killed, every process that was locked here is first brought back to running.

States are the driver's, CUprocess_state of cuda.h: 0 running, 1 locked, 2 checkpointed (the state is in host memory),
3 failed. Functions: the CUDA driver API's chapter "CUDA Checkpointing", in drivers from 570 on; GPU pairs from 580 on.
"""

from __future__ import annotations

import _thread
import ctypes
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

RUNNING, LOCKED, CHECKPOINTED, FAILED = 0, 1, 2, 3
ILLEGAL_STATE, NOT_READY = 401, 600  # of cuda.h's CUresult

CHECKPOINT_CALLS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")
_ARGUMENT_BYTES = 128  # the calls' argument structures have 64 to 72, reserved parts zero
_DEAD_AFTER = 2.0  # seconds that a call may go on after its process has died
_BACK_LIMIT = 300.0  # seconds to bring processes back when nobody is there to set a limit


class CudaError(Exception):
    """A call of the driver failed; `code` is its CUresult, 0 when it is none of the driver's own."""

    def __init__(self, name: str, code: int = 0) -> None:
        super().__init__(name)
        self.code = code


def _load(names: Iterable[str]) -> tuple[ctypes.CDLL, str]:
    problems = []
    for name in names:
        try:
            return ctypes.CDLL(name), name
        except OSError as error:
            problems.append(str(error))
    raise CudaError(problems[0])


class Driver:
    """libcuda's checkpoint calls. Each takes a pid of this program's pid namespace and blocks until it is done."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lib, self.path = _load(names)
        self.missing = [name for name in CHECKPOINT_CALLS if not hasattr(self._lib, f"cuCheckpointProcess{name}")]
        self._initialised = False

    def initialise(self) -> None:
        """Before any other call, once: takes 0.05 to 0.3 s. Raises CudaError."""
        if not self._initialised:
            self._check(self._lib.cuInit(0))  # a restore needs it where persistence mode is off (cuda.h)
            self._initialised = True

    def _check(self, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError((name.value or b"CUDA error %d" % code).decode(), code)

    def state(self, pid: int) -> int:
        """The process's state. NOT_INITIALIZED: it does not use CUDA. Blocks while the process is frozen."""
        state = ctypes.c_int(-1)
        self._check(self._lib.cuCheckpointProcessGetState(pid, ctypes.byref(state)))
        return state.value

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Wait for work in flight and block further calls. NOT_READY after the timeout, the process still running."""
        arguments = (ctypes.c_uint * (_ARGUMENT_BYTES // 4))(timeout_ms)
        self._check(self._lib.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        """Move a locked process's state to host memory and let go of the device."""
        self._check(self._lib.cuCheckpointProcessCheckpoint(pid, (ctypes.c_char * _ARGUMENT_BYTES)()))

    def restore(self, pid: int, pairs: list[list[str]]) -> None:
        """Move it back; the process is locked then. `pairs`: [UUID then, UUID now] of every GPU it had, or none."""
        arguments = (ctypes.c_char * _ARGUMENT_BYTES)()
        table = b"".join(_uuid_bytes(old) + _uuid_bytes(new) for old, new in pairs)
        keep = ctypes.create_string_buffer(table, len(table) + 1)
        if pairs:
            ctypes.c_void_p.from_buffer(arguments, 0).value = ctypes.addressof(keep)
            ctypes.c_uint.from_buffer(arguments, ctypes.sizeof(ctypes.c_void_p)).value = len(pairs)
        self._check(self._lib.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> None:
        """Let a locked process go on."""
        self._check(self._lib.cuCheckpointProcessUnlock(pid, (ctypes.c_char * _ARGUMENT_BYTES)()))


def _uuid_bytes(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t. The first version counts what the driver keeps for itself (0.6 GB on an H200) as used."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


_MEMORY_V2 = ctypes.sizeof(_Memory) | 2 << 24


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Inventory:
    """The node's GPUs and who uses them, from NVML, the driver's library of management.

    libcuda cannot answer this: asking it for free memory makes a context of its own, which takes half a gigabyte.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._lib, _ = _load(names)
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.nvmlErrorString.restype = ctypes.c_char_p
            raise CudaError(f"{name}: {(self._lib.nvmlErrorString(code) or b'?').decode()}")

    def _text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *arguments, buffer, ctypes.c_uint(96))
        return buffer.value.decode(errors="replace")

    def driver_version(self) -> str:
        """The driver's version, such as 580.159.04."""
        return self._text("nvmlSystemGetDriverVersion")

    def gpus(self) -> list[dict[str, Any]]:
        """Every GPU: uuid, model, minor (N of /dev/nvidiaN), total, free, used (bytes), processes (pid to bytes)."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            minor, memory = ctypes.c_uint(), _Memory(version=_MEMORY_V2)
            self._call("nvmlDeviceGetMinorNumber", handle, ctypes.byref(minor))
            self._call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
            found.append(
                {
                    "uuid": self._text("nvmlDeviceGetUUID", handle),
                    "model": self._text("nvmlDeviceGetName", handle),
                    "minor": minor.value,
                    "total": memory.total,
                    "free": memory.free,
                    "used": memory.used,
                    "processes": self._processes(handle),
                }
            )
        return found

    def _processes(self, handle: ctypes.c_void_p) -> dict[str, int]:
        count = ctypes.c_uint(256)
        table = (_ProcessInfo * count.value)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), table)
        unknown = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
        return {str(entry.pid): 0 if entry.bytes == unknown else entry.bytes for entry in table[: count.value]}


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def each(pids: list[int], work: Callable[[int], object], limit: float) -> list[dict[str, Any]]:
    """Run `work(pid)` for all pids at once; a result for each: pid, seconds, value or error and code.

    A call that goes on after its process has died, or after `limit` seconds, is reported as failed and left behind:
    nothing can take a thread out of the driver, so this program should be ended soon after.
    """
    results: dict[int, dict[str, Any]] = {}
    done = _thread.allocate_lock()
    done.acquire()
    guard = _thread.allocate_lock()
    began = time.monotonic()

    def run(pid: int) -> None:
        result: dict[str, Any] = {"pid": pid}
        try:
            result["value"] = work(pid)
        except CudaError as error:
            result["error"], result["code"] = str(error), error.code
        except Exception as error:
            result["error"], result["code"] = repr(error), 0
        result["seconds"] = round(time.monotonic() - began, 6)
        with guard:
            results[pid] = result
            if len(results) == len(pids) and done.locked():
                done.release()

    for pid in pids:
        _thread.start_new_thread(run, (pid,))
    dead: dict[int, float] = {}
    while pids and not done.acquire(timeout=0.1):
        now = time.monotonic()
        for pid in pids:
            if pid not in results and not _alive(pid):
                dead.setdefault(pid, now)
        waiting = [pid for pid in pids if pid not in results]
        if all(pid in dead and now - dead[pid] > _DEAD_AFTER for pid in waiting) or now - began > limit:
            for pid in waiting:
                error = "the process died meanwhile" if pid in dead else f"no answer from the driver in {limit:.0f} s"
                results[pid] = {"pid": pid, "error": error, "code": 0, "seconds": round(now - began, 6)}
            break
    for pid, result in list(results.items()):
        if "error" in result and not _alive(pid):
            result["error"] = "the process died meanwhile"
            result["died"] = True
    return [results[pid] for pid in pids]


def bring_to_running(driver: Driver, pid: int, pairs: list[list[str]], limit: float) -> int:
    """From whatever state, back to running. Returns the state it was in first; raises CudaError.

    A program that was killed inside a call leaves the driver's other end at work: until that has ended, calls answer
    ILLEGAL_STATE or NOT_READY, and are made again.
    """
    until = time.monotonic() + limit
    first = -1
    while True:
        try:
            state = driver.state(pid)
            first = state if first < 0 else first
            if state == RUNNING:
                return first
            if state == FAILED:
                raise CudaError("the driver says that the process's state is lost")
            if state == CHECKPOINTED:
                driver.restore(pid, pairs)
            driver.unlock(pid)
        except CudaError as error:
            if error.code not in (ILLEGAL_STATE, NOT_READY) or time.monotonic() > until:
                raise
            time.sleep(0.05)


class Session:
    """Answers requests, and remembers which processes it holds."""

    def __init__(self, driver: Driver, inventory: Inventory) -> None:
        self._driver = driver
        self._inventory = inventory
        self._held: set[int] = set()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        driver, op = self._driver, str(request["op"])
        pids: list[int] = request.get("pids", [])
        limit = float(request.get("limit", _BACK_LIMIT))
        pairs: list[list[str]] = request.get("pairs") or []
        if op == "inventory":
            return {"gpus": self._inventory.gpus()}
        driver.initialise()
        if op == "state":
            return {"results": each(pids, driver.state, limit)}
        if op == "lock":
            self._held.update(pids)
            milliseconds = int(request["timeout_ms"])
            return {"results": each(pids, lambda pid: driver.lock(pid, milliseconds), limit)}
        if op == "checkpoint":
            self._held.update(pids)
            return {"results": each(pids, driver.checkpoint, limit)}
        if op == "restore":
            self._held.update(pids)
            return {"results": each(pids, lambda pid: driver.restore(pid, pairs), limit)}
        if op == "unlock":
            return self._release(each(pids, driver.unlock, limit))
        if op == "running":
            return self._release(each(pids, lambda pid: bring_to_running(driver, pid, pairs, limit), limit + 10))
        return {"error": f"unknown operation {op!r}"}

    def _release(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        self._held.difference_update(result["pid"] for result in results if "error" not in result)
        return {"results": results}

    def abandon(self) -> None:
        """Nobody drives any more: what is held here goes back to running."""
        pids = [pid for pid in self._held if _alive(pid)]
        each(pids, lambda pid: bring_to_running(self._driver, pid, [], _BACK_LIMIT), _BACK_LIMIT + 10)


def main() -> int:
    """Serve stdin and stdout; the exit status."""
    # A signal to the daemon's group must not end this program between two steps.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # The driver may print; the answers keep a descriptor of their own.
    out = os.dup(1)
    os.dup2(2, 1)
    lines = os.fdopen(0, "rb")

    def say(answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    line = lines.readline()
    if not line:
        return 0
    settings = json.loads(line)
    began = time.monotonic()
    try:
        inventory = Inventory(settings["nvml"])
        hello: dict[str, Any] = {"driver": inventory.driver_version()}
        driver = Driver(settings["libcuda"])
        hello.update(libcuda=driver.path, missing=driver.missing, seconds=round(time.monotonic() - began, 6))
    except CudaError as error:
        say({"error": str(error)})
        return 1
    say(hello)
    if settings.get("initialise"):
        # Now, while whoever asked still does something else. What is wrong is said when it is used.
        try:
            driver.initialise()
        except CudaError:
            pass
    session = Session(driver, inventory)
    for line in lines:
        try:
            request = json.loads(line)
            if request["op"] == "end":
                say({})
                os._exit(0)  # threads that the driver keeps do not matter any more
            answer = session.answer(request)
        except CudaError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"a fault in {os.path.basename(__file__)}: {error!r}"}
        try:
            say(answer)
        except OSError:
            break
    session.abandon()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
