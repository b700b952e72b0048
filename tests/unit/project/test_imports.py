"""Who may import whom: layerwriter and criuconf stand on their own, and the shim starts without costly modules."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from node.stack import PROJECT

# Each package, and the others of ours that it may import (`fermata doctor` looks at the differ).
MAY = {
    "layerwriter": set(),
    "criuconf": set(),
    "shim": {"layerwriter", "criuconf", "differ"},
    "differ": {"layerwriter", "shim"},
}
# Measured at a shim's start: 5 to 45 ms each, with what they import, for every container.
COSTLY = (
    *("typing", "dataclasses", "subprocess", "socket", "argparse", "tempfile", "shutil", "asyncio", "tomllib"),
    *("json", "re", "enum", "functools", "collections", "threading", "ctypes", "sysconfig"),
)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", MAY)
def test_a_package_imports_only_what_it_may(package):
    files = sorted((PROJECT / package).rglob("*.py"))
    assert files
    for path in files:
        others = set(imported(path)) & (set(MAY) | {"node", "tests"}) - {package}
        assert others <= MAY[package], f"{path.relative_to(PROJECT)} imports {sorted(others - MAY[package])}"


@pytest.mark.parametrize("package", MAY)
def test_a_package_needs_no_other_distribution_at_run_time(package):
    optional = {"grpc", "zstandard", "compression", "tomli", "tomllib", "typing_extensions"}
    for path in sorted((PROJECT / package).rglob("*.py")):
        foreign = {name for name in imported(path) if name not in sys.stdlib_module_names and name not in MAY}
        assert foreign <= optional | {"__future__"}, f"{path.relative_to(PROJECT)} imports {sorted(foreign - optional)}"


@pytest.mark.parametrize("package", MAY)
def test_every_module_can_be_read_by_the_oldest_python(package):
    for path in sorted((PROJECT / package).rglob("*.py")):
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def test_the_shim_starts_without_what_is_costly():
    program = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); import shim.bootstrap, shim.snapshot, shim.relay\n"
    program += "import _ctypes, _json; from shim import bundle, cleanup, config, fastjson, libc, netns, state\n"
    program += "fastjson.loads(fastjson.dumps({'a': [1, 'b']}).encode()); libc.call('sched_yield')\n"
    program += f"print(*[name for name in {COSTLY!r} if name in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.split() == []
