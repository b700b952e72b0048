"""The steps of a take and of a restore, listed from the code itself: a fault can be had at each of them.

A step is a statement of a function in `STEPS` that calls something. The installed fermata is replaced by one that asks
before each of them whether something is to happen there, and that writes down which it has come to. So a step that is
added to one of these functions is met by the tests without a change to them.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from node.node import PREFIX, Node

SOURCE = Path(__file__).resolve().parents[2] / "shim"

# Module: classes and functions; None: all of the module's.
Wanted = dict[str, "tuple[str, ...] | None"]

STEPS: Wanted = {
    "take": None,
    "restore": ("check", "apply_layer", "write_criu_config", "Timeline.step", "Timeline.keep"),
    "snapshot": (
        "SnapshotShim.create",
        "SnapshotShim._prepare_bundle",
        "SnapshotShim._prepare_restore",
        "SnapshotShim.start",
        "SnapshotShim._restore",
        "SnapshotShim.checkpoint",
    ),
    "network": ("Operation", "Restore"),
    "manifest": ("Manifest.stage", "publish", "sync_files"),
    "criu": ("installed", "write_config"),
    "stdio": ("Substitute.__init__", "Held"),
}
# What a container with weights that stay out of its snapshots has besides.
OF_WEIGHTS: Wanted = {
    "guest": ("Taking", "Returning", "Restoring.bring_back", "Restoring.close", "restoring", "connect_all", "_connect"),
    "weights": (
        *("Mount", "Draft", "Held", "Files", "hold"),
        *("Store.hold", "Store.settle", "Store.sync", "Store.refer", "Store.drop", "Store.has", "Store.make_room"),
    ),
}
FOLDER = "/srv/points"

# What cannot fail for want of space, descriptors or rights, since it stays within the process or is a lock's release.
_WITHIN = re.compile(
    r"time\.(monotonic|time)\(|\.(decode|get|acquire|release|update|settle|clear|resume|step|startswith)\("
    r"|allocate_lock|[._]log\(|_tell\(|Request\(|AnyMessage\(|Call\(|Container\(|Take\(|Manifest\(|State\(|Timeline\("
    r"|isinstance\(|round\(|bool\(|fromkeys\(|\.items\(|json\.loads\(|_gpu\(|_options\(|_source\(|runc_directory\("
    r"|has_own\(|_give_weights\(|netns\.(choose|enter)\(|\.annotate\(|specedits\.apply\(|take\.run\(|self\._(answer|restore)\("
    r"|_give_weights|^finally "
)
_CLEANING = (".__exit__", "._close", "._discard", "._undo_create")
MODULE = f"""
import os, time

if os.path.exists("{FOLDER}/clock"):
    now, now_ns = time.time, time.time_ns

    def stepped():
        return 86400 * (os.urandom(1)[0] % 3 - 1)

    time.time = lambda: now() + stepped()
    time.time_ns = lambda: now_ns() + stepped() * 10**9

def point(name):
    try:
        seen = os.open("{FOLDER}/seen", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    os.write(seen, name.encode() + b"\\n")
    os.close(seen)
    try:
        with open("{FOLDER}/at") as file:
            where, what = file.read().split("\\n")
        if where != name:
            return
        os.rename("{FOLDER}/at", "{FOLDER}/reached")
    except OSError:
        return
    if what == "die":
        os.kill(os.getpid(), 9)
    elif what == "wait":
        while os.path.exists("{FOLDER}/reached"):
            time.sleep(0.02)
    else:
        raise OSError(28, "No space left on device, says the test")
"""


class Points:
    """A node whose fermata stops for the test. Call `close` to have the ordinary one again."""

    def __init__(self, node: Node, wanted: Wanted = STEPS) -> None:
        self.node = node
        self.wanted = wanted
        self.folder = node.path(FOLDER)
        self.library = node.path(f"{PREFIX}/lib/fermata/shim")
        self.renew()

    def renew(self) -> None:
        """Put the points in, unless they are there: after a test that failed the ordinary fermata is installed."""
        self.folder.mkdir(exist_ok=True)
        self._forget()
        if not (self.library / "points.py").exists():
            for module in self.wanted:
                (self.library / f"{module}.py").write_text(instrumented(module, self.wanted[module])[0])
            (self.library / "points.py").write_text(MODULE)

    def _forget(self) -> None:
        for name in ("at", "reached"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "seen").write_text("")

    def seen(self) -> list[str]:
        """The steps that were come to since the last call, in the order of their first time."""
        found = list(dict.fromkeys((self.folder / "seen").read_text().splitlines()))
        self._forget()
        return found

    def plan(self, step: str, what: str) -> None:
        """Have it `fail` (no space is left), `die`, or `wait` until `go_on` at the step, the first time."""
        self._forget()
        (self.folder / "at.new").write_text(f"{step}\n{what}")
        (self.folder / "at.new").rename(self.folder / "at")

    @property
    def reached(self) -> bool:
        """Whether it has come to the step."""
        return (self.folder / "reached").exists()

    def go_on(self) -> None:
        """Let who waits go on, and who would have, not wait."""
        self._forget()

    @contextlib.contextmanager
    def unsteady_clock(self) -> Iterator[None]:
        """For shims that are started in it, the time of day goes to and fro by a day when it is asked for."""
        (self.folder / "clock").touch()
        try:
            yield
        finally:
            (self.folder / "clock").unlink()

    def close(self) -> None:
        """Install the ordinary fermata."""
        self._forget()
        (self.library / "points.py").unlink(missing_ok=True)
        self.node.install()
        self.node.exec(["rm", "-r", FOLDER])


def touches(step: str) -> bool:
    """Whether a step can fail, other than by the death of the process: it reads or writes, or asks somebody."""
    function, _, text = step.partition(": ")
    return not _WITHIN.search(text) and not function.split(" ")[0].endswith(_CLEANING)


def steps(of: Wanted = STEPS) -> list[str]:
    """All steps."""
    return [step for module, wanted in of.items() for step in instrumented(module, wanted)[1]]


def named(function: str, words: str, of: Wanted = STEPS) -> str:
    """The step of a function that has these words."""
    (found,) = (step for step in steps(of) if step.startswith(f"{function} ") and words in step)
    return found


def instrumented(module: str, wanted: tuple[str, ...] | None) -> tuple[str, list[str]]:
    """The module's text with a point before each step, and the steps' names: `take.Take.run 3: held = ...`."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    names: list[str] = []
    for name, function in _functions(tree.body, ""):
        if wanted is None or any(name == want or name.startswith(f"{want}.") for want in wanted):
            found: list[str] = []
            function.body = _with_points(function.body, f"{module}.{name}", found)
            names += found
    tree.body.insert(1 + _end_of_future(tree), ast.parse("from shim.points import point as _point").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)), names


def _end_of_future(tree: ast.Module) -> int:
    return max(
        at for at, found in enumerate(tree.body) if isinstance(found, ast.ImportFrom) and found.module == "__future__"
    )


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for found in body:
        if isinstance(found, ast.ClassDef):
            yield from _functions(found.body, f"{prefix}{found.name}.")
        elif isinstance(found, ast.FunctionDef):
            yield f"{prefix}{found.name}", found


def _with_points(body: list[ast.stmt], function: str, names: list[str], mark: str = "") -> list[ast.stmt]:
    new: list[ast.stmt] = []
    for statement in body:
        if _does(statement):
            text = ast.unparse(statement).splitlines()[0][:60]
            names.append(f"{function} {len(names) + 1}: {mark}{text}")
            call = ast.Call(ast.Name("_point", ast.Load()), [ast.Constant(names[-1])], [])
            new.append(ast.Expr(call))
        for part in ("body", "orelse", "finalbody"):
            if inner := getattr(statement, part, None):
                within = "finally " if part == "finalbody" else mark
                setattr(statement, part, _with_points(inner, function, names, within))
        new.append(statement)
    return new


def _does(statement: ast.stmt) -> bool:
    """Whether the statement itself calls something; what is inside of a compound one counts for itself."""
    if isinstance(statement, (ast.Raise, ast.FunctionDef, ast.Try)):
        return False
    own: list[ast.AST]
    if isinstance(statement, (ast.If, ast.While)):
        own = [statement.test]
    elif isinstance(statement, ast.For):
        own = [statement.iter]
    elif isinstance(statement, ast.With):
        own = list(statement.items)
    else:
        own = [statement]
    return any(isinstance(inner, ast.Call) for part in own for inner in ast.walk(part))
