"""The file that containerd's content store keeps an unfinished upload in, as far as it can be written from here.

containerd goes on with an interrupted upload by reading what its file holds, whoever wrote that. Its local store
(plugins/content/local/store.go, content/local/store.go in 1.7) has for each upload

    ROOT/ingest/SHA-256 OF THE KEY/ref     the key
                                  /data    what was written

where the key is "NAMESPACE/1/REFERENCE" for a reference that was never used before (createKey in core/metadata).
Nothing of this is promised: everything is looked at, and Hidden is raised for whatever is not exactly so.
"""

from __future__ import annotations

import os
import stat
from hashlib import sha256

from differ import messages
from differ.messages import INTROSPECTION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from differ.content import Store

_PLUGIN = "io.containerd.content.v1"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Hidden(Exception):
    """The file cannot be written from here. The text says why."""


class Places:
    """Where containerd keeps uploads. It is asked once, and again when they are not where they were: it may have been
    started again with another configuration."""

    def __init__(self) -> None:
        self._root = ""

    def open(self, store: Store, ref: str, size: int) -> int:
        """A descriptor for writing of the file of an upload that has so many bytes. `ref` is a name that nobody used
        before. Raises Hidden, and grpc.RpcError."""
        known = self._root
        if known:
            try:
                return open_data(known, store.namespace, ref, size)
            except Hidden:
                self._root = ""
        root = _root(store)
        fd = open_data(root, store.namespace, ref, size)
        self._root = root
        return fd


def open_data(root: str, namespace: str, ref: str, size: int) -> int:
    """A descriptor for writing of an upload's file below the content store's root. Raises Hidden."""
    key = f"{namespace}/1/{ref}".encode()
    opened: list[int] = []
    what = root
    try:
        # The way to the root is containerd's and may lead over links, to another disk for instance. Inside, none may.
        opened.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        what = "ingest"
        opened.append(os.open("ingest", _DIRECTORY, dir_fd=opened[-1]))
        what = "the upload's directory"
        opened.append(os.open(sha256(key).hexdigest(), _DIRECTORY, dir_fd=opened[-1]))
        what = "the upload's ref"
        if _content(opened[-1], "ref", len(key)) != key:
            raise Hidden(f"{root}: another upload has its name")
        what = "the upload's data"
        fd = os.open("data", os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened[-1])
    except OSError as failure:
        raise Hidden(f"{root}: {what}: {failure.strerror}") from failure
    finally:
        for directory in opened:
            os.close(directory)
    try:
        check(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check(fd: int, size: int) -> None:
    """Raises Hidden unless this is a file of root's with no other name, and of this size."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        raise Hidden("the upload's data is no file of containerd's alone")
    if found.st_size != size:
        raise Hidden("the upload's data has another size than the upload")


def _content(directory: int, name: str, size: int) -> bytes:
    """At most so many bytes of a file, and one more."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, size + 1)
    finally:
        os.close(fd)


def _root(store: Store) -> str:
    """The directory of containerd's own content store, by its own account. Raises Hidden, and grpc.RpcError."""
    request = messages.PluginsRequest(filters=[f"type=={_PLUGIN}"])
    plugins = store.call(INTROSPECTION, "Plugins", request, messages.PluginsResponse).plugins
    roots = [messages.mapping(plugin.exports).get("root", "") for plugin in plugins if plugin.id == "content"]
    if len(plugins) != 1 or len(roots) != 1 or not roots[0].startswith("/"):
        raise Hidden(f"containerd's content is kept by {', '.join(plugin.id for plugin in plugins) or 'no plugin'}")
    return roots[0]
