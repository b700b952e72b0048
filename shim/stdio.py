"""The FIFOs of a container's input and output while it is restored.

The stock shim opens them after `runc restore`, and an open waits for the other end: when the client has gone by then,
or containerd, for ever, with a lock that every later call for this container waits for. A create without a snapshot
opens them at once, while the client is still there.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from shim.task import CreateTaskRequest

NOWHERE = "file:///dev/null"
"""A log by this name is a pipe for the container, which the stock shim empties into /dev/null."""


class Substitute:
    """Input and output for a restored container whose client gives none.

    The stock shim would hand it the node's own /dev/null, which lies outside of the container, so that the next
    snapshot of it could not be taken. What is given instead is what the snapshot's container had: pipes, to an input
    that never ends and an output that nobody reads.
    """

    def __init__(self, request: CreateTaskRequest, folder: str) -> None:
        """Change the request. The FIFO is made in `folder`. Raises OSError."""
        self._descriptor: int | None = None
        if request.terminal:
            return
        if not request.stdin:
            path = f"{folder}/stdin"
            os.mkfifo(path, 0o600)
            # Both ends: with nobody at the other one, the container would read the end of its input.
            self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request.stdin = path
        if not request.stdout:
            request.stdout = NOWHERE
            request.stderr = request.stderr or NOWHERE

    def close(self) -> None:
        """Let go of the input. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Held:
    """A context manager in which both ends of the FIFOs among `paths` are open.

    Nothing is read or written here: what the container writes meanwhile is still there for whoever reads later, since
    the stock shim holds both ends too once it has opened them.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._open: list[int] = []

    def __enter__(self) -> Held:
        for path in dict.fromkeys(self._paths):
            try:
                if path.startswith("/") and stat.S_ISFIFO(os.stat(path).st_mode):
                    self._open.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            except OSError:
                continue  # the stock shim says what is wrong with it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
