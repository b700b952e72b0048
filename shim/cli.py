"""The operator's command, `fermata`.

Each command lives in the module of its noun, which has `add_parser(subparsers)`; its parser's default `run` carries the
command out and returns the exit status. A module is imported only when one of its commands is used, so that `fermata`
starts as fast as the command needs.

Exit status: 0 done, 1 it failed or found a problem (a sentence on stderr says which), 2 the command line makes no
sense, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

from shim import __version__
from shim.errors import ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

COMMANDS = {
    "checkpoint": ("shim.operation", "take a snapshot of a running container into a directory"),
    "restore": ("shim.operation", "make a new container from a snapshot directory and start it"),
    "check": ("shim.check", "say whether a snapshot can be restored here, and what it lacks"),
    "inspect": ("shim.inspect", "show what is in a snapshot"),
    "ls": ("shim.inspect", "list the snapshots in a directory"),
    "rm": ("shim.inspect", "remove snapshots"),
    "prune": ("shim.weights", "remove weights that no snapshot needs any more"),
    "doctor": ("shim.doctor", "say what this node needs to take and restore snapshots"),
    "metrics": ("shim.metrics", "print counts and times of takes and restores in Prometheus' text format"),
    "flush-locks": ("shim.lockrules", "remove the packet filter rules that a dead CRIU left in a network namespace"),
    "park": ("shim.parking", "move the GPU state of a container's processes to host memory"),
    "unpark": ("shim.parking", "move parked GPU state back to the GPU"),
}
"""Each command, the module that has it, and what it does."""


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one sentence, as every error of the command is said."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end with status 2."""
        self.exit(2, f"fermata: {message}: `{self.prog} --help` shows the syntax\n")


def parser(command: str | None) -> argparse.ArgumentParser:
    """The command line's parser; only the module of `command` is imported, the others are named.

    Raises ShimError when that module cannot be imported.
    """
    top = Parser(
        prog="fermata", description="Take snapshots of running containers, look at them, restore them into new ones."
    )
    top.add_argument("--version", action="version", version=f"fermata {__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    known = set()
    if command in COMMANDS:
        module = COMMANDS[command][0]
        try:
            importlib.import_module(module).add_parser(subparsers)
        except ImportError as error:
            raise ShimError(f"`fermata {command}` is not part of this installation: {error}") from error
        known = {name for name, (other, _) in COMMANDS.items() if other == module}
    for name, (_, summary) in COMMANDS.items():
        if name not in known:
            subparsers.add_parser(name, help=summary)
    return top


def main(words: Sequence[str]) -> int:
    """Run one command; the exit status."""
    command = next((word for word in words if not word.startswith("-")), None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names are bytes, and not every terminal can show them
    try:
        if command is not None and command not in COMMANDS:
            print(f"fermata: there is no command {command}; there are {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
        arguments = parser(command).parse_args(words)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except ShimError as error:
        print(f"fermata: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fermata: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough. Nothing may be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
