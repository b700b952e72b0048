"""SnapshotShim: the few calls that a snapshot changes, each of them handed off to the stock shim and runc."""

from __future__ import annotations

import _thread
import os
import time

from shim import bundle as bundles
from shim import hostfiles, netns, specedits, stock, task
from shim.cleanup import DAEMON, forget, record
from shim.errors import FAILED_PRECONDITION, INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, ShimError
from shim.relay import Call
from shim.rootfs import Rootfs
from shim.runc import RuncShim
from shim.state import State
from shim.ttrpc import AnyMessage, Request, Response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from layerwriter import Applied
    from shim.account import Account
    from shim.config import Config
    from shim.guest import Restoring, Taking
    from shim.log import Log
    from shim.parking import Gpu
    from shim.restore import Timeline
    from shim.stdio import Substitute
    from shim.take import WithoutGuest
    from shim.userns import Images

CRIU_CONF = "criu.conf"
_END = 10.0  # seconds for a container that is killed to end
_GROUP_LINGER = 2.0  # seconds after the last container of a group in which containerd may ask the stock shim to end


class Container:
    """What the shim remembers of one container between its calls."""

    def __init__(self, state: State, bundle: bundles.Bundle, rootfs: Rootfs) -> None:
        self.state = state
        self.spec = bundle.spec
        self.bundle = bundle.path
        self.root = bundle.root
        self.rootfs = rootfs
        self.layer = bundle.annotations.get(bundles.LAYER, "carry")
        self.check = bundle.annotations.get(bundles.CHECK, "refuse")
        self.original = bundle.original  # config.json as the client made it
        self.edits: list[tuple[str, str]] = []  # what specedits changed: the annotation that switches it, and how
        self.criu_config: str | None = None  # the container's own CRIU configuration, merged over ours
        self.netns: str | None = None
        self.applied: Applied | None = None  # a restored layer that can still be taken back
        self.restore_source: str | None = None
        self.account: Account | None = None  # of the restore
        self.timeline: Timeline | None = None  # of the restore
        self.taken: object = None  # when the restored snapshot was taken
        self.restore_logs: str | None = None
        self.service = task.SERVICES[-1]  # as containerd names the task API, which depends on its version
        self.restoring = False  # runc restore runs
        self.runc_directory = ""  # of a container that is restored
        self.empty_upper = ""  # its upper directory, if it had no files before the restore
        self.replaced = ""  # the same, if the restore replaces what it has, for the record
        self.stdio: tuple[str, ...] = ()  # where its input and output go, as the client said
        self.substitute: Substitute | None = None  # for input and output that the client did not give
        self.restore_gpu: dict[str, Any] | None = None  # the snapshot's record of GPU state
        self.guest = bundle.annotations.get(specedits.GUEST) == "on"  # its programs may keep weights out of a snapshot
        self.weights: Restoring | None = None  # what the restore has to bring back of these
        self.images: Images | None = None  # the images as the root of the container's user namespace can read them
        self.take = _thread.allocate_lock()

    def close(self) -> None:
        """Let go of what is held open for the container. Idempotent."""
        if self.substitute is not None:
            self.substitute.close()
        if self.weights is not None:
            self.weights.close()
        if self.images is not None:
            self.images.close()


class SnapshotShim(RuncShim):
    """The stock runc shim, and snapshots."""

    OVERRIDES = {
        "Create": "create",
        "Start": "start",
        "Checkpoint": "checkpoint",
        "Delete": "delete",
        "Kill": "kill",
        "Resume": "resume",
    }

    def __init__(self, stock_path: str, config: Config, log: Log, namespace: str, our_path: str) -> None:
        super().__init__(stock_path, config, log, our_path)
        self._namespace = namespace  # a daemon serves one; containerd 1.7 sends none with its calls
        self._containers: dict[str, Container] = {}
        self._group = False  # whether this process has served several at a time: the containers of a pod

    # Takes and restores, however they end ----------------------------------------------------------------------------

    def _accounted(self, handler: Callable[[Call], Response], call: Call) -> Response:
        """Answer a call; the take or the restore that ends with it gets its line in the log, and is counted."""
        try:
            response = handler(call)
        except Exception as error:
            if call.account is None:
                raise
            self._failed(call, call.account, error)
            if not isinstance(error, ShimError):
                raise
            return Response.failure(error.code, str(error))
        if call.account is not None:
            if response.status is not None and response.status.code:
                self._failed(call, call.account, response.status.message)
            elif call.request.method == "Create":
                call.account.pause()  # until the client starts it
            else:
                call.account.succeeded()
        return response

    def _failed(self, call: Call, account: Account, error: Exception | str) -> None:
        if account.logs and os.path.exists(f"{account.logs}/dump.log"):  # CRIU has met the container's processes
            try:
                state = task.StateResponse.decode(
                    self.forward_checked(
                        Call(Request(service=call.request.service, metadata=call.request.metadata)),
                        task.ExecRequest(id=account.id).encode(),
                        method="State",
                    )
                )
                account.lost = state.status == task.STOPPED
            except (ShimError, OSError):
                account.lost = True  # the stock shim is gone, and what it held with it
        account.failed(error)

    # Create ------------------------------------------------------------------------------------------------------

    def create(self, call: Call) -> Response:
        """Prepare the bundle, and for a restore the writable layer, and hand off.

        The stock shim only records a checkpoint here; `runc restore` runs at Start.
        """
        request = task.CreateTaskRequest.decode(call.request.payload)
        if request.id in self._containers:
            return self.forward(call)  # the stock shim refuses it; what is the first one's must stay
        bundle = bundles.Bundle(request.bundle)
        bundle.settle()
        state = State(self._namespace, request.id)
        container = Container(state, bundle, Rootfs(request.rootfs))
        container.service = call.request.service
        options = _runc_options(request)
        source = _restore_source(request, options, bundle)
        if source:
            from shim.account import RESTORE, Account

            call.account = container.account = Account(RESTORE, request.id, source, self.config, self.log)
        forget(state.namespace, state.id, keep=DAEMON)  # of a container of this name that a crash left
        try:
            state.create()
            state.write(DAEMON, record(self._our_path, self._stock_path))
            self._prepare_bundle(bundle, container)
            if source:
                self._prepare_restore(source, bundle, container, request, options)
            bundle.write()
            response = self.forward(call, request.encode())
            failed = not response.ok
        except BaseException:
            self._undo_create(container)
            raise
        if failed:
            self._undo_create(container)
        else:
            self._group = self._group or bool(self._containers)
            self._containers[request.id] = container
            self.stay_reachable(request.bundle)
            if options.shim_cgroup:
                self.join_cgroups(call, request.id)
        return response

    def _prepare_bundle(self, bundle: bundles.Bundle, container: Container) -> None:
        container.criu_config = bundle.annotations.get(bundles.CRIU_CONFIG)
        # The content is written by the operation that needs it: a container that is never snapshotted needs no CRIU.
        path = container.state.write(CRIU_CONF, "# written by fermata before each operation\n")
        bundle.annotate(bundles.CRIU_CONFIG, path)
        for edit in hostfiles.adopt(bundle.spec, container.state.path):
            self.log(
                "debug", "a host file became the container's own", container=container.state.id, reason=edit.reason
            )
        container.edits = [(edit.annotation, edit.text) for edit in specedits.apply(bundle.spec)]
        if netns.choose(bundle.spec, bundle.annotations.get(bundles.NETNS)).kind == netns.PRIVATE:
            container.netns = netns.create(container.state.namespace, container.state.id)
            netns.enter(bundle.spec, container.netns)

    def _prepare_restore(
        self,
        source: str,
        bundle: bundles.Bundle,
        container: Container,
        request: task.CreateTaskRequest,
        options: task.RuncOptions,
    ) -> None:
        from shim import restore, stdio, unfinished

        container.restore_source = source
        container.substitute = stdio.Substitute(request, container.state.path)
        container.stdio = (request.stdin, request.stdout, request.stderr)
        container.timeline = timeline = restore.Timeline(self.log, container.state.id)
        if container.account is not None:
            container.account.steps = timeline.steps
        explicit = bool(request.checkpoint or options.criu_image_path)
        manifest = restore.check(source, container, bundle, self.config, self.log, explicit=explicit)
        container.weights = restore.hold_weights(manifest, source, bundle, container, self.config, log=self.log)
        timeline.step("check")
        bundle.leave_cgroup(manifest.data, container.state.namespace, container.state.id)
        container.restore_gpu = manifest.data.get("gpu")
        container.taken = manifest.data.get("taken")
        container.restore_logs = container.state.new_log_dir("restore")
        container.runc_directory = unfinished.runc_directory(options.root, self._namespace, request.id)
        if explicit:
            container.replaced = unfinished.replacing(container.rootfs.upper)
        else:
            container.empty_upper = container.rootfs.empty_upper()
        # Until it is done, whoever cleans up after a crash finds by this what nobody else would know of.
        container.state.write(
            unfinished.RECORD,
            unfinished.record(container.runc_directory, upper=container.empty_upper, replaced=container.replaced),
        )
        restore.write_criu_config(container, self.config, self.log)
        container.applied = restore.apply_layer(manifest, source, container, explicit=explicit)
        timeline.step("layer")
        if container.account is not None:
            container.account.tell(manifest.data)
        self.log(
            "debug",
            "restoring",
            container=container.state.id,
            snapshot=source,
            entries=(manifest.layer or {}).get("entries", 0),
        )
        container.images = restore.images(source, bundle)
        request.checkpoint = source if container.images is None else container.images.path
        options.criu_image_path = ""
        options.criu_work_path = container.restore_logs
        request.options = AnyMessage(type_url=task.RUNC_OPTIONS, value=options.encode())

    def _undo_create(self, container: Container) -> None:
        container.close()
        self._take_back_layer(container)
        forget(container.state.namespace, container.state.id)

    def _take_back_layer(self, container: Container) -> None:
        applied, container.applied = container.applied, None
        if applied is None:
            return
        try:
            applied.undo()
        except Exception as error:
            self.log("error", "the restored layer could not be taken back", container=container.state.id, error=error)

    # Start -------------------------------------------------------------------------------------------------------

    def start(self, call: Call) -> Response:
        """Hand off; the first start of a restoring container is the restore."""
        request = task.ExecRequest.decode(call.request.payload)
        container = self._containers.get(request.id)
        if request.exec_id or container is None or container.restore_source is None:
            return self.forward(call)
        record, container.restore_gpu = container.restore_gpu, None
        if not record or not record.get("processes"):
            return self._restore(call, container)
        gpu = self._gpu(call, container)
        gpu.prepare()  # the driver gets ready while CRIU restores
        try:
            return self._restore(call, container, lambda: gpu.after_restore(record))
        finally:
            gpu.dismiss()

    def _restore(
        self, call: Call, container: Container, move_gpu_state: Callable[[], object] | None = None
    ) -> Response:
        from shim import attempt, mounts, network, orphans, restore, stdio, unfinished

        request = task.ExecRequest.decode(call.request.payload)
        assert container.restore_source is not None
        call.account = container.account
        if call.account is not None:
            call.account.resume()
        timeline = container.timeline
        assert timeline is not None
        timeline.resume()

        def note(text: str) -> None:
            self.log("info", text, container=request.id)

        watch = orphans.Watch(container.restore_logs or "", note)
        fresh = attempt.Attempt((container.spec.get("linux") or {}).get("cgroupsPath") or "")
        container.state.write(
            unfinished.RECORD,
            unfinished.record(
                container.runc_directory,
                upper=container.empty_upper,
                cgroup=fresh.record,
                replaced=container.replaced,
            ),
        )
        around = network.Restore(container.spec, container.bundle, container.restore_source, self.config, note)
        limit = restore.Limit(self.config.restore_timeout, lambda: unfinished.end(container.restore_logs or ""))
        with around, watch, limit:
            container.restoring = True
            try:
                with stdio.Held(container.stdio):
                    response = self.forward(call)
            finally:
                container.restoring = False
            if response.ok:
                around.settle(task.PidResponse.decode(response.payload).pid)
        if response.status is not None and response.status.code:
            response.status.message = restore.explain_failure(container, response.status.message)
            if limit.passed:
                if container.account is not None:
                    container.account.cause = "timeout"
                response.status.message = (
                    f"restore of {container.restore_source} failed: CRIU had not come to an end after "
                    f"{self.config.restore_timeout} s ([criu] restore_timeout); "
                    f"log: {container.restore_logs}/restore.log"
                )
            if killed := fresh.undo():
                note(f"killed {killed} processes that waited for a CRIU which is dead")
            # A runc that was killed leaves a root file system mounted there, and then every delete of it fails.
            for path in mounts.detach_below(container.runc_directory):
                note(f"unmounted {path}, which a killed runc left")
            return response
        timeline.step("criu")
        if container.weights is not None:
            moved = self._give_weights(call, container, response, move_gpu_state)
        else:
            moved = False
            if container.guest:
                self._check_weights(call, container, response)
        try:
            container.state.drop(unfinished.RECORD)
        except OSError as error:  # the container runs: only after a crash would it be cleaned up after too much
            self.log("warning", "the record of the restore stays", container=request.id, error=error)
        source, container.restore_source = container.restore_source, None
        if container.images is not None:
            container.images.close()
        applied, container.applied = container.applied, None
        if applied is not None:
            try:
                applied.commit()
            except Exception as error:  # the container runs: what it had before only takes room
                self.log("warning", "the former writable layer stays", container=request.id, error=error)
        if move_gpu_state is not None and not moved:
            move_gpu_state()
            timeline.step("gpu")
        try:
            timeline.keep(container, source, container.taken)
        except OSError as error:  # a full disk is no reason to call a container that runs a failure
            self.log("warning", "the times of the restore cannot be kept", container=request.id, error=error)
        return response

    # GPU state ---------------------------------------------------------------------------------------------------

    def _handler(self, service: str, method: str) -> Callable[[Call], Response] | None:
        # The names stand here too, so that a container without snapshots does not import what moves GPU state.
        if service == "fermata.v1.Guest":
            return self.guest_call
        if service == "fermata.v1.Gpu":
            return self.gpu_call
        handler = super()._handler(service, method)
        if handler is None or method not in ("Create", "Start", "Checkpoint"):
            return handler
        return lambda call: self._accounted(handler, call)

    def _gpu(self, call: Call, container: Container) -> Gpu:
        from shim.parking import Gpu

        # Calls of our own, so without the time limit that a client set for the call that needs them.
        origin = Call(Request(service=container.service, metadata=call.request.metadata))
        return Gpu(
            container,
            lambda method, payload: self.forward_checked(origin, payload, method=method),
            self.config,
            self.log,
        )

    def gpu_call(self, call: Call) -> Response:
        """`Park` and `Unpark`, which `fermata park` and `fermata unpark` make."""
        from shim.parking import METHODS, Report

        request = task.IdRequest.decode(call.request.payload)
        container = self._containers.get(request.id)
        if container is None:
            raise ShimError(f"no container {request.id} here", NOT_FOUND)
        if call.request.method not in METHODS:
            raise ShimError(f"no call {call.request.method}: there are {', '.join(METHODS)}", UNIMPLEMENTED)
        with container.take:  # waits for a snapshot that is being taken
            gpu = self._gpu(call, container)
            if call.request.method == "Park":
                text = gpu.park()
            else:
                text = gpu.unpark()
                self._pay(call, container)
        return Response(payload=Report(text=text).encode())

    def resume(self, call: Call) -> Response:
        """Hand off; a parked container's GPU state is moved back, since its processes could only wait for it."""
        container = self._containers.get(task.IdRequest.decode(call.request.payload).id)
        if container is None or not os.path.exists(f"{container.state.path}/parked.json"):
            return self.forward(call)
        with container.take:
            self._gpu(call, container).unpark()
            self._pay(call, container)
        return Response()

    # Weights -----------------------------------------------------------------------------------------------------

    def _guest(self, call: Call, container: Container, directory: str) -> Taking | WithoutGuest:
        """What keeps the weights of a container's programs out of a snapshot."""
        if not container.guest:
            from shim.take import WithoutGuest

            return WithoutGuest()
        from shim.guest import Taking

        return Taking(container, self._of_our_own(call, container), self.config, self.log, directory)

    def _of_our_own(self, call: Call, container: Container) -> Callable[[str, bytes], bytes]:
        """Makes calls without the time limit that a client set for the call that needs them."""
        origin = Call(Request(service=container.service, metadata=call.request.metadata))
        return lambda method, payload: self.forward_checked(origin, payload, method=method)

    def _give_weights(
        self, call: Call, container: Container, started: Response, move_gpu_state: Callable[[], object] | None
    ) -> bool:
        """Give the restored programs their weights, and the GPU state before; True. Without them nothing runs on.

        Raises ShimError, and then the container has ended.
        """
        weights, timeline = container.weights, container.timeline
        assert weights is not None and timeline is not None

        def between() -> None:
            if move_gpu_state is not None:
                move_gpu_state()
                timeline.step("gpu")

        try:
            weights.bring_back(task.PidResponse.decode(started.payload).pid, between)
        except Exception as error:
            self._end(call, container)
            code = error.code if isinstance(error, ShimError) else FAILED_PRECONDITION
            raise ShimError(f"restore of {container.restore_source} failed: {error}", code) from error
        finally:
            weights.close()
        timeline.step("weights")
        return True

    def _check_weights(self, call: Call, container: Container, started: Response) -> None:
        """None of the restored programs is without its weights. Raises ShimError, and then the container has ended."""
        from shim import guest

        root = f"/proc/{task.PidResponse.decode(started.payload).pid}/root"
        if lost := guest.forgotten(root, (), self.log, container.state.id):
            self._end(call, container)
            raise ShimError(f"restore of {container.restore_source} failed: {lost}", lost.code)

    def _pay(self, call: Call, container: Container) -> None:
        """Give a container that was parked in the middle of a take the weights that it is without since.

        Raises ShimError, and then the container has ended.
        """
        if not container.guest:
            return
        from shim import guest

        try:
            guest.pay(
                container.state, guest.root_of(container.state.id, self._of_our_own(call, container)), self.config
            )
        except ShimError:
            self._end(call, container)
            raise

    def _end(self, call: Call, container: Container) -> None:
        """Kill a container that must not go on, and wait for its end."""
        make, name = self._of_our_own(call, container), container.state.id
        until = time.monotonic() + _END
        try:
            while True:
                state = task.StateResponse.decode(make("State", task.ExecRequest(id=name).encode()))
                if state.status == task.STOPPED:
                    break
                if state.status in (task.PAUSED, task.PAUSING):  # parked: its GPU state could not come back
                    make("Resume", task.IdRequest(id=name).encode())
                make("Kill", task.KillRequest(id=name, signal=9, all=True).encode())
                if time.monotonic() > until:
                    break
                time.sleep(0.02)
            container.state.drop("parked.json")
        except (ShimError, OSError) as error:
            self.log("warning", "the container may run on without its weights", container=name, error=error)

    def guest_call(self, call: Call) -> Response:
        """`Status`, which `fermata checkpoint --when-ready` asks for."""
        from shim import guest

        request = task.IdRequest.decode(call.request.payload)
        container = self._containers.get(request.id)
        if container is None:
            raise ShimError(f"no container {request.id} here", NOT_FOUND)
        if call.request.method != "Status":
            raise ShimError(f"no call {call.request.method}: there is Status", UNIMPLEMENTED)
        if not container.guest:
            raise ShimError(
                f"{request.id} cannot say when it is ready: it was started without the annotation {specedits.GUEST}=on",
                FAILED_PRECONDITION,
            )
        return Response(payload=guest.status(guest.root_of(request.id, self._of_our_own(call, container))).encode())

    # Checkpoint --------------------------------------------------------------------------------------------------

    def checkpoint(self, call: Call) -> Response:
        """Take a snapshot. Refused before the container is touched where it cannot work."""
        from shim import library

        if library.changed():
            raise ShimError(
                "another version of fermata was installed since this container was started, and this installation does "
                "not keep the former one for it: start the container anew",
                FAILED_PRECONDITION,
            )
        from shim.account import TAKE, Account
        from shim.take import Take

        request = task.CheckpointTaskRequest.decode(call.request.payload)
        container = self._containers.get(request.id)
        if container is None:
            return self.forward(call)  # not ours to know: the stock shim says what it thinks of the id
        options = _checkpoint_options(request)
        directory = options.image_path or request.path
        call.account = account = Account(TAKE, request.id, directory, self.config, self.log)
        if container.restore_source is not None:  # its CRIU configuration is that of the restore
            raise ShimError(
                f"{request.id} has not been restored yet: take a snapshot once it runs", FAILED_PRECONDITION
            )
        if not container.take.acquire(False):
            account.cause = "busy"
            raise ShimError(
                f"a snapshot of {request.id} is being taken already: wait for it, then try again", FAILED_PRECONDITION
            )
        try:
            gpu = self._gpu(call, container)
            # Without the client's time limit: at its end the stock shim would kill runc, and CRIU would finish the
            # dump, and the container, with nobody to take the snapshot in. The take itself minds the limit.
            patient = Call(
                Request(service=call.request.service, method=call.request.method, metadata=call.request.metadata)
            )
            # containerd 1.7 hands over an empty directory of its own, which it packs, unless the runtime is named runc.
            with self._guest(call, container, directory) as guest:
                take = Take(
                    container,
                    directory,
                    options,
                    self.config,
                    self.log,
                    gpu=gpu,
                    guest=guest,
                    deadline=call.deadline,
                    account=account,
                )

                def dump(payload: bytes) -> Response:
                    exits = options.exit
                    return guest.dump(
                        lambda: gpu.dump(lambda: self.forward(patient, payload), exits=exits), exits=exits
                    )

                return guest.checked(take.run(dump))
        finally:
            container.take.release()

    # Kill and Delete ---------------------------------------------------------------------------------------------

    def kill(self, call: Call) -> Response:
        """Hand off; a restore is ended first, since the stock shim answers no Kill before its end, if it has one."""
        request = task.KillRequest.decode(call.request.payload)
        if request.signal == 9 and not request.exec_id:
            self._end_restore(request.id, "Kill")
        return self.forward(call)

    def _end_restore(self, container_id: str, method: str) -> None:
        container = self._containers.get(container_id)
        if container is not None and container.restoring and container.restore_logs is not None:
            from shim import unfinished

            if container.account is not None:
                container.account.cause = "killed"
            ended = unfinished.end(container.restore_logs)
            self.log("info", f"{method} ends the restore", container=container_id, processes=len(ended))

    def delete(self, call: Call) -> Response:
        """Hand off; with the container goes everything that was made for it.

        containerd 1.7 deletes a container that it finds half made after its own restart, without a Kill before.
        """
        request = task.ExecRequest.decode(call.request.payload)
        if not request.exec_id:
            self._end_restore(request.id, "Delete")
        response = self.forward(call)
        if response.ok and not request.exec_id:
            container = self._containers.pop(request.id, None)
            if container is not None:
                container.close()
                # After a failed restore the root file system is unmounted by now, and the layer can go back.
                self._take_back_layer(container)
                forget(container.state.namespace, container.state.id)
            if self._group and not self._containers:
                _thread.start_new_thread(self._end_group, ())
        return response

    def _end_group(self) -> None:
        """End the stock shim of a pod that is gone, and ourselves with it.

        containerd 2.x asks for that once, when it deletes the pod's first container. Where another one was being
        started at that moment, the stock shim stays for its sake, and nobody asks again.
        """
        time.sleep(_GROUP_LINGER)
        if not self._containers:
            stock.end_unused(self._stock_path)


def _runc_options(request: task.CreateTaskRequest) -> task.RuncOptions:
    given = request.options
    if given is None or not given.value:
        return task.RuncOptions()
    if given.type_url == task.RUNC_OPTIONS:
        return task.RuncOptions.decode(given.value)
    # The stock shim takes no options but runc's.
    if given.type_url == task.LEGACY_RUNC_OPTIONS:
        options = task.LegacyRuncOptions.decode(given.value).modern()
    elif given.type_url == task.GENERIC_OPTIONS:
        from shim import runtimeoptions

        options = runtimeoptions.read(task.GenericOptions.decode(given.value))
    else:
        raise ShimError(
            f"the runtime options are of type {given.type_url}; fermata takes runc's, {task.RUNC_OPTIONS}",
            INVALID_ARGUMENT,
        )
    request.options = AnyMessage(type_url=task.RUNC_OPTIONS, value=options.encode())
    return options


def _checkpoint_options(request: task.CheckpointTaskRequest) -> task.CheckpointOptions:
    if request.options is None or not request.options.value:
        return task.CheckpointOptions()
    if request.options.type_url == task.LEGACY_CHECKPOINT_OPTIONS:
        return task.LegacyCheckpointOptions.decode(request.options.value).modern()
    if request.options.type_url != task.CHECKPOINT_OPTIONS:
        raise ShimError(
            f"the checkpoint options are of type {request.options.type_url}; fermata takes {task.CHECKPOINT_OPTIONS}",
            INVALID_ARGUMENT,
        )
    return task.CheckpointOptions.decode(request.options.value)


def _restore_source(request: task.CreateTaskRequest, options: task.RuncOptions, bundle: bundles.Bundle) -> str | None:
    """The snapshot directory to restore from: the client's, or the annotation's.

    Raises ShimError when they name two different ones.
    """
    by_client = request.checkpoint or options.criu_image_path
    by_annotation = bundle.annotations.get(bundles.RESTORE_FROM)
    if by_client and by_annotation and os.path.realpath(by_client) != os.path.realpath(by_annotation):
        raise ShimError(
            f"two snapshots to restore from: the client names {by_client}, the annotation {bundles.RESTORE_FROM} names "
            f"{by_annotation}; leave one out",
            INVALID_ARGUMENT,
        )
    return by_client or by_annotation or None
