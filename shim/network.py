"""A container's network namespace around one dump or restore: swept of lock rules, and its sockets settled."""

from __future__ import annotations

import os

from shim import lockrules, netns
from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from shim.config import Config


def path_of(spec: dict[str, Any], bundle: str) -> str | None:
    """The path of a container's network namespace; None for the host's.

    One that runc makes has no path but through the container's first process, whose pid the stock shim keeps in the
    bundle. Before the container's start, or its restore, there is no such namespace yet, and it is None too.
    """
    for entry in (spec.get("linux") or {}).get("namespaces") or ():
        if entry.get("type") == "network":
            path = entry.get("path")
            return str(path) if path else _path_by_process(bundle)
    return None


def _path_by_process(bundle: str) -> str | None:
    try:
        with open(f"{bundle}/init.pid", encoding="ascii") as file:
            return f"/proc/{int(file.read())}/ns/net"
    except FileNotFoundError:
        return None


def is_external(snapshot: str) -> bool:
    """Whether the container's network namespace was external to CRIU, so that a restore can enter another one.

    CRIU names such a one in an image netns-N.img; of one that it dumps there are the devices as well, and of one that
    it leaves empty, or that was the host's, nothing.
    """
    names = os.listdir(snapshot)
    return any(name.startswith("netns-") for name in names) and not any(name.startswith("netdev-") for name in names)


class Operation:
    """A dump or restore. A context manager; entering and leaving it sweep the namespace (`lockrules.Use`).

    `log` gets a sentence for each thing that was done. Raises ShimError on entering if the namespace is not there.
    """

    def __init__(self, path: str | None, log: Callable[[str], None]) -> None:
        self._path = path
        self._log = log

    def __enter__(self) -> Operation:
        self._use = lockrules.Use(self._path)
        self._tell("before", self._use.found)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell("after", self._use.release())

    def _tell(self, when: str, flushed: lockrules.Flushed) -> None:
        for phrase in flushed.removed:
            self._log(f"removed {when} CRIU ran: {phrase}")
        for phrase in flushed.kept:
            self._log(f"kept {when} CRIU ran: {phrase}")


class Restore(Operation):
    """A restore from a snapshot directory, with the settings of [network] in the node's configuration."""

    def __init__(
        self, spec: dict[str, Any], bundle: str, snapshot: str, config: Config, log: Callable[[str], None]
    ) -> None:
        super().__init__(path_of(spec, bundle), log)
        self._spec = spec
        self._snapshot = snapshot
        self._config = config

    def __enter__(self) -> Restore:
        if self._path is not None and not is_external(self._snapshot):
            raise ShimError(
                f"the snapshot {self._snapshot} was taken without a network namespace by path, so CRIU would make one "
                f"and not enter {self._path}: create the container with the annotation {netns.ANNOTATION}: "
                f"{netns.KEEP}, and without a namespace by path",
                FAILED_PRECONDITION,
            )
        super().__enter__()
        # The host's own network is never opened up: that would be a change to the node, felt by all of it.
        if self._path is not None and self._config.network_old_address == "bind":
            from shim import sockets

            try:
                self._use.open_up(sockets.addresses_in(self._snapshot))
            except BaseException:
                self._use.release()
                raise
        return self

    def settle(self, pid: int) -> None:
        """After the restore: reset what connections of the container lead outside.

        In a namespace that runc made, loopback is brought up as well: CRIU leaves the new one as it is born. What
        cannot be done is told to the log, and is no reason to end a container that runs.
        """
        made_by_runc = self._path is None and netns.has_own(self._spec)
        if self._config.network_outside != "reset" and not made_by_runc:
            return
        from shim import sockets

        def work() -> list[str]:
            if made_by_runc:
                netns.raise_loopback()
            return sockets.reset_outside(pid) if self._config.network_outside == "reset" else []

        # By the process, whose namespace is the right one whoever made it.
        try:
            reset = netns.inside(f"/proc/{pid}/ns/net", work)
        except (ShimError, OSError) as failure:
            self._log(f"the network is not settled, and connections to the outside may hang: {failure}")
            return
        for connection in reset:
            self._log(f"reset the connection from {connection}")
