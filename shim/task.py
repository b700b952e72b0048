"""Messages of containerd's task API, and of runc's options inside them, as far as the shim reads or writes them.

The services `containerd.task.v2.Task` (containerd 1.7) and `containerd.task.v3.Task` (2.x) have the same messages.
Field numbers: containerd's api/runtime/task/v3/shim.proto, api/types/mount.proto and
api/types/runc/options/oci.proto. Fields that are not declared here are kept as they came.
"""

from __future__ import annotations

from shim.ttrpc import AnyMessage
from shim.wire import Message

SERVICES = ("containerd.task.v2.Task", "containerd.task.v3.Task")

RUNC_OPTIONS = "containerd.runc.v1.Options"
LEGACY_RUNC_OPTIONS = "containerd.linux.runc.CreateOptions"
CHECKPOINT_OPTIONS = "containerd.runc.v1.CheckpointOptions"
GENERIC_OPTIONS = "runtimeoptions.v1.Options"
LEGACY_CHECKPOINT_OPTIONS = "containerd.linux.runc.CheckpointOptions"

# StateResponse.status
CREATED, RUNNING, STOPPED, PAUSED, PAUSING = 1, 2, 3, 4, 5


class Mount(Message):
    """A mount as a snapshotter describes it."""

    FIELDS = {1: ("type", str), 2: ("source", str), 3: ("target", str), 4: ("options", [str])}
    type: str
    source: str
    target: str
    options: list[str]


class CreateTaskRequest(Message):
    """`Create`: make a container from a bundle; `checkpoint` names a directory to restore it from."""

    FIELDS = {
        1: ("id", str),
        2: ("bundle", str),
        3: ("rootfs", [Mount]),
        4: ("terminal", bool),
        5: ("stdin", str),
        6: ("stdout", str),
        7: ("stderr", str),
        8: ("checkpoint", str),
        10: ("options", AnyMessage),
    }
    id: str
    bundle: str
    rootfs: list[Mount]
    terminal: bool
    stdin: str
    stdout: str
    stderr: str
    checkpoint: str
    options: AnyMessage | None


class RuncOptions(Message):
    """runc's options of a container."""

    FIELDS = {
        1: ("no_pivot_root", bool),
        2: ("no_new_keyring", bool),
        3: ("shim_cgroup", str),
        4: ("io_uid", int),
        5: ("io_gid", int),
        6: ("binary_name", str),
        7: ("root", str),
        9: ("systemd_cgroup", bool),
        10: ("criu_image_path", str),
        11: ("criu_work_path", str),
    }
    no_pivot_root: bool
    no_new_keyring: bool
    shim_cgroup: str
    io_uid: int
    io_gid: int
    binary_name: str
    root: str
    systemd_cgroup: bool
    criu_image_path: str
    criu_work_path: str


class LegacyRuncOptions(Message):
    """The options that a client of containerd 1.7 sends to any runtime whose name does not begin with
    `io.containerd.runc`, meant for a shim that 1.7 has not any more; runc's own shim does not know the type.

    Source: containerd 1.7's runtime/linux/runctypes/runc.proto.
    """

    FIELDS = {
        1: ("no_pivot_root", bool),
        8: ("no_new_keyring", bool),
        9: ("shim_cgroup", str),
        10: ("io_uid", int),
        11: ("io_gid", int),
        12: ("criu_work_path", str),
        13: ("criu_image_path", str),
    }

    def modern(self) -> RuncOptions:
        """The same options as runc's shim knows them."""
        return RuncOptions(**{name: getattr(self, name) for name, _ in self.FIELDS.values()})


class GenericOptions(Message):
    """The options that containerd's CRI plugin sends to any runtime but `io.containerd.runc.v2`.

    `config_body` is the table `options` of the runtime in containerd's configuration, as TOML; `config_path` the value
    of its key ConfigPath, where it has one. Source: containerd's api/types/runtimeoptions/v1/api.proto.
    """

    FIELDS = {1: ("type_url", str), 2: ("config_path", str), 3: ("config_body", bytes)}
    config_path: str
    config_body: bytes


class ExecRequest(Message):
    """The identity that most calls begin with: a container, and one of its extra processes or "" for the first."""

    FIELDS = {1: ("id", str), 2: ("exec_id", str)}
    id: str
    exec_id: str


class IdRequest(Message):
    """Calls that concern a container as a whole: Pause, Resume, Pids, Stats, Connect, Shutdown."""

    FIELDS = {1: ("id", str)}
    id: str


class PidResponse(Message):
    """CreateTaskResponse and StartResponse."""

    FIELDS = {1: ("pid", int)}
    pid: int


class ConnectResponse(Message):
    """The shim's and the first process's pid."""

    FIELDS = {1: ("shim_pid", int), 2: ("task_pid", int), 3: ("version", str)}
    shim_pid: int
    task_pid: int
    version: str


class StateResponse(Message):
    """A process's state; `status` is one of the constants above."""

    FIELDS = {1: ("id", str), 2: ("bundle", str), 3: ("pid", int), 4: ("status", int), 9: ("exit_status", int)}
    id: str
    bundle: str
    pid: int
    status: int
    exit_status: int


class CheckpointTaskRequest(Message):
    """`Checkpoint`: write an image of the running container into the directory `path`."""

    FIELDS = {1: ("id", str), 2: ("path", str), 3: ("options", AnyMessage)}
    id: str
    path: str
    options: AnyMessage | None


class CheckpointOptions(Message):
    """runc's options of a checkpoint. `exit` ends the container after a successful dump."""

    FIELDS = {
        1: ("exit", bool),
        2: ("open_tcp", bool),
        3: ("external_unix_sockets", bool),
        4: ("terminal", bool),
        5: ("file_locks", bool),
        6: ("empty_namespaces", [str]),
        7: ("cgroups_mode", str),
        8: ("image_path", str),
        9: ("work_path", str),
        10: ("parent_path", str),
    }
    exit: bool
    open_tcp: bool
    external_unix_sockets: bool
    terminal: bool
    file_locks: bool
    empty_namespaces: list[str]
    cgroups_mode: str
    image_path: str
    work_path: str
    parent_path: str


class LegacyCheckpointOptions(Message):
    """As LegacyRuncOptions, of a checkpoint."""

    FIELDS = {
        **{number: field for number, field in CheckpointOptions.FIELDS.items() if number < 8},
        8: ("work_path", str),
        9: ("image_path", str),
    }

    def modern(self) -> CheckpointOptions:
        """The same options as runc's shim knows them."""
        return CheckpointOptions(**{name: getattr(self, name) for name, _ in self.FIELDS.values()})


class KillRequest(Message):
    """A signal for a process, or for all of the container's."""

    FIELDS = {1: ("id", str), 2: ("exec_id", str), 3: ("signal", int), 4: ("all", bool)}
    id: str
    exec_id: str
    signal: int
    all: bool


class ShutdownRequest(Message):
    """Ask a shim that serves no container any more to exit."""

    FIELDS = {1: ("id", str), 2: ("now", bool)}
    id: str
    now: bool


class RuntimeInfo(Message):
    """What `-info` prints: the runtime's name and more that is passed through."""

    FIELDS = {1: ("name", str)}
    name: str


class BootstrapResult(Message):
    """What `start` prints from containerd 2.3 on."""

    FIELDS = {1: ("version", int), 2: ("address", str), 3: ("protocol", str)}
    version: int
    address: str
    protocol: str
