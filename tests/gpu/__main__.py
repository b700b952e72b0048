"""`python3 tests/gpu [--results FOLDER] [CASE…]`: prove on this machine's GPU what fermata says of GPUs.

Needs root, an NVIDIA GPU with a driver from 570 on, and a python3 that has torch. Each case's result goes into one JSON
file together with the hardware and the versions; the exit status is 1 when a case failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent), str(HERE.parent.parent / "packaging")]

import containers  # noqa: E402
import moving  # noqa: E402
import serving  # noqa: E402
import weights  # noqa: E402
from machine import Machine  # noqa: E402

GROUPS: dict[str, Any] = {"moving": moving, "containers": containers, "serving": serving, "weights": weights}


def machine() -> dict[str, Any]:
    """Hardware and versions, as far as they can be told without effort."""
    found: dict[str, Any] = {"kernel": platform.release(), "python": platform.python_version()}
    for name, argv in (
        (
            "gpu",
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,persistence_mode", "--format=csv,noheader"],
        ),
        ("processor", ["sh", "-c", "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-; nproc"]),
        ("memory", ["sh", "-c", "grep MemTotal /proc/meminfo"]),
        ("os", ["sh", "-c", ". /etc/os-release; echo $PRETTY_NAME"]),
        ("cgroup", ["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]),
        ("huge_pages", ["cat", "/sys/kernel/mm/transparent_hugepage/enabled"]),
        ("torch", [sys.executable, "-c", "import torch; print(torch.__version__)"]),
    ):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            found[name] = " ".join(done.stdout.split())
        except (OSError, subprocess.TimeoutExpired) as error:
            found[name] = f"unknown: {error}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 tests/gpu", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="GROUP or GROUP.CASE (default: all)")
    parser.add_argument("--results", type=Path, default=HERE.parent.parent / "docs" / "results")
    parser.add_argument("--name", default="gpu", help="the result file's name, without .json")
    options = parser.parse_args()
    if not Path("/dev/nvidiactl").exists():
        print("skipped: this machine has no NVIDIA driver (no /dev/nvidiactl)")
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.name}.json"
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "cases": {}}
    print(json.dumps(results["machine"]), flush=True)
    failed = 0
    node: Machine | None = None
    for group, module in GROUPS.items():
        for name, case in module.CASES.items():
            full = f"{group}.{name}"
            if options.cases and group not in options.cases and full not in options.cases:
                continue
            began = time.monotonic()
            result: dict[str, Any]
            try:
                if group == "moving":
                    result = {"passed": True, **case()}
                else:
                    node = node or Machine()
                    result = {"passed": True, **case(node)}
            except Exception as error:
                failed += 1
                result = {"passed": False, "error": str(error)[-3000:], "trace": traceback.format_exc()[-3000:]}
                if node:
                    lines = node.node.log.read_text(errors="replace").splitlines()
                    result["node_log"] = [line for line in lines if "runtime=fermata" in line][-8:]
            result["case_s"] = round(time.monotonic() - began, 3)
            results["cases"][full] = result
            print(full, json.dumps(result), flush=True)
            # After every case, so that a machine that is taken away has left what it measured.
            path.write_text(json.dumps(results, indent=1) + "\n")
    if node:
        node.down()
    print(f"{len(results['cases'])} cases, {failed} failed; {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
