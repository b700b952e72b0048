"""The node's command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from node import image, stack
from node.errors import NodeError
from node.node import SOCKET, Node


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    command: list[str] = []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, command = arguments[:cut], arguments[cut + 1 :]
    options = _parser().parse_args(arguments)
    options.command = command or getattr(options, "rest", [])
    try:
        status: int = options.action(options)
        return status
    except NodeError as error:
        print(f"node: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 packaging/node",
        description="A private containerd with runc, CRIU and fermata, with its own root, state and socket.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, action: object, text: str, *, named: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if named:
            sub.add_argument("node", metavar="NODE")
            sub.add_argument("--dir", type=Path, help="the node's directory (default: in the cache)")
        sub.set_defaults(action=action)
        return sub

    up = add("up", _up, "bring a node up, with fermata installed and the test image imported")
    up.add_argument("--stack", choices=stack.STACKS, default="auto", help="whose containerd, runc and CRIU (auto)")
    up.add_argument("--cri", action="store_true", help="with containerd's CRI plugins")
    up.add_argument("--differ", action="store_true", help="with fermata-differ for containerd's diffs")
    up.add_argument("--no-install", action="store_true", help="without fermata")
    up.add_argument("--no-image", action="store_true", help="without the test image")
    down = add("down", _down, "take a node down, and remove all that it left", named=False)
    down.add_argument("node", metavar="NODE", nargs="?")
    down.add_argument("--dir", type=Path, help="the node's directory (default: in the cache)")
    down.add_argument("--all", action="store_true", help="every node in the cache")
    add("status", _status, "the nodes there are", named=False)
    for name in ("run", "exec"):
        add(name, _run, "run a command in a node: run NODE -- COMMAND…").add_argument("rest", nargs="*")
    add("ctr", _ctr, "ctr in a node: ctr NODE -- ARGUMENTS…").add_argument("rest", nargs="*")
    add("install", _install, "install fermata from this working tree into a running node")
    add("restart-containerd", _restart, "end containerd and start it again").add_argument(
        "--kill", action="store_true", help="end it with SIGKILL"
    )
    make = add("image", _image, "build an OCI image without a registry and import it")
    make.add_argument("--from", dest="source", type=Path, metavar="PATH", help="a directory or an uncompressed tar")
    make.add_argument("--entries", type=int, help="generate an image of so many files and directories")
    make.add_argument("--name", help=f"the image's name (default: {image.TEST_IMAGE})")
    make.add_argument("--namespace", default="default", help="containerd's namespace (default: default)")
    root = add("root", _root, "build a stack's root if need be, and print where it is", named=False)
    root.add_argument("stack", choices=list(stack.RECIPES))
    return parser


def _open(options: argparse.Namespace) -> Node:
    return Node.open(options.node, options.dir)


def _up(options: argparse.Namespace) -> int:
    node = Node.up(
        options.node,
        options.stack,
        directory=options.dir,
        cri=options.cri,
        install=not options.no_install,
        differ=options.differ,
        say=stack.Progress(),
    )
    if not options.no_image:
        try:
            node.import_image()
        except BaseException:
            node.down()
            raise
    print(f"{node.name} is up: stack {node.stack}, containerd's log {node.log}")
    return 0


def _down(options: argparse.Namespace) -> int:
    if options.all:
        for node in Node.known():
            node.down()
            print(f"{node.name} is down")
        return 0
    if not options.node:
        raise NodeError("say which node, or --all")
    there = Node.take_down(options.node, options.dir)
    print(f"{options.node} is down" if there else f"there is no node {options.node}")
    return 0


def _status(options: argparse.Namespace) -> int:
    for node in Node.known():
        state = f"up, pid {node.pid}, containerd {node.containerd_pid() or 'down'}" if node.alive() else "left over"
        print(f"{node.name}\t{node.stack}\t{state}\t{node.directory}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if not options.command:
        raise NodeError("say what to run, after --")
    process = _open(options).popen(options.command, stdin=None, start_new_session=False)
    return _waited(process)


def _ctr(options: argparse.Namespace) -> int:
    command = ["ctr", "--address", SOCKET, *options.command]
    return _waited(_open(options).popen(command, stdin=None, start_new_session=False))


def _waited(process: subprocess.Popen[bytes]) -> int:
    status = process.wait()
    return status if status >= 0 else 128 - status


def _install(options: argparse.Namespace) -> int:
    _open(options).install()
    return 0


def _restart(options: argparse.Namespace) -> int:
    _open(options).restart_containerd(kill=options.kill)
    return 0


def _image(options: argparse.Namespace) -> int:
    node = _open(options)
    archive: Path | None = None
    if options.entries or options.source:
        name = options.name or ("fermata-synthetic:latest" if options.entries else image.TEST_IMAGE)
        archive = node.directory / "image.tar"
        if options.entries:
            image.synthetic(archive, name, options.entries)
        elif options.source.is_dir():
            image.from_directory(options.source, archive, name)
        else:
            image.from_tar(options.source, archive, name)
    try:
        print(node.import_image(archive, namespace=options.namespace))
    finally:
        if archive:
            archive.unlink(missing_ok=True)
    return 0


def _root(options: argparse.Namespace) -> int:
    print(stack.root(options.stack, stack.Progress()))
    return 0
