"""The kernel's nf_tables over netlink: read tables, chains and rules, and delete some of them in one transaction.

Before every dump and restore a namespace is searched for rules that a dead CRIU left. Asked over netlink that takes
less than a millisecond and needs no `nft`, which a node need not have: CRIU itself uses a library. The rules that
iptables-nft makes are here too. Formats: linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h.

A transaction names the generation of the rules that it was decided on. If anybody has changed a rule since, the kernel
refuses it as a whole (`Changed`), and the caller looks again.
"""

from __future__ import annotations

import _socket
import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

NETLINK_NETFILTER = 12
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
NFNL_SUBSYS_NFTABLES = 10
NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END, NFNL_BATCH_GENID = 0x10, 0x11, 1
GETTABLE, DELTABLE, GETCHAIN, DELCHAIN, GETRULE, DELRULE, GETGEN = 1, 2, 4, 5, 7, 8, 16
NLA_TYPE_MASK = 0x3FFF

IP, INET, IP6 = 2, 1, 10
FAMILIES = {IP: "ip", INET: "inet", IP6: "ip6"}
DROP, ACCEPT, JUMP, GOTO = 0, 1, -3, -4
NFT_META_MARK = 3
CMP_EQ, CMP_NEQ = 0, 1


class Changed(Exception):
    """Somebody changed the rules between looking and deleting."""


class Rule:
    """One rule, as far as it matters here.

    `verdict` is DROP, ACCEPT, JUMP, GOTO or None, `target` the chain that a jump names, `mark` the packet mark that the
    rule asks for as (value, wanted), `wanted` False where all other marks match; `matches` are the names of all other
    expressions but counters, with `payload BASE OFFSET LENGTH` for a packet's field, and `differs` for a `cmp` that is
    not for equality.
    """

    __slots__ = ("chain", "handle", "mark", "matches", "target", "verdict")

    def __init__(self, chain: str, handle: int, expressions: list[tuple[str, dict[int, bytes]]]) -> None:
        self.chain = chain
        self.handle = handle
        self.verdict: int | None = None
        self.target: str | None = None
        self.mark: tuple[int, bool] | None = None
        self.matches: list[str] = []
        loaded_mark = False
        for name, data in expressions:
            if name == "immediate" and (verdict := _verdict(data)) is not None:
                self.verdict, self.target = verdict
            elif name == "meta" and _number(data.get(2)) == NFT_META_MARK and 1 in data:
                loaded_mark = True
            elif name == "cmp" and loaded_mark and _number(data.get(2)) in (CMP_EQ, CMP_NEQ):
                value = dict(_attributes(data.get(3, b""))).get(1, b"")
                self.mark = (struct.unpack("=I", value)[0], _number(data.get(2)) == CMP_EQ) if len(value) == 4 else None
                loaded_mark = False
            elif name == "match" and data.get(1, b"").rstrip(b"\0") == b"mark" and self._xt_mark(data.get(3, b"")):
                pass
            elif name == "payload":
                self.matches.append(f"payload {_number(data.get(2))} {_number(data.get(3))} {_number(data.get(4))}")
            elif name == "cmp" and _number(data.get(2)) != CMP_EQ:
                self.matches.append("differs")
            elif name != "counter":
                self.matches.append(name)

    def _xt_mark(self, info: bytes) -> bool:
        """Read struct xt_mark_mtinfo1 (linux/netfilter/xt_mark.h), which iptables-nft passes on as it is."""
        if len(info) < 9:
            return False
        mark, mask, invert = struct.unpack_from("=IIB", info)
        if mask != 0xFFFFFFFF:
            return False
        self.mark = (mark, not invert)
        return True


class Nftables:
    """A connection to the nf_tables of the calling thread's network namespace. Raises OSError."""

    def __init__(self) -> None:
        self._sequence = 0
        self._socket = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(10)

    def __enter__(self) -> Nftables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def generation(self) -> int:
        """The number that changes with every change of any rule."""
        for attributes in self._ask(GETGEN, 0, 0, b""):
            return _number(attributes.get(1))
        return 0

    def tables(self) -> list[tuple[int, str]]:
        """Family and name of every table. A kernel without nf_tables has none."""
        try:
            return [(family, _text(found.get(1))) for family, found in self._dump(GETTABLE, 0, b"")]
        except OSError as cause:
            if cause.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return []
            raise

    def chains(self, family: int, table: str) -> dict[str, bool]:
        """The names of a table's chains; True for those that packets reach by a hook."""
        found = (attributes for _, attributes in self._dump(GETCHAIN, family, b""))
        return {_text(chain.get(3)): 4 in chain for chain in found if _text(chain.get(1)) == table}

    def rules(self, family: int, table: str) -> list[Rule]:
        """The rules of a table, each chain's in their order."""
        rules = []
        for _, found in self._dump(GETRULE, family, _attribute(1, _name(table))):
            if _text(found.get(1)) == table:  # kernels before 4.14 do not filter
                expressions = [_expression(element) for _, element in _attributes(found.get(4, b""))]
                rules.append(Rule(_text(found.get(2)), _number(found.get(3)), expressions))
        return rules

    def delete(self, generation: int, deletions: list[Deletion]) -> None:
        """Delete all of these, or nothing. Raises Changed and OSError."""
        begin = _attribute(NFNL_BATCH_GENID, struct.pack(">I", generation))
        frame = self._message(NFNL_MSG_BATCH_BEGIN, 0, 0, begin, NFNL_SUBSYS_NFTABLES)
        for deletion in deletions:
            frame += self._message(_type(deletion.kind), NLM_F_ACK, deletion.family, deletion.attributes())
        frame += self._message(NFNL_MSG_BATCH_END, 0, 0, b"", NFNL_SUBSYS_NFTABLES)
        self._socket.send(frame)
        answers = 0
        while answers < len(deletions):
            for kind, _, body in _messages(self._socket.recv(1 << 17)):
                if kind == NLMSG_ERROR:
                    number = -int(struct.unpack_from("=i", body)[0])
                    if number in (errno.ERESTART, errno.ENOENT):
                        raise Changed
                    if number:
                        raise OSError(number, f"nf_tables: {os.strerror(number)}")
                    answers += 1

    def _ask(self, kind: int, flags: int, family: int, body: bytes) -> Iterator[dict[int, bytes]]:
        for _, attributes in self._request(kind, flags, family, body):
            yield attributes

    def _dump(self, kind: int, family: int, body: bytes) -> list[tuple[int, dict[int, bytes]]]:
        while True:
            try:
                return list(self._request(kind, NLM_F_DUMP, family, body))
            except InterruptedError:  # the rules changed under the dump; what came is of no one moment
                continue

    def _request(self, kind: int, flags: int, family: int, body: bytes) -> Iterator[tuple[int, dict[int, bytes]]]:
        self._socket.send(self._message(_type(kind), flags, family, body))
        mine = self._sequence
        interrupted = False
        while True:
            for kind_, header, body_ in _messages(self._socket.recv(1 << 17)):
                flags_, sequence = header
                if sequence != mine:
                    continue
                interrupted |= bool(flags and flags_ & 0x10)  # NLM_F_DUMP_INTR
                if kind_ == NLMSG_ERROR or (kind_ == NLMSG_DONE and len(body_) >= 4):
                    number = -int(struct.unpack_from("=i", body_)[0])
                    if number:
                        raise OSError(number, f"nf_tables: {os.strerror(number)}")
                if kind_ in (NLMSG_ERROR, NLMSG_DONE):
                    if interrupted:
                        raise InterruptedError
                    return
                yield body_[0], dict(_attributes(body_[4:]))
                if not flags:
                    return

    def _message(self, kind: int, flags: int, family: int, body: bytes, resource: int = 0) -> bytes:
        self._sequence += 1
        body = struct.pack(">BBH", family, 0, resource) + body
        return struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | flags, self._sequence, 0) + body


class Deletion:
    """One thing to delete: a table, a chain (once nothing jumps to it), or a rule by its handle."""

    __slots__ = ("chain", "family", "handle", "kind", "table")

    def __init__(self, kind: int, family: int, table: str, chain: str | None = None, handle: int | None = None) -> None:
        self.kind = kind
        self.family = family
        self.table = table
        self.chain = chain
        self.handle = handle

    def attributes(self) -> bytes:
        """The netlink attributes that name it."""
        encoded = _attribute(1, _name(self.table))
        if self.chain is not None:  # a chain's name is attribute 3 of a chain and 2 of a rule
            encoded += _attribute(3 if self.kind == DELCHAIN else 2, _name(self.chain))
        if self.handle is not None:
            encoded += _attribute(3, struct.pack(">Q", self.handle))
        return encoded


def _type(kind: int) -> int:
    return NFNL_SUBSYS_NFTABLES << 8 | kind


def _messages(data: bytes) -> Iterator[tuple[int, tuple[int, int], bytes]]:
    offset = 0
    while offset + 16 <= len(data):
        length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", data, offset)
        yield kind, (flags, sequence), data[offset + 16 : offset + length]
        offset += length + 3 & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        yield kind & NLA_TYPE_MASK, data[offset + 4 : offset + length]
        offset += length + 3 & ~3


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _expression(element: bytes) -> tuple[str, dict[int, bytes]]:
    found = dict(_attributes(element))
    return _text(found.get(1)), dict(_attributes(found.get(2, b"")))


def _verdict(immediate: dict[int, bytes]) -> tuple[int, str | None] | None:
    verdict = dict(_attributes(immediate.get(2, b""))).get(2)
    if verdict is None:
        return None
    found = dict(_attributes(verdict))
    return struct.unpack(">i", found[1])[0], _text(found[2]) if 2 in found else None


def _name(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape") + b"\0"


def _text(value: bytes | None) -> str:
    return (value or b"").rstrip(b"\0").decode("utf-8", "surrogateescape")


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", "big")
