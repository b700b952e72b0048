"""Snapshots without images and their diffs, made by a program that runs in a node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "diffs.py"


class Diffs:
    """The program in the node, and a way to talk to it."""

    def __init__(self, node):
        argv = ["python3", "-I", "-c", PROGRAM.read_text()]
        self.process = node.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __getattr__(self, name):
        return lambda *values, **named: self.ask(name, *values, **named)

    def ask(self, do, *values, **named):
        order = {
            "layer": ("key", "program", "parent"),
            "diff": ("key", "parent"),
            "apply": ("key", "parent"),
            "differences": ("one", "other"),
            "remove": ("key",),
            "labels": ("digest",),
            "upper": ("key",),
        }
        request = {"do": do, **dict(zip(order.get(do, ()), values, strict=False)), **named}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the program ended at {do}"
        said = json.loads(answer)
        if "code" in said:
            raise Failed(said["code"], said["details"])
        return said["is"]

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Failed(Exception):
    def __init__(self, code, details):
        super().__init__(f"{code}: {details}")
        self.code = code
