"""Restoring: the check, the layer, CRIU's configuration, and the words when it fails."""

from __future__ import annotations

import os
import platform

from shim import manifest as manifests
from shim.errors import FAILED_PRECONDITION, ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from layerwriter import Applied
    from shim.config import Config
    from shim.snapshot import Container


def check(source: str, spec: dict[str, Any], config: Config) -> manifests.Manifest:
    """Read a snapshot and compare it with the new container and this node.

    Raises ShimError that names everything that does not fit, at once.
    """
    manifest = manifests.read(source)
    requires = manifest.data.get("requires")
    requires = requires if isinstance(requires, dict) else {}
    wrong = []
    if (machine := requires.get("architecture")) and machine != platform.machine():
        wrong.append(f"it was taken on {machine}, this node is {platform.machine()}: restore it on a node of its kind")
    mounts = requires.get("mounts")
    if isinstance(mounts, list):
        wrong += manifests.missing_mounts([mount for mount in mounts if isinstance(mount, dict)], spec)
    if manifest.layer:
        name = str(manifest.layer["file"])
        if "/" in name or not os.path.isfile(f"{source}/{name}"):
            wrong.append(f"its layer {name!r} is not in the directory: copy the snapshot again, whole")
    if not os.path.isfile(f"{source}/inventory.img"):
        wrong.append("CRIU's images are not in the directory: copy the snapshot again, whole")
    if manifest.data.get("gpu"):
        from shim import gpu

        wrong += gpu.missing(manifest, spec, open_driver=lambda: gpu.Helper(config))
    if wrong:
        raise ShimError(f"snapshot {source} cannot be restored here: {'; '.join(wrong)}", FAILED_PRECONDITION)
    return manifest


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
            xattr_prefix=container.rootfs.xattr_prefix,
        )
    except layerwriter.LayerError as error:
        raise ShimError(f"snapshot {source}: its layer cannot be unpacked: {error}", FAILED_PRECONDITION) from error


def write_criu_config(container: Container, config: Config) -> None:
    """Write the configuration with which runc's CRIU restores this container. Raises ShimError."""
    from shim.criu import write_config

    write_config(container, config, operation="restore")


def explain_failure(container: Container, message: str) -> str:
    """The stock shim's message of a failed restore, in CRIU's own last words where it left any."""
    from shim.criu import explain

    return explain(f"{container.restore_logs}/restore.log", message, f"restore of {container.restore_source} failed")
