"""What a take or a restore came to: one line in the log, and its counts."""

from __future__ import annotations

import errno
import time

from shim.errors import ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shim.config import Config
    from shim.log import Log
    from shim.metrics import Change

TAKE, RESTORE = "take", "restore"
_WORDS = {TAKE: ("snapshot taken", "snapshot failed"), RESTORE: ("restored", "restore failed")}


class Account:
    """One operation, from its beginning. Who carries it out fills in what it learns; `succeeded` or `failed` ends it.

    cause      of a failure, where it is known better than by the error: the name that docs/criu-errors.md has for it
    bytes      of the snapshot, all its files together
    entries    in its layer; made_by: "upperdir" or "full-diff", None without a layer
    frozen     seconds for which CRIU held the processes
    steps      seconds of each step
    logs       the directory of CRIU's logs, once it is asked to work
    lost       whether the container ended that was to go on
    """

    def __init__(self, operation: str, container_id: str, directory: str, config: Config, log: Log) -> None:
        self.operation = operation
        self.id = container_id
        self.directory = directory
        self._path = config.metrics_textfile
        self._log = log
        self._spent = 0.0
        self._began = time.monotonic()
        self.cause = ""
        self.bytes: int | None = None
        self.entries: int | None = None
        self.made_by: str | None = None
        self.frozen: float | None = None
        self.steps: dict[str, float] = {}
        self.logs = ""
        self.lost = False

    def tell(self, manifest: dict[str, Any]) -> None:
        """Take over what a snapshot's fermata.json has of its size."""
        layer = manifest.get("layer") or {}
        self.bytes = sum((manifest.get("files") or {}).values())
        self.entries, self.made_by = layer.get("entries"), layer.get("made_by")

    def pause(self) -> None:
        """What comes now, until `resume`, is the client's time."""
        self._spent += time.monotonic() - self._began

    def resume(self) -> None:
        """Go on."""
        self._began = time.monotonic()

    def succeeded(self) -> None:
        """It is done."""
        self._write("success", {})

    def failed(self, error: BaseException | str) -> None:
        """It is not: what was raised, or what the stock shim answered."""
        self.cause = self.cause or cause_of(error)
        text = str(error) if isinstance(error, (str, ShimError, OSError)) else repr(error)
        self._write("failure", {"cause": self.cause, **({"lost": True} if self.lost else {}), "error": text})

    def _write(self, outcome: str, more: dict[str, object]) -> None:
        seconds = self._spent + time.monotonic() - self._began
        known = {"bytes": self.bytes, "entries": self.entries, "layer": self.made_by, "frozen": _shown(self.frozen)}
        self._log(
            "info" if outcome == "success" else "error",
            _WORDS[self.operation][outcome != "success"],
            container=self.id,
            directory=self.directory,
            operation=self.operation,
            outcome=outcome,
            seconds=_shown(seconds),
            **{name: value for name, value in known.items() if value is not None},
            **{f"step_{name}": _shown(value) for name, value in self.steps.items()},
            **more,
        )
        if self._path:
            count(self._path, self._changes(outcome, seconds), self._log)

    def _changes(self, outcome: str, seconds: float) -> list[Change]:
        name = f"fermata_{self.operation}"
        changes: list[Change] = [(f"{name}s_total", {"outcome": outcome}, 1)]
        if outcome == "failure":
            changes.append((f"{name}_failures_total", {"cause": self.cause}, 1))
            if self.lost:
                changes.append((f"{name}_lost_containers_total", {}, 1))
            return changes
        changes.append((f"{name}_seconds", {}, seconds))
        changes += [(f"{name}_step_seconds", {"step": step}, took) for step, took in self.steps.items()]
        changes.append((f"{name}_bytes_total", {}, self.bytes or 0))
        changes.append((f"{name}_last_success_timestamp_seconds", {}, round(time.time(), 3)))
        if self.operation == TAKE:
            if self.frozen is not None:
                changes.append((f"{name}_frozen_seconds", {}, self.frozen))
            changes.append((f"{name}_layer_entries_total", {}, self.entries or 0))
            changes.append((f"{name}_layers_total", {"made_by": self.made_by or "none"}, 1))
        return changes


def _shown(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.3f}"


def count(path: str, changes: list[Change], log: Log) -> None:
    """Add to the metrics; a failure is a line in the log, since no operation fails for its count's sake."""
    from shim import metrics

    try:
        if not metrics.add(path, changes):
            log("warning", "the metrics could not be read and begin anew", path=path)
    except Exception as error:  # whatever is the matter with the file: the operation itself is done
        log("warning", "an operation is not in the metrics", path=path, error=error)


def cause_of(error: BaseException | str) -> str:
    """A word for what stopped an operation, one of few.

    `disk-full`; for a refusal of fermata's the part of it that refused, which is a module's name, or `layer`; `fault`
    for a fault in fermata itself; `runtime` for an error of the stock shim's or runc's own.
    """
    if isinstance(error, str):
        return "runtime"
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk-full"
        if type(seen).__module__.partition(".")[0] == "layerwriter":
            return "layer"
        seen = seen.__cause__
    if not isinstance(error, ShimError):
        return "fault"
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    return name.rpartition(".")[2] or "fault"
