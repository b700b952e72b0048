"""A container's GPU state: which of its processes hold some, moving it to host memory and back, all or nothing.

Nothing of this costs a node without an NVIDIA driver more than one look for /dev/nvidiactl. The driver itself is only
ever loaded by shim/cuda.py, a process of its own for the length of one operation.
"""

from __future__ import annotations

import os
import time

from shim import library
from shim.errors import FAILED_PRECONDITION, RESOURCE_EXHAUSTED, UNKNOWN, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, Protocol

    from shim.config import Config
    from shim.log import Log
    from shim.manifest import Manifest

    class Task(Protocol):
        """What moving GPU state needs of a container: see shim/tree.py."""

        id: str

        def pids(self) -> list[int]: ...
        def paused(self) -> bool: ...
        def pause(self) -> None: ...
        def resume(self) -> None: ...

    class Driver(Protocol):
        """A session with shim/cuda.py: see Helper."""

        @property
        def version(self) -> str: ...
        @property
        def missing(self) -> list[str]: ...

        def call(self, op: str, **fields: Any) -> dict[str, Any]: ...
        def end(self) -> None: ...
        def kill(self) -> None: ...

    OpenDriver = Callable[[], Driver]


CONTROL_DEVICE = "/dev/nvidiactl"
MARGIN = 1 << 30  # bytes that must be free beside the state itself before it moves back
FIRST_DRIVER, FIRST_DRIVER_WITH_PAIRS = 570, 580
LIBRARY_DIRS = (
    "",  # wherever the dynamic linker has it
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/",  # the driver container of NVIDIA's GPU operator
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu/",
    "/run/nvidia/driver/usr/lib64/",
    "/usr/local/nvidia/lib64/",
    "/home/kubernetes/bin/nvidia/lib64/",
)
_STATES = ("running", "locked", "in host memory", "failed")
# CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_NOT_INITIALIZED (as driver 580 says): the pid's process does not use CUDA.
_NOT_CUDA = (1, 3)
_NOT_SUPPORTED, _NOT_READY = 801, 600


# Who uses a GPU ----------------------------------------------------------------------------------------------------


class User:
    """A process that has a GPU's device open or the driver's library loaded."""

    def __init__(self, pid: int, container_pid: int, command: str, descriptors: list[tuple[int, str]]) -> None:
        self.pid = pid
        self.container_pid = container_pid
        self.command = command
        self.descriptors = descriptors  # (number, path) of each open /dev/nvidia*

    def __str__(self) -> str:
        inside = "" if self.container_pid == self.pid else f" ({self.container_pid} in the container)"
        return f"process {self.pid}{inside}, `{self.command}`"


def node_has_driver() -> bool:
    """Whether an NVIDIA driver is loaded here."""
    return os.path.exists(CONTROL_DEVICE)


def users(pids: Iterable[int], proc: str = "/proc") -> list[User]:
    """The processes among `pids` that use a GPU, or did before their state was moved out.

    A moved-out process has no device open, but the driver's library is still mapped.
    """
    found = []
    for pid in pids:
        descriptors = nvidia_descriptors(pid, proc)
        if descriptors or _maps_libcuda(pid, proc):
            found.append(User(pid, _container_pid(pid, proc), _command(pid, proc), descriptors))
    return found


def nvidia_descriptors(pid: int, proc: str = "/proc") -> list[tuple[int, str]]:
    """(number, path) of each descriptor of a process that is an NVIDIA device; none when the process is gone."""
    found = []
    try:
        for name in os.listdir(f"{proc}/{pid}/fd"):
            try:
                target = os.readlink(f"{proc}/{pid}/fd/{name}")
            except OSError:
                continue  # closed meanwhile
            if target.startswith("/dev/nvidia"):
                found.append((int(name), target))
    except OSError:
        return []
    return sorted(found)


def _maps_libcuda(pid: int, proc: str) -> bool:
    try:
        with open(f"{proc}/{pid}/maps", "rb") as file:
            return b"/libcuda.so" in file.read()
    except OSError:
        return False


def _container_pid(pid: int, proc: str) -> int:
    try:
        with open(f"{proc}/{pid}/status") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    except OSError:
        pass
    return pid


def _command(pid: int, proc: str) -> str:
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    text = " ".join(word.decode(errors="replace") for word in words)
    return text if len(text) <= 120 else text[:119] + "…"


def shares_of(all_users: list[User], proc: str = "/proc") -> list[str]:
    """A sentence for each process that has another one's GPU memory open (CUDA IPC).

    Driver 580 moves the state of such a process out and then cannot move it back, ever, in no order. It does not say
    so, but for each process that gives memory away it makes a file /dev/shm/cuda.shm.UID.PID.N, PID in hexadecimal and
    as the process itself sees it, which both ends map.
    """
    sentences = []
    by_container_pid = {user.container_pid: user for user in all_users}
    for user in all_users:
        for owner in sorted(_ipc_owners(user.pid, proc) - {user.container_pid}):
            other = by_container_pid.get(owner)
            whose = str(other) if other else f"a process {owner} that is not here"
            sentences.append(f"{user} uses GPU memory of {whose}")
    return sentences


def _ipc_owners(pid: int, proc: str) -> set[int]:
    owners = set()
    try:
        with open(f"{proc}/{pid}/maps", errors="replace") as file:
            for line in file:
                _, found, name = line.partition("/cuda.shm.")
                parts = name.split(".")
                if found and len(parts) >= 3:
                    try:
                        owners.add(int(parts[1], 16))
                    except ValueError:
                        continue
    except OSError:
        return set()
    return owners


def minors(pid: int, proc: str = "/proc") -> set[int]:
    """The N of every /dev/nvidiaN in a process's root: the GPUs that its container has, whoever put them there."""
    found = set()
    try:
        names = os.listdir(f"{proc}/{pid}/root/dev")
    except OSError:
        return set()
    for name in names:
        digits = name.removeprefix("nvidia")
        if digits != name and digits.isdigit():
            try:
                found.add(os.minor(os.stat(f"{proc}/{pid}/root/dev/{name}").st_rdev))
            except OSError:
                continue
    return found


# The driver --------------------------------------------------------------------------------------------------------


class Helper:
    """A run of shim/cuda.py: started, asked line by line, ended.

    It starts in the background: `version`, `missing` and `call` wait for it, and raise ShimError when there is no
    usable driver library. With `initialise` it makes the driver ready at once, for more than an inventory.
    """

    def __init__(self, config: Config, *, initialise: bool = True) -> None:
        import sys

        self._config = config
        self._buffer = b""
        self._hello: dict[str, Any] | None = None
        child_in, self._in = os.pipe()
        self._out, child_out = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, child_in, 0), (os.POSIX_SPAWN_DUP2, child_out, 1)]
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", *library.program("shim.cuda")],
                {"PATH": os.environ.get("PATH", os.defpath)},  # no CUDA_VISIBLE_DEVICES of whoever started containerd
                file_actions=actions,
            )
        except OSError as error:
            os.close(self._in)
            os.close(self._out)
            raise ShimError(f"cannot run {sys.executable}: {error.strerror}") from error
        finally:
            os.close(child_in)
            os.close(child_out)
        self._open = True
        self._send(
            {
                "libcuda": self._names("libcuda.so.1"),
                "nvml": self._names("libnvidia-ml.so.1"),
                "initialise": initialise,
            }
        )

    @property
    def version(self) -> str:
        """The driver's version."""
        return str(self._greeting().get("driver", "unknown"))

    @property
    def missing(self) -> list[str]:
        """Of the calls that move GPU state, those that this driver lacks."""
        return list(self._greeting().get("missing") or [])

    def _greeting(self) -> dict[str, Any]:
        if self._hello is None:
            self._hello = self._receive(120)
        if problem := self._hello.get("error"):
            self.kill()
            raise ShimError(
                f"the NVIDIA driver's libraries cannot be used: {problem}; if they are somewhere else, name "
                "libcuda.so.1 in /etc/fermata/config.toml: [gpu] libcuda",
                FAILED_PRECONDITION,
            )
        return self._hello

    def _names(self, library: str) -> list[str]:
        configured = self._config.gpu_libcuda
        if configured:
            folder = os.path.dirname(configured)
            beside = configured if library.startswith("libcuda") else f"{folder}/{library}" if folder else library
            return [beside]
        return [f"{folder}{library}" for folder in LIBRARY_DIRS]

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Make one request. Raises ShimError when it was refused or the program ended."""
        limit = float(fields.get("limit", self._config.gpu_move_timeout))
        self._greeting()
        self._send({"op": op, "limit": limit, **fields})
        answer = self._receive(limit + 30)
        if "error" in answer:
            raise ShimError(f"the NVIDIA driver: {answer['error']}")
        return answer

    def _send(self, request: dict[str, Any]) -> None:
        import json

        if not self._open:
            raise ShimError("the program that moves GPU state was ended")
        try:
            os.write(self._in, json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ShimError(f"the program that moves GPU state has ended: {error.strerror}") from error

    def _receive(self, limit: float) -> dict[str, Any]:
        import json
        import select

        if not self._open:
            raise ShimError("the program that moves GPU state was ended")
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        until = time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise ShimError(f"the NVIDIA driver did not answer in {limit:.0f} s")
            data = os.read(self._out, 1 << 16)
            if not data:
                raise ShimError("the program that moves GPU state was killed")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the program; the processes stay as they are."""
        if self._open:
            try:
                self._greeting()
                self._send({"op": "end"})
                self._receive(5)
            except (ShimError, ValueError):
                pass  # killed below
            self.kill()

    def kill(self) -> None:
        """End the program at once."""
        import signal

        if not self._open:
            return
        self._open = False
        os.close(self._in)
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass
        os.close(self._out)


class _Failure(ShimError):
    """Some processes' step failed."""


def _require(driver: Driver) -> None:
    if driver.missing:
        raise ShimError(
            f"the NVIDIA driver {driver.version} cannot move GPU state: that came with driver {FIRST_DRIVER}; "
            "install that or a newer one",
            FAILED_PRECONDITION,
        )


def _major(version: str) -> int:
    digits = version.partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _step(driver: Driver, op: str, all_users: list[User], what: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """One step for all processes at once; results by pid. Raises ShimError that names each process that failed."""
    if not all_users:
        return {}
    answer = driver.call(op, pids=[user.pid for user in all_users], **fields)
    results = {int(result["pid"]): result for result in answer["results"]}
    wrong = [f"{user}: {_meaning(results[user.pid], op, fields)}" for user in all_users if "error" in results[user.pid]]
    if wrong:
        raise _Failure(f"{what}: {'; '.join(wrong)}", FAILED_PRECONDITION)
    return results


def _meaning(result: dict[str, Any], op: str, fields: dict[str, Any]) -> str:
    code, error = result.get("code"), str(result["error"])
    if code == _NOT_READY and op == "lock":
        return (
            f"its work on the GPU did not end in {fields['timeout_ms'] / 1000:g} s ({error}); wait for it, or set a "
            "longer [gpu] lock_timeout in /etc/fermata/config.toml"
        )
    if code == _NOT_SUPPORTED:
        return (
            f"it has GPU state that the driver cannot move ({error}): memory shared with another process (CUDA IPC, "
            "NCCL between GPUs) or managed memory"
        )
    return error


# Out ---------------------------------------------------------------------------------------------------------------


class Out:
    """GPU state that is in host memory, and what it takes to bring it back."""

    def __init__(self, record: dict[str, Any], holders: list[User], moved: list[User], steps: dict[str, float]) -> None:
        self.record = record
        """For fermata.json and the state directory: driver, gpus, processes (pid in the container, bytes, by_gpu)."""
        self.holders = holders  # all whose state is out
        self.moved = moved  # those that were running before: the others had been parked
        self.steps = steps

    @property
    def bytes(self) -> int:
        """What they held on the GPUs together."""
        return sum(int(process["bytes"]) for process in self.record["processes"])


def take_out(task: Task, config: Config, log: Log, *, open_driver: OpenDriver, proc: str = "/proc") -> Out | None:
    """Move the GPU state of all of a container's processes to host memory; None when there is none.

    A paused container is resumed for it (a frozen process cannot move its state) and paused again, also on failure.
    Raises ShimError, and then every process runs on with its state on the GPU.
    """
    if not users(task.pids(), proc):
        return None
    paused = task.paused()
    if paused:
        task.resume()
    try:
        return _Taking(task, config, log, open_driver, proc).run()
    finally:
        if paused:
            task.pause()


class _Taking:
    def __init__(self, task: Task, config: Config, log: Log, open_driver: OpenDriver, proc: str) -> None:
        self._task = task
        self._config = config
        self._log = log
        self._open_driver = open_driver
        self._proc = proc
        self._steps: dict[str, float] = {}
        self._holders: dict[int, User] = {}
        self._moved: dict[int, User] = {}
        self._what = f"the GPU state of container {task.id} cannot be moved out"

    def run(self) -> Out:
        began = time.monotonic()
        driver = self._open_driver()
        try:
            _require(driver)
            gpus = driver.call("inventory")["gpus"]
            self._steps["gpu_driver"] = time.monotonic() - began  # what is left of its getting ready
            # Processes may be started while others are moved: what is new is moved in a further round.
            for _ in range(3):
                if not self._round(driver):
                    break
            else:
                raise ShimError(
                    f"{self._what}: it keeps starting processes that use the GPU; try again later", FAILED_PRECONDITION
                )
            record = self._record(driver, gpus)
        except BaseException as error:
            driver.kill()
            self._put_back(error)
            raise
        driver.end()
        return Out(record, list(self._holders.values()), list(self._moved.values()), self._steps)

    def _round(self, driver: Driver) -> bool:
        """Move what runs on the GPU; False when nothing did. Raises ShimError for what cannot be moved."""
        present = users(self._task.pids(), self._proc)
        states = driver.call("state", pids=[user.pid for user in present])["results"]
        running = []
        for user, result in zip(present, states, strict=True):
            if result.get("code") in _NOT_CUDA or result.get("died"):
                self._refuse_stranger(user)
            elif "error" in result:
                raise ShimError(f"{self._what}: {user}: {result['error']}", FAILED_PRECONDITION)
            else:
                self._holders[user.pid] = user
                if result["value"] == 3:
                    raise ShimError(
                        f"{self._what}: {user}: the driver has lost its state; only a new start helps",
                        FAILED_PRECONDITION,
                    )
                if result["value"] != 2:
                    running.append(user)
                elif user.descriptors:
                    raise ShimError(
                        f"{self._what}: {user} has its state in host memory and still holds descriptor "
                        f"{_shown(user.descriptors)}, so it cannot be dumped: something beside CUDA has opened it, "
                        "such as NVML (nvmlInit without nvmlShutdown) or a graphics library",
                        FAILED_PRECONDITION,
                    )
        if not running:
            return False
        if shares := shares_of(present, self._proc):
            raise ShimError(
                f"{self._what}: {'; '.join(shares)}: the NVIDIA driver cannot move memory that processes share (CUDA "
                "IPC, NCCL between GPUs); give each process memory of its own",
                FAILED_PRECONDITION,
            )
        for user in running:
            self._moved[user.pid] = user
        self._timed("gpu_lock", driver, "lock", running, timeout_ms=int(self._config.gpu_lock_timeout * 1000))
        self._timed("gpu_out", driver, "checkpoint", running)
        return True

    def _timed(self, step: str, driver: Driver, op: str, which: list[User], **fields: Any) -> None:
        began = time.monotonic()
        try:
            _step(driver, op, which, self._what, **fields)
        finally:
            self._steps[step] = self._steps.get(step, 0.0) + time.monotonic() - began

    def _refuse_stranger(self, user: User) -> None:
        """A process that is no CUDA process of its own may have the library mapped, but no device open."""
        descriptors = nvidia_descriptors(user.pid, self._proc)
        if not descriptors:
            return
        raise ShimError(
            f"{self._what}: {user} holds descriptor {_shown(descriptors)} and no GPU state of its own, so it cannot be "
            "dumped. A process forked from one that uses CUDA is the usual cause: start it with the spawn method "
            "instead (VLLM_WORKER_MULTIPROC_METHOD=spawn, multiprocessing.set_start_method('spawn'))",
            FAILED_PRECONDITION,
        )

    def _record(self, driver: Driver, before: list[dict[str, Any]]) -> dict[str, Any]:
        seen: set[int] = set()
        for user in self._holders.values():
            seen |= minors(user.pid, self._proc)
        # What was parked before holds nothing any more: its size is in the record of its parking, not here.
        processes = []
        for user in self._holders.values():
            by_gpu = {gpu["uuid"]: gpu["processes"].get(str(user.pid), 0) for gpu in before}
            by_gpu = {uuid: size for uuid, size in by_gpu.items() if size}
            processes.append(
                {
                    "pid": user.container_pid,
                    "command": user.command,
                    "bytes": sum(by_gpu.values()),
                    "by_gpu": by_gpu,
                }
            )
        return {
            "driver": driver.version,
            "gpus": [
                {"uuid": gpu["uuid"], "model": gpu["model"], "memory": gpu["total"]}
                for gpu in before
                if gpu["minor"] in seen
            ],
            "processes": processes,
        }

    def _put_back(self, error: BaseException) -> None:
        """Whatever was reached: every process back to running, by a new helper, since the first may be stuck."""
        if not self._moved:
            return
        failed = put_back(list(self._moved.values()), self._open_driver, self._config)
        if failed:
            self._log("error", "GPU state could not be put back", container=self._task.id, processes="; ".join(failed))
            raise ShimError(
                f"{error}; and then {'; '.join(failed)}: end this container, it may not compute any more", UNKNOWN
            ) from error


def _shown(descriptors: list[tuple[int, str]]) -> str:
    first = ", ".join(f"{number} ({path})" for number, path in descriptors[:3])
    return first if len(descriptors) <= 3 else f"{first} and {len(descriptors) - 3} more"


def put_back(
    moved: list[User], open_driver: OpenDriver, config: Config, pairs: list[list[str]] | None = None
) -> list[str]:
    """Bring processes back to running from whatever state; a sentence for each live one for which that failed."""
    sentences = []
    for attempt in range(2):  # a helper that was killed once may be killed twice, not for ever
        try:
            driver = open_driver()
        except ShimError as error:
            sentences = [str(error)]
            continue
        try:
            answer = driver.call("running", pids=[user.pid for user in moved], pairs=pairs or [])
        except ShimError as error:
            driver.kill()
            sentences = [str(error)]
            continue
        driver.end()
        by_pid = {int(result["pid"]): result for result in answer["results"]}
        sentences = [
            f"{user}: {by_pid[user.pid]['error']}"
            for user in moved
            if "error" in by_pid[user.pid] and not by_pid[user.pid].get("died")
        ]
        if not sentences or attempt:
            break
    return sentences


# Back --------------------------------------------------------------------------------------------------------------


class NoRoom(ShimError):
    """The GPU has too little memory free. The state is still in host memory, and a later try may succeed."""


def bring_back(
    task: Task, record: dict[str, Any], config: Config, *, open_driver: OpenDriver, proc: str = "/proc"
) -> dict[str, float]:
    """Move the state of all processes of a running container back to the GPU; returns the seconds of each step.

    Raises NoRoom before anything is moved when a GPU lacks the recorded size plus 1 GiB, and ShimError for everything
    else. All or nothing: after an error everything is in host memory as before.
    """
    steps: dict[str, float] = {}
    began = time.monotonic()
    driver = open_driver()
    what = f"the GPU state of container {task.id} cannot be moved back"
    try:
        _require(driver)
        present = users(task.pids(), proc)
        states = driver.call("state", pids=[user.pid for user in present])["results"]
        held = [user for user, result in zip(present, states, strict=True) if result.get("value") == 2]
        gpus = driver.call("inventory")["gpus"]
        steps["gpu_driver"] = time.monotonic() - began  # what is left of its getting ready
        seen: set[int] = set()
        for user in held:
            seen |= minors(user.pid, proc)
        now = [gpu for gpu in gpus if gpu["minor"] in seen]
        pairs = pair(record.get("gpus") or [], now, driver.version, what) if held else []
        check_room(record, now, pairs, held, what)
        began = time.monotonic()
        try:
            _step(driver, "restore", held, what, pairs=pairs)
        except _Failure:
            # Those that did come back are locked: out again, so that a later try finds one state.
            _park_again(driver, held)
            raise
        steps["gpu_back"] = time.monotonic() - began
        began = time.monotonic()
        _step(driver, "unlock", held, what)
        steps["gpu_unlock"] = time.monotonic() - began
    except BaseException:
        driver.kill()
        raise
    driver.end()
    return steps


def _park_again(driver: Driver, held: list[User]) -> None:
    states = driver.call("state", pids=[user.pid for user in held])["results"]
    locked = [int(result["pid"]) for result in states if result.get("value") == 1]
    if locked:
        driver.call("checkpoint", pids=locked)


def needed(record: dict[str, Any]) -> dict[str, int]:
    """Bytes by GPU UUID that a record's processes held."""
    sizes: dict[str, int] = {}
    for process in record.get("processes") or []:
        for uuid, size in (process.get("by_gpu") or {}).items():
            sizes[uuid] = sizes.get(uuid, 0) + int(size or 0)
    return sizes


def check_room(
    record: dict[str, Any], now: list[dict[str, Any]], pairs: list[list[str]], held: list[User], what: str
) -> None:
    """Raises NoRoom unless every GPU has free what moves back to it plus 1 GiB.

    A restore that runs out of GPU memory in the middle leaves the process unrestorable for ever.
    """
    if not held:
        return
    renamed = dict(pairs)
    recorded = record.get("gpus") or []
    if not pairs and len(recorded) == 1 and len(now) == 1:
        renamed = {recorded[0]["uuid"]: now[0]["uuid"]}
    free = {gpu["uuid"]: gpu for gpu in now}
    short = []
    for uuid, size in needed(record).items():
        gpu = free.get(renamed.get(uuid, uuid))
        if gpu is not None and gpu["free"] < size + MARGIN:
            short.append(
                f"{gpu['model']} {gpu['uuid']} has {mib(gpu['free'])} free and needs {mib(size + MARGIN)} "
                f"({mib(size)} and {mib(MARGIN)} to be safe): {mib(size + MARGIN - gpu['free'])} are missing"
            )
    if short:
        raise NoRoom(f"{what}: {'; '.join(short)}", RESOURCE_EXHAUSTED)


def mib(size: int) -> str:
    """A size in MiB, rounded up."""
    return f"{-(-size >> 20)} MiB"


def pair(recorded: list[dict[str, Any]], now: list[dict[str, Any]], driver: str, what: str) -> list[list[str]]:
    """[UUID then, UUID now] for each GPU, or nothing where the driver needs no map. Raises ShimError for a misfit."""
    problems = misfits(recorded, now, driver)
    if problems:
        raise ShimError(f"{what}: {'; '.join(problems)}", FAILED_PRECONDITION)
    then = [gpu["uuid"] for gpu in recorded]
    present = [gpu["uuid"] for gpu in now]
    if len(then) <= 1 or set(then) == set(present):
        return []
    # A GPU that is still there keeps its place; the others are taken in the order of their device numbers.
    left = [uuid for uuid in present if uuid not in then]
    return [[uuid, uuid if uuid in present else left.pop(0)] for uuid in then]


def misfits(recorded: list[dict[str, Any]], now: list[dict[str, Any]], driver: str) -> list[str]:
    """A sentence for each reason why state of the recorded GPUs cannot move to those of now."""
    if not recorded:
        return []
    if not now:
        return [f"it was taken with {_several(recorded)}, and this container has none: give it the same"]
    sentences = []
    if len(now) != len(recorded):
        sentences.append(
            f"it was taken with {_several(recorded)}, and this container has {_several(now)}: give it as many"
        )
    then, present = sorted(gpu["model"] for gpu in recorded), sorted(gpu["model"] for gpu in now)
    if len(now) == len(recorded) and then != present:
        sentences.append(
            f"it was taken with {_several(recorded)}, and this container has {_several(now)}: the models must be equal"
        )
    uuids = {gpu["uuid"] for gpu in recorded}, {gpu["uuid"] for gpu in now}
    if not sentences and len(recorded) > 1 and uuids[0] != uuids[1] and _major(driver) < FIRST_DRIVER_WITH_PAIRS:
        sentences.append(
            f"moving to other GPUs needs the NVIDIA driver {FIRST_DRIVER_WITH_PAIRS} or newer, this node has {driver}"
        )
    return sentences


def _several(gpus: list[dict[str, Any]]) -> str:
    models: dict[str, int] = {}
    for gpu in gpus:
        models[gpu["model"]] = models.get(gpu["model"], 0) + 1
    return " and ".join(f"{count} × {model}" for model, count in models.items())


# Before a restore --------------------------------------------------------------------------------------------------


def missing(manifest: Manifest, spec: dict[str, Any], *, open_driver: OpenDriver) -> list[str]:
    """A sentence for each reason why this container, on this node, cannot take the snapshot's GPU state."""
    record = recorded(manifest)
    if record is None:
        return []
    gpus = record.get("gpus") or []
    if not node_has_driver():
        return [f"it was taken with {_several(gpus)}, and this node has no NVIDIA driver: restore it on one that has"]
    wanted = spec_minors(spec)
    if wanted is not None and not wanted:
        return [f"it was taken with {_several(gpus)}, and this container has none: give it the same"]
    try:
        driver = open_driver()
    except ShimError as error:
        return [str(error)]
    try:
        _require(driver)
        present = driver.call("inventory")["gpus"]
    except ShimError as error:
        return [str(error)]
    finally:
        driver.end()
    if wanted is None and len(present) != len(gpus):
        return []  # the runtime's hook chooses the devices later: what does not fit then is found at start
    now = [gpu for gpu in present if wanted is None or gpu["minor"] in wanted]
    return misfits(gpus, now, driver.version)


def spec_minors(spec: dict[str, Any]) -> set[int] | None:
    """The N of each /dev/nvidiaN that a spec gives its container; None when a hook decides (NVIDIA's own runtime)."""
    devices = (spec.get("linux") or {}).get("devices") or []
    found = set()
    for device in devices:
        name = str(device.get("path", "")).removeprefix("/dev/nvidia")
        if name.isdigit():
            found.add(int(device.get("minor", name)))
    if found:
        return found
    for word in (spec.get("process") or {}).get("env") or []:
        name, _, value = str(word).partition("=")
        if name == "NVIDIA_VISIBLE_DEVICES" and value not in ("", "void", "none"):
            return None
    return found


def recorded(manifest: Manifest) -> dict[str, Any] | None:
    """The snapshot's record of GPU state; None when it has none."""
    record = manifest.data.get("gpu")
    return record if isinstance(record, dict) and record.get("processes") else None
