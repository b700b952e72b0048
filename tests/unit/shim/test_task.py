"""The options that a client of containerd 1.7 sends to a runtime whose name is not runc's."""

from __future__ import annotations

from shim import task
from shim.snapshot import _checkpoint_options, _runc_options
from shim.ttrpc import AnyMessage


def test_the_legacy_options_of_a_container_become_runcs():
    legacy = task.LegacyRuncOptions(no_new_keyring=True, shim_cgroup="/shims", io_uid=100000, criu_image_path="/images")
    request = task.CreateTaskRequest(options=AnyMessage(type_url=task.LEGACY_RUNC_OPTIONS, value=legacy.encode()))
    options = _runc_options(request)
    assert (options.no_new_keyring, options.shim_cgroup, options.io_uid) == (True, "/shims", 100000)
    assert options.criu_image_path == "/images"
    # What is handed off is of the type that runc's shim knows.
    assert request.options.type_url == task.RUNC_OPTIONS
    assert task.RuncOptions.decode(request.options.value).io_uid == 100000


def test_the_legacy_options_of_a_checkpoint_become_runcs():
    legacy = task.LegacyCheckpointOptions(exit=True, open_tcp=True, work_path="/work", image_path="/images")
    carried = AnyMessage(type_url=task.LEGACY_CHECKPOINT_OPTIONS, value=legacy.encode())
    options = _checkpoint_options(task.CheckpointTaskRequest(options=carried))
    assert (options.exit, options.open_tcp) == (True, True)
    assert (options.work_path, options.image_path) == ("/work", "/images")
