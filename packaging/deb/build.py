"""Builds fermata's .deb: `make deb`, or `python3 packaging/deb/build.py OUT_DIRECTORY`.

dpkg-deb is all that it takes. The package is for every architecture and every Python from 3.10 on: it holds sources,
and compiles them where it is installed. Manual pages and shell completion are made from the commands' own parsers.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from shim import __version__, cli  # noqa: E402

SYNOPSIS = "snapshots of running containers, restored into new ones"
CONTROL = f"""Package: fermata
Version: {__version__}
Architecture: all
Maintainer: The fermata developers <fermata@localhost>
Section: admin
Priority: optional
Depends: python3 (>= 3.10)
Recommends: containerd | containerd.io, runc | containerd.io, criu (>= 4.0), nftables | iptables, python3-grpcio,
 python3-tomli | python3 (>= 3.11), libisal2
Suggests: python3-zstandard
Description: {SYNOPSIS}
 A containerd runtime shim. It takes snapshots of running containers, files, network and GPU state included, and
 restores them into new containers, with the commands that ctr, nerdctl and the kubelet already have.
"""
PRERM = """#!/bin/sh
set -e
# Containers go on: what serves them is in memory.
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl --quiet disable --now fermata-differ.socket fermata-differ.service 2>/dev/null || :
fi
if [ "$1" = remove ] && grep -rqs /run/fermata-differ/differ.sock /etc/containerd; then
    echo "fermata: containerd's configuration still names fermata-differ, which is gone now: until its file is" \\
        "removed from /etc/containerd/conf.d and containerd restarted, no diff is made and images may not be" \\
        "unpacked" >&2
fi
if [ "$1" = upgrade ]; then
    # Containers go on being started meanwhile: from the library's one file, until there is that of the new version.
    touch /usr/lib/fermata/.changing
else
    find /usr/lib/fermata -name __pycache__ -prune -exec rm -rf {} +
fi
"""
POSTINST = """#!/bin/sh
set -e
# Python would write these itself the first time it runs as root; an operator's first container need not wait for it.
if [ "$1" = configure ] || [ "$1" = triggered ]; then
    find /usr/lib/fermata -name '*.pyc' -delete
    python3 -I /usr/lib/fermata/shim/library.py || find /usr/lib/fermata -name __pycache__ -prune -exec rm -rf {} +
fi
rm -f /usr/lib/fermata/.changing
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    # It holds the former version open, as shims do, but nothing depends on it: what it is asked meanwhile waits.
    [ "$1" != configure ] || [ -z "$2" ] || systemctl --quiet try-restart fermata-differ.service || :
fi
"""
POSTRM = """#!/bin/sh
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload || :
if [ "$1" = purge ]; then
    # What snapshots left beside them: logs, and versions of programs that were asked for. Snapshots themselves stay.
    rm -rf /var/log/fermata /run/fermata-metrics
    rm -f /run/fermata/metrics.lock
    rmdir /run/fermata/* /run/fermata 2>/dev/null || :
fi
"""
COPYRIGHT = """Copyright: the fermata developers
License: Apache-2.0
 On Debian and Ubuntu its text is in /usr/share/common-licenses/Apache-2.0.
"""
# Another Python means other compiled files.
TRIGGERS = "interest-noawait /usr/bin/python3\n"


def main(out: Path) -> Path:
    """Build into the directory `out`; the package's path."""
    out.mkdir(parents=True, exist_ok=True)
    package = out / f"fermata_{__version__}_all.deb"
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "root")
        _fill(root)
        _control(root)
        argv = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(package)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return package


def _fill(root: Path) -> None:
    # Called from within make, the outer one's flags would reach the inner.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    argv = ["make", "--silent", "--no-print-directory", "-C", str(PROJECT), "install", f"DESTDIR={root}", "PREFIX=/usr"]
    subprocess.run(argv, check=True, timeout=120, env=env)
    _write(root, "usr/lib/tmpfiles.d/fermata.conf", (PROJECT / "packaging/tmpfiles/fermata.conf").read_text())
    for source in sorted([*(PROJECT / "docs").glob("*.md"), *(PROJECT / "docs").glob("*.svg")]):
        _write(root, f"usr/share/doc/fermata/{source.name}", source.read_text())
    _write(root, "usr/share/doc/fermata/copyright", COPYRIGHT)
    _write(root, "usr/share/doc/fermata/changelog.gz", (PROJECT / "CHANGELOG.md").read_text())
    _write(root, "usr/share/doc/fermata/README.md", (PROJECT / "README.md").read_text())
    _write(root, "usr/share/bash-completion/completions/fermata", completion())
    for name, text in pages().items():
        _write(root, f"usr/share/man/man{name[-1]}/{name}.gz", text)


def _control(root: Path) -> None:
    _write(root, "DEBIAN/control", CONTROL)
    _write(root, "DEBIAN/triggers", TRIGGERS)
    for name, text in (("postinst", POSTINST), ("prerm", PRERM), ("postrm", POSTRM)):
        _write(root, f"DEBIAN/{name}", text).chmod(0o755)


def _write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    path.chmod(0o644)
    for folder in path.relative_to(root).parents:
        (root / folder).chmod(0o755)
    return path


# Made from the parsers ----------------------------------------------------------------------------------------------


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Each command of `fermata` with its parser."""
    found = {}
    for command in cli.COMMANDS:
        top = cli.parser(command)
        action = next(each for each in top._actions if isinstance(each, argparse._SubParsersAction))
        found[command] = action.choices[command]
    return found


def completion() -> str:
    """A completion for bash: the commands, and the options of each; a directory where nothing else is asked for."""
    lines = [
        "# bash completion for fermata",
        "_fermata() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}"',
        '    if [ "$COMP_CWORD" = 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{" ".join(cli.COMMANDS)} --help --version" -- "$word"))',
        "        return",
        "    fi",
        "    local options=",
        '    case "${COMP_WORDS[1]}" in',
    ]
    for command, parser in parsers().items():
        options = " ".join(option for action in parser._actions for option in action.option_strings)
        lines.append(f'        {command}) options="{options}" ;;')
    lines += [
        "    esac",
        '    case "$word" in',
        '        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;',
        '        *) COMPREPLY=($(compgen -d -- "$word")) ;;',
        "    esac",
        "}",
        "complete -o filenames -F _fermata fermata",
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """The manual pages by name and section, in man(7)."""
    top = cli.parser(None)
    page = [
        _title("fermata", 1, SYNOPSIS),
        ".SH SYNOPSIS",
        ".B fermata",
        "COMMAND [OPTION]... [ARGUMENT]...",
        ".SH DESCRIPTION",
    ]
    page += [_text(top.description or "")]
    page += [".SH COMMANDS"]
    for command, parser in parsers().items():
        page += [f".SS {command}", _text(_usage(parser)), ".PP", _text(parser.description or parser.format_help())]
        for action in parser._actions:
            if action.dest == "help" or action.help == argparse.SUPPRESS:
                continue
            name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            if action.option_strings and action.nargs != 0:
                name += f" {action.metavar or action.dest.upper()}"
            page += [".TP", f".B {_text(name)}", _text(_help(parser, action))]
    page += [".SH FILES", ".TP", ".I /etc/fermata/config.toml", "The node's settings; no file is needed."]
    page += [".TP", ".I /var/log/fermata", "CRIU's logs of the newest ten operations of each container."]
    shim = [
        _title("containerd-shim-fermata-v1", 8, "the runtime io.containerd.fermata.v1"),
        ".SH DESCRIPTION",
        "containerd starts it for every container of the runtime io.containerd.fermata.v1. It starts",
        ".B containerd-shim-runc-v2",
        "and passes on every call that is not about snapshots. A person runs",
        ".BR fermata (1).",
    ]
    return {"fermata.1": "\n".join(page) + "\n", "containerd-shim-fermata-v1.8": "\n".join(shim) + "\n"}


def _title(name: str, section: int, summary: str) -> str:
    return f'.TH {name.upper()} {section} "" "fermata {__version__}"\n.SH NAME\n{name} \\- {_text(summary)}'


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().removeprefix("usage: ").split())


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    words = {**vars(action), "prog": parser.prog}
    return (action.help or "") % words if "%" in (action.help or "") else (action.help or "")


def _text(text: str) -> str:
    """Text that troff takes as it is."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + escaped if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    if shutil.which("dpkg-deb") is None:
        sys.exit("dpkg-deb is not here: the package can be built on Debian and Ubuntu")
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else PROJECT / "dist")))
