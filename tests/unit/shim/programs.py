"""A stand-in for a program that keeps weights out of snapshots: it speaks the protocol, and can fail at each step."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import socket
import threading

CHUNK = 1 << 20


def described(data, name="model", chunk=CHUNK):
    """A pack as a program describes it."""
    chunks = [hashlib.sha256(data[at : at + chunk]).hexdigest() for at in range(0, len(data), chunk)]
    text = f"fermata weights 1\n{len(data)}\n{chunk}\n" + "".join(f"{one}\n" for one in chunks)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"name": name, "bytes": len(data), "chunk": chunk, "chunks": chunks, "digest": f"sha256:{digest}"}


def hex_of(data):
    """The name of a pack in the store."""
    return described(data)["digest"].removeprefix("sha256:")


class Program:
    """Listens in `folder`. `fails` maps a step (prepare, write, release, armed, back) to what it does there instead:
    bytes that it sends, "end" (it listens no more), "die" (after its answer), "hang up", "wait", or a function of the
    files."""

    def __init__(self, folder, pid, data, **fails):
        self.pid, self.data, self.fails = pid, data, fails
        self.steps, self.held, self.got = [], [], None
        self.socket = socket.socket(socket.AF_UNIX)
        path = f"{folder}/{pid}.sock"
        directory = os.open(folder, os.O_PATH)
        # CRIU binds to the same path again; a long one is no socket's.
        self.socket.bind(path if len(path) < 108 else f"/proc/self/fd/{directory}/{pid}.sock")
        os.close(directory)
        self.socket.listen(8)
        self.enough = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        self.enough.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for fd in self.held:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _serve(self):
        while not self.enough.is_set():
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, _Stop):
                self._answer(connection, connection.makefile("wb"))

    def _receive(self, connection):
        data, fds = b"", array.array("i")
        while b"\n" not in data:
            part, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(1024))
            for _, _, payload in ancillary:
                fds.frombytes(payload)
            if not part:
                self.steps.append("let go")
                raise _Stop
            data += part
        message = json.loads(data)
        assert message.get("fds", 0) == len(fds)
        return message, list(fds)

    def _say(self, step, out, message, files=()):
        self.steps.append(step)
        instead = self.fails.get(step)
        if callable(instead):
            instead(files)
        elif instead == "end":
            self.close()
            raise _Stop
        elif instead == "hang up":
            raise _Stop
        elif instead == "wait":
            self.enough.wait()
            raise _Stop
        elif instead == "die":
            out.write(json.dumps(message).encode() + b"\n")
            out.flush()
            os._exit(1)
        elif instead is not None:
            out.write(instead)
            out.flush()
            return
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    def _answer(self, connection, out):
        message, fds = self._receive(connection)
        if message["step"] == "status":
            self._say("status", out, {"ready": True})
        elif message["step"] == "prepare":
            packs = [described(self.data)] if self.data else []
            self._say("prepare", out, {"packs": packs})
            answer, fds = self._receive(connection)
            self.written = [pack["write"] for pack in answer["packs"]]
            for fd in fds:
                if "lie" in self.fails:
                    os.pwrite(fd, b"x" * len(self.data), 0)
                else:
                    os.pwrite(fd, self.data, 0)
            if callable(self.fails.get("write")):
                self._say("write", out, {"written": True}, fds)
            else:
                for fd in fds:
                    os.close(fd)
                self._say("write", out, {"written": True})
            self._receive(connection)
            self._say("release", out, {"released": len(self.data), "notes": ["trimmed\x1b[31m"]})
        else:
            assert message["step"] == "restored"
            self.new = message["new"]
            self._say("armed", out, {"armed": True})
            self._receive(connection)
            flags = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in fds]
            self.direct = [bool(each & os.O_DIRECT) for each in flags]
            for fd, each in zip(fds, flags, strict=True):
                fcntl.fcntl(fd, fcntl.F_SETFL, each & ~os.O_DIRECT)
            self.got = b"".join(os.pread(fd, len(self.data), 0) for fd in fds)
            for fd in fds:
                try:
                    os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
                    self.steps.append("could write")
                except OSError:
                    pass
                os.close(fd)
            self._say("back", out, {"back": len(self.data), "seconds": {"total": 0.5, "read": "x"}})


class _Stop(Exception):
    pass
