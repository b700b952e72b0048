"""Against the kernel's real packet filter: rules are made by nft and iptables, as CRIU and other people make them."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from shim import lockrules, netns, nftables
from shim.errors import ShimError

PROJECT = Path(__file__).parents[3]
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces and packet filter rules"),
    pytest.mark.usefixtures("tools", "leaves_lock_rules"),
]


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.setenv("PATH", PATH)
    for tool in ("nft", "iptables-nft", "iptables-legacy"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.fixture
def space(request):
    """A network namespace of the test's own."""
    path = netns.create("unit", f"l{os.getpid()}")
    yield path
    netns.remove(path)


def inside(path: str, *command: str, text: str = "") -> str:
    process = subprocess.run(
        ["nsenter", f"--net={path}", *command], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 0, f"{command}: {process.stderr}"
    return process.stdout


def state(path: str) -> str:
    """All rules of a namespace, with handles and counters.

    But for the counters of the old tables' policies: iptables-legacy sets them to zero with every change by anybody.
    """
    words = [inside(path, "nft", "-a", "-j", "list", "ruleset")]
    for family in ("", "6"):
        for backend in ("nft", "legacy"):
            for line in inside(path, f"ip{family}tables-{backend}-save", "-c").splitlines():
                if not line.startswith("#"):
                    words.append(line.partition(" [")[0] if line.startswith(":") and backend == "legacy" else line)
    return "\n".join(words)


def loopback_works(path: str) -> bool:
    code = """
import socket
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.create_server((address, 0), family=family) as server:
        try:
            socket.create_connection(server.getsockname()[:2], 0.3).close()
        except TimeoutError:
            print("lost")
"""
    return inside(path, sys.executable, "-I", "-S", "-c", code) == ""


# What CRIU makes --------------------------------------------------------------------------------------------------


def nft_lock(path: str, run: str) -> None:
    table = f"inet CRIU-{run}"
    commands = [f"create table {table}"]
    for hook in ("output", "input"):
        commands.append(f"add chain {table} {hook} {{ type filter hook {hook} priority 0; policy drop; }}")
        commands.append(f"add rule {table} {hook} meta mark 0xC114 accept")
    inside(path, "nft", "-f", "-", text="\n".join(commands))


def nft_connection_locks(path: str, run: str) -> None:
    table = f"inet CRIU-{run}"
    commands = [f"create table {table}"]
    for hook in ("output", "input"):
        commands.append(f"add chain {table} {hook} {{ type filter hook {hook} priority 0; }}")
        commands.append(f"add rule {table} {hook} meta mark 0xC114 accept")
    for version, ip in (("4", "ip"), ("6", "ip6")):
        kind = f"ipv{version}_addr . inet_service . ipv{version}_addr . inet_service"
        commands.append(f"add set {table} conns{version} {{ type {kind}; }}")
        for hook in ("output", "input"):
            match = f"{ip} saddr . tcp sport . {ip} daddr . tcp dport"
            commands.append(f"add rule {table} {hook} {match} @conns{version} drop")
    commands.append(f"add element {table} conns4 {{ 127.0.0.1 . 80 . 127.0.0.1 . 40000 }}")
    inside(path, "nft", "-f", "-", text="\n".join(commands))


def iptables_lock(path: str, backend: str) -> None:
    text = """
        *filter
        :CRIU - [0:0]
        -I INPUT -j CRIU
        -I OUTPUT -j CRIU
        -A CRIU -m mark --mark 0xC114 -j ACCEPT
        -A CRIU -j DROP
        COMMIT
    """
    for family in ("", "6"):
        inside(path, f"ip{family}tables-{backend}-restore", "--noflush", text=textwrap.dedent(text))


def iptables_connection_locks(path: str, backend: str) -> None:
    for family, mine, theirs in (("", "127.0.0.1", "127.0.0.2"), ("6", "::1", "::1")):
        for chain, source, source_port, target, target_port in (
            ("INPUT", theirs, "40000", mine, "80"),
            ("OUTPUT", mine, "80", theirs, "40000"),
        ):
            command = f"-t filter -I {chain} --protocol tcp -m mark ! --mark 0xC114 --source {source}"
            command += f" --sport {source_port} --destination {target} --dport {target_port} -j DROP"
            inside(path, f"ip{family}tables-{backend}", "-w", *command.split())


RUN = "6ef569ba-3392-438f-a36b-06c1f0f2a1de"
LOCKS = {
    "nftables": lambda path: nft_lock(path, RUN),
    "nftables of CRIU 4.1": lambda path: nft_lock(path, RUN[:21]),
    "nftables by pid": lambda path: nft_lock(path, "4711"),
    "nftables killed at once": lambda path: inside(path, "nft", "create", "table", "inet", f"CRIU-{RUN}"),
    "nftables connections": lambda path: nft_connection_locks(path, RUN),
    "iptables-nft": lambda path: iptables_lock(path, "nft"),
    "iptables-legacy": lambda path: iptables_lock(path, "legacy"),
    "iptables-nft connections": lambda path: iptables_connection_locks(path, "nft"),
    "iptables-legacy connections": lambda path: iptables_connection_locks(path, "legacy"),
}
SHUT = ["nftables", "nftables of CRIU 4.1", "nftables by pid", "iptables-nft", "iptables-legacy"]

# What other people make -------------------------------------------------------------------------------------------

KUBE = """
    *nat
    :PREROUTING ACCEPT [0:0]
    :KUBE-SERVICES - [0:0]
    :KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
    :KUBE-SEP-2LIBQ2OS3SY7NQ2W - [0:0]
    :KUBE-MARK-MASQ - [0:0]
    -A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
    -A KUBE-SERVICES -d {one} -p tcp -m comment --comment "kube-system/kube-dns:dns-tcp" -m tcp --dport 53 -j KUBE-SVC-ERIFXISQEP7F7OF4
    -A KUBE-SVC-ERIFXISQEP7F7OF4 -m statistic --mode random --probability 0.5 -j KUBE-SEP-2LIBQ2OS3SY7NQ2W
    -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
    COMMIT
    *filter
    :INPUT ACCEPT [0:0]
    :FORWARD DROP [0:0]
    :OUTPUT ACCEPT [0:0]
    :KUBE-FIREWALL - [0:0]
    :CRIUX - [0:0]
    :criu - [0:0]
    -A INPUT -j KUBE-FIREWALL
    -A INPUT -j CRIUX
    -A INPUT -p tcp -m mark ! --mark 0xc114 -m tcp --dport 2049 -j ACCEPT
    -A INPUT -m mark ! --mark 0xc115 -m tcp -p tcp --dport 2050 -j DROP
    -A FORWARD -m mark --mark 0xc114 -j ACCEPT
    -A OUTPUT -j criu
    -A OUTPUT -m mark --mark 0xc114 -j ACCEPT
    -A OUTPUT -j ACCEPT
    -A OUTPUT -m mark ! --mark 0xc114 -j DROP
    -A OUTPUT -s {one} -d {one} -p tcp -m mark ! --mark 0xc114 -m tcp --dport 80 -j DROP
    -A OUTPUT -s {one} -d {net} -p tcp -m mark ! --mark 0xc114 -m tcp --sport 4 --dport 80 -j DROP
    -A OUTPUT ! -s {one} -d {one} -p tcp -m mark ! --mark 0xc114 -m tcp --sport 4 --dport 80 -j DROP
    -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
    -A CRIUX -m mark --mark 0xc114 -j ACCEPT
    -A CRIUX -s {one} -j DROP
    -A criu -m mark --mark 0xc114 -j ACCEPT
    -A criu -d {one} -j DROP
    COMMIT
"""  # noqa: E501
NFT = """
    table inet CRIU {
        chain input { type filter hook input priority 10; meta mark 0xc114 accept; }
    }
    table inet CRIUX-0815 {
        chain input { type filter hook input priority 10; meta mark 0xc114 accept; }
    }
    table inet CRIU-monitor {
        chain input { type filter hook input priority 10; counter; }
    }
    table inet CRIU-77 {
        chain accounting { type filter hook input priority 10; counter; }
    }
    table inet CRIU-78 {
        chain input { type filter hook input priority 10; tcp dport 22 counter accept; }
    }
    table inet CRIU-80 {
        chain forward { type filter hook forward priority 10; meta mark 0xc114 accept; }
    }
    table ip CRIU-79 {
        chain input { type filter hook input priority 10; meta mark 0xc114 accept; }
    }
    table inet fw {
        set allowed { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, 192.168.0.0/16 } }
        map ports { type inet_service : verdict; elements = { 22 : accept, 23 : drop } }
        counter seen { }
        chain input {
            type filter hook input priority 10; policy accept;
            meta mark 0xc114 counter accept
            ip saddr @allowed tcp dport vmap @ports
            ct state established,related accept
            udp dport 9 counter name seen drop
        }
    }
"""


def other_peoples_rules(path: str) -> None:
    for family, one, net in (("", "10.96.0.10/32", "10.0.0.0/12"), ("6", "fd00::a/128", "fd00::/60")):
        for backend in ("nft", "legacy"):
            text = textwrap.dedent(KUBE.format(one=one, net=net))
            inside(path, f"ip{family}tables-{backend}-restore", text=text)
    inside(path, "nft", "-f", "-", text=NFT)
    assert loopback_works(path)  # and the counters have counted


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_goes_and_other_peoples_rules_stay_to_the_byte(space, lock):
    other_peoples_rules(space)
    before = state(space)
    LOCKS[lock](space)
    locked = state(space)
    assert locked != before
    assert lockrules.flush(space, dry_run=True).removed
    assert state(space) == locked
    flushed = lockrules.flush(space)
    assert flushed.removed
    assert flushed.kept == []
    assert state(space) == before
    assert lockrules.flush(space).removed == []


@pytest.mark.parametrize("lock", SHUT)
def test_loopback_is_lost_to_a_lock_and_comes_back(space, lock):
    LOCKS[lock](space)
    assert not loopback_works(space)
    lockrules.flush(space)
    assert loopback_works(space)


def test_nothing_of_other_peoples_is_taken_for_a_lock(space):
    other_peoples_rules(space)
    before = state(space)
    flushed = lockrules.flush(space)
    assert (flushed.removed, flushed.kept) == ([], [])
    assert state(space) == before


def test_the_locks_of_several_crashes_go_at_once(space):
    for run in range(3):
        nft_lock(space, str(uuid.uuid5(uuid.NAMESPACE_DNS, str(run))))
        iptables_lock(space, "nft")
        iptables_lock(space, "legacy")
    lockrules.flush(space)
    assert loopback_works(space)
    assert "CRIU" not in state(space)


@pytest.mark.parametrize("backend", ["nft", "legacy"])
@pytest.mark.parametrize(
    "content",
    [
        "-A CRIU -m mark --mark 0xc114 -j ACCEPT",
        "-A CRIU -m mark --mark 0xc115 -j ACCEPT\n-A CRIU -j DROP",
        "-A CRIU -m mark --mark 0xc114/0xffff -j ACCEPT\n-A CRIU -j DROP",
        "-A CRIU -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -p udp -j DROP",
        "-A CRIU -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -j DROP\n-A CRIU -j DROP",
        "-A CRIU -p tcp -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -j DROP",
        "-A CRIU -j RETURN",
        "",
    ],
)
def test_a_users_chain_that_is_called_criu_stays(space, backend, content):
    rules = f"*filter\n:CRIU - [0:0]\n-A INPUT -j CRIU\n-A OUTPUT -j CRIU\n{content}\nCOMMIT\n"
    inside(space, f"iptables-{backend}-restore", text=rules)
    before = state(space)
    assert lockrules.flush(space).removed == []
    assert state(space) == before


@pytest.mark.parametrize("backend", ["nft", "legacy"])
@pytest.mark.parametrize("use", ["-A FORWARD -j CRIU", "-A INPUT -p udp -j CRIU", "-A INPUT -g CRIU"])
def test_a_chain_that_somebody_else_uses_stays_without_crius_jumps(space, backend, use):
    iptables_lock(space, backend)
    inside(space, f"iptables-{backend}", *use.split())
    lockrules.flush(space)
    saved = inside(space, f"iptables-{backend}-save", "-t", "filter")
    assert [line for line in saved.splitlines() if line.startswith("-A") and "CRIU" in line] == [
        use,
        "-A CRIU -m mark --mark 0xc114 -j ACCEPT",
        "-A CRIU -j DROP",
    ]


def test_looking_makes_no_tables(space):
    before = state(space)
    lockrules.flush(space)
    names = "cat /proc/net/ip_tables_names /proc/net/ip6_tables_names"
    fresh = netns.create("unit", "fresh")
    try:
        lockrules.flush(fresh)
        assert inside(fresh, "sh", "-c", names) == ""
        assert inside(fresh, "nft", "list", "ruleset") == ""
    finally:
        netns.remove(fresh)
    assert state(space) == before


@pytest.mark.parametrize("lock", ["nftables", "iptables-legacy"])
def test_the_rules_of_an_operation_under_way_are_kept_until_the_last_has_left(space, lock):
    first, second = lockrules.Use(space), lockrules.Use(space)
    LOCKS[lock](space)
    before = state(space)
    flushed = lockrules.flush(space)
    assert flushed.removed == []
    assert all("under way" in phrase for phrase in flushed.kept)
    assert flushed.kept
    assert first.release().removed == []
    assert state(space) == before
    assert second.release().removed != []
    assert loopback_works(space)


def test_a_use_sweeps_what_an_earlier_one_left(space):
    nft_lock(space, RUN)
    with lockrules.Use(space) as use:
        assert use.found.removed == [f"nftables table inet CRIU-{RUN}"]
        nft_lock(space, "12")
    assert use.left.removed == ["nftables table inet CRIU-12"]
    assert use.release() is use.left


def test_the_lock_of_a_shim_that_was_killed_is_no_lock(space):
    code = f"""
import sys, time
sys.path.insert(0, {str(PROJECT)!r})
from shim import lockrules
use = lockrules.Use({space!r})
print("held", flush=True)
time.sleep(60)
"""
    shim = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        assert shim.stdout is not None
        assert shim.stdout.readline() == b"held\n"
        nft_lock(space, RUN)
        assert lockrules.flush(space).removed == []
    finally:
        shim.kill()
        shim.communicate()
    assert lockrules.flush(space).removed != []


def test_no_lock_file_is_left(space):
    inode = str(os.stat(space).st_ino)
    with lockrules.Use(space), lockrules.Use(space):
        assert inode in os.listdir(netns.LOCKS)
    lockrules.flush(space)
    assert inode not in os.listdir(netns.LOCKS)


def criu_in(tmp_path: Path, *arguments: str) -> subprocess.Popen:
    """A process that is called criu, as far as the kernel can tell."""
    program = tmp_path / "criu"
    shutil.copy("/bin/sh", program)
    process = subprocess.Popen([str(program), *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("lock", ["nftables", "iptables-legacy"])
@pytest.mark.parametrize("where", ["in the namespace", "parent of a task there"])
def test_the_rules_of_a_criu_that_somebody_else_started_are_kept(space, tmp_path, where, lock):
    LOCKS[lock](space)
    if where == "in the namespace":
        shutil.copy("/bin/sh", tmp_path / "criu")
        command = ["nsenter", f"--net={space}", str(tmp_path / "criu"), "-c", "echo ready; read x; true"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    else:
        process = criu_in(tmp_path, "-c", f"nsenter --net={space} sh -c 'echo ready; exec sleep 60' & read x; kill $!")
    try:
        flushed = lockrules.flush(space)
        assert flushed.removed == []
        assert str(process.pid) in flushed.kept[0]
    finally:
        process.communicate(b"\n", timeout=30)
    assert lockrules.flush(space).removed != []


def test_a_criu_elsewhere_is_no_reason_to_keep_rules(space, tmp_path):
    nft_lock(space, RUN)
    process = criu_in(tmp_path, "-c", "echo ready; read x; true")
    try:
        assert lockrules.flush(space).removed != []
    finally:
        process.communicate(b"\n", timeout=30)


def test_a_deletion_decided_on_old_rules_is_refused_as_a_whole(space):
    nft_lock(space, RUN)

    def work() -> None:
        with nftables.Nftables() as connection:
            generation = connection.generation()
            subprocess.run(["nft", "add", "table", "inet", "meanwhile"], check=True)
            deletion = nftables.Deletion(nftables.DELTABLE, nftables.INET, f"CRIU-{RUN}")
            with pytest.raises(nftables.Changed):
                connection.delete(generation, [deletion])
            assert f"CRIU-{RUN}" in [name for _, name in connection.tables()]
            connection.delete(connection.generation(), [deletion])
            assert [name for _, name in connection.tables()] == ["meanwhile"]

    netns.inside(space, work)


def test_many_chains_and_rules_are_read_whole(space):
    commands = ["add table ip filter"]
    for number in range(700):
        commands.append(f"add chain ip filter c{number}")
        commands += [f"add rule ip filter c{number} tcp dport {port} counter accept" for port in (1, 2, 3)]
    inside(space, "nft", "-f", "-", text="\n".join(commands))
    with_chains = netns.inside(space, lambda: _read(nftables.IP, "filter"))
    assert len(with_chains[0]) == 700
    assert len(with_chains[1]) == 2100
    assert {(rule.verdict, rule.mark) for rule in with_chains[1]} == {(nftables.ACCEPT, None)}
    assert all("payload 2 2 2" in rule.matches for rule in with_chains[1])


def _read(family: int, table: str) -> tuple[dict[str, bool], list[nftables.Rule]]:
    with nftables.Nftables() as connection:
        return connection.chains(family, table), connection.rules(family, table)


def test_without_the_legacy_tools_it_says_that_legacy_rules_may_be_there(space, monkeypatch):
    iptables_lock(space, "legacy")
    monkeypatch.setenv("PATH", "/nonexistent")
    flushed = lockrules.flush(space)
    assert flushed.removed == []
    assert any("iptables-legacy is not installed" in phrase for phrase in flushed.kept)


def test_a_namespace_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(ShimError, match="/run/netns/absent"):
        lockrules.flush("/run/netns/absent")


def test_a_path_that_is_no_namespace_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ShimError, match=r"/file is no network namespace$"):
        lockrules.flush(str(tmp_path / "file"))
    with pytest.raises(ShimError, match=r"^/proc/self/ns/mnt is no network namespace$"):
        lockrules.flush("/proc/self/ns/mnt")


def test_every_namespace_with_a_name_or_a_process_is_known(space):
    found = lockrules.namespaces()
    assert found[os.stat(space).st_ino] == space
    assert os.stat("/proc/self/ns/net").st_ino in found


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    lockrules.add_parser(parser.add_subparsers())
    args = parser.parse_args(["flush-locks", *arguments])
    return args.run(args)


def test_the_command_says_what_it_removed_and_a_dry_run_changes_nothing(space, capsys):
    nft_lock(space, RUN)
    assert command("--netns", space, "--dry-run") == 0
    assert capsys.readouterr().out == f"{space}: would remove nftables table inet CRIU-{RUN}\n"
    assert command("--netns", space) == 0
    assert capsys.readouterr().out == f"{space}: removed nftables table inet CRIU-{RUN}\n"
    assert command("--netns", space) == 0
    assert capsys.readouterr().out == "No lock rule of CRIU's was left behind.\n"


def test_the_command_finds_every_namespace(space, capsys):
    nft_lock(space, RUN)
    assert command("--all", "--dry-run") == 0
    assert f"{space}: would remove nftables table inet CRIU-{RUN}\n" in capsys.readouterr().out


def test_a_namespace_that_went_after_it_was_listed_is_no_failure(space, monkeypatch, capsys):
    nft_lock(space, RUN)
    short = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    listed = {0: f"/proc/{short.pid}/ns/net", **lockrules.namespaces()}
    short.communicate()
    monkeypatch.setattr(lockrules, "namespaces", lambda: listed)
    assert command("--all", "--dry-run") == 0
    said = capsys.readouterr()
    assert (f"{space}: would remove" in said.out, said.err) == (True, "")


def test_the_command_fails_for_a_namespace_that_is_not_there(capsys):
    assert command("--netns", "/run/netns/absent") == 1
    assert capsys.readouterr().err == (
        "fermata: there is no network namespace /run/netns/absent: `ip netns` lists those with a name, and a process "
        "has one at /proc/PID/ns/net\n"
    )
