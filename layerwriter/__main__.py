"""The command: python3 -m layerwriter write|apply|full-diff|record|list|compare."""

from __future__ import annotations

import argparse
import json
import os
import sys

import layerwriter
from layerwriter.layer import Layer, shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="layerwriter", description="An overlay's upper directory as a layer file.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, writes: bool = False, limited: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if limited:
            sub.add_argument("--limit", type=int, default=layerwriter.DEFAULT_LIMIT, help="bytes of tar at most")
            sub.add_argument("--userxattr", action="store_true", help="the overlay is mounted with userxattr")
        if writes:
            sub.add_argument("--zstd", action="store_true", help="compress the layer with zstd")
        return sub

    sub = command("write", "write an upper directory to a layer file", writes=True, limited=True)
    sub.add_argument("upperdir")
    sub.add_argument("layer")
    sub = command(
        "full-diff", "write a layer by comparing a merged tree with the layers below", writes=True, limited=True
    )
    sub.add_argument("--lower", required=True, help="the lower directories, the topmost first, separated by colons")
    sub.add_argument("merged")
    sub.add_argument("layer")
    sub = command("apply", "make an upper directory what a layer file says", limited=True)
    sub.add_argument("--digest", help="sha256:... that the layer file must have")
    sub.add_argument("--replace", action="store_true", help="replace what the directory holds")
    sub.add_argument("layer")
    sub.add_argument("upperdir")
    sub = command("list", "list what a layer file holds")
    sub.add_argument("layer")
    sub = command("record", "print every entry of a tree, one JSON object a line")
    sub.add_argument("directory")
    sub = command("compare", "print how two trees differ; exit status 1 if they do")
    sub.add_argument("one")
    sub.add_argument("other")
    return parser


def _describe(layer: Layer) -> None:
    for field in ("path", "digest", "diff_id", "size", "entries", "made_by", "reason"):
        print(f"{field:8} {getattr(layer, field)}")
    for note in layer.notes:
        print(f"note     {note}")


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for a difference, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except layerwriter.LayerError as failure:
        print(f"layerwriter: {failure}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command in ("write", "full-diff"):
        compression = "zstd" if options.zstd else "none"
        prefix = "user." if options.userxattr else "trusted."
        if options.command == "write":
            layer = layerwriter.write(
                options.upperdir, options.layer, compression=compression, limit=options.limit, xattr_prefix=prefix
            )
        else:
            layer = layerwriter.full_diff(
                options.lower.split(":"),
                options.merged,
                options.layer,
                compression=compression,
                limit=options.limit,
                xattr_prefix=prefix,
            )
        _describe(layer)
    elif options.command == "apply":
        applied = layerwriter.apply(
            options.layer,
            options.upperdir,
            digest=options.digest,
            replace=options.replace,
            limit=options.limit,
            xattr_prefix="user." if options.userxattr else "trusted.",
        )
        print(f"{applied.path}: {applied.entries} entries")
    elif options.command == "list":
        for entry in layerwriter.read(options.layer):
            print(_line(entry))
    elif options.command == "record":
        for item in layerwriter.record(options.directory):
            print(json.dumps(item.as_dict()))
    else:
        differs = False
        for difference in layerwriter.compare(options.one, options.other):
            differs = True
            print(difference)
        return int(differs)
    return 0


_LETTERS = {
    b"0": "-",
    b"1": "h",
    b"2": "l",
    b"3": "c",
    b"4": "b",
    b"5": "d",
    b"6": "p",
    b"s": "s",
    b"w": "w",
    b"o": "o",
}


def _line(entry: layerwriter.reader.Entry) -> str:
    name = shown(entry.path)
    letter = _LETTERS[entry.kind]
    if letter == "w":
        return f"deleted {name}"
    if letter == "o":
        return f"opaque  {name}"
    seconds, fraction = divmod(abs(entry.mtime), 1_000_000_000)
    sign = "-" if entry.mtime < 0 else ""
    size = f"{entry.device[0]},{entry.device[1]}" if letter in "cb" else str(entry.size)
    line = f"{letter}{entry.mode:04o} {entry.uid}/{entry.gid} {size:>10} {sign}{seconds}.{fraction:09d} {name}"
    if entry.link:
        line += f" {'link to' if letter == 'h' else '->'} {shown(entry.link)}"
    for key, _ in entry.xattrs:
        line += f" [{shown(key)}]"
    return line


if __name__ == "__main__":
    sys.exit(main())
