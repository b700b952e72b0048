"""The node's store of weights: each distinct pack of bytes once, by its digest, referred to by snapshots.

    DIRECTORY/<sha256>.weights          the bytes, in chunks one after the other
    DIRECTORY/refs/<sha256>/<name>      a symbolic link whose target is the directory of a snapshot that needs them
    DIRECTORY/locks/<sha256>            flock(2): shared by takes and restores, exclusive for a removal
    DIRECTORY/draft-…                   what a take is writing, locked for as long as it lives

A hugetlbfs can hold neither links nor what is written; the references and locks of a store on one are in /run.

A store that is mounted read-only serves restores: what is in it cannot be removed by this node, so nothing has to be
held or referred to there.

The bytes come from inside a container, and others find them by digest, so a container gets a file to write through a
mount of its own that is nowhere in the file system tree. Once the program is done the mount is made read-only, which
the kernel refuses while one writer or writable mapping is left (mount_setattr(2), Linux 5.12). From then on not even a
descriptor that was kept can be opened again for writing by way of /proc. Only then the bytes are hashed. For reading it
is the same from the beginning.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import os
import stat
import time

from shim.errors import FAILED_PRECONDITION, ShimError
from shim.state import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from shim.config import Config

_SUFFIX = ".weights"
_DRAFT = "draft-"
_PACKED = "packed-"
_ALIGNMENT = 4096
_PIECE = 1 << 20  # bytes that are hashed at a time
_ATTEMPTS = 1000  # at a name in a directory that others remove
_WRITERS_LINGER = 5.0  # seconds for a program to let go of what it has written
# linux/mount.h, asm-generic/unistd.h
_SYS_OPEN_TREE, MOUNT_SETATTR = 428, 442
_OPEN_TREE_CLONE, _MOUNT_ATTR_RDONLY, EMPTY_PATH = 1, 1, 0x1000


class Pack:
    """Bytes of a program that stay out of its snapshot, as it describes them.

    `name`, `size` in bytes, `chunk` in bytes (the last one may be shorter), `chunks` the SHA-256 of each in hex.
    """

    __slots__ = ("chunk", "chunks", "name", "size")

    def __init__(self, name: str, size: int, chunk: int, chunks: Sequence[str]) -> None:
        self.name = name
        self.size = size
        self.chunk = chunk
        self.chunks = list(chunks)

    @property
    def digest(self) -> str:
        """SHA-256 in hex, over sizes and chunk digests; the pack's name in the store."""
        import hashlib

        text = f"fermata weights 1\n{self.size}\n{self.chunk}\n" + "".join(f"{chunk}\n" for chunk in self.chunks)
        return hashlib.sha256(text.encode()).hexdigest()


class Mount:
    """A directory as a mount of its own, which is nowhere in the tree: `fd` stands for it. Raises OSError."""

    def __init__(self, directory: str, *, read_only: bool) -> None:
        import ctypes

        path = ctypes.c_char_p(os.fsencode(directory))
        self.fd = system_call(_SYS_OPEN_TREE, -100, path, _OPEN_TREE_CLONE | os.O_CLOEXEC)
        try:
            if read_only:
                self.forbid_writing()
        except BaseException:
            os.close(self.fd)
            raise

    def forbid_writing(self) -> None:
        """Make it read-only, for good. Raises OSError, EBUSY while a file is open for writing or mapped writable."""
        import ctypes

        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
        system_call(MOUNT_SETATTR, self.fd, ctypes.c_char_p(b""), EMPTY_PATH, attributes, 32)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a regular file in it. Raises OSError."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)

    def close(self) -> None:
        """Let go of it; what is open stays what it is."""
        os.close(self.fd)


def system_call(number: int, *arguments: Any) -> int:
    """A system call that the C library has no function for; its result. Raises OSError."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_long(word) if isinstance(word, int) else word for word in arguments)
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            raise OSError(code, "keeping weights out of a snapshot needs Linux 5.12 or newer")
        raise OSError(code, os.strerror(code))
    return result


class Draft:
    """A file that a program writes into: `fd` is for it, the draft is locked until `close`."""

    def __init__(self, store: Store, mount: Mount, pack: Pack) -> None:
        self._store = store
        self.pack = pack
        self.size = store.rounded(pack.size)
        self.name = f"{_DRAFT}{os.getpid()}-{os.urandom(8).hex()}"
        self.path = f"{store.directory}/{self.name}"
        fd = mount.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.fd: int | None = fd
        self._lock: int | None = None
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whole and at once: a full disk is met here, not by the program, which a mapping would kill.
            os.posix_fallocate(fd, 0, self.size)
        except OSError as error:
            self.close()
            raise ShimError(f"no {self.size} bytes for {pack.name!r} in {store.directory}: {error.strerror}") from error

    def handed_over(self) -> None:
        """The program has the descriptor; ours would count as one that writes."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def publish(self) -> None:
        """Give it its name in the store; it was verified. Raises OSError."""
        os.rename(self.path, self._store.path(self.pack.digest))
        self.close()

    def close(self) -> None:
        """Let go of it, and remove it if it has no name of its own yet."""
        self.handed_over()
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            if os.path.samestat(os.fstat(lock), os.stat(self.path)):
                os.unlink(self.path)
        except OSError:
            pass  # published, or gone
        os.close(lock)


class Held:
    """Packs of the store that are not removed as long as this is held."""

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._locks

    @property
    def digests(self) -> list[str]:
        """What is held."""
        return list(self._locks)

    def add(self, digest: str, lock: int) -> None:
        """Hold one more, by its lock's descriptor."""
        self._locks[digest] = lock

    def close(self) -> None:
        """Let go. Idempotent."""
        while self._locks:
            os.close(self._locks.popitem()[1])


class Files:
    """Packs of a store that are open for reading, through a mount that is read-only.

    They can be read whatever becomes of the directory: removed, unmounted, or another one by now. Raises OSError.
    """

    def __init__(self, store: Store, digests: Iterable[str]) -> None:
        self._fds: dict[str, int] = {}
        mount = Mount(store.directory, read_only=True)
        try:
            for digest in digests:
                self._fds[digest] = mount.open(os.path.basename(store.path(digest)), os.O_RDONLY)
        except BaseException:
            self.close()
            raise
        finally:
            mount.close()

    def open(self, digest: str, *, direct: bool) -> tuple[int, bool]:
        """A descriptor with a position and flags of its own, and whether it reads past the page cache as wished.

        Raises OSError.
        """
        path, how = f"/proc/self/fd/{self._fds[digest]}", os.O_RDONLY | os.O_CLOEXEC
        if direct:
            try:
                return os.open(path, how | os.O_DIRECT), True
            except OSError:
                pass  # a file system without it; whatever else it is, is said next
        return os.open(path, how), False

    def close(self) -> None:
        """Close them. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])


class Store:
    """The store in one directory, which is made if it is not there. Raises ShimError where it cannot be used."""

    def __init__(self, directory: str, *, limit: int = 0) -> None:
        self.directory = directory.rstrip("/") or "/"
        self.limit = limit  # bytes; 0: what the file system holds
        if not directory.startswith("/"):
            raise ShimError(f"the weights' directory {directory!r} must be an absolute path: [weights] directory")
        try:
            make_private(self.directory)
            status = os.stat(self.directory)
            self.kind = _kind(status.st_dev)
            """The file system's type, as mountinfo has it: tmpfs, hugetlbfs, ext4 …"""
            self._records = self.directory if self.kind != "hugetlbfs" else _records_of(self.directory)
            self.read_only = bool(os.statvfs(self.directory).f_flag & os.ST_RDONLY)
            for path in () if self.read_only else (f"{self._records}/refs", f"{self._records}/locks"):
                make_private(path)
        except OSError as error:
            raise ShimError(
                f"weights cannot be kept in {self.directory}: {error.strerror}; name another: [weights] directory",
                FAILED_PRECONDITION,
            ) from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ShimError(
                f"weights are not kept in {self.directory}, which others than root can get at: chown 0:0 "
                f"{self.directory}; chmod 700 {self.directory}",
                FAILED_PRECONDITION,
            )

    @property
    def in_memory(self) -> bool:
        """Whether what is in it is memory, and gone after a reboot."""
        return self.kind in ("tmpfs", "hugetlbfs", "ramfs")

    def path(self, digest: str) -> str:
        """The file of a pack."""
        return f"{self.directory}/{digest}{_SUFFIX}"

    def rounded(self, size: int) -> int:
        """The size of a file that holds so many bytes: up to whole pages, or whole huge pages."""
        unit = os.statvfs(self.directory).f_bsize if self.kind == "hugetlbfs" else _ALIGNMENT
        return max(-(-size // unit), 1) * unit

    def bytes(self) -> int:
        """What all packs together take up."""
        return sum(self.size(digest) or 0 for digest in self.digests())

    def digests(self) -> list[str]:
        """Every pack that is there."""
        names = (name.removesuffix(_SUFFIX) for name in os.listdir(self.directory) if name.endswith(_SUFFIX))
        return sorted(name for name in names if is_digest(name))

    def size(self, digest: str) -> int | None:
        """Bytes of a pack's file; None when it is not there, or is no file of root's alone."""
        try:
            status = os.lstat(self.path(digest))
        except OSError:
            return None
        whole = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return status.st_size if whole else None

    # Holding -----------------------------------------------------------------------------------------------------

    def hold(self, held: Held, digest: str) -> None:
        """Keep a pack, which need not be there yet, from being removed. Raises OSError."""
        if digest not in held:
            # Where nothing can be removed the directory stands for a lock: it is open for as long as the pack is held.
            how = os.O_RDONLY | os.O_CLOEXEC
            held.add(digest, os.open(self.directory, how) if self.read_only else self._locked(digest, fcntl.LOCK_SH))

    def _locked(self, digest: str, how: int) -> int:
        path = f"{self._records}/locks/{digest}"
        while True:
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, how)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            except FileNotFoundError:
                pass  # who removed the pack has removed its lock too
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    # Writing -----------------------------------------------------------------------------------------------------

    def has(self, pack: Pack) -> bool:
        """Whether the pack is there and its bytes are right: they are read. A wrong one is replaced by a later draft.

        Raises OSError.
        """
        if self.size(pack.digest) != self.rounded(pack.size):
            return False
        fd = os.open(self.path(pack.digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return wrong_chunk(fd, pack) is None
        finally:
            os.close(fd)

    def make_room(self, size: int) -> None:
        """Raises ShimError unless so many bytes may and can be added."""
        if self.read_only:
            raise ShimError(
                f"{self.directory} is mounted read-only, and the weights are not in it yet: mount it for writing, or "
                "name another: [weights] directory",
                FAILED_PRECONDITION,
            )
        if self.limit and self.bytes() + size > self.limit:
            raise ShimError(
                f"the weights have {size} bytes, and {self.directory} may hold {self.limit} and has {self.bytes()}: "
                "`fermata prune`, or raise [weights] limit",
                FAILED_PRECONDITION,
            )
        there = os.statvfs(self.directory)
        # A hugetlbfs without a limit of its own says nothing of its room: there allocating tells.
        if there.f_blocks and size > there.f_bavail * there.f_frsize:
            raise ShimError(
                f"the weights have {size} bytes, and {self.directory} has {there.f_bavail * there.f_frsize} free: "
                "`fermata prune`, or make room there",
                FAILED_PRECONDITION,
            )

    def settle(self, mount: Mount, drafts: Iterable[Draft], published: set[str]) -> None:
        """Once the programs have written: forbid it, check every byte, and give the drafts their names.

        `published` gets the digests of those that have one. Raises ShimError, OSError.
        """
        until = time.monotonic() + _WRITERS_LINGER
        while True:
            try:
                mount.forbid_writing()
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                if time.monotonic() > until:
                    raise ShimError("the program keeps a file open that it has written its weights to") from error
                time.sleep(0.01)
        for draft in drafts:
            fd = os.open(draft.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_size != draft.size:
                    raise ShimError(f"the program has changed the size of the file of {draft.pack.name!r}")
                os.fchown(fd, os.geteuid(), os.getegid())  # the program could change these too
                os.fchmod(fd, 0o600)
                wrong = wrong_chunk(fd, draft.pack)
            finally:
                os.close(fd)
            if wrong is not None:
                raise ShimError(
                    f"what the program has written of {draft.pack.name!r} is not what it said: chunk {wrong} has "
                    "another SHA-256"
                )
            draft.publish()
            published.add(draft.pack.digest)

    def sync(self, digests: Iterable[str]) -> None:
        """Bring packs to disk. Raises OSError."""
        if self.in_memory:
            return
        for path in (*(self.path(digest) for digest in digests), self.directory):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    # References --------------------------------------------------------------------------------------------------

    def refer(self, digest: str, name: str, snapshot: str) -> None:
        """Say that the snapshot in a directory needs a pack; `name` is `reference`'s. Raises OSError.

        Where nothing can be removed nothing is said either.
        """
        if self.read_only:
            return
        folder = f"{self._records}/refs/{digest}"
        draft = f"{folder}/.{os.urandom(8).hex()}"
        for left in range(_ATTEMPTS, 0, -1):
            try:
                make_private(folder)
                os.symlink(snapshot, draft)
                break
            except (
                FileNotFoundError,
                FileExistsError,
            ):  # with another snapshot's reference, the last one, its directory has gone
                if left == 1:
                    raise
        os.rename(draft, f"{folder}/{name}")

    def drop(self, digest: str, name: str) -> None:
        """Take a reference back. Idempotent. Raises OSError."""
        if self.read_only:
            return
        try:
            os.unlink(f"{self._records}/refs/{digest}/{name}")
            os.rmdir(f"{self._records}/refs/{digest}")
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise

    def references(self, digest: str) -> dict[str, str]:
        """The snapshots that need a pack: name of the reference to directory."""
        folder = f"{self._records}/refs/{digest}"
        found: dict[str, str] = {}
        try:
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            return found
        for name in names:
            if name[0] != ".":
                try:
                    found[name] = os.readlink(f"{folder}/{name}")
                except FileNotFoundError:
                    pass  # taken back meanwhile; the others count
        return found

    def remove(self, digest: str) -> int | None:
        """Remove a pack that no snapshot needs; the bytes that it had.

        None when it stays: it is referred to, or a take or restore uses it. Raises OSError.
        """
        try:
            lock = self._locked(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            if self.references(digest):
                return None
            self._tidy(digest)
            size = self.size(digest) or 0
            _unlink(self.path(digest))
            _unlink(f"{self._records}/locks/{digest}")
            return size
        finally:
            os.close(lock)

    def let_go(self, digest: str) -> None:
        """Remove the lock of a pack that never came to be, and of which nobody knows. Raises OSError."""
        if self.read_only or self.size(digest) is not None:
            return
        try:
            lock = self._locked(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            if not os.path.lexists(self.path(digest)) and not self.references(digest):
                self._tidy(digest)
                _unlink(f"{self._records}/locks/{digest}")
        finally:
            os.close(lock)

    def _tidy(self, digest: str) -> None:
        """Remove references that were never given their name; with the pack's lock, so that nobody makes one."""
        folder = f"{self._records}/refs/{digest}"
        try:
            for name in os.listdir(folder):
                if name[0] == ".":
                    _unlink(f"{folder}/{name}")
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise

    # Pruning -----------------------------------------------------------------------------------------------------

    def prune(self, digest: str, *, packed: bool, dry_run: bool = False) -> Pruned:
        """Remove the references to a pack whose snapshot is gone, and the pack when none is left. Raises OSError."""
        size = self.size(digest) or 0
        there = os.path.lexists(self.path(digest))
        try:
            lock = self._locked(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Pruned(digest, size, "in use", {}, self.references(digest))
        try:
            every = self.references(digest)
            stale = self.stale(digest, packed=packed)
            left = {name: directory for name, directory in every.items() if name not in stale}
            if not dry_run:
                for name in stale:
                    self.drop(digest, name)
                self._tidy(digest)
            if not left:
                if not dry_run:
                    _unlink(self.path(digest))
                # Last: from then on others can hold what there is of it.
                _unlink(f"{self._records}/locks/{digest}")
            outcome = "kept" if left else "removed" if there or stale else "nothing"
            return Pruned(digest, size, outcome, stale, left)
        finally:
            os.close(lock)

    def known(self) -> list[str]:
        """Every digest that there is something of: a pack, a reference or a lock."""
        places = (_names(f"{self._records}/{place}") for place in ("refs", "locks"))
        return sorted({*self.digests(), *(name for names in places for name in names if is_digest(name))})

    def stale(self, digest: str, *, packed: bool) -> dict[str, str]:
        """The references to a pack whose snapshot is gone: name to directory.

        What containerd packed into an image or archive cannot be seen from here: that counts as gone with `packed`.
        """
        return {
            name: directory
            for name, directory in self.references(digest).items()
            if (packed if name.startswith(_PACKED) else not _needs(directory, digest))
        }

    def drafts(self) -> Iterator[tuple[str, int]]:
        """Path and bytes of each draft that whoever wrote it has left."""
        for name in sorted(os.listdir(self.directory)):
            if not name.startswith(_DRAFT):
                continue
            path = f"{self.directory}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue  # published or removed meanwhile
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, os.fstat(fd).st_size
            except BlockingIOError:
                pass  # a take is writing it
            finally:
                os.close(fd)


class Pruned:
    """What came of a pack when the store was pruned.

    `outcome`: "removed", "kept" (a snapshot needs it), "in use" (by a take or a restore) or "nothing" (no more than the
    lock of a take that failed was there, and is gone). `stale`: the references whose snapshot is gone, `left`: the
    others; both by name, with the snapshot's directory.
    """

    __slots__ = ("digest", "left", "outcome", "size", "stale")

    def __init__(self, digest: str, size: int, outcome: str, stale: dict[str, str], left: dict[str, str]) -> None:
        self.digest = digest
        self.size = size
        self.outcome = outcome
        self.stale = stale
        self.left = left

    @property
    def packed(self) -> int:
        """For how many snapshots it is kept that containerd has packed."""
        return sum(name.startswith(_PACKED) for name in self.left)


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:  # a read-only store need not have them
        return []


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def is_digest(text: object) -> bool:
    """Whether it is a SHA-256 in hex."""
    return isinstance(text, str) and len(text) == 64 and not text.strip("0123456789abcdef")


def reference(snapshot: str, token: str) -> str:
    """The name of a snapshot's references, by its directory.

    containerd packs what it has a snapshot taken for into an image or an archive, and unpacks it for a restore, in
    directories that it removes again (`ctrd-checkpoint…`, or below its own). `token` tells such snapshots apart.
    """
    import hashlib

    if os.path.basename(snapshot.rstrip("/")).startswith("ctrd-checkpoint") or "/io.containerd." in snapshot:
        return f"{_PACKED}{''.join(c for c in token if c.isalnum())[:32]}"
    return hashlib.sha256(os.fsencode(os.path.realpath(snapshot))).hexdigest()


def wrong_chunk(fd: int, pack: Pack) -> int | None:
    """The first chunk found whose bytes in a file have another SHA-256 than the pack says; None if all are right.

    Several threads hash, each a chunk. Raises OSError.
    """
    count = min(len(pack.chunks), os.cpu_count() or 1, 16)
    turn = iter(range(len(pack.chunks)))
    found: list[int] = []
    failed: list[OSError] = []
    guard, done = _thread.allocate_lock(), _thread.allocate_lock()
    left = [count]

    def work() -> None:
        buffer = bytearray(_PIECE)
        try:
            while True:
                with guard:
                    at = next(turn, None)
                if at is None or found or failed:
                    return
                if _hash(fd, buffer, at * pack.chunk, min(pack.size, (at + 1) * pack.chunk)) != pack.chunks[at]:
                    found.append(at)
        except OSError as error:
            failed.append(error)
        finally:
            with guard:
                left[0] -= 1
                if not left[0]:
                    done.release()

    if not count:
        return None
    done.acquire()
    for _ in range(count - 1):
        _thread.start_new_thread(work, ())
    work()
    done.acquire()
    if failed:
        raise failed[0]
    return found[0] if found else None


def _hash(fd: int, buffer: bytearray, start: int, end: int) -> str:
    import hashlib

    made = hashlib.sha256()
    view = memoryview(buffer)
    while start < end:
        read = os.preadv(fd, [view[: min(len(view), end - start)]], start)
        if not read:
            break  # shorter than it should be: another digest
        made.update(view[:read])
        start += read
    return made.hexdigest()


def _kind(device: int) -> str:
    """The type of the file system with this device number (proc_pid_mountinfo(5)); empty when it is not listed."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/thread-self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return ""


def _records_of(directory: str) -> str:
    import hashlib

    return f"/run/fermata-weights/{hashlib.sha256(os.fsencode(directory)).hexdigest()[:32]}"


def _needs(snapshot: str, digest: str) -> bool:
    """Whether a directory holds a snapshot that needs a pack; one that cannot be read does, to be on the safe side."""
    from shim import manifest as manifests

    if not _is_there(f"{snapshot}/{manifests.NAME}"):
        # A take that ended its container and could not give the snapshot its name has left that to the operator.
        return _is_there(f"{snapshot}/{manifests.STAGED}")
    try:
        return digest in digests_of(manifests.read(snapshot).data.get("guest"))
    except ShimError:
        return True


def _is_there(path: str) -> bool:
    """Whether something is there, or may be: a volume that answers with an error is no volume without the file."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


# A snapshot's record ----------------------------------------------------------------------------------------------


def digests_of(record: object) -> dict[str, int]:
    """The digests in a snapshot's record of weights, as hex, with the bytes of each.

    Raises ShimError for one that is no digest.
    """
    found: dict[str, int] = {}
    for process in (record.get("processes") or []) if isinstance(record, dict) else []:
        for pack in process.get("packs") or []:
            digest = str(pack.get("digest")).removeprefix("sha256:")
            if not is_digest(digest):
                raise ShimError(f"{pack.get('digest')!r} is no digest of weights", FAILED_PRECONDITION)
            found[digest] = int(pack.get("bytes") or 0)
    return found


def missing(record: object, config: Config) -> list[str]:
    """A sentence for each pack of a snapshot's record that this node does not have whole. Raises nothing."""
    try:
        wanted = digests_of(record)
        if not wanted:
            return []
        directory = config.weights_directory
        if unmounted(directory):  # and it is left as it is: what is made there would be hidden by the mount
            return [_is_missing(f"{directory}/{digest}{_SUFFIX}", "is not there", directory) for digest in wanted]
        store = Store(directory)
        sentences = []
        for digest, size in wanted.items():
            path = store.path(digest)
            here = store.size(digest)
            if here is None:
                why = "is no file of root's alone" if os.path.lexists(path) else "is not there"
                sentences.append(_is_missing(path, why))
            elif here < size:
                sentences.append(
                    f"its weights sha256:{digest} are not whole on this node: {path} has {here} bytes and they have "
                    f"{size}; copy it again from the node that the snapshot was taken on"
                )
        return sentences
    except ShimError as error:
        return [str(error)]


def _is_missing(path: str, why: str, empty: str = "") -> str:
    digest = os.path.basename(path).removesuffix(_SUFFIX)
    sentence = (
        f"its weights sha256:{digest} are not on this node: {path} {why}; copy it from the node that the snapshot was "
        "taken on"
    )
    if not empty:
        return sentence
    return f"{sentence} ({empty} is empty and no mount point: if a file system with weights belongs there, mount it)"


def unmounted(directory: str) -> bool:
    """Whether a store's directory is empty and in its place no file system is mounted: perhaps one should be.

    Directories that are empty count for nothing: a store makes them wherever it is looked for.
    """
    try:
        for place in (directory, f"{directory}/refs", f"{directory}/locks"):
            if any(name not in ("refs", "locks") for name in _names(place)):
                return False
        return not os.path.ismount(directory)
    except OSError:
        return False  # who uses it says what is wrong with it


def hold(record: object, config: Config, snapshot: str) -> Held:
    """Hold all packs of a snapshot's record, for a restore, and say that the snapshot in this directory needs them.

    Raises ShimError.
    """
    wanted = digests_of(record)
    store, held = Store(config.weights_directory), Held()
    token = str(record.get("token")) if isinstance(record, dict) else ""
    try:
        for digest in wanted:
            store.hold(held, digest)
            store.refer(digest, reference(snapshot, token), os.path.realpath(snapshot))
    except OSError as error:
        held.close()
        raise ShimError(f"the weights of {snapshot} cannot be held: {error}", FAILED_PRECONDITION) from error
    return held


def in_files(sizes: Sequence[int]) -> str:
    """The size of some packs, for people, who see them as files."""
    from shim.host import size

    return f"{size(sum(sizes))} in {len(sizes)} file{'' if len(sizes) == 1 else 's'}"


def forget(record: object, config: Config, snapshot: str) -> tuple[int, int]:
    """A snapshot is gone: take its references back, and remove what nobody else needs.

    `snapshot` is the path that its directory had. Returns the bytes that were removed, and how many packs stay because
    somebody uses them at this moment. Raises ShimError.
    """
    freed = busy = 0
    wanted = digests_of(record)
    token = str(record.get("token")) if isinstance(record, dict) else ""
    if not wanted or not os.path.isdir(config.weights_directory):
        return 0, 0
    store = Store(config.weights_directory)
    if store.read_only:
        return 0, 0
    try:
        for digest in wanted:
            store.drop(digest, reference(snapshot, token))
            here = store.size(digest)
            removed = store.remove(digest)
            freed += removed or 0
            busy += removed is None and here is not None and not store.references(digest)
    except OSError as error:
        raise ShimError(f"the weights of {snapshot} stay: {error}; `fermata prune` tries again") from error
    return freed, busy


# The command ------------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Add the command `prune` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prune",
        help="remove weights that no snapshot needs any more",
        description="Remove from the node's store of weights what no snapshot needs: weights whose snapshots are gone, "
        "and what a take that died has left. What a take or a restore uses at this moment stays.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--packed",
        action="store_true",
        help="also what only snapshots need that containerd has packed into images or archives (ctr, nerdctl, the "
        "kubelet): where these are cannot be seen from here, so they are taken to be there without this",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `prune`. Raises ShimError."""
    from shim import config
    from shim.host import size

    directory = config.load().weights_directory
    pruned: list[Pruned] = []
    drafts: list[tuple[str, int]] = []
    if os.path.isdir(directory):
        store = Store(directory)
        try:
            for digest in store.known():
                found = store.prune(digest, packed=args.packed, dry_run=args.dry_run)
                if found.outcome != "nothing":
                    pruned.append(found)
            for path, bytes_ in store.drafts():
                drafts.append((path, bytes_))
                if not args.dry_run:
                    _unlink(path)
        except OSError as error:
            raise ShimError(f"{directory} cannot be pruned: {error}", FAILED_PRECONDITION) from error
    if args.json:
        import json

        packs = [
            {
                "digest": f"sha256:{found.digest}",
                "bytes": found.size,
                "outcome": found.outcome,
                "gone": sorted(found.stale.values()),
                "snapshots": sorted(found.left.values()),
            }
            for found in pruned
        ]
        listing = [{"path": path, "bytes": bytes_} for path, bytes_ in drafts]
        print(json.dumps({"directory": directory, "dry_run": args.dry_run, "weights": packs, "drafts": listing}))
        return 0
    word = "would be removed" if args.dry_run else "removed"
    for found in pruned:
        if found.outcome == "removed":
            why = f"; gone: {', '.join(sorted(found.stale.values()))}" if found.stale else ""
            print(f"sha256:{found.digest}: {word}, {size(found.size)}{why}")
        elif found.outcome == "in use":
            print(f"sha256:{found.digest}: in use, stays, {size(found.size)}")
        elif found.packed == len(found.left):
            print(
                f"sha256:{found.digest}: stays, {size(found.size)}, for {found.packed} snapshots that containerd has "
                "packed (--packed removes it)"
            )
    for path, bytes_ in drafts:
        print(f"{path}: {word}, {size(bytes_)}, of a take that died")
    freed = sum(found.size for found in pruned if found.outcome == "removed") + sum(bytes_ for _, bytes_ in drafts)
    stays = [found for found in pruned if found.outcome != "removed"]
    print(f"{directory}: {size(freed)} {word}; {in_files([found.size for found in stays])} left")
    return 0
