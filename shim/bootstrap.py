"""The shim's command line, which containerd calls: `start`, `delete`, `-info` and `-v`.

    containerd-shim-fermata-v1 -namespace NS -address SOCK -publish-binary BIN -id ID [-bundle DIR] [-debug]
    start|delete

Each of them runs the stock shim's own action first and alone decides what of ours goes with it. `start` runs for every
container, so the stock shim is started before anything else is imported: what the daemon needs is imported while the
stock shim starts, which takes it longer.
"""

from __future__ import annotations

import os
import sys

from shim.errors import ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence

    from shim.config import Config
    from shim.stock import Action

_VALUED = ("namespace", "address", "publish-binary", "id", "bundle", "socket")
_SWITCHES = ("debug", "info", "v")


class Arguments:
    """The command line, parsed as Go's flag package does: `-id x`, `-id=x`, `--id x`; flags end at the action."""

    def __init__(self, words: Sequence[str]) -> None:
        """Parse. Raises ShimError that names what cannot be understood."""
        self.words = list(words)
        self.values: dict[str, str] = {}
        self.switches: set[str] = set()
        self.action = ""
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not word.startswith("-") or word == "-":
                self.action = word
                break
            if word == "--":
                self.action = words[at] if at < len(words) else ""
                break
            name, equals, value = word.lstrip("-").partition("=")
            if name in _SWITCHES:
                if value not in ("false", "0", "f", "F", "FALSE", "False"):
                    self.switches.add(name)
            elif name in _VALUED:
                if not equals:
                    if at == len(words):
                        raise ShimError(f"flag needs an argument: -{name}")
                    value = words[at]
                    at += 1
                self.values[name] = value
            else:
                raise ShimError(f"flag provided but not defined: -{name}")

    def required(self, name: str) -> str:
        """A flag's value. Raises ShimError when it is not there."""
        value = self.values.get(name)
        if not value:
            raise ShimError(f"flag -{name} is required; containerd runs this program, a person runs `fermata`")
        return value


def main(words: Sequence[str]) -> int:
    """Run the command line; the exit status. On failure a sentence goes to stderr, which containerd shows."""
    try:
        arguments = Arguments(words)
        if "v" in arguments.switches:
            return _version()
        if "info" in arguments.switches:
            return _info(arguments)
        if arguments.action == "start":
            return _start(arguments)
        if arguments.action == "delete":
            return _delete(arguments)
        raise ShimError(
            f"unknown action {arguments.action!r}: containerd runs this program with start or delete, "
            "a person runs `fermata`"
        )
    except (ShimError, OSError) as error:
        print(f"fermata: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        import traceback

        frame = traceback.extract_tb(error.__traceback__)[-1]
        print(f"fermata: a fault in fermata itself: {error!r}, {frame.filename}:{frame.lineno}", file=sys.stderr)
        return 1


def _run_stock(arguments: Arguments) -> Action:
    """Run the stock shim with our own command line.

    Raises ShimError, for a configuration that makes no sense too, but not for `delete`: what was started under an
    earlier one is cleaned up.
    """
    from shim import config, stock

    try:
        configured = config.load().stock_shim
    except ShimError as error:
        if arguments.action != "delete":
            raise
        print(f"fermata: {error}", file=sys.stderr)
        configured = None
    return stock.Action(stock.find(configured, arguments.values.get("publish-binary")), arguments.words)


def _version() -> int:
    from shim import RUNTIME, __version__

    print(f"{os.path.basename(sys.argv[0])}:\n  Version:  {__version__}\n  Runtime:  {RUNTIME}")
    return 0


def _info(arguments: Arguments) -> int:
    """The stock shim's RuntimeInfo under our name."""
    from shim import RUNTIME
    from shim.task import RuntimeInfo

    status, out = _run_stock(arguments).finish()
    if status == 0:
        info = RuntimeInfo.decode(out)
        info.name = RUNTIME
        out = info.encode()
    _write(1, out)
    return status


def _start(arguments: Arguments) -> int:
    namespace, container_id = arguments.required("namespace"), arguments.required("id")
    action = _run_stock(arguments)
    try:
        # While the stock shim starts, which takes it longer than all these imports: what this needs, and what the
        # daemon does.
        import _ctypes  # noqa: F401 (libc's)
        import _json  # noqa: F401 (fastjson's)

        from shim import cleanup, client, config, log, netns, runc, snapshot, state, stock  # noqa: F401

        settings = config.load()
        if _restores(arguments.values.get("bundle") or "."):
            from shim import restore

            restore.prepare()
    except BaseException:
        _end_started(action)
        raise
    status, out = action.finish()
    if status:
        return status
    answer = stock.Bootstrap(out)
    stock_path = client.socket_path(answer.address)
    try:
        our_path = _address_for(stock_path)
        # Before anybody may call: should the daemon die, `delete` finds the stock shim by this.
        kept = state.State(namespace, container_id)
        kept.create()
        kept.write(cleanup.DAEMON, cleanup.record(our_path, stock_path))
        listener = _listen(our_path)
        # None: the daemon of this container's group serves already.
        if listener is not None and os.fork() == 0:
            _daemon(listener, stock_path, our_path, settings, arguments)
    except BaseException:
        stock.end_unused(stock_path)
        cleanup.forget(namespace, container_id)
        raise
    _write(1, answer.with_address(f"unix://{our_path}"))
    return 0


def _end_started(action: Action) -> None:
    """End the stock shim that a `start` which cannot be finished has started."""
    from shim import client, stock

    status, out = action.finish()
    if status == 0:
        stock.end_unused(client.socket_path(stock.Bootstrap(out).address))


def _restores(bundle: str) -> bool:
    """Whether a container of this bundle is likely to be restored; only time is lost by a wrong guess."""
    try:
        with open(f"{bundle}/config.json", "rb") as file:
            return b'"fermata/restore-from' in file.read()
    except OSError:
        return False


def _address_for(stock_path: str) -> str:
    """Our socket's path for a stock shim: one for each of its instances, computable from its socket alone.

    The containers of a pod share a stock shim, whose `start` then answers the address that serves already; so does
    ours. The socket's inode tells an instance from an earlier one at the same path, whose relay may still be on its
    way out.
    """
    folder, _, name = stock_path.rpartition("/")
    # No longer than the stock shim's name, a SHA-256 in hex, where it can be helped: a socket's path has 107 bytes.
    return f"{folder}/f-{os.stat(stock_path).st_ino:x}-{name[:40]}"


def _listen(path: str) -> _socket.socket | None:
    """Listen at `path`, or None when somebody serves there. A socket that nobody serves is replaced."""
    import _socket
    import errno

    from shim.client import connect

    old = os.umask(0o177)
    try:
        for _ in range(3):
            sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            try:
                sock.bind(path)
                sock.listen(128)
                return sock
            except OSError as error:
                sock.close()
                if error.errno != errno.EADDRINUSE:
                    raise ShimError(f"cannot listen at {path}: {error.strerror}") from error
            try:
                connect(path).close()
                return None
            except OSError:
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass
    finally:
        os.umask(old)
    raise ShimError(f"cannot listen at {path}: others come and go there")


def _daemon(listener: _socket.socket, stock_path: str, our_path: str, settings: Config, arguments: Arguments) -> None:
    """The life of the daemon, in the forked child. Does not return."""
    status = 1
    try:
        import _signal  # signal makes enums of its numbers, which takes 2 ms
        import gc

        from shim import runc
        from shim.log import Log
        from shim.snapshot import SnapshotShim

        os.setsid()
        bundle = arguments.values.get("bundle") or os.getcwd()
        namespace = arguments.values["namespace"]
        log = Log.open_fifo(bundle, debug="debug" in arguments.switches, runtime="fermata", namespace=namespace)
        null = os.open("/dev/null", os.O_RDWR)
        for fd, target in ((null, 0), (null, 1), (log.fd, 2)):
            os.dup2(fd, target)
        os.chdir("/")
        # As the stock shim: a terminal's or a supervisor's signal to the group must not end what holds a container.
        for ignored in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGPIPE):
            _signal.signal(ignored, _signal.SIG_IGN)
        runc.adjust_oom_score()
        if settings.metrics_textfile and not os.path.exists(settings.metrics_textfile):
            # Once after a boot: what is counted is there at 0, so that its first increase is one.
            from shim import account

            account.count(settings.metrics_textfile, [], log)
        shim = SnapshotShim(stock_path, settings, log, namespace, our_path)
        # What stays is not looked at again. Collecting it now would copy the memory that is shared with `start`.
        gc.freeze()
        shim.serve(listener)
        status = 0
    except BaseException:
        import traceback

        from shim import stock

        traceback.print_exc()
        # One that holds containers stays: containerd calls `delete` for each of them, now that we are gone.
        stock.end_unused(stock_path)
    finally:
        try:
            os.unlink(our_path)
        except OSError:
            pass
        os._exit(status)


def _delete(arguments: Arguments) -> int:
    """Clean up after a container whose daemon is gone: the stock shim's part, then ours.

    Everything is found from the disk: no daemon is needed.
    """
    from shim.state import State

    namespace, container_id = arguments.required("namespace"), arguments.required("id")
    state = State(namespace, container_id)
    left = os.path.exists(state.path)
    if left:
        from shim import cleanup, unfinished

        cleanup.end_orphaned_stock_shim(namespace, container_id, arguments.values.get("address", ""))
        unfinished.end(state.log_path)
        if restoring := state.read(unfinished.RECORD):
            unfinished.detach(restoring)
    status, out = _run_stock(arguments).finish()
    try:
        if left:
            cleanup.forget(namespace, container_id)
    except (ShimError, OSError) as error:  # the container has ended all the same, and containerd waits to hear how
        print(f"fermata: {error}", file=sys.stderr)
    _write(1, out)
    return status


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
