"""`make demo`: what fermata does, on a private containerd node, beside what the stock runtime does with the same.

Ends with 0 only if every item came back under fermata, in both ways to restore.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from node import Node, NodeError

HERE = Path(__file__).parent
FERMATA, STOCK = "io.containerd.fermata.v1", "io.containerd.runc.v2"
ITEMS = {
    "counter": "a counter in memory",
    "mapped": "a file in the writable layer that is mapped",
    "deleted": "a file of its image that it deleted",
    "lock": "a multiprocessing lock",
    "connection": "a live loopback TCP connection",
}
ASK = """
import socket
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect("/run/state.sock")
print(sock.makefile().read())
"""
LABEL_WIDTH = max(map(len, ITEMS.values()))


class Demo:
    """The demo on one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def run(self, container: str, items: list[str], runtime: str, *options: str) -> None:
        """Start the workload and wait until it answers."""
        script = (HERE / "workload.py").read_text()
        command = ("python3", "-c", script, *items)
        self.node.ctr("run", "-d", "--runtime", runtime, *options, self.image, container, *command)
        self.states(container)

    def states(self, container: str) -> dict[str, tuple[bool, str]]:
        """What the workload says of its items. Raises NodeError when it does not answer."""
        deadline = time.monotonic() + 20
        while True:
            exec_id = f"ask{time.monotonic_ns()}"
            result = self.node.ctr("t", "exec", "--exec-id", exec_id, container, "python3", "-c", ASK, check=False)
            if result.returncode == 0:
                return {name: (ok, text) for name, (ok, text) in json.loads(result.stdout).items()}
            if time.monotonic() > deadline or "RUNNING" not in self.node.ctr("t", "ls").stdout:
                raise NodeError(f"{container} does not answer: {result.stderr.strip()}")
            time.sleep(0.1)

    def remove(self, container: str) -> None:
        """End a container and remove it, whatever its state."""
        self.node.ctr("t", "kill", "-s", "KILL", container, check=False)
        deadline = time.monotonic() + 10
        while self.node.ctr("t", "rm", container, check=False).returncode and time.monotonic() < deadline:
            if container not in self.node.ctr("t", "ls").stdout:
                break
            time.sleep(0.05)
        self.node.ctr("c", "rm", container, check=False)

    def timed(self, *words: str) -> float:
        """Run ctr and return the seconds it took."""
        began = time.monotonic()
        self.node.ctr(*words)
        return time.monotonic() - began

    def main(self) -> bool:
        """The whole demo; whether everything came back under fermata."""
        version = ".".join(map(str, self.node.containerd_version()))
        self.say(f"a private node is up: stack {self.node.stack}, containerd {version}")
        self.image = self.node.import_image()
        self.say(f"image {self.image} is imported")
        restored = self.with_fermata()
        stock = self.with_stock()
        self.table(restored, stock)
        return all(ok for states in restored.values() for ok, _ in states.values())

    def with_fermata(self) -> dict[str, dict[str, tuple[bool, str]]]:
        """The main job: snapshot, delete, restore into a new container, in both ways."""
        self.run("song", list(ITEMS), FERMATA)
        before = self.states("song")
        self.say("container song runs under fermata, with all five kinds of state")
        seconds = self.timed("c", "checkpoint", "--task", "song", "snapshot/song:1")
        self.say(f"ctr c checkpoint --task song snapshot/song:1           {seconds:.2f} s, song runs on")
        seconds = self.timed("t", "checkpoint", "--image-path", "/srv/song", "song")
        self.say(f"ctr t checkpoint --image-path /srv/song song           {seconds:.2f} s, a plain directory")
        self.remove("song")
        self.say("song is deleted, its writable layer with it")
        results = {}
        seconds = self.timed("c", "restore", "--live", "song-2", "snapshot/song:1")
        results["ctr c restore"] = self.checked("song-2", before)
        self.say(f"ctr c restore --live song-2 snapshot/song:1            {seconds:.2f} s")
        annotation = "fermata/restore-from=/srv/song"
        seconds = self.timed(
            "run", "-d", "--runtime", FERMATA, "--annotation", annotation, self.image, "song-3", "true"
        )
        results["annotation"] = self.checked("song-3", before)
        self.say(f"ctr run --annotation {annotation} …    {seconds:.2f} s")
        for container in ("song-2", "song-3"):
            self.remove(container)
        return results

    def checked(self, container: str, before: dict[str, tuple[bool, str]]) -> dict[str, tuple[bool, str]]:
        """The restored workload's states; the counter has to be the one of before."""
        states = self.states(container)
        token = before["counter"][1].split()[-1]
        good, text = states["counter"]
        states["counter"] = (good and token in text, text)
        return states

    def with_stock(self) -> dict[str, str]:
        """The same under the stock runtime: all at once, then each item alone. Returns what became of each item."""
        self.say("the same workload under the stock runtime:")
        whole = self.stock_outcome("whole", list(ITEMS))
        self.say(f"  all five: {whole}")
        outcomes = {}
        for name, label in ITEMS.items():
            outcomes[name] = self.stock_outcome(f"stock-{name}", [name])
            self.say(f"  {label} alone: {outcomes[name]}")
        return outcomes

    def stock_outcome(self, container: str, items: list[str]) -> str:
        """Snapshot, delete and restore under the stock runtime: "came back", or what went wrong."""
        reference = f"snapshot/{container}:1"
        try:
            self.run(container, items, STOCK)
            result = self.node.ctr("c", "checkpoint", "--task", container, reference, check=False)
            if result.returncode:
                return f"no snapshot: {_last_line(result.stderr)}"
            self.remove(container)
            result = self.node.ctr("c", "restore", "--live", container, reference, check=False)
            if result.returncode:
                return f"no restore: {_last_line(result.stderr)}"
            states = self.states(container)
            wrong = [text for ok, text in states.values() if not ok]
            return f"restored wrong, without a word: {', '.join(wrong)}" if wrong else "came back"
        finally:
            self.remove(container)

    def table(self, restored: dict[str, dict[str, tuple[bool, str]]], stock: dict[str, str]) -> None:
        """What came back, as a table."""
        ways = list(restored)
        print()
        print(f"{'state':{LABEL_WIDTH}}  {''.join(f'{way:15}' for way in ways)}stock runtime")
        for name, label in ITEMS.items():
            row = "".join(f"{'came back' if restored[way][name][0] else 'LOST':15}" for way in ways)
            print(f"{label:{LABEL_WIDTH}}  {row}{_shorten(stock[name], 60)}")
        print()
        for name, label in ITEMS.items():
            print(f"{label}: {restored[ways[-1]][name][1]}")
        print(flush=True)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.startswith("ctr:")] or text.strip().splitlines() or [""]
    # The heart of it: the beginning says which program called which, the end names a log that goes with the container.
    message = lines[-1].removeprefix("ctr: ")
    return message[max(message.find("criu failed"), 0) :].partition(" path=")[0]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def main() -> int:
    """Bring a node up, run the demo in it and take it down. Returns the exit status."""
    began = time.monotonic()
    print("bringing up a private containerd node (the first time, its root is built from packages)", flush=True)
    try:
        # CRIU before 4.2 cannot dump an internet socket on Linux 6.16 and newer, and trixie's is 4.1.1.
        with Node.up(stack_name="sid", say=lambda text: print(f"  {text}", flush=True)) as node:
            worked = Demo(node).main()
    except NodeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(
        f"{'everything came back' if worked else 'something was lost'}; {time.monotonic() - began:.0f} s, node removed"
    )
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
