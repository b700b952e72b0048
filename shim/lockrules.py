"""CRIU's lock rules: which of a namespace's packet filter rules a dead CRIU left behind, and their removal.

While CRIU dumps a tree it locks the tree's network namespace, so that no packet meets a socket whose owner is frozen.
A CRIU that is killed leaves the lock. One that dumps and ends the tree leaves it on purpose (nothing may answer the
peers before the restore). In a namespace that lives on, a pod's, that shuts everybody out, loopback included.

What CRIU makes, by `network-lock` method (criu/net.c and criu/netfilter.c of CRIU 3.17 to 4.3):

- `nftables`: a table `inet CRIU-ID` with the chains `input` and `output`, whose policy is drop and which accept the
  mark 0xc114. ID is the run's UUID, cut to 21 characters by CRIU 4.1, or the pid of the tree's root with older ones.
  For a tree in CRIU's own namespace the chains drop the connections in two sets instead.
- `iptables`: a chain `CRIU` in the tables `filter` of IPv4 and IPv6, which accepts the mark and drops the rest, and one
  jump to it at the head of INPUT and of OUTPUT. For a tree in CRIU's own namespace it is a rule for each connection and
  direction instead: TCP, both addresses, both ports, any other mark, drop. All these stand in nf_tables or in the old
  ip_tables, depending on which iptables the node has.

Rules are recognised by all of their content, not by a name: a user's chain or table of the same name stays.

A rule is no leftover while its CRIU works. A dump or restore of fermata's holds a lock on its namespace, a file named
after the namespace's inode under `netns.LOCKS`. The holders share it and whoever sweeps wants it alone, so the last one
to leave a namespace sweeps it. The kernel lets go of the lock of a holder that dies. A CRIU which somebody else started
(and one of fermata's that outlived its shim) shows in /proc: CRIU traces every task of the tree before it locks the
network, and until after it has unlocked it; and a task under restore is CRIU's child and bears CRIU's name.
"""

from __future__ import annotations

import fcntl
import os

from shim import netns
from shim.errors import FAILED_PRECONDITION, ShimError
from shim.state import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from shim.nftables import Deletion, Nftables, Rule

OWN = "/proc/thread-self/ns/net"
MARK = 0xC114
"""SOCCR_MARK (soccr/soccr.h): the mark that CRIU's own packets carry."""

NS_GET_NSTYPE = 0xB703
"""ioctl(2) of a namespace, since Linux 4.11: its kind, as clone(2) has it (linux/nsfs.h)."""

TABLE_PREFIX = "CRIU-"
CHAIN = "CRIU"
HOOKS = ("INPUT", "OUTPUT")
ATTEMPTS = 10


class Flushed:
    """What a sweep did: `removed`, one phrase for each rule or table, and `kept`, what was left alone and why."""

    __slots__ = ("kept", "removed")

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.kept: list[str] = []

    def __repr__(self) -> str:
        return f"Flushed(removed={self.removed!r}, kept={self.kept!r})"


class Use:
    """A dump or restore in a network namespace: no rule of it is a leftover before `release`.

    Taking it sweeps the namespace first, and `release` sweeps it again, each unless another dump or restore is under
    way there. `found` is what the first sweep did, `left` what the second did. Hold it for no longer than CRIU runs.
    Never waits for more than another's sweep. Raises ShimError if there is no such namespace; a sweep that fails is
    told in `kept`, since a dump or restore may succeed all the same.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.left = Flushed()
        self._lock: _Lock | None = _Lock(path)
        self.found = self._lock.try_sweep()
        self._lock.share()

    def open_up(self, addresses: set[bytes]) -> None:
        """Let sockets with these addresses be restored here (`sockets.open_up`) until the last has left.

        Raises ShimError.
        """
        from shim import sockets

        lock = self._lock
        assert lock is not None, "released"
        try:
            lock.inside(lambda: sockets.open_up(addresses, lock.write_note))
        except OSError as cause:
            raise ShimError(
                f"{lock.where} could not be prepared for a restore: {cause}", FAILED_PRECONDITION
            ) from cause

    def release(self) -> Flushed:
        """End it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self.left = lock.try_sweep()
            lock.close()
        return self.left

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def flush(path: str | None = None, *, dry_run: bool = False) -> Flushed:
    """Remove CRIU's leftover rules from the namespace at `path` (None: the caller's), and nothing else.

    With `dry_run` nothing is changed and `removed` says what would be. Takes about 1 ms where there is nothing to do.
    Raises ShimError if the namespace cannot be entered or the kernel refuses.
    """
    lock = _Lock(path)
    try:
        return lock.sweep(dry_run)
    finally:
        lock.close()


def _is_network_namespace(path: str) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return fcntl.ioctl(handle, NS_GET_NSTYPE) == netns.CLONE_NEWNET
        finally:
            os.close(handle)
    except OSError:  # what is no namespace does not know of the question
        return False


class _Lock:
    """The lock file of one network namespace.

    Its content is a note of what `Use.open_up` changed, which whoever holds the lock alone undoes: the last one to
    leave, or the first one after a crash.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.where = f"The network namespace {path}" if path else "This network namespace"
        try:
            self._inode = os.stat(path or OWN).st_ino
            make_private(netns.LOCKS)
            self._file = f"{netns.LOCKS}/{self._inode}"
            self._open()
        except OSError as cause:
            raise self._error(cause) from cause

    def _error(self, cause: OSError) -> ShimError:
        if self._path and not os.path.exists(self._path):
            return ShimError(
                f"there is no network namespace {self._path}: `ip netns` lists those with a name, and a process has "
                "one at /proc/PID/ns/net",
                FAILED_PRECONDITION,
            )
        if self._path and not _is_network_namespace(self._path):
            return ShimError(f"{self._path} is no network namespace", FAILED_PRECONDITION)
        reason = f"{cause.strerror or cause}{f' ({cause.filename})' if cause.filename else ''}"
        return ShimError(f"{self.where} cannot be cleared of CRIU's rules: {reason}", FAILED_PRECONDITION)

    def _open(self) -> None:
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _is_current(self) -> bool:
        """Whether the name still leads to the locked file; its last holder may have unlinked it meanwhile."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _take(self, operation: int) -> bool:
        while True:
            try:
                fcntl.flock(self._descriptor, operation)
            except BlockingIOError:
                return False
            if self._is_current():
                return True
            os.close(self._descriptor)
            self._open()

    def share(self) -> None:
        """Hold the lock together with others."""
        self._take(fcntl.LOCK_SH)

    def write_note(self, text: str) -> None:
        """Add to the note."""
        os.write(self._descriptor, f"{text} ".encode())

    def inside(self, work: Callable[[], None]) -> None:
        """Run `work` in the namespace. Raises what it raises, and OSError."""
        if self._path is None:
            work()
        else:
            netns.inside(self._path, work)

    def try_sweep(self) -> Flushed:
        """`sweep`, with a failure among what was kept."""
        try:
            return self.sweep()
        except ShimError as failure:
            flushed = Flushed()
            flushed.kept.append(str(failure))
            return flushed

    def sweep(self, dry_run: bool = False) -> Flushed:
        """Remove what nobody at work needs any more. Raises ShimError."""
        from shim import sockets

        flushed = Flushed()
        alone = self._take(fcntl.LOCK_EX | fcntl.LOCK_NB)
        note = os.pread(self._descriptor, 1 << 16, 0).decode() if alone and not dry_run else ""

        def work() -> None:
            if note:
                sockets.close_down(note)
            _sweep(flushed, self._inode, self.where, alone, dry_run)

        try:
            self.inside(work)
            if note:
                os.ftruncate(self._descriptor, 0)
        except OSError as cause:
            raise self._error(cause) from cause
        return flushed

    def close(self) -> None:
        """Let go. The last one removes the file."""
        try:
            if self._take(fcntl.LOCK_EX | fcntl.LOCK_NB) and os.fstat(self._descriptor).st_size == 0:
                os.unlink(self._file)
        finally:
            os.close(self._descriptor)


def _sweep(flushed: Flushed, inode: int, where: str, alone: bool, dry_run: bool) -> None:
    """Sweep the calling thread's network namespace."""
    from shim import nftables

    for _ in range(ATTEMPTS):
        try:
            with nftables.Nftables() as filter_:
                generation = filter_.generation()
                leftovers = _leftovers(filter_)
                reason = _busy(inode, alone) if leftovers else None
                if leftovers and reason is None and not dry_run:
                    filter_.delete(generation, [deletion for _, deletions in leftovers for deletion in deletions])
            break
        except nftables.Changed:  # somebody else changed rules since we looked
            continue
    else:
        raise ShimError(f"{where} has packet filter rules that change too fast; try again", FAILED_PRECONDITION)
    phrases = [phrase for phrase, _ in leftovers]
    if reason is None:
        flushed.removed += phrases
    else:
        flushed.kept += [f"{phrase}: {reason}" for phrase in phrases]
    _sweep_legacy(flushed, inode, alone, dry_run)


def _leftovers(filter_: Nftables) -> list[tuple[str, list[Deletion]]]:
    from shim import nftables

    found = []
    for family, table in filter_.tables():
        if family == nftables.INET and _is_run(table) and _is_lock_table(filter_, table):
            found.append((f"nftables table inet {table}", [nftables.Deletion(nftables.DELTABLE, family, table)]))
        elif family in (nftables.IP, nftables.IP6) and table == "filter":
            found += _filter_leftovers(filter_, family)
    return found


def _is_run(table: str) -> bool:
    """Whether a table bears the name of a CRIU run: a UUID, whole or cut short, or a pid."""
    run = table.removeprefix(TABLE_PREFIX)
    return run not in (table, "") and not run.strip("0123456789abcdef-")


def _is_lock_table(filter_: Nftables, table: str) -> bool:
    """Whether a table holds what CRIU puts into one, or as much of it as a CRIU that was killed had come to."""
    from shim import nftables

    if not set(filter_.chains(nftables.INET, table)) <= {"input", "output"}:
        return False
    return all(
        (rule.verdict, rule.mark, rule.matches) == (nftables.ACCEPT, (MARK, True), [])
        or (rule.verdict == nftables.DROP and rule.mark is None and "lookup" in rule.matches)
        for rule in filter_.rules(nftables.INET, table)
    )


def _filter_leftovers(filter_: Nftables, family: int) -> list[tuple[str, list[Deletion]]]:
    """What is in one family's table `filter`, jumps before the chain that they jump to."""
    from shim import nftables

    name = nftables.FAMILIES[family]
    rules = filter_.rules(family, "filter")
    found = []

    def removal(rule: Rule) -> Deletion:
        return nftables.Deletion(nftables.DELRULE, family, "filter", rule.chain, rule.handle)

    lock = [rule for rule in rules if rule.chain == CHAIN]
    if [(rule.verdict, rule.mark, rule.matches) for rule in lock] == [
        (nftables.ACCEPT, (MARK, True), []),
        (nftables.DROP, None, []),
    ]:
        callers = [rule for rule in rules if rule.target == CHAIN]
        jumps = [
            rule
            for rule in callers
            if rule.chain in HOOKS and (rule.verdict, rule.mark, rule.matches) == (nftables.JUMP, None, [])
        ]
        for rule in jumps:
            found.append((f"jump from {rule.chain} to {CHAIN} in {name} filter", [removal(rule)]))
        if len(jumps) == len(callers):  # else somebody made use of the chain, and the kernel would refuse
            chain = nftables.Deletion(nftables.DELCHAIN, family, "filter", CHAIN)
            found.append((f"chain {CHAIN} in {name} filter", [*map(removal, lock), chain]))
    for rule in rules:
        connection = rule.chain in HOOKS and _names_connection(family, rule.matches)
        if connection and (rule.verdict, rule.mark) == (nftables.DROP, (MARK, False)):
            found.append((f"lock of one connection in {rule.chain} of {name} filter", [removal(rule)]))
    return found


def _names_connection(family: int, matches: list[str]) -> bool:
    """Whether a rule of iptables-nft compares both addresses, whole, and both ports, and nothing else but TCP."""
    from shim import nftables

    # linux/netfilter/nf_tables.h: base 1 is the network header, 2 the transport header
    addresses = ("payload 1 12 4", "payload 1 16 4") if family == nftables.IP else ("payload 1 8 16", "payload 1 24 16")
    ports = {"payload 2 0 4", "match"}  # older versions of iptables-nft leave the ports to xtables' match `tcp`
    fields = [match for match in matches if match not in ("cmp", "meta", "payload 1 9 1")]  # the protocol is TCP's
    return len(fields) == 3 and set(fields) - ports == set(addresses)


def _sweep_legacy(flushed: Flushed, inode: int, alone: bool, dry_run: bool) -> None:
    """The same for the old ip_tables, by their own tools.

    The kernel makes a table when it is first asked for, so only tables that /proc names are looked at.
    """
    for family, suffix, listing in (("ip", "", "ip_tables_names"), ("ip6", "6", "ip6_tables_names")):
        try:
            with open(f"/proc/thread-self/net/{listing}", encoding="ascii") as file:
                if "filter" not in file.read().split():
                    continue
        except FileNotFoundError:  # a kernel without ip_tables
            continue
        tool = f"ip{suffix}tables-legacy"
        saved = _output([f"{tool}-save", "-t", "filter"])
        if saved is None:
            flushed.kept.append(f"legacy {family} filter: {tool} is not installed, so its rules cannot be read")
            continue
        phrases, commands = _legacy_leftovers(saved.splitlines(), f"legacy {family} filter")
        if not phrases:
            continue
        reason = _busy(inode, alone)
        if reason is not None:
            flushed.kept += [f"{phrase}: {reason}" for phrase in phrases]
            continue
        if not dry_run:
            # One transaction; -w waits for other users of iptables instead of failing.
            text = "\n".join(["*filter", *commands, "COMMIT", ""])
            _output([f"{tool}-restore", "-w", "5", "--noflush"], text)
        flushed.removed += phrases


def _legacy_leftovers(saved: list[str], where: str) -> tuple[list[str], list[str]]:
    """Phrases for a person, and the iptables-restore commands that remove what they name."""
    rules = [line for line in saved if line.startswith("-A ")]
    phrases, commands = [], []
    lock = [rule for rule in rules if rule.startswith(f"-A {CHAIN} ")]
    if lock == [f"-A {CHAIN} -m mark --mark {MARK:#x} -j ACCEPT", f"-A {CHAIN} -j DROP"]:
        callers = [rule for rule in rules if {f"-j {CHAIN}", f"-g {CHAIN}"} & {rule[-7:]}]
        jumps = [rule for rule in callers if rule in [f"-A {hook} -j {CHAIN}" for hook in HOOKS]]
        for rule in jumps:
            phrases.append(f"jump from {rule.split()[1]} to {CHAIN} in {where}")
            commands.append(f"-D{rule[2:]}")
        if len(jumps) == len(callers):
            phrases.append(f"chain {CHAIN} in {where}")
            commands += [f"-F {CHAIN}", f"-X {CHAIN}"]
    for rule in rules:
        words = rule.split()
        if words[1] in HOOKS and _is_connection_lock(words):
            phrases.append(f"lock of one connection in {words[1]} of {where}")
            commands.append(f"-D{rule[2:]}")
    return phrases, commands


def _is_connection_lock(words: list[str]) -> bool:
    mark = ["-p", "tcp", "-m", "mark", "!", "--mark", f"{MARK:#x}", "-m", "tcp"]
    return (
        len(words) == 21
        and (words[2], words[4]) == ("-s", "-d")
        and all(word.endswith(("/32", "/128")) for word in (words[3], words[5]))
        and words[6:15] == mark
        and (words[15], words[17], words[19:]) == ("--sport", "--dport", ["-j", "DROP"])
    )


def _output(command: list[str], text: str = "") -> str | None:
    """What a command prints; None if it is not installed. Raises ShimError if it fails."""
    import subprocess

    try:
        process = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as cause:
        raise ShimError(f"{command[0]} did not end within 30 s", FAILED_PRECONDITION) from cause
    if process.returncode != 0:
        raise ShimError(f"{command[0]} failed: {process.stderr.strip()}", FAILED_PRECONDITION)
    return process.stdout


def _busy(inode: int, alone: bool) -> str | None:
    """Why rules in a network namespace may be those of a CRIU at work; None if there is none."""
    if not alone:
        return "a dump or restore is under way there"
    criu = _working_criu(inode)
    return f"CRIU is at work there, process {criu}" if criu else None


def _working_criu(inode: int) -> int | None:
    """The pid of a CRIU that dumps or restores a task in a network namespace, whoever started it."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}/ns/net").st_ino != inode:
                continue
            with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                status = dict(line.split(":", 1) for line in file if ":" in line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended
            continue
        for pid in (name, status["TracerPid"].strip(), status["PPid"].strip()):
            if pid != "0" and _is_criu(pid):
                return int(pid)
    return None


def _is_criu(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().startswith("criu")
    except (FileNotFoundError, ProcessLookupError):
        return False


def namespaces() -> dict[int, str]:
    """Every network namespace that a process is in or that has a name: its inode, and a path to it.

    A name is preferred to a process, and the caller's own namespace is always there.
    """
    found = {os.stat(OWN).st_ino: OWN}
    paths = [f"/proc/{name}/ns/net" for name in os.listdir("/proc") if name.isdigit()]
    with open("/proc/thread-self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:  # proc_pid_mountinfo(5): field 4 is the root, 5 the mount point, octal for white space
            fields = line.split()
            if fields[3].startswith("net:["):
                paths.append(fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape"))
    for path in paths:
        try:
            found[os.stat(path).st_ino] = path
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def add_parser(subparsers: Any) -> None:
    """Add the command `flush-locks` to argparse's subparsers; its `run` default is `run` below."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "flush-locks",
        help="remove the packet filter rules that a dead CRIU left in a network namespace",
        description="Remove the packet filter rules that a dead CRIU left in a network namespace. "
        "Rules of a dump or restore that is under way stay, and so does everything that CRIU did not make.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--netns", metavar="PATH", help="the namespace, such as /run/netns/NAME or /proc/PID/ns/net")
    where.add_argument("--all", action="store_true", help="every network namespace of this node")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and change nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `flush-locks`. Returns the exit status: 0, or 1 if a namespace could not be searched."""
    import sys

    paths: list[str | None] = [args.netns]
    if args.all:
        paths = list(namespaces().values())
    verb = "would remove" if args.dry_run else "removed"
    status = count = 0
    for path in paths:
        where = path or "the network namespace of this process"
        try:
            flushed = flush(path, dry_run=args.dry_run)
        except ShimError as failure:
            if args.all and path and not _is_network_namespace(path):
                continue  # it went after it was listed, and its rules with it
            print(f"fermata: {failure}", file=sys.stderr)
            status = 1
            continue
        count += len(flushed.removed)
        for phrase in flushed.removed:
            print(f"{where}: {verb} {phrase}")
        for phrase in flushed.kept:
            print(f"{where}: kept {phrase}")
    if count == status == 0:
        print("No lock rule of CRIU's was left behind.")
    return status
