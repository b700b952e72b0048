"""CRIU for one operation of one container: its configuration file, and why it failed."""

from __future__ import annotations

import os

from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import criuconf
    from shim.config import Config
    from shim.log import Log
    from shim.snapshot import Container

CACHE = "/run/fermata"
EMPTY_PLUGIN_DIR = "/run/fermata/no-plugins"
RUNC_CONF = "/etc/criu/runc.conf"
"""What runc gives CRIU for a container that names no configuration, as all of ours do: so its settings are merged."""

LOG_LIMIT = 8 << 20
"""Bytes of a log that are kept: its end, where the reason stands."""


def installed(config: Config) -> criuconf.Criu:
    """Which CRIU this node has. Raises ShimError that says what to install."""
    import criuconf

    os.makedirs(CACHE, mode=0o700, exist_ok=True)
    try:
        return criuconf.probe(config.criu, CACHE)
    except criuconf.CriuConfError as error:
        raise ShimError(str(error), FAILED_PRECONDITION) from error


def write_config(
    container: Container,
    config: Config,
    log: Log,
    *,
    operation: str,
    action_script: str | None = None,
    ext_unix_sk: bool = False,
) -> None:
    """Write the container's CRIU configuration for a `dump` or a `restore`. Raises ShimError."""
    import criuconf

    criu = installed(config)
    os.makedirs(EMPTY_PLUGIN_DIR, mode=0o700, exist_ok=True)
    source = container.criu_config or (RUNC_CONF if os.path.exists(RUNC_CONF) else None)
    own = None
    if source:
        try:
            with open(source, encoding="utf-8") as file:
                own = file.read()
        except (OSError, ValueError) as error:
            raise ShimError(
                f"the container's own CRIU configuration {source} cannot be read: {error}", FAILED_PRECONDITION
            ) from error
    try:
        rendered = criuconf.render(
            criu,
            criuconf.Request(
                operation=operation,
                libdir=EMPTY_PLUGIN_DIR,
                action_script=action_script,
                ghost_limit=config.ghost_limit,
                ext_unix_sk=ext_unix_sk,
                extra=config.criu_options,
                container_text=own,
                container_source=source or "the container's org.criu.config",
            ),
        )
    except criuconf.CriuConfError as error:
        raise ShimError(str(error), FAILED_PRECONDITION) from error
    for text in (*rendered.conflicts, *rendered.notes):
        log("warning", str(text), container=container.state.id)
    container.state.write("criu.conf", rendered.text)


def frozen_seconds(work: str) -> float | None:
    """How long CRIU held the processes still in the dump that worked in the directory `work`; None if it left no word.

    From its `stats-dump`: after eight bytes of magic and a length u32, a message whose field 1 (dump) has in field 2
    (frozen_time) the microseconds from the freeze to the end of the dump, action scripts included
    (criu/images/stats.proto).
    """
    from shim import wire

    try:
        with open(f"{work}/stats-dump", "rb") as file:
            data = file.read(4096)
        size = int.from_bytes(data[8:12], "little")
        for number, _, dump, _ in wire.fields(data[12 : 12 + size]):
            if number == 1:
                for field, _, value, _ in wire.fields(dump):
                    if field == 2:
                        return int(value) / 1e6
    except (OSError, wire.WireError, TypeError):
        pass  # statistics only: the snapshot does not depend on them
    return None


def explain(log: str, message: str, what: str) -> tuple[str, str]:
    """One sentence for a failed operation: what CRIU's log says was the cause, and where the log is kept. And the
    cause's name; "unknown" for one that has none, "runtime" when it was none of CRIU's."""
    import criuconf

    try:
        explanation = criuconf.explain(log if os.path.exists(log) else message.encode())
    except (OSError, criuconf.CriuConfError) as error:
        return f"{what}: {message} (the log {log} cannot be read: {error})", "unknown"
    trim(log)
    kept = f"; log: {log}" if os.path.exists(log) else ""
    if explanation is None:
        return f"{what}: {message}{kept}", "runtime"
    return f"{what}: {explanation.sentence}{kept}", explanation.cause or "unknown"


def trim(log: str) -> None:
    """Keep only the end of a log that has grown too large."""
    try:
        with open(log, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= LOG_LIMIT:
                return
            file.seek(-LOG_LIMIT, os.SEEK_END)
            end = file.read()
            file.seek(0)
            file.write(b"(the beginning of this log was cut off)\n" + end)
            file.truncate()
    except OSError:
        pass  # no log, or no room for a shorter one
