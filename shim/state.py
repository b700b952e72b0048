"""What the shim keeps of a container outside its own memory, so that `delete` can clean up after a crash.

`/run/fermata/<namespace>/<id>/` is gone after a reboot, as the container is. `/var/log/fermata/<namespace>/<id>/`
keeps the logs of the newest operations.
"""

from __future__ import annotations

import errno
import os

from shim.errors import FAILED_PRECONDITION, INVALID_ARGUMENT, ShimError

RUN = "/run/fermata"
LOGS = "/var/log/fermata"
KEPT_OPERATIONS = 10


def check_identifier(kind: str, name: str) -> str:
    """Return `name` if it is letters, digits and `.`, `_`, `-` between them. Raises ShimError otherwise.

    containerd has checked it already (pkg/identifiers); a shim that removes directories by name, and puts names into
    configuration files and commands, checks again.
    """
    plain = name.replace(".", "").replace("_", "").replace("-", "")
    if not (plain.isascii() and plain.isalnum() and name[0].isalnum() and len(name) <= 76):
        raise ShimError(f"{kind} {name!r} is not an identifier of containerd's", INVALID_ARGUMENT)
    return name


class State:
    """The state directory of one container, mode 0700."""

    def __init__(self, namespace: str, container_id: str, *, run: str = RUN, logs: str = LOGS) -> None:
        self.namespace = check_identifier("namespace", namespace)
        self.id = check_identifier("container id", container_id)
        self.path = f"{run}/{namespace}/{container_id}"
        self.log_path = f"{logs}/{namespace}/{container_id}"

    def create(self) -> None:
        """Make the directory. Raises ShimError."""
        while True:
            try:
                make_private(self.path)
                return
            except FileNotFoundError:
                continue  # the namespace's last container before this one took the namespace's directory with it
            except OSError as error:
                raise self._cannot_keep(error) from error

    def _cannot_keep(self, error: OSError) -> ShimError:
        message = f"cannot keep the container's state in {self.path}: {error.strerror}"
        if error.errno == errno.ENOSPC:
            message += "; make room there"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            message += "; something that is no directory is in the way, remove it"
        return ShimError(message, FAILED_PRECONDITION)

    def write(self, name: str, text: str) -> str:
        """Write a small file of the directory, by rename, and return its path. Raises ShimError."""
        path = f"{self.path}/{name}"
        data = text.encode()
        try:
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                while data:  # a disk that fills up takes the first part and refuses the rest
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
            os.rename(f"{path}.new", path)
        except OSError as error:
            raise self._cannot_keep(error) from error
        return path

    def read(self, name: str) -> str | None:
        """Read a file of the directory; None when it is not there."""
        try:
            fd = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return os.read(fd, 1 << 20).decode()
        finally:
            os.close(fd)

    def drop(self, name: str) -> None:
        """Remove a file of the directory; one that is not there is no error. Raises OSError."""
        try:
            os.unlink(f"{self.path}/{name}")
        except FileNotFoundError:
            pass

    def remove(self, keep: str = "") -> None:
        """Remove the directory and what is in it, and the namespace's when it is empty now; or all but one file."""
        if keep:
            for name in os.listdir(self.path) if os.path.isdir(self.path) else ():
                if name != keep:
                    remove_tree(f"{self.path}/{name}")
            return
        remove_tree(self.path)
        try:
            os.rmdir(os.path.dirname(self.path))
        except OSError:
            pass  # other containers, or gone already

    def new_log_dir(self, operation: str) -> str:
        """Make a directory for the logs of one operation (`dump`, `restore`), the newest ten of a container are
        kept. Raises ShimError."""
        import time

        now = time.time_ns()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9)) + f".{now % 10**9 // 1000:06d}"
        name = f"{stamp}-{operation}"
        try:
            make_private(self.log_path)
            os.mkdir(f"{self.log_path}/{name}", mode=0o700)
            # The new one is out of the count: after the clock was set back its name is not the last.
            others = sorted(other for other in os.listdir(self.log_path) if other != name)
            for old in others[: 1 - KEPT_OPERATIONS]:
                remove_tree(f"{self.log_path}/{old}")
        except OSError as error:
            raise ShimError(
                f"cannot keep the logs of a {operation} in {self.log_path}: {error.strerror}; without them nobody "
                "could say why it failed",
                FAILED_PRECONDITION,
            ) from error
        return f"{self.log_path}/{name}"


def make_private(path: str) -> None:
    """Make a directory, and those above it that are missing, for root alone: mode 0700 whatever the umask is.

    `os.makedirs` gives its mode to the last one only, and with the umask 0 the others would be everybody's to write.
    """
    above = os.path.dirname(path)
    if not os.path.exists(above):
        make_private(above)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def remove_tree(path: str) -> None:
    """Remove a directory tree that only root writes to; what is gone already is no error."""
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        try:
            os.unlink(path)
        except NotADirectoryError:
            pass  # nor is what should hold it
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(entry.path)
        else:
            try:
                os.unlink(entry.path)
            except FileNotFoundError:
                pass
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
