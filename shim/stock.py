"""The stock shim, `containerd-shim-runc-v2`: where it is, running its actions, and what its `start` answers."""

from __future__ import annotations

import os

from shim.errors import NOT_FOUND, ShimError
from shim.task import BootstrapResult
from shim.wire import WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

BINARY = "containerd-shim-runc-v2"


def find(configured: str | None, containerd: str | None) -> str:
    """Path of the stock shim: as configured, else beside the containerd binary, else on PATH.

    Raises ShimError that says where it was looked for.
    """
    if configured:
        if os.access(configured, os.X_OK):
            return configured
        raise ShimError(
            f"no stock shim: /etc/fermata/config.toml names {configured} as stock_shim, which is no executable",
            NOT_FOUND,
        )
    folders = os.environ.get("PATH", os.defpath).split(":")
    if containerd and "/" in containerd:
        folders.insert(0, os.path.dirname(os.path.realpath(containerd)))
    for folder in folders:
        path = f"{folder or '.'}/{BINARY}"
        if os.access(path, os.X_OK):
            return path
    raise ShimError(
        f"no stock shim: {BINARY} is neither beside containerd nor on PATH ({':'.join(folders)}); it comes with "
        'containerd: install it there, or name it in /etc/fermata/config.toml: [shim] stock_shim = "/path/to/it"',
        NOT_FOUND,
    )


class Action:
    """One run of the stock shim's command line, stdin and stderr ours, stdout read to its end.

    containerd reads stdout and stderr of `start` together, so nothing of ours may be printed beside the stock shim's.
    """

    def __init__(self, binary: str, arguments: Sequence[str]) -> None:
        self.binary = binary
        self._out, child = os.pipe()
        try:
            self._pid = os.posix_spawn(
                binary, [binary, *arguments], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, child, 1)]
            )
        except OSError as error:
            raise ShimError(f"cannot run the stock shim {binary}: {error.strerror}") from error
        finally:
            os.close(child)

    def finish(self) -> tuple[int, bytes]:
        """Wait for the end. Returns (exit status, stdout); a death by signal N is status 128 + N."""
        chunks = []
        while chunk := os.read(self._out, 65536):
            chunks.append(chunk)
        os.close(self._out)
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return (code if code >= 0 else 128 - code), b"".join(chunks)


def end_unused(path: str) -> None:
    """Ask the stock shim at the socket `path` to end, which it does unless it holds containers. Nothing is raised."""
    from shim import task
    from shim.client import Client

    request = task.ShutdownRequest(now=True).encode()
    for service in task.SERVICES:  # it knows one of them
        try:
            with Client(path) as client:
                client.call(service, "Shutdown", request, timeout_nano=5 * 10**9)
        except ShimError:
            pass  # it has gone, as it should


class Bootstrap:
    """What `start` answered: an address, in one of the three forms that containerd's versions know."""

    def __init__(self, answer: bytes) -> None:
        """Read an answer: text (1.7), JSON (1.7 to 2.2) or protobuf (2.3 and newer). Raises ShimError for anything
        else."""
        self._answer = answer
        self._protobuf: BootstrapResult | None = None
        stripped = answer.strip()
        if stripped.startswith(b"unix://"):
            self.address = stripped.decode()
        elif stripped.startswith(b"{"):
            self.address = self._json_address()
        else:
            try:
                self._protobuf = BootstrapResult.decode(answer)
                self.address = self._protobuf.address
            except WireError as error:
                raise ShimError(
                    f"the stock shim's start answered {answer[:200]!r}, which is no address: {error}"
                ) from error
        if not self.address.startswith("unix:///"):
            raise ShimError(f"the stock shim's start answered {answer[:200]!r}, which has no address")

    def _json_address(self) -> str:
        # Read without the json module (10 ms): the stock shim writes `"address":"unix://…"` with Go's encoder, and a
        # socket's path holds nothing that JSON escapes.
        _, key, rest = self._answer.partition(b'"address":"')
        address, quote, _ = rest.partition(b'"')
        if not key or not quote or b"\\" in address:
            import json

            try:
                return str(json.loads(self._answer)["address"])
            except (ValueError, KeyError, TypeError) as error:
                raise ShimError(
                    f"the stock shim's start answered {self._answer[:200]!r}, which has no address"
                ) from error
        return address.decode()

    def with_address(self, address: str) -> bytes:
        """The same answer in the same form with another address."""
        if self._protobuf is not None:
            answer = BootstrapResult.decode(self._answer)
            answer.address = address
            return answer.encode()
        return self._answer.replace(self.address.encode(), address.encode())
