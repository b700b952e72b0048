"""Restoring: the check, the layer, CRIU's configuration, and the words when it fails."""

from __future__ import annotations

import _thread
import os
import time

from shim import manifest as manifests
from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from layerwriter import Applied
    from shim.bundle import Bundle
    from shim.config import Config
    from shim.guest import Restoring
    from shim.log import Log
    from shim.snapshot import Container
    from shim.userns import Images


KEPT = "restore.json"
"""Beside a restore's logs: which snapshot, into which container, when, and the seconds of each step."""


class Timeline:
    """When a restore began and how long each of its steps took."""

    def __init__(self, log: Log, container_id: str) -> None:
        self._log = log
        self._id = container_id
        self.began = time.time()
        self.steps: dict[str, float] = {}
        self.resume()

    def resume(self) -> None:
        """Go on measuring after a pause that is not ours, such as between the client's Create and Start."""
        self._since = time.monotonic()

    def step(self, name: str) -> None:
        """What was done since the last step, or since `resume`, was this."""
        now = time.monotonic()
        self.steps[name] = round(now - self._since, 6)
        self._since = now
        self._log("debug", "restore step", container=self._id, step=name, seconds=f"{self.steps[name]:.3f}")

    def keep(self, container: Container, source: str, taken: object) -> None:
        """Write it beside the restore's logs. Raises OSError."""
        import json

        data = {
            "snapshot": source,
            "taken": taken,
            "container": container.state.id,
            "namespace": container.state.namespace,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "steps": self.steps,
        }
        with open(f"{container.restore_logs}/{KEPT}", "w", encoding="utf-8") as file:
            json.dump(data, file)


class Limit:
    """A context manager around something that `end` is called for when it takes longer than `seconds` (0: never).

    `passed` says whether it was.
    """

    def __init__(self, seconds: float, end: Callable[[], object]) -> None:
        self._seconds = seconds
        self._end = end
        self._over = _thread.allocate_lock()
        self.passed = False

    def __enter__(self) -> Limit:
        self._over.acquire()
        if self._seconds:
            _thread.start_new_thread(self._wait, ())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.release()

    def _wait(self) -> None:
        if not self._over.acquire(True, self._seconds):
            self.passed = True
            self._end()


def check(
    source: str, container: Container, bundle: Bundle, config: Config, log: Log, *, explicit: bool
) -> manifests.Manifest:
    """Read a snapshot and compare it with the new container and this node. `explicit`: the client itself names it.

    Raises ShimError that names everything that does not fit, at once; a container annotated `fermata/check: warn` has
    it in the log instead.
    """
    from shim.check import findings, refuse

    manifest = manifests.read(source)
    if not explicit:
        bundle.check_recorded_name(source, manifest.data)
    found = findings(source, manifest, config, bundle.spec, container.rootfs)
    refuse(source, [finding for finding in found if container.check == "refuse" or not finding.waivable])
    for finding in found:
        log("warning", finding.text, container=container.state.id, snapshot=source)
    return manifest


def hold_weights(
    manifest: manifests.Manifest, source: str, bundle: Bundle, container: Container, config: Config, *, log: Log
) -> Restoring | None:
    """What brings back the weights that were kept out of a snapshot; None when there are none. Raises ShimError.

    The directory for its programs' sockets is mounted whether the container is annotated or not: theirs come back.
    """
    record = manifest.data.get("guest")
    if not record:
        return None
    from shim import guest, specedits

    specedits.add_channel(bundle.spec)
    container.guest = True
    return guest.restoring(record, config, log, container.state.id, source)


def images(source: str, bundle: Bundle) -> Images | None:
    """A snapshot's directory as CRIU can read it in the container's user namespace; None without one.

    Raises ShimError.
    """
    if not (bundle.spec.get("linux") or {}).get("uidMappings"):
        return None
    from shim.userns import Images

    return Images(source, bundle.spec)


def prepare() -> None:
    """Import what a restore needs, which takes 20 ms, while there is something to wait for."""
    import criuconf
    import layerwriter
    from shim import attempt, check, criu, images, lockrules, network, nftables, orphans, sockets, stdio  # noqa: F401

    _ = (criuconf.probe, criuconf.render, layerwriter.apply)


def apply_layer(manifest: manifests.Manifest, source: str, container: Container, *, explicit: bool) -> Applied | None:
    """Unpack the layer into the new container's upper directory, which nothing has mounted yet.

    A client that restores explicitly means the container's files too, so what stands in its upper directory is replaced
    (`ctr c restore --rw` has put containerd's own diff there). A restore by annotation of a container that has files
    of its own is a container started for the second time, whose files must not be lost: refused.
    """
    import layerwriter

    if container.layer == "none" or manifest.layer is None:
        return None
    upper = container.rootfs.require_overlay(
        f"restore the writable layer of {source} into container {container.state.id}"
    )
    layer = manifest.layer
    if not explicit and any(os.scandir(upper)):
        raise ShimError(
            f"container {container.state.id} has files in its writable layer already, so it has run before: a restore "
            f"by annotation would lose them; create a new container to restore {source} again",
            FAILED_PRECONDITION,
        )
    try:
        return layerwriter.apply(
            f"{source}/{layer['file']}",
            upper,
            digest=str(layer.get("digest")),
            replace=explicit,
            keep_old=True,
            xattr_prefix=container.rootfs.xattr_prefix,
        )
    except layerwriter.LayerError as error:
        raise ShimError(f"snapshot {source}: its layer cannot be unpacked: {error}", FAILED_PRECONDITION) from error


def write_criu_config(container: Container, config: Config, log: Log) -> None:
    """Write the configuration with which runc's CRIU restores this container. Raises ShimError."""
    from shim.criu import write_config

    write_config(container, config, log, operation="restore")


def explain_failure(container: Container, message: str) -> str:
    """The stock shim's message of a failed restore, in CRIU's own last words where it left any."""
    from shim.criu import explain

    sentence, cause = explain(
        f"{container.restore_logs}/restore.log", message, f"restore of {container.restore_source} failed"
    )
    if container.account is not None:
        container.account.cause = container.account.cause or cause
    return sentence
