"""GPU state around a container's life: out before a dump and back after it, back after a restore, parked in between.

A container is parked when its GPU state is in host memory and it is paused. The file PARKED of its state directory says
so and holds the record of what moves back, so that a later attempt needs nothing else.
"""

from __future__ import annotations

import os
import time

from shim import gpu, task
from shim.cleanup import DAEMON
from shim.errors import FAILED_PRECONDITION, NOT_FOUND, ShimError
from shim.state import RUN, State
from shim.ttrpc import Response
from shim.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from shim.config import Config
    from shim.log import Log
    from shim.snapshot import Container

PARKED = "parked.json"
SERVICE = "fermata.v1.Gpu"
METHODS = ("Park", "Unpark")


class ProcessInfo(Message):
    """A process of a container, by the pid of the shim's own pid namespace."""

    FIELDS = {1: ("pid", int)}
    pid: int


class PidsResponse(Message):
    """The answer of `Pids`: all of a container's processes."""

    FIELDS = {1: ("processes", [ProcessInfo])}
    processes: list[ProcessInfo]


class Report(Message):
    """The answer of `Park` and `Unpark`: a sentence for a person."""

    FIELDS = {1: ("text", str)}
    text: str


class Tree:
    """A container's processes, through the stock shim's own calls: `call(method, payload)` makes one."""

    def __init__(self, container_id: str, call: Callable[[str, bytes], bytes]) -> None:
        self.id = container_id
        self._call = call
        self._request = task.IdRequest(id=container_id).encode()

    def pids(self) -> list[int]:
        """Every process. Raises ShimError."""
        answer = PidsResponse.decode(self._call("Pids", self._request))
        return [process.pid for process in answer.processes]

    def paused(self) -> bool:
        """Whether the container is frozen. Raises ShimError."""
        answer = task.StateResponse.decode(self._call("State", task.ExecRequest(id=self.id).encode()))
        return answer.status in (task.PAUSED, task.PAUSING)

    def pause(self) -> None:
        """Freeze it. Raises ShimError."""
        self._call("Pause", self._request)

    def resume(self) -> None:
        """Thaw it. Raises ShimError."""
        self._call("Resume", self._request)


class Gpu:
    """One container's GPU state, for the length of one call."""

    def __init__(self, container: Container, call: Callable[[str, bytes], bytes], config: Config, log: Log) -> None:
        self._container = container
        self._tree = Tree(container.state.id, call)
        self._config = config
        self._log = log
        self.record: dict[str, Any] | None = None
        """After `dump`: what was on the GPU, for fermata.json; None when nothing was."""
        self.steps: dict[str, float] = {}
        """After `dump`: seconds of each step."""
        self._prepared: gpu.Helper | None = None

    def prepare(self) -> None:
        """Make the driver ready in the background for what comes after something that takes long."""
        if self._prepared is None:
            self._prepared = gpu.Helper(self._config)

    def dismiss(self) -> None:
        """End what `prepare` started, when it was not used."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.kill()

    def _open_driver(self) -> gpu.Helper:
        prepared, self._prepared = self._prepared, None
        return prepared or gpu.Helper(self._config)

    # A dump ------------------------------------------------------------------------------------------------------

    def dump(self, dump: Callable[[], Response], *, exits: bool) -> Response:
        """Move the state out, call `dump`, and move it back unless that has ended the container.

        Raises ShimError; the container then goes on as before, or, when its GPU has no room any more, is parked.
        """
        if not gpu.node_has_driver():
            return dump()
        parked = read_record(self._container.state)
        out = None
        if parked is None:
            out = self._take_out()
            self.record = out.record if out else None
        else:
            self.record = parked  # parked before: nothing to move, and nothing to move back
        if out and out.moved and not exits:
            self.prepare()
        try:
            try:
                response = dump()
            except BaseException:
                self._back_after_dump(out)
                raise
            if not (exits and response.ok):
                self._back_after_dump(out)
        finally:
            self.dismiss()
        return response

    def _take_out(self) -> gpu.Out | None:
        out = gpu.take_out(self._tree, self._config, self._log, open_driver=self._open_driver)
        if out:
            self.steps.update(out.steps)
            self._log(
                "info",
                "GPU state moved to host memory",
                container=self._tree.id,
                processes=len(out.holders),
                bytes=out.bytes,
                **{name: f"{seconds:.3f}" for name, seconds in out.steps.items()},
            )
        return out

    def _back_after_dump(self, out: gpu.Out | None) -> None:
        if out is None or not out.moved:
            return
        paused = self._tree.paused()
        if paused:
            self._tree.resume()
        try:
            steps = self._bring_back(out.record)
        finally:
            if paused and not self._tree.paused():  # it may have been parked meanwhile
                self._tree.pause()
        self.steps.update({f"{name}_again" if name in self.steps else name: value for name, value in steps.items()})

    def _bring_back(self, record: dict[str, Any]) -> dict[str, float]:
        """Move back into a running container; one that cannot be is parked. Raises ShimError."""
        try:
            steps = gpu.bring_back(self._tree, record, self._config, open_driver=self._open_driver)
        except ShimError as error:
            self._park_for_later(record)
            raise type(error)(
                f"{error}; the container is parked, its GPU state is safe in host memory: "
                f"`fermata unpark {self._tree.id}` tries again",
                error.code,
            ) from error
        forget_record(self._container.state)
        self._log(
            "info",
            "GPU state moved back",
            container=self._tree.id,
            **{name: f"{seconds:.3f}" for name, seconds in steps.items()},
        )
        return steps

    def _park_for_later(self, record: dict[str, Any]) -> None:
        write_record(self._container.state, record)
        if not self._tree.paused():
            self._tree.pause()

    # A restore ---------------------------------------------------------------------------------------------------

    def after_restore(self, record: dict[str, Any]) -> dict[str, float]:
        """Move the recorded state of a tree that CRIU has just restored to the GPU; the seconds of each step.

        Raises ShimError; the tree is then parked, and `unpark` tries again.
        """
        return self._bring_back(record)

    # Parking -----------------------------------------------------------------------------------------------------

    def park(self) -> str:
        """Move the state to host memory and pause the container; says what was done. Raises ShimError."""
        name = self._tree.id
        if read_record(self._container.state) is not None:
            if not self._tree.paused():
                self._tree.pause()
            return f"{name} is parked already"
        if not gpu.node_has_driver():
            raise ShimError(f"{name} has no GPU state: this node has no NVIDIA driver", FAILED_PRECONDITION)
        began = time.monotonic()
        paused = self._tree.paused()
        out = self._take_out()
        if out is None:
            raise ShimError(
                f"{name} has no GPU state: none of its processes uses a GPU; `ctr task pause` only pauses it",
                FAILED_PRECONDITION,
            )
        write_record(self._container.state, out.record)
        if not paused:
            self._tree.pause()
        return (
            f"{name} is parked: {gpu.mib(out.bytes)} of {_processes(len(out.holders))} moved to host memory in "
            f"{time.monotonic() - began:.2f} s"
        )

    def unpark(self) -> str:
        """Move the state back and let the container go on; says what was done. Raises ShimError."""
        name = self._tree.id
        record = read_record(self._container.state)
        if record is None:
            return f"{name} is not parked"
        began = time.monotonic()
        if self._tree.paused():
            self._tree.resume()
        self._bring_back(record)
        size = sum(gpu.needed(record).values())
        return f"{name} goes on: {gpu.mib(size)} moved back to the GPU in {time.monotonic() - began:.2f} s"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def read_record(state: State) -> dict[str, Any] | None:
    """The record of a parked container; None when it is not parked."""
    text = state.read(PARKED)
    if text is None:
        return None
    import json

    record: dict[str, Any] = json.loads(text)
    return record


def write_record(state: State, record: dict[str, Any]) -> None:
    """Say that a container is parked."""
    import json

    state.write(PARKED, json.dumps(record))


def forget_record(state: State) -> None:
    """Say that a container is not parked."""
    try:
        os.unlink(f"{state.path}/{PARKED}")
    except FileNotFoundError:
        pass


# The commands ------------------------------------------------------------------------------------------------------


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `park` and `unpark` to the command's parsers; each sets `run` to the function that carries it out."""
    for method, text in (
        ("Park", "move a running container's GPU state to host memory and pause it; the GPU is free then"),
        ("Unpark", "move a parked container's GPU state back and let it go on"),
    ):
        parser = subparsers.add_parser(method.lower(), help=text, description=text)
        parser.add_argument("id", metavar="ID", help="the container")
        parser.add_argument(
            "-n", "--namespace", default="", help="containerd's namespace (default: the only one with ID)"
        )
        parser.set_defaults(run=run, method=method)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `park` or `unpark`. Raises ShimError."""
    from shim.client import Client

    with Client(daemon_socket(arguments.namespace, arguments.id), "the container's shim") as client:
        response = client.call(SERVICE, arguments.method, task.IdRequest(id=arguments.id).encode())
    if response.status is not None and response.status.code:
        raise ShimError(response.status.message, response.status.code)
    print(Report.decode(response.payload).text)
    return 0


def daemon_socket(namespace: str, container_id: str, run_dir: str = RUN) -> str:
    """The socket of the shim that serves a container. Raises ShimError when there is none, or more than one."""
    try:
        names = [namespace] if namespace else sorted(os.listdir(run_dir))
    except FileNotFoundError:
        names = []
    found = []
    for name in names:
        try:
            recorded = State(name, container_id, run=run_dir).read(DAEMON)
        except (ShimError, NotADirectoryError):
            continue
        if recorded is not None:
            found.append((name, recorded.split("\n")[0]))
    if not found:
        where = f"in namespace {namespace}" if namespace else "in any namespace"
        raise ShimError(f"no running container {container_id} of fermata's {where} on this node", NOT_FOUND)
    if len(found) > 1:
        known = ", ".join(name for name, _ in found)
        raise ShimError(f"container {container_id} is in several namespaces ({known}): say which, -n NAME")
    return found[0][1]
