"""Programs in a container that keep their weights out of its snapshot: the channel to them, and the steps through it.

A program that uses the library `fermata` listens at /run/fermata/<its pid>.sock, on a tmpfs of the container's own. The
shim looks for these sockets through /proc/<pid>/root, never out of the container, and speaks first: a message is one
JSON object on one line, descriptors travel with the first byte of the message that says how many they are ("fds").

    status                                        is the program ready?
    prepare, packs, written, release, released    before a dump: the weights go into files of the store, then away
    restored, armed, go, back                     after a dump or a restore: they come back

Whatever fails before the release costs nothing: the program goes on with its weights, which are in the snapshot then.
What a program says is never trusted: its digests are checked against the bytes, and each wait has a limit.
"""

from __future__ import annotations

import _socket
import _thread
import os
import stat
import struct
import time

from shim import specedits, task, weights
from shim.errors import FAILED_PRECONDITION, ShimError
from shim.parking import Tree
from shim.ttrpc import Response
from shim.wire import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import Any, TypeVar

    from shim.config import Config
    from shim.log import Log
    from shim.snapshot import Container
    from shim.state import State
    from shim.weights import Pack

    T = TypeVar("T")

SERVICE = "fermata.v1.Guest"
PROTOCOL = 1
OUT, INSIDE, NONE = "out", "inside", "none"
"""What became of the weights, in fermata.json: out of the snapshot, in it, or no program that has any was there."""

LINE_LIMIT = 16 << 20
_MOST_LISTENERS, _MOST_PACKS = 256, 250
_MOST_NAMES, _AT_ONCE = 4096, 64  # names of sockets, and how many of them are open at a time
_MOST_CHUNKS = 1 << 18  # of all programs of a container, which is what a line holds for one of them
_MOST_TIMES, _MOST_NOTES = 30, 30
_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 20, 1 << 30
_HANG_UP = 5.0  # seconds for a program to close its end of a connection
_LOOK = 5.0  # seconds for a look into the container
_STATUS = 1.0
_PIECE, _READERS = 4 << 20, 4  # bytes, and threads, of reading ahead
# openat2(2)
_SYS_OPENAT2, _RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 437, 0x02, 0x10


class Status(Message):
    """The answer of `Status`: whether a program in the container has said that it is ready, and what is known."""

    FIELDS = {1: ("ready", bool), 2: ("text", str)}
    ready: bool
    text: str


# The channel ------------------------------------------------------------------------------------------------------


class ChannelError(ShimError):
    """A program did not answer, or not as it should."""


class Gone(ChannelError):
    """A program has ended."""


class Whole(ChannelError):
    """A program is offered weights that it has never let go of."""


class Listener:
    """A socket of a program: its pid in the container, and a descriptor of the socket's name (O_PATH)."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.fd = fd

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


def sockets(root: str) -> list[int]:
    """The pids for which there is a name in /run/fermata below a container's root, such as /proc/<pid>/root.

    Many may be of processes that have ended: nobody has to remove them. Raises ShimError when that takes too long, a
    container may have mounted a file system that does not answer, and for more names than anybody needs.
    """
    return _in_time(_LOOK, lambda: _names(root), "the container's /run/fermata does not answer")


def listeners(root: str, pids: Iterable[int]) -> list[Listener]:
    """The sockets in /run/fermata below a container's root that are there for these pids; for some of them none.

    Links in the container lead to what is in the container, and a link in the place of a socket nowhere. Raises
    ShimError as `sockets` does.
    """
    return _in_time(_LOOK, lambda: _look(root, pids), "the container's /run/fermata does not answer")


def _names(root: str) -> list[int]:
    folder = _open_folder(root)
    if folder is None:
        return []
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                digits, _, suffix = entry.name.partition(".")
                # One that begins with 0 is a second socket of a process, for who keeps them by its number.
                number = digits.isascii() and digits.isdigit() and len(digits) <= 10 and digits[0] != "0"
                if suffix == "sock" and number:
                    found.append(int(digits))
                if len(found) > _MOST_NAMES:
                    raise ShimError(f"more than {_MOST_NAMES} sockets are in the container's {specedits.CHANNEL}")
    finally:
        os.close(folder)
    return sorted(found)


def _open_folder(root: str) -> int | None:
    try:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None  # it has ended
    try:
        return _open_below(top, specedits.CHANNEL.lstrip("/"))
    except OSError:
        return None
    finally:
        os.close(top)


def _look(root: str, pids: Iterable[int]) -> list[Listener]:
    found: list[Listener] = []
    folder = _open_folder(root)
    if folder is None:
        return found
    try:
        device = os.fstat(folder).st_dev
        for pid in pids:
            try:
                fd = os.open(f"{pid}.sock", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                continue  # there is none, or no more
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and status.st_dev == device:
                found.append(Listener(pid, fd))
            else:
                os.close(fd)
    finally:
        os.close(folder)
    return found


def _open_below(top: int, path: str) -> int:
    """Open a directory for which `top` is the root, whatever links there are on the way. Raises OSError."""
    import ctypes

    # struct open_how: flags, mode, resolve
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    how = (ctypes.c_uint64 * 3)(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    return weights.system_call(_SYS_OPENAT2, top, ctypes.c_char_p(os.fsencode(path)), how, 24)


def _in_time(limit: float, work: Callable[[], T], what: str) -> T:
    """What `work` returns or raises, in a thread that is left alone when it does not come back. Raises ShimError."""
    results: list[T] = []
    failures: list[Exception] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(error)
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    if not done.acquire(timeout=limit):
        raise ShimError(f"{what} within {limit:g} s")
    if failures:
        raise failures[0]
    return results[0]


def socket_for(root: str) -> _socket.socket:
    """A socket for a connection into the container with this root, in its network namespace.

    A program's end of a connection is in the namespace of whoever connected, and CRIU, which looks into the container's
    alone, could not dump one that a program does not close. Raises OSError.
    """

    def make() -> _socket.socket:
        return _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)

    namespace = f"{os.path.dirname(root)}/ns/net"
    if not os.path.lexists(namespace):
        return make()
    from shim import netns

    return netns.inside(namespace, make)


class Channel:
    """A connection to a program, through a socket of `socket_for`.

    Raises ChannelError, Gone when nobody listens; every wait ends at `until`.
    """

    def __init__(self, listener: Listener, sock: _socket.socket, until: float) -> None:
        self.pid = listener.pid
        self._buffer = bytearray()
        self._sock = sock
        try:
            while True:
                self._patient(until)
                try:
                    self._sock.connect(f"/proc/self/fd/{listener.fd}")
                    return
                except BlockingIOError:  # others wait to be accepted
                    time.sleep(0.01)
        except OSError as error:
            self._sock.close()
            if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                raise Gone(f"{self} has ended") from error
            raise ChannelError(f"{self} cannot be reached: {error}") from error
        except BaseException:
            self._sock.close()
            raise

    def __str__(self) -> str:
        return f"process {self.pid} of the container"

    def _patient(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise ChannelError(f"{self} does not answer: its time is over ([weights] timeout)")
        self._sock.settimeout(left)

    def send(self, message: dict[str, Any], until: float, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with descriptors."""
        import json

        data = json.dumps(message).encode() + b"\n"
        try:
            self._patient(until)
            if descriptors:
                packed = struct.pack(f"={len(descriptors)}i", *descriptors)
                sent = self._sock.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
                data = data[sent:]
            while data:
                self._patient(until)
                data = data[self._sock.send(data) :]
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, until: float) -> dict[str, Any]:
        """The next message. Descriptors that come with it are closed by the kernel: nobody asks for any."""
        import json

        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if len(self._buffer) > LINE_LIMIT:
                raise ChannelError(f"{self} answers with a line of more than {LINE_LIMIT >> 20} MiB")
            try:
                self._patient(until)
                data = self._sock.recv(1 << 18)
            except OSError as error:
                raise self._broken(error) from error
            if not data:
                raise ChannelError(f"{self} has ended, or hung up")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"{self} answers with something that is no JSON") from error
        if not isinstance(message, dict):
            raise ChannelError(f"{self} answers with something that is no object")
        if "error" in message:
            kind = Whole if message.get("whole") is True else ChannelError
            raise kind(f"{self}: {plain(message['error'])}")
        return message

    def _broken(self, error: OSError) -> ChannelError:
        if isinstance(error, TimeoutError):
            return ChannelError(f"{self} does not answer in time ([weights] timeout)")
        return ChannelError(f"{self} has ended, or hung up: {error.strerror}")

    def expect(self, key: str, until: float) -> dict[str, Any]:
        """The next message, which must have a key."""
        message = self.receive(until)
        if key not in message:
            raise ChannelError(f"{self} does not say {key!r}")
        return message

    def let_go(self) -> None:
        """Say that nothing more comes. `hang_up` waits for the other end to say so too. Idempotent."""
        try:
            self._sock.shutdown(_socket.SHUT_WR)
        except OSError:
            pass  # closed, or the other end is gone

    def hang_up(self, until: float) -> None:
        """Wait until the other end has closed too, and close: then it holds nothing of ours, which could not be dumped.

        Idempotent.
        """
        try:
            while (left := until - time.monotonic()) > 0:
                self._sock.settimeout(left)
                if not self._sock.recv(1 << 16):
                    break
        except OSError:
            pass  # closed, or the dump says what it thinks of what is still there
        self.close()

    def close(self) -> None:
        """Close it. Idempotent."""
        self._sock.close()


def hang_up(channels: Sequence[Channel], until: float = 0.0) -> None:
    """Wait for the other ends of all together, until then and a few seconds at least, and close them."""
    until = max(until, time.monotonic() + _HANG_UP)
    for channel in channels:
        channel.hang_up(until)


def plain(text: object) -> str:
    """What a program says, as it can stand in a log or on a terminal."""
    if not isinstance(text, str):
        return "(no text)"
    shown = "".join(c if c.isprintable() else " " for c in text[:1000])
    return shown if len(shown) < 1000 else f"{shown}…"


def packs_of(channel: Channel, message: dict[str, Any]) -> list[Pack]:
    """The packs that a program describes. Raises ChannelError for what makes no sense."""
    packs = message.get("packs")
    if not isinstance(packs, list) or len(packs) > _MOST_PACKS:
        raise ChannelError(f"{channel} does not describe its weights in at most {_MOST_PACKS} packs")
    return [_pack(channel, pack) for pack in packs]


def _pack(channel: Channel, given: object) -> Pack:
    described = given if isinstance(given, dict) else {}
    size, chunk, chunks = (described.get(key) for key in ("bytes", "chunk", "chunks"))
    if (
        type(size) is not int
        or type(chunk) is not int
        or not isinstance(chunks, list)
        or not (0 < size < 1 << 62 and _SMALLEST_CHUNK <= chunk <= _LARGEST_CHUNK and chunk % 4096 == 0)
        or len(chunks) != -(-size // chunk)
        or not all(weights.is_digest(digest) for digest in chunks)
    ):
        raise ChannelError(f"{channel} describes its weights in a way that makes no sense")
    pack = weights.Pack(plain(described.get("name") or "")[:200], size, chunk, chunks)
    if described.get("digest") != f"sha256:{pack.digest}":
        raise ChannelError(f"{channel} names its weights by a digest that is not theirs")
    return pack


# A take -----------------------------------------------------------------------------------------------------------


class _Process:
    """A program in a take."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = channel.pid
        self.packs: list[Pack] = []
        self.until = 0.0  # the end of its patience while it holds files of ours
        self.released = False  # from the moment at which it was told to


class Taking:
    """One take of a container whose programs keep weights out: `dump` around the dump, `record` for fermata.json.

    To be closed (`with`) once the snapshot is there, or is not: its references to weights go with it then.
    """

    def __init__(
        self,
        container: Container,
        call: Callable[[str, bytes], bytes],
        config: Config,
        log: Log,
        directory: str,
    ) -> None:
        self._container = container
        self._tree = Tree(container.state.id, call)
        self._call = call
        self._config = config
        self._log = log
        self._directory = directory
        self._token = os.urandom(16).hex()
        self._processes: list[_Process] = []
        self._held = weights.Held()
        self._store: weights.Store | None = None
        self._mount: weights.Mount | None = None
        self._files: weights.Files | None = None  # what the programs are to have back
        self._drafts: dict[str, weights.Draft] = {}
        self._new: set[str] = set()  # what this take has brought into the store
        self._referred: set[str] = set()
        self._recorded: set[str] = set()  # what the snapshot needs of that
        self._synced: _Background | None = None
        self._failure: ShimError | None = None  # a program that could not have its weights back
        self.outcome = INSIDE
        self.reason: str | None = None
        self.steps: dict[str, float] = {}

    # Around the dump ---------------------------------------------------------------------------------------------

    def dump(self, dump: Callable[[], Response], *, exits: bool) -> Response:
        """Have the programs let go of their weights, call `dump`, and give them back unless that ended the container.

        A paused container is resumed for it, since a frozen program cannot answer, and paused again. Where the weights
        cannot leave they are dumped with all else. Raises ShimError, for a program that cannot have them back too.
        """
        paused = self._tree.paused()
        if paused:
            self._tree.resume()
        ended = False
        try:
            self._take_out()
            try:
                response = dump()
                ended = exits and response.ok
            finally:
                if not ended:
                    self._give_back()
            return response
        finally:
            if paused and not ended:
                self._pause_again()

    def checked(self, response: Response) -> Response:
        """The take's answer. Raises ShimError when the container, though left running, has lost its weights."""
        if response.ok and self._failure is not None:
            raise ShimError(f"the snapshot in {self._directory} is complete, but {self._failure}", FAILED_PRECONDITION)
        return response

    def _pause_again(self) -> None:
        try:
            self._tree.pause()
        except ShimError as error:  # it has ended, perhaps
            self._log("warning", "the container is not paused again", container=self._tree.id, error=error)

    def _take_out(self) -> None:
        until = time.monotonic() + self._config.weights_timeout
        try:
            self._timed("guest_prepare", self._prepare, until)
            if not self._processes:
                self._stay_inside(
                    "no program in the container listens at /run/fermata: it does not use the library, or has not yet",
                    NONE,
                )
                return
            self._timed("guest_write", self._write, until)
            self._timed("guest_release", self._release, until)
        except (ShimError, OSError) as error:
            self._stay_inside(str(error), INSIDE)
            self._give_back()
            if self._failure is not None:
                raise self._failure from error
            return
        self.outcome = OUT
        self._log(
            "info",
            "weights are kept out of the snapshot",
            container=self._tree.id,
            processes=len(self._processes),
            bytes=sum(pack.size for process in self._processes for pack in process.packs),
            written=sum(draft.pack.size for draft in self._drafts.values()),
        )

    def _timed(self, step: str, work: Callable[[float], None], until: float) -> None:
        began = time.monotonic()
        try:
            work(until)
        finally:
            self.steps[step] = time.monotonic() - began

    def _stay_inside(self, reason: str, outcome: str) -> None:
        self.outcome, self.reason = outcome, reason
        self._log("error", "the weights are in the snapshot", container=self._tree.id, reason=reason)
        for process in self._processes:
            process.channel.let_go()  # which tells one that has not been released yet to go on
        hang_up(
            [process.channel for process in self._processes],
            max((process.until for process in self._processes), default=0.0),
        )
        self._close_drafts()

    def _init_root(self) -> str:
        return root_of(self._tree.id, self._call)

    def _prepare(self, until: float) -> None:
        silence = self._config.weights_timeout + self._config.gpu_move_timeout + 60
        for channel in connect_all(self._init_root(), until):
            self._processes.append(_Process(channel))
        for process in self._processes:
            # It gives up a little before us, so that it has let go of everything when we do.
            left = until - time.monotonic()
            seconds = round(max(left - min(left / 10, 5.0), 0.1), 3)
            process.channel.send(
                {"protocol": PROTOCOL, "step": "prepare", "seconds": seconds, "silence": silence}, until
            )
        for process in self._processes:
            process.packs = packs_of(process.channel, process.channel.expect("packs", until))
            if sum(len(pack.chunks) for each in self._processes for pack in each.packs) > _MOST_CHUNKS:
                raise ChannelError(f"the programs describe more than {_MOST_CHUNKS} chunks of weights together")

    def _write(self, until: float) -> None:
        store = self._store = weights.Store(self._config.weights_directory, limit=self._config.weights_limit)
        wanted = {pack.digest: pack for process in self._processes for pack in process.packs}
        for digest in wanted:
            store.hold(self._held, digest)
        lacking = {digest: pack for digest, pack in wanted.items() if not store.has(pack)}
        if lacking:
            store.make_room(sum(store.rounded(pack.size) for pack in lacking.values()))
            self._mount = weights.Mount(store.directory, read_only=False)
        by = "mmap" if store.kind == "hugetlbfs" else "write"
        for process in self._processes:
            answers: list[dict[str, Any]] = []
            drafts = []
            for pack in process.packs:
                write = pack.digest in lacking and pack.digest not in self._drafts
                if write:
                    assert self._mount is not None
                    draft = self._drafts[pack.digest] = weights.Draft(store, self._mount, pack)
                    drafts.append(draft)
                answers.append({"write": True, "by": by} if write else {"write": False})
            descriptors = [draft.fd for draft in drafts if draft.fd is not None]
            process.until = until
            process.channel.send({"packs": answers, "fds": len(descriptors)}, until, descriptors)
            for draft in drafts:
                draft.handed_over()
        for process in self._processes:
            process.channel.expect("written", until)
        if self._mount is not None:
            store.settle(self._mount, self._drafts.values(), self._new)
            self._close_drafts()
            self._synced = _Background(lambda: store.sync(self._new))
        # While a store that takes no reference, or whose files are gone again, costs nothing.
        self._files = weights.Files(store, wanted)
        self._refer(set(wanted))

    def _release(self, until: float) -> None:
        for process in self._processes:
            process.released = True
            process.channel.send({"release": True}, until)
        for process in self._processes:
            answer = process.channel.expect("released", until)
            for note in answer["notes"][:_MOST_NOTES] if isinstance(answer.get("notes"), list) else ():
                self._log("info", "of a program", container=self._tree.id, process=process.pid, note=plain(note))
        hang_up([process.channel for process in self._processes])

    def _give_back(self) -> None:
        """To every program that is without its weights. What fails is kept for `checked`."""
        out = [process for process in self._processes if process.released]
        self._processes = self._processes if self.outcome == OUT else []
        if not out or self._store is None or self._files is None:
            return
        began = time.monotonic()
        wanted = [(process.pid, [pack.digest for pack in process.packs]) for process in out]
        back = Returning(wanted, self._files, self._config, direct=_direct(self._config, self._store), new=False)
        try:
            if self._tree.paused():  # parked, since the GPU has no room for its state: a frozen program takes nothing
                owe(self._container.state, wanted, self._store)
                return
            back.arm(self._init_root())
            back.go()
        except (ShimError, OSError) as error:
            self._failure = ShimError(f"its weights could not be given back to container {self._tree.id}: {error}")
            self._log("error", "weights are lost", container=self._tree.id, error=error)
            self._refuse(back)
        finally:
            back.close()
            for process in out:
                process.released = False
        for pid in back.gone:
            self._log("warning", "a program ended before it had its weights back", container=self._tree.id, process=pid)
        self.steps["guest_back"] = time.monotonic() - began

    def _refuse(self, back: Returning) -> None:
        try:
            back.refuse(self._init_root())
        except (ShimError, OSError) as error:  # they end by themselves, after a silence
            self._log("warning", "programs without weights cannot be told", container=self._tree.id, error=error)

    # The snapshot ------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What fermata.json says of the weights; the references to them are there then, and their bytes on disk.

        Raises ShimError, OSError.
        """
        processes = []
        if self.outcome == OUT:
            for process in self._processes:
                # One that ended before the dump is not in it, or as a zombie, without memory.
                if os.path.lexists(f"{self._directory}/mm-{process.pid}.img"):
                    processes.append(process)
            self._recorded = {pack.digest for process in processes for pack in process.packs}
            assert self._store is not None
            for digest in self._recorded:
                if self._store.size(digest) is None:
                    raise ShimError(
                        f"the weights sha256:{digest} of container {self._tree.id} are no more in "
                        f"{self._store.directory}: was it unmounted or emptied?",
                        FAILED_PRECONDITION,
                    )
            if self._synced is not None:
                self._synced.wait()
            self._refer(self._recorded)
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "token": self._token,
            "processes": [
                {
                    "pid": process.pid,
                    "packs": [
                        {"name": pack.name, "digest": f"sha256:{pack.digest}", "bytes": pack.size}
                        for pack in process.packs
                    ],
                }
                for process in processes
            ],
            "seconds": {name.removeprefix("guest_"): round(took, 6) for name, took in self.steps.items()},
        }

    def _refer(self, digests: set[str]) -> None:
        assert self._store is not None
        for digest in digests - self._referred:
            self._store.refer(digest, self._reference, os.path.realpath(self._directory))
            self._referred.add(digest)

    @property
    def _reference(self) -> str:
        return weights.reference(self._directory, self._token)

    def __enter__(self) -> Taking:
        return self

    def __exit__(self, *_: object) -> None:
        from shim import manifest as manifests

        for process in self._processes:
            process.channel.close()
        self._close_drafts()
        if self._synced is not None:
            self._synced.finish()
        there = any(os.path.lexists(f"{self._directory}/{name}") for name in (manifests.NAME, manifests.STAGED))
        held = self._held.digests
        self._held.close()
        if self._files is not None:
            self._files.close()
        if self._store is None:
            return
        try:
            for digest in self._referred - (self._recorded if there else set()):
                self._store.drop(digest, self._reference)
            for digest in self._new:
                self._store.remove(digest)  # which leaves what a snapshot refers to
            for digest in held:
                self._store.let_go(digest)  # which leaves what is there, whoever knows of it
        except OSError as error:
            self._log("warning", "weights stay that no snapshot needs", container=self._tree.id, error=error)

    def _close_drafts(self) -> None:
        for draft in self._drafts.values():
            draft.close()
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()


class _Background:
    """Work in a thread of its own, beside something else that takes long."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error
        finally:
            self._done.release()

    def finish(self) -> None:
        """Wait for its end, whatever it is."""
        with self._done:
            pass

    def wait(self) -> None:
        """Wait for its end. Raises what the work raised."""
        self.finish()
        if self._error is not None:
            raise self._error


def connect_all(root: str, until: float, but: Collection[int] = ()) -> list[Channel]:
    """A connection to every program of a container that listens, but to those with these pids. Raises ShimError."""
    channels: list[Channel] = []
    pids = [pid for pid in sockets(root) if pid not in but]
    try:
        for at in range(0, len(pids), _AT_ONCE):
            found = listeners(root, pids[at : at + _AT_ONCE])
            try:
                channels += _connect(root, found, until)
            finally:
                for listener in found:
                    listener.close()
            if len(channels) > _MOST_LISTENERS:
                raise ShimError(f"more than {_MOST_LISTENERS} programs listen in the container's {specedits.CHANNEL}")
    except BaseException:
        for channel in channels:
            channel.close()
        raise
    return channels


def _connect(root: str, found: Sequence[Listener], until: float) -> list[Channel]:
    channels: list[Channel] = []
    try:
        for listener in found:
            try:
                channels.append(Channel(listener, socket_for(root), until))
            except Gone:
                continue  # what is left of a process that has ended
    except BaseException:
        for channel in channels:
            channel.close()
        raise
    return channels


def root_of(container_id: str, call: Callable[[str, bytes], bytes]) -> str:
    """The root directory of a container as seen from here. Raises ShimError."""
    answer = task.StateResponse.decode(call("State", task.ExecRequest(id=container_id).encode()))
    if not answer.pid:
        raise ShimError(f"container {container_id} does not run", FAILED_PRECONDITION)
    return f"/proc/{answer.pid}/root"


# Back -------------------------------------------------------------------------------------------------------------


class Returning:
    """Weights on their way back to the programs of a container: `arm`, then `go`, then `close`.

    `wanted` has the pid in the container and the digests of each program, in the order in which it described them.
    Of a container that is not new, every program that can have its weights gets them, whatever fails with another.
    """

    def __init__(
        self, wanted: Iterable[tuple[int, list[str]]], files: weights.Files, config: Config, *, direct: bool, new: bool
    ) -> None:
        self._wanted = dict(wanted)
        self._files = files
        self._new = new
        self._direct = direct
        self._told: set[int] = set()
        self._failures: list[Exception] = []
        self._limit = config.weights_timeout
        self._until = 0.0
        self._channels: list[Channel] = []
        self.gone: list[int] = []
        """After `arm`, of a container that is not new: the programs that have ended."""

    def arm(self, root: str) -> None:
        """Tell every program that its weights are there. It gets ready to take them while others work.

        Raises ShimError, OSError.
        """
        self._until = time.monotonic() + self._limit
        found = {listener.pid: listener for listener in listeners(root, self._wanted)}
        try:
            for pid, digests in self._wanted.items():
                try:
                    if pid not in found:
                        raise Gone(f"process {pid} of the container does not listen")
                    channel = Channel(found[pid], socket_for(root), self._until)
                    try:
                        self._send(channel, digests)
                    except BaseException:
                        channel.close()
                        raise
                    self._channels.append(channel)
                    self._told.add(pid)
                except Gone:
                    if self._new:
                        raise
                    self.gone.append(pid)
                except (ShimError, OSError) as error:
                    if self._new:
                        raise
                    self._failures.append(error)
        finally:
            for listener in found.values():
                listener.close()

    def _send(self, channel: Channel, digests: list[str]) -> None:
        descriptors: list[int] = []
        try:
            described = []
            for digest in digests:
                fd, direct = self._files.open(digest, direct=self._direct)
                descriptors.append(fd)
                described.append({"digest": f"sha256:{digest}", "by": "read", "direct": direct})
            seconds = max(self._until - time.monotonic(), 0.1)
            message = {"protocol": PROTOCOL, "step": "restored", "seconds": round(seconds, 3), "new": self._new}
            channel.send({**message, "packs": described, "fds": len(descriptors)}, self._until, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)

    def refuse(self, root: str) -> None:
        """After a failure: have those end that were told of nothing yet, and would wait for their weights in vain.

        The others see that their connection ends. Raises ShimError.
        """
        self.close()
        until = time.monotonic() + _HANG_UP
        for listener in listeners(root, self._wanted.keys() - self._told):
            try:
                channel = Channel(listener, socket_for(root), until)
            except (ShimError, OSError):
                continue  # it has ended, or will
            finally:
                listener.close()
            try:
                message = {"protocol": PROTOCOL, "step": "restored", "seconds": _HANG_UP, "new": self._new}
                channel.send({**message, "packs": [], "fds": 0}, until)
                channel.let_go()
                channel.receive(until)
            except ShimError:
                continue  # which says that it ends, or that it has
            finally:
                channel.close()

    def go(self) -> dict[str, float]:
        """Have them take their weights, and wait until they have; the slowest one's seconds of each part.

        Raises ShimError, OSError: the first thing that failed.
        """
        armed = []
        for channel in self._channels:
            try:
                channel.expect("armed", self._until)
                channel.send({"go": True}, self._until)
                armed.append(channel)
            except Whole:
                if self._new:
                    raise
                # It was not to be reached with the word to let go of them, and has seen us leave instead.
            except ChannelError as error:
                if self._new:
                    raise
                self._failures.append(error)
        slowest: dict[str, float] = {}
        for channel in armed:
            try:
                for name, took in _times(channel.expect("back", self._until)):
                    slowest[name] = max(slowest.get(name, 0.0), took)
            except ChannelError as error:
                if self._new:
                    raise
                self._failures.append(error)
        hang_up(self._channels)
        if self._failures:
            raise self._failures[0]
        return slowest

    def close(self) -> None:
        """Hang up. Idempotent."""
        for channel in self._channels:
            channel.close()


def _times(answer: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What a program says of how long it took, as far as a line of the log can have it."""
    seconds = answer.get("seconds")
    for name, took in list(seconds.items() if isinstance(seconds, dict) else ())[:_MOST_TIMES]:
        a_word = name.isascii() and name.isidentifier() and len(name) <= 40
        a_time = isinstance(took, (int, float)) and 0 <= took < 1e9
        if a_word and a_time and name not in ("container", "level", "message"):
            yield name, float(took)


class Restoring:
    """The weights of a snapshot that is being restored: held from the check on, read ahead, brought back at the end."""

    def __init__(self, record: dict[str, Any], held: weights.Held, config: Config, log: Log, container_id: str) -> None:
        self._record = record
        self._held = held
        self._config = config
        self._log = log
        self._id = container_id
        self._store = weights.Store(config.weights_directory)
        self._files = weights.Files(self._store, held.digests)
        self._closed = False
        if not self._store.in_memory and config.weights_read == "cached":
            pieces = self._pieces()
            turn = _thread.allocate_lock()
            for _ in range(_READERS):
                _thread.start_new_thread(self._read_ahead, (pieces, turn))

    def _pieces(self) -> Iterator[tuple[str, int]]:
        for digest in self._held.digests:
            path = self._store.path(digest)
            for at in range(0, os.stat(path).st_size, _PIECE):
                yield path, at

    def _read_ahead(self, pieces: Iterator[tuple[str, int]], turn: _thread.LockType) -> None:
        """Bring what is on disk into the page cache while CRIU restores; nothing depends on it.

        By reading: the kernel takes no more than a part of a large piece as an advice (posix_fadvise(2)).
        """
        buffer = memoryview(bytearray(_PIECE))
        try:
            while not self._closed:
                with turn:
                    piece = next(pieces, None)
                if piece is None:
                    return
                path, at = piece
                with open(path, "rb", buffering=0) as file:
                    if not _is_cached(file.fileno(), at) or not _is_cached(file.fileno(), at + _PIECE - 4096):
                        os.preadv(file.fileno(), [buffer], at)
        except OSError as error:
            self._log("warning", "weights cannot be read ahead", container=self._id, error=error)

    def bring_back(self, pid: int, between: Callable[[], object]) -> None:
        """Give every program its weights; `between` moves the GPU state back, for which they get ready meanwhile.

        `pid` is the container's first process. Raises ShimError and what `between` raises: nothing may run on then.
        """
        direct = _direct(self._config, self._store)
        back = Returning(_wanted(self._record), self._files, self._config, direct=direct, new=True)
        try:
            back.arm(f"/proc/{pid}/root")
            between()
            slowest = back.go()
            if lost := forgotten(f"/proc/{pid}/root", dict(_wanted(self._record)), self._log, self._id):
                raise lost
        except OSError as error:
            raise ShimError(f"the weights cannot be given back: {error}", FAILED_PRECONDITION) from error
        finally:
            back.close()
        self._log(
            "info", "weights are back", container=self._id, **{name: f"{took:.3f}" for name, took in slowest.items()}
        )

    def close(self) -> None:
        """Let go of the weights. Idempotent."""
        self._closed = True
        self._held.close()
        self._files.close()


def _direct(config: Config, store: weights.Store) -> bool:
    return config.weights_read == "direct" and not store.in_memory


def _is_cached(fd: int, at: int) -> bool:
    """Whether a page of a file is in the page cache, or is none of its."""
    try:
        os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot say
        return False
    return True


def forgotten(root: str, known: Collection[int], log: Log, container_id: str) -> ShimError | None:
    """Whether a restored program other than those with these pids is without its weights.

    The snapshot's record was changed then, and the program would wait for what nobody brings. One that does not say so
    is taken to have them.
    """
    try:
        answers = _asked(connect_all(root, time.monotonic() + _STATUS, known))
    except (ShimError, OSError) as error:
        log("warning", "programs cannot be asked whether they have their weights", container=container_id, error=error)
        return None
    for channel, answer in answers:
        if isinstance(answer, dict) and answer.get("out") is True:
            return ShimError(
                f"{channel} is without its weights, and the snapshot does not say which they are: its fermata.json was "
                "changed since it was taken",
                FAILED_PRECONDITION,
            )
    return None


def restoring(record: object, config: Config, log: Log, container_id: str, snapshot: str) -> Restoring | None:
    """What brings a snapshot's weights back; None when they are in it. Raises ShimError."""
    if not isinstance(record, dict) or record.get("outcome") != OUT:
        return None
    held = weights.hold(record, config, snapshot)
    try:
        if lacking := weights.missing(record, config):  # removed after the check, before it was held
            raise ShimError(f"snapshot {snapshot} cannot be restored here: {'; '.join(lacking)}", FAILED_PRECONDITION)
        return Restoring(record, held, config, log, container_id)
    except OSError as error:
        held.close()
        raise ShimError(f"the weights of {snapshot} cannot be read: {error}", FAILED_PRECONDITION) from error
    except BaseException:
        held.close()
        raise


# Owed -------------------------------------------------------------------------------------------------------------

OWED = "fermata.json"
"""File of the state directory of a container that was parked without its weights. For the store, which its reference
leads there, it is a snapshot that needs them."""


def owe(state: State, wanted: Iterable[tuple[int, list[str]]], store: weights.Store) -> None:
    """Keep for later which weights a container's programs must have back. Raises ShimError, OSError."""
    import json

    processes = [
        {"pid": pid, "packs": [{"digest": f"sha256:{digest}"} for digest in digests]} for pid, digests in wanted
    ]
    record = {"processes": processes}
    state.write(OWED, json.dumps({"version": {"major": 1, "minor": 1}, "directory": store.directory, "guest": record}))
    for digest in weights.digests_of(record):
        store.refer(digest, weights.reference(state.path, ""), state.path)


def pay(state: State, root: str, config: Config) -> None:
    """Give a container that goes on what it is owed, if anything. Raises ShimError."""
    import json

    text = state.read(OWED)
    if text is None:
        return
    kept = json.loads(text)
    store = weights.Store(kept["directory"])
    wanted = _wanted(kept["guest"])
    files = back = None
    try:
        files = weights.Files(store, {digest for _, digests in wanted for digest in digests})
        back = Returning(wanted, files, config, direct=_direct(config, store), new=False)
        back.arm(root)
        back.go()
        state.drop(OWED)
        for _, digests in wanted:
            for digest in digests:
                store.drop(digest, weights.reference(state.path, ""))
    except OSError as error:
        raise ShimError(f"the weights of {state.id} cannot be given back: {error}", FAILED_PRECONDITION) from error
    finally:
        if back is not None:
            back.close()
        if files is not None:
            files.close()


def _wanted(record: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """Pid and digests of each program in a snapshot's record."""
    return [
        (
            int(process.get("pid") or 0),
            [str(pack.get("digest")).removeprefix("sha256:") for pack in process.get("packs") or []],
        )
        for process in record.get("processes") or []
    ]


# Readiness --------------------------------------------------------------------------------------------------------


def status(root: str) -> Status:
    """Whether one of a container's programs has called `snapshot_ready`. Raises ShimError."""
    said = []
    ready = False
    for channel, answer in _asked(connect_all(root, time.monotonic() + _STATUS)):
        if isinstance(answer, ChannelError):
            said.append(str(answer))
        else:
            ready = ready or answer.get("ready") is True
            said.append(f"{channel} is {'ready' if answer.get('ready') is True else 'not ready'}")
    return Status(ready=ready, text="; ".join(said) or "no program in the container listens at /run/fermata")


def _asked(channels: Sequence[Channel]) -> list[tuple[Channel, dict[str, Any] | ChannelError]]:
    """Each with its answer to the step `status`, or why there is none; they are closed."""
    until = time.monotonic() + _STATUS
    answers: list[tuple[Channel, dict[str, Any] | ChannelError]] = []
    for channel in channels:
        try:
            channel.send({"protocol": PROTOCOL, "step": "status"}, until)
        except ChannelError:
            continue
    for channel in channels:
        try:
            answers.append((channel, channel.receive(until)))
        except ChannelError as error:
            answers.append((channel, error))
        finally:
            channel.close()
    return answers


def wait_until_ready(namespace: str, container_id: str, seconds: float) -> None:
    """Wait, through the shim, until a program of a container says that it is ready. Raises ShimError."""
    from shim.client import Client
    from shim.parking import daemon_socket

    until = time.monotonic() + seconds
    while True:
        with Client(daemon_socket(namespace, container_id), "the container's shim") as client:
            response = client.call(SERVICE, "Status", task.IdRequest(id=container_id).encode())
        if response.status is not None and response.status.code:
            raise ShimError(response.status.message, response.status.code)
        answer = Status.decode(response.payload)
        if answer.ready:
            return
        if time.monotonic() > until:
            raise ShimError(
                f"{container_id} was not ready within {seconds:g} s: {answer.text}; it is once a program in it has "
                "called fermata.snapshot_ready(), and --timeout waits longer",
                FAILED_PRECONDITION,
            )
        time.sleep(0.1)
