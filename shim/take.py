"""Taking a snapshot: the dump through the stock shim, the layer while CRIU holds the processes, fermata.json last."""

from __future__ import annotations

import _socket
import _thread
import fcntl
import os
import time

from shim import config as configuration
from shim import manifest as manifests
from shim import task
from shim.cleanup import HOOK_RECORD
from shim.errors import ALREADY_EXISTS, FAILED_PRECONDITION, INVALID_ARGUMENT, ShimError
from shim.hook import socket_path
from shim.ttrpc import AnyMessage, Response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from layerwriter import Layer
    from shim.account import Account
    from shim.config import Config
    from shim.guest import Taking
    from shim.log import Log
    from shim.parking import Gpu
    from shim.snapshot import Container

HOOK = f"{os.path.dirname(os.path.abspath(__file__))}/hook.sh"


class Take:
    """One snapshot of one container into one directory.

    Any failure leaves the container as it was and the directory without fermata.json.
    """

    def __init__(
        self,
        container: Container,
        directory: str,
        options: task.CheckpointOptions,
        config: Config,
        log: Log,
        *,
        gpu: Gpu,
        guest: Taking | WithoutGuest | None = None,
        deadline: float | None = None,
        account: Account | None = None,
    ) -> None:
        self.container = container
        self.directory = directory
        self.options = options
        self.config = config
        self.log = log
        self.gpu = gpu  # whose `dump` the caller puts around the dump
        self.guest = guest or WithoutGuest()  # as well, around that
        self.deadline = deadline  # by time.monotonic(); after it the client waits no more
        self.steps: dict[str, float] = {}
        self.layer: Layer | None = None
        self._account = account
        self._bytes: int | None = None
        self._frozen: float | None = None
        self._ended = False  # the container has, by this take
        self._staged = False  # all of the snapshot was brought to disk, while CRIU held the processes
        self._made = False  # the directory was

    def run(self, dump: Callable[[bytes], Response]) -> Response:
        """Take it; `dump` makes the Checkpoint call at the stock shim. Raises ShimError."""
        try:
            return self._run(dump)
        except OSError as error:
            raise ShimError(f"snapshot of {self.container.state.id} failed: {error}", FAILED_PRECONDITION) from error
        finally:
            self._tell()

    def _tell(self) -> None:
        """Say what is known of the take, however it ended."""
        account = self._account
        if account is None:
            return
        account.steps, account.frozen, account.bytes = self.steps, self._frozen, self._bytes
        if self.layer is not None:
            account.entries, account.made_by = self.layer.entries, self.layer.made_by

    def _run(self, dump: Callable[[bytes], Response]) -> Response:
        from shim import criu

        self._began = time.monotonic()
        self._criu = criu.installed(self.config)
        self._check_layer()
        held = self._prepare_directory()
        try:
            response = self._dump(dump)
            if response.ok:
                self._complete()
        except BaseException as error:
            if not self._ended:
                self._discard()
                raise
            # What is in the directory is all that is left of the container.
            if not self._staged or os.path.lexists(f"{self.directory}/{manifests.NAME}"):
                raise
            self.log("error", "a step after the dump failed", container=self.container.state.id, error=error)
            self._publish()
            return Response()
        finally:
            os.close(held)
        if not response.ok:
            self._discard()
        return response

    def _dump(self, dump: Callable[[bytes], Response]) -> Response:
        from shim import criu, network

        container = self.container
        logs = container.state.new_log_dir("dump")
        if self._account is not None:
            self._account.logs = logs
        self.log("debug", "taking a snapshot", container=container.state.id, directory=self.directory, logs=logs)
        request = task.CheckpointTaskRequest(id=container.state.id, path=self.directory)
        self.options.image_path = ""
        asked, self.options.work_path = self.options.work_path, logs
        request.options = AnyMessage(type_url=task.CHECKPOINT_OPTIONS, value=self.options.encode())
        path = network.path_of(container.spec, container.bundle)
        container.state.write(HOOK_RECORD, socket_path(self.directory))
        with network.Operation(path, self._log_network), _Hook(self.directory, self._while_held) as hook:
            criu.write_config(
                container,
                self.config,
                self.log,
                operation="dump",
                action_script=HOOK,
                ext_unix_sk=self.options.external_unix_sockets,
            )
            dumping = time.monotonic()
            response = dump(request.encode())
            self._ended = response.ok and self.options.exit
        if hook.error is not None:
            if isinstance(hook.error, ShimError):
                raise hook.error
            raise ShimError(f"snapshot of {container.state.id} failed: {hook.error}") from hook.error
        if response.status is not None and response.status.code:
            response.status.message, cause = criu.explain(
                f"{logs}/dump.log", response.status.message, f"snapshot of {container.state.id} failed"
            )
            if self._account is not None:
                self._account.cause = cause
        elif not hook.ran:
            raise ShimError(
                f"snapshot of {container.state.id} failed: CRIU did not run the action script after the dump; "
                f"log: {logs}/dump.log",
                FAILED_PRECONDITION,
            )
        self.steps.update({**self.guest.steps, **self.gpu.steps})
        self.steps["dump"] = time.monotonic() - dumping - sum(self.steps.values())
        for step, seconds in self.steps.items():
            self.log("debug", "snapshot step", container=container.state.id, step=step, seconds=f"{seconds:.3f}")
        self._frozen = criu.frozen_seconds(logs)
        criu.trim(f"{logs}/dump.log")
        if asked:
            self._copy_logs(logs, asked)
        return response

    def _copy_logs(self, logs: str, directory: str) -> None:
        """Leave CRIU's log and statistics where the client wants them: the CRI plugin packs them into its archive."""
        import shutil

        for name in ("dump.log", "stats-dump"):
            if os.path.exists(f"{logs}/{name}"):
                try:
                    os.makedirs(directory, mode=0o700, exist_ok=True)
                    shutil.copyfile(f"{logs}/{name}", f"{directory}/{name}")
                except OSError as error:
                    self.log("warning", "a log cannot be copied to the client's work path", path=directory, error=error)

    def _log_network(self, note: str) -> None:
        self.log("info", note, container=self.container.state.id)

    def _while_held(self) -> None:
        """What is done while CRIU holds the dumped processes: the layer, with CRIU's link-remap files still there.

        A take that ends the container makes the snapshot durable here as well, all but the name: whatever fails now
        takes the dump back, and after this the processes are gone.
        """
        began = time.monotonic()
        upper = self._upper()
        if upper is not None:
            self.layer = self._layer_of(upper)
        self.steps["layer"] = time.monotonic() - began
        if self.options.exit:
            self._describe().stage(self.directory)
            self._staged = True
        if self.deadline is not None and time.monotonic() > self.deadline:
            # The client believes by now that it has failed, and with what it asked for the container might end.
            raise ShimError(
                f"snapshot of {self.container.state.id} failed: the client's time limit passed while the writable "
                "layer was written: give it more time",
                FAILED_PRECONDITION,
            )

    def _complete(self) -> None:
        """The dump is done: give the snapshot its fermata.json."""
        try:
            self._describe().stage(self.directory)
        except (OSError, ShimError) as error:
            if not self._ended:
                raise
            # The processes are gone: what was staged before lacks some of the times, and nothing else.
            self.log("warning", "the staged fermata.json is used", container=self.container.state.id, error=error)
        self._publish()

    def _publish(self) -> None:
        try:
            manifests.publish(self.directory)
        except OSError as error:
            if not self._ended:
                raise
            if os.path.lexists(f"{self.directory}/{manifests.NAME}"):
                self.log("warning", "the snapshot's name may not outlive a power loss", error=error)
                return
            raise ShimError(
                f"container {self.container.state.id} has ended, and its snapshot in {self.directory} is whole but for "
                f"its name, which could not be given: {error}; rename {manifests.STAGED} there to {manifests.NAME}"
            ) from error

    def _upper(self) -> str | None:
        """The upper directory whose layer this snapshot carries, or None. Raises ShimError when it cannot be told."""
        container = self.container
        if container.layer == "none" or container.rootfs.kind == "directory":
            return None
        return container.rootfs.require_overlay(f"take the writable layer of container {container.state.id}")

    def _check_layer(self) -> None:
        """Refuse a layer that is too large, while nothing has been touched."""
        upper = self._upper()
        if upper is None:
            return
        import layerwriter

        if layerwriter.choose(self.container.rootfs.options).made_by == "upperdir":
            try:
                size = layerwriter.measure(upper).bytes
            except layerwriter.LayerError as error:
                raise ShimError(
                    f"snapshot of {self.container.state.id} failed: {error}", FAILED_PRECONDITION
                ) from error
            if size > self.config.layer_limit:
                raise ShimError(
                    f"the writable layer of container {self.container.state.id} has {size} bytes, the limit is "
                    f"{self.config.layer_limit}: raise [layer] limit in {configuration.PATH}, or keep large "
                    "files on a volume",
                    FAILED_PRECONDITION,
                )

    def _prepare_directory(self) -> int:
        """Make the directory, or take it if it is empty. Returns a descriptor that keeps other takes out until
        closed."""
        path = self.directory
        if not path.startswith("/"):
            raise ShimError(f"snapshot directory {path!r} must be an absolute path", INVALID_ARGUMENT)
        there = os.path.lexists(path)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ShimError(
                f"cannot use {path} as a snapshot directory: {error.strerror}", FAILED_PRECONDITION
            ) from error
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.listdir(held):
                raise ShimError(f"snapshot directory {path} is not empty: name a new one", ALREADY_EXISTS)
            owner = os.fstat(held).st_uid
            if there and owner != os.geteuid():  # one that was made here may have any: NFS gives root's away
                raise ShimError(
                    f"snapshot directory {path} belongs to user {owner}, who could read the container's memory there "
                    "and change it: name a new one, or give this one to root",
                    FAILED_PRECONDITION,
                )
            os.fchmod(held, 0o700)
            self._made = not there
        except BlockingIOError as error:
            os.close(held)
            raise ShimError(f"another snapshot is being written into {path}: name a new one", ALREADY_EXISTS) from error
        except BaseException:
            os.close(held)
            if not there:
                os.rmdir(path)
            raise
        return held

    def _layer_of(self, upper: str) -> Layer:
        import layerwriter

        container = self.container
        compression = self.config.layer_compression
        out = f"{self.directory}/layer.tar{'.zst' if compression == 'zstd' else ''}"
        limit = self.config.layer_limit
        choice = layerwriter.choose(container.rootfs.options)
        reason = choice.reason
        try:
            if choice.made_by == "upperdir":
                try:
                    return layerwriter.write(
                        upper,
                        out,
                        compression=compression,
                        limit=limit,
                        xattr_prefix=choice.xattr_prefix,
                        sync=False,  # while the processes stand still; the manifest waits for the disk
                    )
                except layerwriter.HiddenChange as hidden:
                    reason = str(hidden)
            self.log("warning", "the layer is made by a full comparison", container=container.state.id, reason=reason)
            return layerwriter.full_diff(
                container.rootfs.lower,
                container.root,
                out,
                compression=compression,
                limit=limit,
                xattr_prefix=choice.xattr_prefix,
                reason=reason,
                sync=False,
            )
        except layerwriter.LayerError as error:
            raise ShimError(f"snapshot of {container.state.id} failed: {error}", FAILED_PRECONDITION) from error

    def _discard(self) -> None:
        """Remove what this take wrote; the directory was empty before. Why the take failed matters more than this."""
        from shim.state import remove_tree

        try:
            for name in os.listdir(self.directory):
                remove_tree(f"{self.directory}/{name}")
            if self._made:
                os.rmdir(self.directory)
        except OSError as error:  # the directory itself is gone, perhaps
            self.log("warning", "the failed take's files stay", directory=self.directory, error=error)

    def _describe(self) -> manifests.Manifest:
        import json

        from shim import host, specedits

        container = self.container
        original = json.loads(container.original)
        files = manifests.files(self.directory)
        self._bytes = sum(files.values())
        now = time.time()
        data: dict[str, Any] = {
            "version": {"major": manifests.MAJOR, "minor": manifests.MINOR},
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
            "container": {
                "id": container.state.id,
                "namespace": container.state.namespace,
                "image": (container.spec.get("annotations") or {}).get("io.kubernetes.cri.image-name"),
                "left_running": not self.options.exit,
            },
            "node": {"name": os.uname().nodename, "containerd": host.program_version("containerd")},
            "requires": manifests.requirements(
                {**original, "mounts": specedits.mounts_as_given(original, container.spec)},
                container.rootfs,
                self.directory,
                ".".join(map(str, self._criu.version)),
            ),
            "files": files,
            "edits": [{"annotation": annotation, "text": text} for annotation, text in container.edits],
            "layer": None,
            "gpu": self.gpu.record,
            "guest": self.guest.record(),
            "steps": {name: round(seconds, 6) for name, seconds in self.steps.items()},
        }
        if self.layer is not None:
            data["layer"] = {
                "file": os.path.basename(self.layer.path),
                "digest": self.layer.digest,
                "diff_id": self.layer.diff_id,
                "size": self.layer.size,
                "entries": self.layer.entries,
                "made_by": self.layer.made_by,
                "reason": self.layer.reason,
                "notes": list(self.layer.notes),
            }
        data["frozen"] = self._frozen
        data["steps"]["total"] = round(time.monotonic() - self._began, 6)
        data["spec"] = original
        return manifests.Manifest(data)


class WithoutGuest:
    """In the place of a guest.Taking, for a container whose programs keep nothing out of its snapshots."""

    steps: dict[str, float] = {}

    def dump(self, dump: Callable[[], Response], *, exits: bool) -> Response:
        """Call `dump`."""
        return dump()

    def record(self) -> None:
        """Nothing."""

    def checked(self, response: Response) -> Response:
        """The take's answer."""
        return response

    def __enter__(self) -> WithoutGuest:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Hook:
    """Serves CRIU's action script: runs `work` when CRIU has dumped the tree, and answers it.

    `ran` says whether CRIU came to it, `error` what `work` raised, in which case CRIU was told to take the dump back.
    """

    def __init__(self, directory: str, work: Callable[[], None]) -> None:
        self._path = socket_path(directory)
        self._work = work
        self._done = _thread.allocate_lock()
        self._ending = False
        self.ran = False
        self.error: Exception | None = None

    def __enter__(self) -> _Hook:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        self._sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            self._sock.bind(self._path)
            self._sock.listen(1)
            self._done.acquire()
            _thread.start_new_thread(self._serve, ())
        except BaseException as error:
            self._close()
            if isinstance(error, RuntimeError):  # no more threads to be had
                raise OSError(str(error)) from error
            raise
        return self

    def _serve(self) -> None:
        """Until `__exit__`, or until it cannot serve any more: then the script must not wait, and CRIU with it."""
        try:
            while True:
                fd, _ = self._sock._accept()  # type: ignore[attr-defined]
                try:
                    connection = _socket.socket(fileno=fd)
                except BaseException:
                    os.close(fd)
                    raise
                try:
                    if connection.recv(64):
                        self._answer(connection)
                except OSError:  # the script was killed, and CRIU with it
                    pass
                finally:
                    connection.close()
        except Exception as error:
            if not self._ending:
                self.error = self.error or error
        finally:
            self._sock.close()
            self._done.release()

    def _answer(self, connection: _socket.socket) -> None:
        """Do the work, once: CRIU 4.1 reads its configuration file twice and runs the script twice."""
        if not self.ran:
            self.ran = True
            try:
                self._work()
            except Exception as error:
                self.error = error
        if self.error is None:
            connection.sendall(b"ok\n")

    def __exit__(self, *_: object) -> None:
        self._ending = True
        try:
            self._sock.shutdown(_socket.SHUT_RDWR)  # wakes the accept
        except OSError:
            pass
        self._done.acquire()
        self._close()

    def _close(self) -> None:
        self._sock.close()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
