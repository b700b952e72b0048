"""TCP sockets across a restore into a network namespace that has other addresses than the one they come from.

Everything here acts on the calling thread's network namespace.

CRIU makes each socket again with the addresses that it had: it binds to the local one and, for a connection, connects
to the other one in repair mode, in which no packet goes out. Bind refuses an address that is not there, and connect one
that no route leads to. So `open_up` lets both through for as long as a restore takes: it gives loopback the addresses
that are missing, and a default route, over which a packet gets nowhere, where there is none. (The sysctl
ip_nonlocal_bind would do for bind, but the route of a connection needs its source address to be there.)

A connection to a peer outside was restored without its peer: data would vanish until a timeout after many minutes. So
`reset_outside` aborts it, as `ss --kill` does (CONFIG_INET_DIAG_DESTROY). A program sees that at its next use of the
socket, ECONNABORTED or for a write EPIPE, which every program that talks over a network handles.
"""

from __future__ import annotations

import _socket
import errno
import os
import struct

from shim.errors import INTERNAL, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AF_INET, AF_INET6 = 2, 10
LOOPBACK_INDEX = 1  # the kernel gives it to every namespace's `lo`
NETLINK_ROUTE, NETLINK_SOCK_DIAG = 0, 4
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP, NLM_F_CREATE, NLM_F_EXCL = 0x1, 0x4, 0x300, 0x400, 0x200
NLMSG_ERROR, NLMSG_DONE = 2, 3
# linux/rtnetlink.h
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR, RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 20, 21, 22, 24, 25, 26
IFA_F_NODAD, RT_SCOPE_HOST = 0x2, 254
IFA_ADDRESS, IFA_LOCAL, RTA_OIF, RTA_PRIORITY = 1, 2, 4, 6
RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_UNIVERSE, RTN_UNICAST = 254, 4, 0, 1
LAST_PRIORITY = 0xFFFFFFFF
# linux/sock_diag.h, linux/inet_diag.h
SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 20, 21
IPPROTO_TCP = 6
TCP_LISTEN, TCP_CLOSE, TCP_TIME_WAIT = 10, 7, 6
ALL_STATES = 0xFFFFFFFF
SOCKID_SIZE = 48


class Connection:
    """A TCP connection: its socket's `inode` (0 once the kernel alone has it), both ends, and what names it."""

    __slots__ = ("_address", "family", "inode", "local", "local_port", "peer", "peer_port")

    def __init__(self, family: int, sockid: bytes, inode: int) -> None:
        size = 4 if family == AF_INET else 16
        self.family = family
        self.inode = inode
        self.local_port, self.peer_port = struct.unpack_from(">HH", sockid)
        self.local = sockid[4 : 4 + size]
        self.peer = sockid[20 : 20 + size]
        self._address = sockid

    def request(self) -> bytes:
        """struct inet_diag_req_v2 for this socket and no other."""
        return struct.pack("=BBBxI", self.family, IPPROTO_TCP, 0, ALL_STATES) + self._address

    def __str__(self) -> str:
        local, peer = (_socket.inet_ntop(self.family, end) for end in (self.local, self.peer))
        return f"{local} port {self.local_port} to {peer} port {self.peer_port}"


def addresses_in(snapshot: str) -> set[bytes]:
    """The IP addresses that the sockets of a snapshot are bound to, but for loopback's and the wildcards.

    4 or 16 bytes each. Raises ShimError if the images cannot be read.
    """
    from shim import images

    found = set()
    for entry in images.entries(f"{snapshot}/files.img", images.FileEntry):
        if entry.isk is not None and entry.isk.family in (AF_INET, AF_INET6):
            address = _plain(_socket.inet_pton(entry.isk.family, entry.isk.address(11)))
            if any(address[:-1]) and not _is_loopback(address):
                found.add(address)
    return found


def open_up(addresses: set[bytes], keep: Callable[[str], None]) -> None:
    """Let sockets that are bound to these addresses be restored, and connections from them.

    `keep` gets what `close_down` needs, before anything changes. Raises OSError.
    """
    missing = sorted(addresses - _local_addresses())
    families = [family for family in (AF_INET, AF_INET6) if any(_family(address) == family for address in addresses)]
    routes = [family for family in families if not _has_default_route(family)]
    if not missing and not routes:
        return
    keep(" ".join([*(address.hex() for address in missing), *map(str, routes)]))
    for address in missing:
        _change(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, _loopback_address(address), errno.EEXIST)
    for family in routes:
        _change(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, _default_route(family), errno.EEXIST)


def close_down(record: str) -> None:
    """Undo `open_up`. What is undone already is no error. Sockets stay bound. Raises OSError."""
    for word in record.split():
        if word in (str(AF_INET), str(AF_INET6)):
            _change(RTM_DELROUTE, 0, _default_route(int(word)), errno.ESRCH)
        else:
            _change(RTM_DELADDR, 0, _loopback_address(bytes.fromhex(word)), errno.EADDRNOTAVAIL)


def reset_outside(pid: int) -> list[str]:
    """Abort a container's connections whose peer, or whose own address, is not in this namespace. Returns them.

    `pid` is the container's first process. Raises ShimError where the kernel cannot abort a socket.
    """
    here = _local_addresses()
    outside = [c for c in connections() if not (_is_here(c.local, here) and _is_here(c.peer, here))]
    # To find a container's sockets takes a look at every process of the node, so only if there is one to look for.
    inodes = of_container(pid) if outside else set()
    reset = []
    for connection in outside:
        if connection.inode not in inodes:
            continue
        try:
            for _ in _ask(NETLINK_SOCK_DIAG, SOCK_DESTROY, NLM_F_ACK, connection.request()):
                pass
        except OSError as cause:
            if cause.errno == errno.ENOENT:  # closed meanwhile
                continue
            raise ShimError(
                f"The connection from {connection} could not be reset after the restore: {cause.strerror}", INTERNAL
            ) from cause
        reset.append(str(connection))
    return reset


def connections() -> list[Connection]:
    """Every TCP socket that has a peer."""
    found = []
    states = ALL_STATES & ~(1 << TCP_LISTEN | 1 << TCP_CLOSE | 1 << TCP_TIME_WAIT)
    for family in (AF_INET, AF_INET6):
        request = struct.pack("=BBBxI", family, IPPROTO_TCP, 0, states) + bytes(SOCKID_SIZE)
        for body in _ask(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, request):
            sockid = body[4 : 4 + SOCKID_SIZE]
            (inode,) = struct.unpack_from("=I", body, 4 + SOCKID_SIZE + 16)
            found.append(Connection(body[0], sockid, inode))
    return found


def of_container(pid: int) -> set[int]:
    """The inodes of all sockets that the processes of a container have open; `pid` is its first process.

    Its processes are those in its control group and below. In the root group, where everybody is, it is `pid` alone.
    """
    group = _group(str(pid))
    alone = group in (None, "/")
    inodes: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        theirs = _group(name)
        inside = theirs is not None and (theirs == group or theirs.startswith(f"{group}/"))
        if not (int(name) == pid if alone else inside):
            continue
        try:
            for descriptor in os.listdir(f"/proc/{name}/fd"):
                try:
                    target = os.readlink(f"/proc/{name}/fd/{descriptor}")
                except FileNotFoundError:
                    continue
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return inodes


def _group(pid: str) -> str | None:
    """A process's control group, in the hierarchy that every container has one in; None if it has ended."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            groups = {line.split(":", 2)[1]: line.rstrip("\n").split(":", 2)[2] for line in file}
    except (FileNotFoundError, ProcessLookupError):
        return None
    return groups.get("pids", groups.get("memory", groups.get("")))


def _is_here(address: bytes, here: set[bytes]) -> bool:
    address = _plain(address)
    return address in here or _is_loopback(address)


def _plain(address: bytes) -> bytes:
    """An IPv4 address that an IPv6 socket has, as the IPv4 address that it is."""
    return address[12:] if address.startswith(bytes(10) + b"\xff\xff") and len(address) == 16 else address


def _is_loopback(address: bytes) -> bool:
    return address[0] == 127 if len(address) == 4 else address == bytes(15) + b"\1"


def _family(address: bytes) -> int:
    return AF_INET if len(address) == 4 else AF_INET6


def _local_addresses() -> set[bytes]:
    found = set()
    for family in (AF_INET, AF_INET6):
        # struct ifaddrmsg
        for body in _ask(NETLINK_ROUTE, RTM_GETADDR, NLM_F_DUMP, struct.pack("=BBBBI", family, 0, 0, 0, 0)):
            attributes = _attributes(body[8:])
            found.add(attributes.get(IFA_LOCAL, attributes.get(IFA_ADDRESS, b"")))
    return found


def _has_default_route(family: int) -> bool:
    # struct rtmsg: the destination's length is its second byte, the table its fifth, the type its eighth
    for body in _ask(NETLINK_ROUTE, RTM_GETROUTE, NLM_F_DUMP, _rtmsg(family)):
        if body[0] == family and body[1] == 0 and body[4] == RT_TABLE_MAIN and body[7] == RTN_UNICAST:
            return True
    return False


def _change(kind: int, flags: int, body: bytes, done: int) -> None:
    """Change an address or a route; the error `done` says that it is so already."""
    try:
        for _ in _ask(NETLINK_ROUTE, kind, flags | NLM_F_ACK, body):
            pass
    except OSError as cause:
        if cause.errno != done:
            raise


def _loopback_address(address: bytes) -> bytes:
    # struct ifaddrmsg: family, prefix length, flags, scope, interface. A duplicate address check would take a second.
    body = struct.pack("=BBBBI", _family(address), 8 * len(address), IFA_F_NODAD, RT_SCOPE_HOST, LOOPBACK_INDEX)
    for attribute in (IFA_LOCAL, IFA_ADDRESS):
        body += struct.pack("=HH", 4 + len(address), attribute) + address
    return body


def _default_route(family: int) -> bytes:
    body = _rtmsg(family)
    for attribute, value in ((RTA_OIF, LOOPBACK_INDEX), (RTA_PRIORITY, LAST_PRIORITY)):
        body += struct.pack("=HHI", 8, attribute, value)
    return body


def _rtmsg(family: int) -> bytes:
    return struct.pack("=BBBBBBBBI", family, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_UNIVERSE, RTN_UNICAST, 0)


def _ask(protocol: int, kind: int, flags: int, body: bytes) -> Iterator[bytes]:
    """The bodies of the answers to one netlink request. Raises OSError with the kernel's number."""
    connection = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, protocol)
    try:
        connection.bind((0, 0))
        connection.settimeout(10)
        connection.send(struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body)
        while True:
            data = connection.recv(1 << 17)
            offset = 0
            while offset + 16 <= len(data):
                length, answer, _, _, _ = struct.unpack_from("=IHHII", data, offset)
                payload = data[offset + 16 : offset + length]
                offset += length + 3 & ~3
                if answer == NLMSG_ERROR:
                    number = -int(struct.unpack_from("=i", payload)[0])
                    if number:
                        raise OSError(number, os.strerror(number))
                if answer in (NLMSG_ERROR, NLMSG_DONE):
                    return
                yield payload
    finally:
        connection.close()


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            break
        found[kind] = data[offset + 4 : offset + length]
        offset += length + 3 & ~3
    return found
