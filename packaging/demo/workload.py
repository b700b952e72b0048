"""The demo's workload: a program with the kinds of state that a snapshot has to bring back.

Run as PID 1 of a container, with the items to hold as arguments. It answers on the unix socket /run/state.sock with
one JSON object: for each item, whether it is as it should be, and what a person wants to see of it.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import socket
import sys
import threading
import time

DELETED = "/etc/issue"
MAPPED = "/var/lib/mapped"
SOCKET = "/run/state.sock"


class Counter:
    """A number and a random token, in memory alone."""

    def __init__(self) -> None:
        self.token = os.urandom(4).hex()
        self.value = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            self.value += 1
            time.sleep(0.01)

    def state(self) -> tuple[bool, str]:
        """The count goes on from where it was; a new start would have another token."""
        before = self.value
        time.sleep(0.05)
        return self.value > before, f"{self.value} (token {self.token})"


class MappedFile:
    """A file that the program wrote into its root file system and maps."""

    def __init__(self) -> None:
        self.token = os.urandom(4).hex()
        with open(MAPPED, "wb") as file:
            file.write(self.token.encode().ljust(4096, b"\0"))
        fd = os.open(MAPPED, os.O_RDWR)
        self.map = mmap.mmap(fd, 4096)
        os.close(fd)

    def state(self) -> tuple[bool, str]:
        """A write through the mapping is seen in the file by name."""
        stamp = str(time.monotonic_ns()).encode()
        self.map[100 : 100 + len(stamp)] = stamp
        with open(MAPPED, "rb") as file:
            data = file.read()
        same = data.startswith(self.token.encode()) and data[100:].startswith(stamp)
        return same, f"{MAPPED} holds {self.token}" if same else f"{MAPPED} is another file"


class DeletedFile:
    """A file of the image that the program deleted."""

    def __init__(self) -> None:
        os.unlink(DELETED)

    def state(self) -> tuple[bool, str]:
        """It is still gone."""
        back = os.path.exists(DELETED)
        return not back, f"{DELETED} is {'back' if back else 'gone'}"


class Lock:
    """A multiprocessing lock between two processes, of the kind that spawned workers share: its name stays."""

    def __init__(self) -> None:
        self.lock = multiprocessing.get_context("spawn").Lock()
        context = multiprocessing.get_context("fork")  # `python3 -c` has no module that a spawned process could import
        self.number = context.Value("l", 0, lock=False)
        context.Process(target=self._add, daemon=True).start()

    def _add(self) -> None:
        while True:
            with self.lock:
                self.number.value += 1
            time.sleep(0.01)

    def state(self) -> tuple[bool, str]:
        """Held, it stops the other process; released, it lets it go on."""
        with self.lock:
            held = self.number.value
            time.sleep(0.1)
            stopped = self.number.value == held
        time.sleep(0.2)
        goes_on = self.number.value > held
        return stopped and goes_on, "excludes the other process" if stopped and goes_on else "does not exclude"


class Connection:
    """A live TCP connection over loopback."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.client = socket.create_connection(listener.getsockname())
        self.client.settimeout(5)
        server, _ = listener.accept()
        threading.Thread(target=self._echo, args=(server,), daemon=True).start()

    def _echo(self, server: socket.socket) -> None:
        while data := server.recv(64):
            server.sendall(data)

    def state(self) -> tuple[bool, str]:
        """A word sent comes back over the same connection."""
        try:
            self.client.sendall(b"still there?")
            answer = self.client.recv(64)
        except OSError as error:
            return False, str(error)
        return answer == b"still there?", f"port {self.client.getsockname()[1]} answers"


ITEMS = {"counter": Counter, "mapped": MappedFile, "deleted": DeletedFile, "lock": Lock, "connection": Connection}


def main(names: list[str]) -> None:
    """Hold the items and answer for them."""
    os.makedirs("/run", exist_ok=True)
    items = {name: ITEMS[name]() for name in names}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen()
    while True:
        asker, _ = listener.accept()
        states = {name: item.state() for name, item in items.items()}
        asker.sendall(json.dumps(states).encode())
        asker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
