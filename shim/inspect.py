"""`fermata inspect`, `ls` and `rm`: what is in a snapshot, as a person asks about it."""

from __future__ import annotations

import os
import re
import sys
import time

from shim import images
from shim import manifest as manifests
from shim.errors import FAILED_PRECONDITION, ShimError
from shim.host import size
from shim.restore import KEPT
from shim.state import LOGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from shim.manifest import Manifest

_STEPS_BEFORE_DUMP = ("guest_prepare", "guest_write", "guest_release", "gpu_driver", "gpu_lock", "gpu_out")
_SHOWN_FILES = 12  # of a process, without --files


def add_parser(subparsers: Any) -> None:
    """Add the commands `inspect`, `ls` and `rm` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="show what is in a snapshot",
        description="Show what is in a snapshot: from where and when, its size by part, processes, open files, "
        "sockets, GPU state, how long each step took, and the restores from it that this node has logs of.",
    )
    parser.add_argument("directory", metavar="DIR", help="the snapshot")
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    parser.add_argument("--files", action="store_true", help="every open file of every process")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a timeline of the take and of each restore")
    parser.set_defaults(run=inspect)

    parser = subparsers.add_parser(
        "ls",
        help="list the snapshots in a directory",
        description="List the snapshots in a directory, the newest last.",
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the working directory")
    parser.add_argument("--json", action="store_true", help="a JSON array on stdout")
    parser.set_defaults(run=ls)

    parser = subparsers.add_parser(
        "rm",
        help="remove snapshots",
        description="Remove snapshot directories, and the weights that no other snapshot needs. Anything else is "
        "refused, and then nothing is removed.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", help="a snapshot")
    parser.add_argument(
        "--unfinished", action="store_true", help="also a directory of CRIU's images whose take did not finish"
    )
    parser.set_defaults(run=rm)


# inspect ----------------------------------------------------------------------------------------------------------


def inspect(args: argparse.Namespace) -> int:
    """Carry out `inspect`."""
    directory = os.path.abspath(args.directory)
    manifest = manifests.read(directory)
    found = describe(directory, manifest)
    if args.plot:
        with open(args.plot, "w", encoding="utf-8") as file:
            file.write(plot(manifest, found["restores"]))
    if args.json:
        import json

        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_page(found, all_files=args.files)))
    return 0


def describe(directory: str, manifest: Manifest, *, logs: str = LOGS) -> dict[str, Any]:
    """All that `inspect` shows, as JSON: fermata.json without the specification, and what CRIU's images hold."""
    data = manifest.data
    return {
        "directory": directory,
        **{key: value for key, value in data.items() if key not in ("spec", "files")},
        "sizes": sizes(directory),
        "processes": [
            {
                "pid": process.pid,
                "parent": process.parent,
                "name": process.name,
                "threads": process.threads,
                "memory": process.memory,
                "files": [{"fd": file.fd, "kind": file.kind, "what": file.text} for file in process.files],
            }
            for process in images.processes(directory)
        ],
        "restores": restores(directory, str(data.get("taken")), logs=logs),
    }


def sizes(directory: str) -> dict[str, int]:
    """Bytes by part: memory (pages), layer, tmpfs, other files of CRIU's and ours, and total."""
    parts = {"memory": 0, "layer": 0, "tmpfs": 0, "other": 0}
    for entry in os.scandir(directory):
        name, bytes_ = entry.name, entry.stat(follow_symlinks=False).st_size
        if name.startswith("pages-"):
            parts["memory"] += bytes_
        elif name.startswith("layer.tar"):
            parts["layer"] += bytes_
        elif name.startswith("tmpfs-"):
            parts["tmpfs"] += bytes_
        else:
            parts["other"] += bytes_
    return {**parts, "total": sum(parts.values())}


def restores(directory: str, taken: str, *, logs: str = LOGS) -> list[dict[str, Any]]:
    """The restores from this snapshot that this node still has logs of, the oldest first.

    A container keeps the logs of its newest ten operations. `taken` tells snapshots apart that were in one directory.
    """
    import glob
    import json

    found = []
    for path in glob.glob(f"{glob.escape(logs)}/*/*/*-restore/{KEPT}"):
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
        except (OSError, ValueError):
            continue  # written at this moment, or of another program
        if isinstance(record, dict) and record.get("taken") == taken and record.get("snapshot") == directory:
            found.append({**record, "logs": os.path.dirname(path)})
    return sorted(found, key=lambda record: str(record.get("began")))


def _page(found: dict[str, Any], *, all_files: bool) -> list[str]:
    container, node = found.get("container") or {}, found.get("node") or {}
    requires = found.get("requires") or {}
    parts = found["sizes"]
    lines = [
        f"snapshot   {found['directory']}",
        f"container  {container.get('id')} in {container.get('namespace')}, "
        + ("left running" if container.get("left_running") else "ended with the take"),
        f"image      {container.get('image') or '(not recorded)'} {container.get('image_digest') or ''}".rstrip(),
        f"taken      {found.get('taken')} on {node.get('name') or '?'}: {requires.get('architecture')}, "
        f"kernel {requires.get('kernel')}, CRIU {requires.get('criu')}, runc {requires.get('runc') or '?'}, "
        f"containerd {node.get('containerd') or '?'}, cgroup v{requires.get('cgroup')}",
        f"size       {size(parts['total'])}: "
        + ", ".join(f"{name} {size(parts[name])}" for name in ("memory", "layer", "tmpfs", "other")),
        f"layer      {_layer(found.get('layer'))}",
        f"GPU        {_gpu(found.get('gpu'))}",
        *([f"weights    {weights_of(found['guest'])}"] if found.get("guest") else []),
        f"took       {_steps(found.get('steps') or {})}"
        + (f"; the processes stood still for {found['frozen']:.3f} s" if found.get("frozen") is not None else ""),
        *(
            f"restored   {it.get('began')} into {it.get('container')}: {_steps(it.get('steps') or {})}"
            for it in found["restores"]
        ),
        "",
        *_tree(found["processes"], all_files=all_files),
    ]
    return lines


def _layer(layer: dict[str, Any] | None) -> str:
    if not layer:
        return "none: the writable layer is not in this snapshot"
    made = f", by a full comparison: {layer.get('reason')}" if layer.get("made_by") == "full-diff" else ""
    return f"{layer.get('entries')} entries, {layer.get('digest')}{made}"


def _gpu(gpu: dict[str, Any] | None) -> str:
    if not gpu or not gpu.get("processes"):
        return "none"
    models = ", ".join(f"{entry.get('model')} {entry.get('uuid')}" for entry in gpu.get("gpus") or [])
    held = ", ".join(f"process {entry.get('pid')}: {size(entry.get('bytes') or 0)}" for entry in gpu["processes"])
    return f"{models} (driver {gpu.get('driver')}); {held}"


def weights_of(guest: dict[str, Any]) -> str:
    """What became of a container's weights, for a person."""
    if guest.get("outcome") != "out":
        return f"inside: {guest.get('reason')}"
    packs = [pack for process in guest.get("processes") or [] for pack in process.get("packs") or []]
    listed = "".join(f"; {pack.get('name')} {size(pack.get('bytes') or 0)} {pack.get('digest')}" for pack in packs)
    return f"{size(sum(pack.get('bytes') or 0 for pack in packs))} kept out{listed}"


def _steps(steps: dict[str, Any]) -> str:
    return ", ".join(f"{name} {took:.3f} s" for name, took in steps.items() if isinstance(took, (int, float)))


def _tree(processes: list[dict[str, Any]], *, all_files: bool) -> list[str]:
    children: dict[int, list[dict[str, Any]]] = {}
    pids = {process["pid"] for process in processes}
    for process in processes:
        children.setdefault(process["parent"] if process["parent"] in pids else 0, []).append(process)
    lines: list[str] = []

    def show(process: dict[str, Any], depth: int) -> None:
        pad = "  " * depth
        threads = f", {process['threads']} threads" if process["threads"] > 1 else ""
        lines.append(f"{pad}{process['pid']} {process['name']}  {size(process['memory'])}{threads}")
        files = process["files"]
        shown = files if all_files else files[:_SHOWN_FILES]
        lines.extend(f"{pad}    {file['fd']:>3} {file['what']}" for file in shown)
        if len(files) > len(shown):
            lines.append(f"{pad}        and {len(files) - len(shown)} more (--files)")
        for child in children.get(process["pid"], []):
            show(child, depth + 1)

    for process in children.get(0, []):
        show(process, 0)
    return lines


# plot -------------------------------------------------------------------------------------------------------------

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#8c8c8c")
_LEFT, _WIDTH, _ROW = 190, 720, 34


def plot(manifest: Manifest, found: list[dict[str, Any]]) -> str:
    """An SVG with one bar for the take and one for each restore, its steps one after the other, all on one scale."""
    container = manifest.data.get("container") or {}
    rows = [(f"take of {container.get('id')}", in_order(manifest.steps))]
    for record in found:
        steps = [(name, took) for name, took in (record.get("steps") or {}).items() if isinstance(took, (int, float))]
        rows.append((f"restore of {record.get('container')}", steps))
    names = list(dict.fromkeys(name for _, steps in rows for name, _ in steps))
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    longest = max(sum(took for _, took in steps) for _, steps in rows) or 1.0
    out = []
    for at, (title, steps) in enumerate(rows):
        top, left = 20 + at * _ROW, float(_LEFT)
        out.append(f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{_escape(title)}</text>')
        for name, took in steps:
            width = took / longest * _WIDTH
            out.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="22" fill="{colours[name]}">'
                f"<title>{_escape(name)}: {took:.3f} s</title></rect>"
            )
            left += width
        out.append(f'<text x="{left + 6:.1f}" y="{top + 16}">{sum(took for _, took in steps):.3f} s</text>')
    bottom = 20 + len(rows) * _ROW + 10
    for at, name in enumerate(names):
        left = _LEFT + at % 5 * 150
        top = bottom + at // 5 * 20
        out.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colours[name]}"/>')
        out.append(f'<text x="{left + 18}" y="{top + 11}">{_escape(name)}</text>')
    height = bottom + (len(names) + 4) // 5 * 20 + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="13">\n' + "\n".join(out) + "\n</svg>\n"
    )


def in_order(steps: dict[str, float]) -> list[tuple[str, float]]:
    """A take's steps in the order in which they happen, and what is left of its total."""
    known = [name for name in steps if name != "total"]
    before = [name for name in known if name in _STEPS_BEFORE_DUMP]
    middle = [name for name in ("dump", "layer") if name in known]
    rest = [name for name in known if name not in (*before, *middle)]
    ordered = [(name, steps[name]) for name in (*before, *middle, *rest)]
    other = steps.get("total", 0.0) - sum(took for _, took in ordered)
    return [*ordered, ("other", other)] if other > 0 else ordered


def _escape(text: str) -> str:
    return re.sub(r"[<>&]", lambda found: {"<": "&lt;", ">": "&gt;", "&": "&amp;"}[found.group()], text)


# ls and rm --------------------------------------------------------------------------------------------------------


def ls(args: argparse.Namespace) -> int:
    """Carry out `ls`."""
    found = snapshots(args.directory)
    if args.json:
        import json

        print(json.dumps(found))
        return 0
    for snapshot in found:
        container = snapshot["container"]
        what = f"{container.get('namespace')}/{container.get('id')}" if container else snapshot["problem"]
        print(f"{snapshot['name']:<24} {snapshot['taken'] or '-':<21} {size(snapshot['bytes']):>10}  {what}")
    return 0


def snapshots(parent: str) -> list[dict[str, Any]]:
    """The snapshots among the sub-directories of `parent`, finished or not, the newest last. Raises ShimError."""
    try:
        entries = [entry for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise ShimError(f"cannot list {parent}: {error.strerror}", FAILED_PRECONDITION) from error
    found = []
    for entry in entries:
        if not _looks_like_a_snapshot(entry.path):
            continue
        listing: dict[str, Any] = {"name": entry.name, "bytes": sizes(entry.path)["total"], "problem": None}
        try:
            data = manifests.read(entry.path).data
            listing |= {"taken": data.get("taken"), "container": data.get("container") or {}}
        except ShimError as error:
            listing |= {"taken": None, "container": None, "problem": str(error)}
        found.append(listing)
    return sorted(found, key=lambda listing: (listing["taken"] or "", listing["name"]))


def _looks_like_a_snapshot(path: str) -> bool:
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return manifests.NAME in names or any(
        name.startswith(("core-", "pages-")) and name.endswith(".img") for name in names
    )


def rm(args: argparse.Namespace) -> int:
    """Carry out `rm`."""
    for directory in args.directories:
        refuse_to_remove(directory, unfinished=args.unfinished)
    for directory in args.directories:
        began = time.monotonic()
        record, realpath = _weights(directory), os.path.realpath(directory)
        freed = remove(directory)
        text = ""
        if record:
            from shim import config, weights

            released, busy = weights.forget(record, config.load(), realpath)
            text = f", {size(released)} of weights with it" if released else ""
            text += f"; {busy} of its weights are in use and stay: `fermata prune`" if busy else ""
        print(f"{directory}: removed, {size(freed)} in {time.monotonic() - began:.2f} s{text}")
    return 0


def _weights(directory: str) -> dict[str, Any] | None:
    """The snapshot's record of weights; None when there is none, or nobody can read it."""
    try:
        return manifests.read(directory).data.get("guest")
    except ShimError:
        return None


def refuse_to_remove(directory: str, *, unfinished: bool) -> None:
    """Raise ShimError unless the directory is a snapshot and nothing else.

    A snapshot is flat: what has sub-directories or links in it is something else, whatever its files are named.
    """
    try:
        manifests.read(directory)
    except ShimError as error:
        # One of another version is a snapshot too.
        if not os.path.isfile(f"{directory}/{manifests.NAME}") and not (
            unfinished and _looks_like_a_snapshot(directory)
        ):
            fix = (
                "the take of what is in it did not finish: --unfinished removes that too"
                if _looks_like_a_snapshot(directory)
                else str(error).removesuffix("; take it again")
            )
            raise ShimError(f"{directory} is not removed: {fix}", error.code) from error
    if os.path.islink(directory.rstrip("/")):
        raise ShimError(f"{directory} is not removed: it is a link; name the directory itself", FAILED_PRECONDITION)
    for entry in os.scandir(directory):
        if not entry.is_file(follow_symlinks=False):
            raise ShimError(
                f"{directory} is not removed: {entry.name} in it is no regular file, so it is more than a snapshot",
                FAILED_PRECONDITION,
            )


def remove(directory: str) -> int:
    """Remove a snapshot's directory; the bytes that it had. fermata.json goes first: what is left is no snapshot."""
    freed = sizes(directory)["total"]
    names = sorted(os.listdir(directory), key=lambda name: name != manifests.NAME)
    for name in names:
        os.unlink(f"{directory}/{name}")
    try:
        os.rmdir(directory)
    except OSError as error:
        print(f"fermata: {directory} is empty and stays: {error.strerror}", file=sys.stderr)
    return freed
