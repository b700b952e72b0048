"""RuncShim: the stock runc shim, one ttrpc hop away."""

from __future__ import annotations

import os

from shim import task
from shim.client import Client
from shim.errors import ShimError
from shim.relay import Relay

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable

    from shim.config import Config
    from shim.log import Log
    from shim.relay import Call
    from shim.ttrpc import Response


class RuncShim:
    """Serves the task API by forwarding every call to the stock shim, whose stdio, exec, reaping and events are its
    own.

    A subclass overrides calls of the task service by naming them in `OVERRIDES`: method to attribute.
    """

    OVERRIDES: dict[str, str] = {}

    def __init__(self, stock_path: str, config: Config, log: Log, our_path: str) -> None:
        self._stock_path = stock_path
        self._our_path = our_path
        self.config = config
        self.log = log

    def serve(self, listener: _socket.socket) -> None:
        """Serve until the stock shim has ended."""
        Relay(listener, self._stock_path, self._handler, self.log).serve()

    def _handler(self, service: str, method: str) -> Callable[[Call], Response] | None:
        if service not in task.SERVICES or method not in self.OVERRIDES:
            return None
        handler: Callable[[Call], Response] = getattr(self, self.OVERRIDES[method])
        return handler

    def forward(self, call: Call, payload: bytes | None = None, *, method: str | None = None) -> Response:
        """Make the call, or another of the same service, at the stock shim; returns its answer, error or not."""
        request = call.request
        with Client(self._stock_path) as client:
            return client.call(
                request.service,
                method or request.method,
                request.payload if payload is None else payload,
                timeout_nano=call.remaining_nano(),
                metadata=request.metadata,
            )

    def forward_checked(self, call: Call, payload: bytes, *, method: str) -> bytes:
        """Like forward, for a call of our own: returns the answer's payload, raises ShimError for an error."""
        response = self.forward(call, payload, method=method)
        if response.status is not None and response.status.code:
            raise ShimError(response.status.message, response.status.code)
        return response.payload

    def stay_reachable(self, bundle: str) -> None:
        """Have containerd 1.7 come back to us after its own restart.

        It goes to the address in the bundle's file `address`, which the stock shim writes; 2.x keeps what `start`
        answered, in a file of its own. Not to be called before a call was answered: the stock shim reads the file when
        it begins to serve, to know which socket to remove at its end.
        """
        path = f"{bundle}/address"
        try:
            with open(path, encoding="utf-8") as file:
                if file.read() != f"unix://{self._stock_path}":
                    return
        except FileNotFoundError:
            return
        with open(f"{path}.fermata", "w", encoding="utf-8") as file:
            file.write(f"unix://{self._our_path}")
        os.rename(f"{path}.fermata", path)

    def join_cgroups(self, call: Call, container_id: str) -> None:
        """Join the cgroups that the option `shim_cgroup` moved the stock shim to."""
        payload = self.forward_checked(call, task.IdRequest(id=container_id).encode(), method="Connect")
        join_cgroups_of(task.ConnectResponse.decode(payload).shim_pid)


def adjust_oom_score() -> None:
    """Be killed after the containers and before containerd, as the stock shim: its parent's score plus one."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = min(int(file.read()) + 1, 1000)
            file.seek(0)
            file.write(str(score))
    except OSError:
        pass  # not permitted in some sandboxes; the stock shim goes on as well


def join_cgroups_of(pid: int) -> None:
    """Join the cgroups of the stock shim, which `shim_cgroup` may have moved. Best effort, as there."""
    try:
        with open("/proc/self/cgroup") as file:
            ours = file.read()
        with open(f"/proc/{pid}/cgroup") as file:
            theirs = file.read()
    except OSError:
        return
    if ours == theirs:
        return
    known = set(ours.splitlines())
    for line in theirs.splitlines():
        if line in known:
            continue
        _, controllers, path = line.split(":", 2)
        name = controllers.removeprefix("name=")
        folder = f"/sys/fs/cgroup/{name}{path}" if name else f"/sys/fs/cgroup{path}"
        try:
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        except OSError:
            continue
