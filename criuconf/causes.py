"""What the lines in CRIU's logs mean, and what to do.

One row for each cause: a pattern for the message behind `Error (file:line): `, what it means, and the remedy. Groups of
the pattern fill the placeholders. Rows are tried in order, so the special ones stand before the general ones. For every
row there is a log in tests/unit/criuconf/logs that was seen in the wild or made here by letting it happen.

The messages are those of CRIU 3.11 to 4.3: the wording changed little, the line numbers with every version.
"""

from __future__ import annotations

ERROR = "Error"
WARN = "Warn"
TEXT = "text"  # a line that is none of the log's: from CRIU's command line, or from runc about CRIU


class Cause:
    """One row. `vague`: a symptom, taken only where no row that names a cause fits."""

    __slots__ = ("level", "meaning", "name", "pattern", "remedy", "vague")

    def __init__(
        self, name: str, pattern: str, meaning: str, remedy: str, *, level: str = ERROR, vague: bool = False
    ) -> None:
        self.name = name
        self.pattern = pattern
        self.meaning = meaning
        self.remedy = remedy
        self.level = level
        self.vague = vague


CAUSES: tuple[Cause, ...] = (
    # --- devices and kernel objects behind descriptors and mappings
    Cause(
        "gpu-descriptor",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \(chr (?P<device>195:\d+)",
        "a process holds an NVIDIA device (chr {device}, descriptor {fd}) open: its GPU state was not moved out",
        "start CUDA workers by spawn, not fork (VLLM_WORKER_MULTIPROC_METHOD=spawn)",
    ),
    Cause(
        "render-descriptor",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \(chr (?P<device>226:\d+)",
        "a process holds a graphics device (DRM, chr {device}) open on descriptor {fd}, which CRIU cannot save",
        "run the container without /dev/dri, or close the device before the snapshot",
    ),
    Cause(
        "fuse-descriptor",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \(chr 10:229",
        "a process serves a FUSE file system (/dev/fuse on descriptor {fd}); the kernel's half of it cannot be saved",
        "mount the file system on the node and give it to the container as a volume",
    ),
    Cause(
        "device-descriptor",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \((?P<kind>chr|blk) (?P<device>\d+:\d+)",
        "a process holds the device {kind} {device} open on descriptor {fd}; its driver's state cannot be saved",
        "close it before the snapshot, or run the container without that device (`ls -l /dev` shows {device})",
    ),
    Cause(
        "io-uring",
        r"(?:Unknown shit \d+ \(anon_inode:\[io_uring\]|Can't dump file \d+ of that type .*anon_inode:\[io_uring\])",
        "a process uses io_uring, whose rings CRIU cannot save",
        "take the annotation fermata/io-uring: allow away, so that the program falls back, or turn io_uring off in it",
    ),
    Cause(
        "io-uring-descriptor",
        r"send_fds failed \(-22\)",
        "a process holds a descriptor that the kernel lets nobody pass on; io_uring is the one such kind",
        "take the annotation fermata/io-uring: allow away, so that the program falls back, or turn io_uring off in it",
    ),
    Cause(
        "kernel-object",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \(\S+ anon_inode:\[?(?P<what>[\w.-]+)",
        "a process holds a kernel object of the kind {what} on descriptor {fd}, which CRIU cannot save",
        "turn off what opens it in the program (a profiler, a sandbox, a debugger), or close it before the snapshot",
    ),
    Cause(
        "secret-memory",
        r"Unknown shit \d+ \(/secretmem",
        "a process uses memory of memfd_secret(2), which nobody but that process may read",
        "turn the use of secret memory off in the program",
    ),
    Cause(
        "kernel-object-mapping",
        r"Unknown shit \d+ \(anon_inode:\[?(?P<what>[\w.-]+)",
        "a process has memory of a kernel object of the kind {what} mapped, which CRIU cannot save",
        "turn off what maps it in the program (a profiler, for perf_event)",
    ),
    Cause(
        "device-mapping",
        r"Can't handle non-regular mapping(?: on (?P<pid>\d+)'s map (?P<address>[0-9a-f]+))?",
        "process {pid} has a device's memory mapped (a GPU's, mostly), which CRIU cannot save",
        "GPU state has to be moved out first: look for a GPU error before this one",
    ),
    Cause(
        "cuda-plugin",
        r"cuda_plugin: (?P<what>.*)",
        "CRIU's own CUDA plugin was loaded and failed ({what}); it pauses GPU processes by rules of its own",
        "fermata moves GPU state itself: take `libdir` out of the container's own CRIU configuration",
    ),
    # --- watches
    Cause(
        "lost-watch",
        r"fsnotify:\s+Can't dump that handle",
        "a process watches a file (inotify, fanotify) whose path CRIU cannot find, before 4.3 any on overlayfs",
        "install criu >= 4.3, or give the watched folder by irmap-scan-path in [criu.options] of config.toml",
    ),
    Cause(
        "watch-refused",
        r"fsnotify: Can't add watch for (?P<watch>\S+) with \S+: (?P<error>.*)",
        "the kernel refused to watch again what was watched before the dump ({error})",
        "see that the watched path exists and that fs.inotify.max_user_watches is as large as on the other node",
    ),
    # --- sockets
    Cause(
        "unix-socket-outside",
        r"unix: External socket is used",
        "a unix socket's other end is a process outside the container (a log daemon, a display, the node's D-Bus)",
        "close it before the snapshot; for datagrams `ext-unix-sk = true` in [criu.options] of config.toml helps",
    ),
    Cause(
        "unix-stream-outside",
        r"unix: Can't dump half of stream unix connection(?:\. name: (?P<name>.*); peer name: (?P<peer>.*?))?\.?$",
        "a unix stream connection's other end ({peer}) is outside the container; half of a connection cannot be saved",
        "close the connection before the snapshot, or run its other end in the same container",
    ),
    Cause(
        "unix-socket-outside-image",
        r"unix: External socket found in image",
        "the snapshot has a unix socket whose other end was outside the container, and the restore does not allow it",
        "set `ext-unix-sk = true` in [criu.options] of config.toml",
    ),
    Cause(
        "tcp-connected",
        r"Connected TCP socket, consider using",
        "a TCP connection is open, and tcp-established is switched off for this container",
        "take no-tcp-established out of [criu.options] of config.toml or of the container's own CRIU configuration",
    ),
    Cause(
        "tcp-connected-image",
        r"Connected TCP socket in image",
        "the snapshot has an open TCP connection, and tcp-established is switched off for this restore",
        "take no-tcp-established out of [criu.options] of config.toml or of the container's own CRIU configuration",
    ),
    Cause(
        "tcp-close-missing",
        r"Need to set the --tcp-close options",
        "the snapshot was taken with tcp-close, and the restore was not told so",
        "set `tcp-close = true` in [criu.options] of config.toml here too, or in the container's CRIU configuration",
    ),
    Cause(
        "tcp-in-flight",
        r"In-flight connection \(l\)",
        "a TCP connection waits at a listening socket and is not accepted yet",
        "try again, or set `skip-in-flight = true` in [criu.options] of config.toml, which drops such connections",
    ),
    Cause(
        "multipath-tcp",
        r"Unsupported proto 262 for socket",
        "a process uses multipath TCP (Go programs do by default), which CRIU cannot save",
        "set GODEBUG=multipathtcp=0 in the container's environment, or turn MPTCP off in the program",
    ),
    Cause(
        "socket-family",
        r"(?:BUG! )?Unknown socket collected \(family (?P<family>\d+)\)",
        "a process has a socket of address family {family}, which CRIU cannot save (40 is vsock, 38 kernel crypto)",
        "close it before the snapshot, or turn off what opens it in the program",
    ),
    Cause(
        "socket-options-moved",
        r"Can't get 1:(?:16|34) opt: Operation not supported",
        "this CRIU can save no network socket on this kernel (from 6.16 on, SO_PASSCRED is for unix sockets only)",
        "install criu >= 4.2",
    ),
    Cause(
        "netlink-data",
        r"The socket has data to read",
        "a netlink socket has messages that the process has not read yet, which this CRIU cannot save",
        "try again, or install criu >= 4.0",
    ),
    Cause(
        "corked-socket",
        r"Can't dump corked dgram socket",
        "a UDP socket holds back data (UDP_CORK, MSG_MORE), which CRIU cannot save",
        "try again; if it stays so, let the program flush the socket",
    ),
    Cause(
        "port-taken",
        r"Can't bind inet socket.*: Address (?:already )?in use",
        "a port that the container had is taken in the network namespace that it is restored into",
        "give it a network namespace of its own (annotation fermata/netns: private), or stop what has the port",
    ),
    Cause(
        "address-missing",
        r"Can't (?:bind|connect) inet socket(?: back)?.*: Cannot assign requested address",
        "a socket's IP address does not exist in the network namespace that the container is restored into",
        "give the new container the same address, or use `tcp-close = true` in [criu.options] and listen on 0.0.0.0",
    ),
    Cause(
        "network-down",
        r"Can't connect inet socket back: Network is unreachable",
        "a TCP connection was open, and in the network namespace of the restore no interface is up, not even lo",
        "give it a network namespace that is set up before (annotation fermata/netns: private, or a CNI's)",
    ),
    Cause(
        "unix-name-taken",
        r"unix: Can't bind id .*: Address already in use",
        "the name of a unix socket is taken in this network namespace (CUDA's cuda-uvmfd-… is one such name)",
        "give it a network namespace of its own (annotation fermata/netns: private), or stop what has the name",
    ),
    Cause(
        "parallel-restores",
        r"Can't bind transport socket (?P<name>\S+): Address (?:already )?in use",
        "another restore is under way in the same network namespace, and CRIU gave both the same socket name",
        "restore one after the other, or in network namespaces of their own (annotation fermata/netns: private)",
    ),
    Cause(
        "network-namespace-missing",
        r"Unable to find an external netns: (?P<key>\S+)",
        "the container was dumped in a network namespace that was given to it, and the restore gives none",
        "give the new container a network namespace of its own (annotation fermata/netns: private)",
    ),
    Cause(
        "network-lock",
        r"(?:Locking network failed|Iptables configuration failed|Failed to lock TCP connection)",
        "CRIU could not hold the container's network still: nftables or iptables refused its rules",
        "see that nft or iptables-restore works in that namespace; `fermata flush-locks` removes leftover rules",
    ),
    # --- terminals, sessions, namespaces
    Cause(
        "terminal",
        r"tty: (?:Found dangling tty with sid|Found slave peer index \d+ without|ctty inheritance detected)",
        "a process is tied to a terminal outside the container (an exec -t, a debugger, a shell of the node)",
        "end what was started with that terminal, and start the container's own program without one",
    ),
    Cause(
        "not-a-session-leader",
        r"The root process (?P<pid>\d+) is not a session leader",
        "process {pid}, the container's first one, belongs to a session that began outside the container",
        "start the container anew through containerd, whose runtime makes it the leader of its session",
    ),
    Cause(
        "nested-namespace",
        r"Can't dump nested (?P<kind>\w+) namespace for (?P<pid>\d+)",
        "process {pid} has made a {kind} namespace of its own inside the container, which CRIU cannot save",
        "turn off the sandbox that makes it (a browser's, systemd's PrivateX=, unshare, a container in the container)",
    ),
    # --- files
    Cause(
        "link-remap",
        r"Can't create link remap for (?P<path>.*?)\. Use link-remap option",
        "{path} is open but its name is gone or covered by a mount, and link-remap is switched off for this container",
        "take no-link-remap out of the container's own CRIU configuration",
    ),
    Cause(
        "link-remap-leftover",
        r"Can't link remap to (?P<path>.*): File exists",
        "an earlier dump left its temporary link_remap file beside {path}",
        "remove the files link_remap.N in that folder and take the snapshot again",
    ),
    Cause(
        "link-remap-lost",
        r"Can't link (?P<link>\S*link_remap\.\d+) -> (?P<path>.*): No such file or directory",
        "the snapshot's files lack {link}, the temporary name of a file that was open though unlinked",
        "take the snapshot again with fermata, whose layer is written while CRIU still keeps that name",
    ),
    Cause(
        "ghost-too-large",
        r"Can't dump ghost file (?P<path>.*) of (?P<size>\d+) size, increase limit",
        "{path} is open and unlinked, and its {size} bytes are more than the ghost-limit",
        "set a larger ghost_limit (bytes) in [criu] of config.toml, or let the program close the file",
    ),
    Cause(
        "ghost-exists",
        r"Can't create ghost \w+: File exists",
        "a leftover of an earlier restore (NAME.cr.N.ghost) is where an unlinked open file has to be made again",
        "remove the files *.cr.*.ghost from the volume and restore again",
    ),
    Cause(
        "ghost-read-only",
        r"Can't create ghost \w+: Read-only file system",
        "an unlinked open file has to be made again in a file system that is read-only now",
        "mount that volume writable for the restored container, as it was for the dumped one",
    ),
    Cause(
        "file-locks",
        r"Some file locks are hold by dumping tasks",
        "a process holds file locks, and file-locks is switched off for this container",
        "take no-file-locks out of [criu.options] of config.toml or of the container's own CRIU configuration",
    ),
    Cause(
        "file-missing",
        r"Can't open file (?P<path>.*?) on restore: No such file or directory",
        "the file or folder {path}, which a process had open or mapped, is not there",
        "restore from the same image, with the same volumes; what is in a volume has to be as it was at the dump",
    ),
    Cause(
        "file-refused",
        r"Can't open file (?P<path>.*?) on restore: (?P<error>.*)",
        "the file {path}, which a process had open or mapped, cannot be opened ({error})",
        "see that it is of the same kind and may be opened the same way as when the snapshot was taken",
    ),
    Cause(
        "file-size",
        r"File (?P<path>.*) has bad size (?P<found>\d+) \(expect (?P<expected>\d+)\)",
        "{path} has {found} bytes and had {expected} when the snapshot was taken",
        "restore from the same image; a file in a volume has to be as it was at the dump",
    ),
    Cause(
        "file-mode",
        r"File (?P<path>.*) has bad mode (?P<found>0\d+) \(expect (?P<expected>0\d+)\)",
        "{path} has the mode {found} and had {expected} when the snapshot was taken",
        "give it that mode again, or set `skip-file-rwx-check = true` in [criu.options] of config.toml",
    ),
    Cause(
        "file-build",
        r"File (?P<path>.*) has bad build-ID",
        "{path} is another build of the program or library that was running when the snapshot was taken",
        "restore from the same image; for GPU libraries, on a node with the same driver version",
    ),
    # --- mounts
    Cause(
        "mount-outside",
        r"Can't lookup mount=\d+ for fd=(?P<fd>-?\d+) path=(?P<path>.*)",
        "descriptor {fd} of a process leads to {path} on a mount outside the container (its starter's terminal or log)",
        "start the container through containerd, with stdio of its own; an exec's descriptors count too",
    ),
    Cause(
        "mount-inside-mount",
        r"mnt: \d+:\.?(?P<path>.*?) doesn't have a proper root mount",
        "only part of the file system behind {path} is visible in the container, and CRIU cannot save such a mount",
        "give {path} to the container as a mount in its specification, not as a bind mount made from inside",
    ),
    Cause(
        "file-system-kind",
        r"mnt: FS mnt \.?(?P<path>\S+) dev \S+ root \S+ unsupported id",
        "a file system of a kind that CRIU cannot save was mounted at {path} from inside the container",
        "mount it on the node and give it to the container as a volume, or unmount it before the snapshot",
    ),
    Cause(
        "mount-inaccessible",
        r"mnt: The file system \S+ \S+ \(\S+\) (?P<kind>\S+) \.?(?P<path>\S+) is inaccessible",
        "the {kind} file system at {path} cannot be found by its device number (each btrfs subvolume has its own)",
        "keep what the container has open and watches on ext4, xfs or tmpfs",
    ),
    Cause(
        "mount-source-missing",
        r"mnt-v2: Failed to open_tree (?P<path>.*): No such file or directory",
        "the source {path} of a mount of the container is not on this node",
        "make it, or give the new container the mount with a source that exists here",
    ),
    Cause(
        "mount-missing",
        r"No mapping for (?:\d+:)?(?P<path>\S+) mountpoint",
        "a mount that the dumped container had ({path}) is not in the new container's specification",
        "give the new container the same mounts; `fermata inspect SNAPSHOT` lists them",
    ),
    # --- processes, identities, privileges
    Cause(
        "pid-taken",
        r"Can't fork for (?P<pid>\d+): File exists",
        "process id {pid}, which the restore needs, is taken",
        "restore into a pid namespace of its own (no host pid), and end what is left of an earlier restore",
    ),
    Cause(
        "thread-id-taken",
        r"Thread pid mismatch (?P<found>\d+)/(?P<wanted>\d+)",
        "a thread's id ({wanted}) was taken by something else while the restore was under way",
        "restore into a pid namespace of its own (no host pid), or try again",
    ),
    Cause(
        "process-gone",
        r"Unable to detach from (?P<pid>\d+): No such process",
        "process {pid} is gone: it ended before it could be saved, or was killed meanwhile",
        "see whether the container still runs, and what its own log says",
        vague=True,
    ),
    Cause(
        "capability-missing",
        r"CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability",
        "CRIU runs without the capabilities that it needs",
        "run containerd as root with all capabilities (CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_NET_ADMIN, CAP_SYS_RESOURCE)",
        level=TEXT,
    ),
    Cause(
        "capabilities-restore",
        r"Unable to restore capabilities: (?P<error>-?\d+)",
        "a process had capabilities that CRIU may not give here",
        "run containerd with all capabilities; inside a container or a user namespace some are missing",
    ),
    Cause(
        "seccomp",
        r"(?:sys_seccomp\(\)|SECCOMP_SET_MODE_FILTER|PR_SET_SECCOMP) returned (?P<error>-?\d+)",
        "the kernel refused to install a process's seccomp filter again ({error})",
        "restore on a node with a kernel at least as new, and with CONFIG_SECCOMP_FILTER",
    ),
    Cause(
        "seccomp-filter",
        r"SECCOMP_MODE_FILTER not currently supported",
        "this CRIU is too old to save seccomp filters, and the container has one",
        "install criu >= 4.0",
    ),
    Cause(
        "security-label-mismatch",
        r"mismatched lsm types and lsm profile specified",
        "the snapshot has AppArmor or SELinux labels of another kind than this node uses",
        "restore on a node with the same security module, or set no profile for the container on both",
    ),
    Cause(
        "security-label",
        r"can't write lsm profile (?P<error>-?\d+)",
        "the AppArmor or SELinux profile that a process had cannot be set here ({error})",
        "load the same profile on this node (a reboot may have lost it), or run the container unconfined on both",
    ),
    Cause(
        "security-module-missing",
        r"(?P<module>apparmor|selinux) LSM specified but \w+ not supported by kernel",
        "the configuration names a profile of {module}, which this node's kernel does not have",
        "take lsm-profile out of the CRIU configuration, or restore on a node with {module}",
    ),
    Cause(
        "traced",
        r"Unable to interrupt task: (?P<pid>\d+) \(Operation not permitted\)",
        "process {pid} may not be traced: a debugger or strace is attached to it, or CRIU lacks CAP_SYS_PTRACE",
        "end the debugger and take the snapshot again",
        level=WARN,
    ),
    Cause(
        "not-traceable",
        r"Can't attach to (?P<pid>\d+): Operation not permitted",
        "CRIU may not trace the restored process {pid}: SELinux, Yama, or a missing CAP_SYS_PTRACE forbids it",
        "look for a denial in the node's audit log, and run containerd with all capabilities",
    ),
    Cause(
        "unprivileged",
        r"Can't open (?P<pid>\d+)'s mapfile link \S+ Operation not permitted",
        "CRIU may not look at the memory of process {pid}: it runs without CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE",
        "run containerd as root with all capabilities",
    ),
    Cause(
        "chroot",
        r"Failed to unshare namespaces to check binfmt_misc sandboxing: Operation not permitted",
        "CRIU may not make a user namespace, as in a chroot; in other places the same line is harmless",
        "run containerd and CRIU in the node's own root (pivot_root, not chroot)",
        vague=True,
    ),
    Cause(
        "shared-memory-outside",
        r"Task (?P<pid>\d+) with SysVIPC shmem map @\S+ doesn't live in IPC ns",
        "process {pid} uses System V shared memory of the node's IPC namespace",
        "run the container with an IPC namespace of its own (no host IPC)",
    ),
    # --- the machine
    Cause(
        "vdso",
        r"vdso: (?:Unexpected rt vDSO area bounds|Can't find vDSO area in image|Failed to fill (?:self|compat) vdso)",
        "this CRIU does not know the layout of this kernel's vDSO: it is older than the kernel",
        "install criu >= 4.0",
    ),
    Cause(
        "cpu-instructions",
        r"cpu: CPU (?:instruction )?capabilities do not match run time",
        "the processes may use instructions of the processor that they were dumped on, and this one lacks some",
        "restore on a node with the same processor or a newer one; `criu cpuinfo check` compares",
    ),
    Cause(
        "cpu-registers",
        r"cpu: FPU feature required by image is not supported on host",
        "the snapshot has register state (AVX, AVX-512, AMX) that this processor does not have",
        "restore on a node with the same processor or a newer one; `criu cpuinfo check` compares",
    ),
    Cause(
        "memory",
        r"(?:Can't restore 0x[0-9a-f]+ mapping with 0xfffffffffffffff4|Unable to map ANON_VMA: Cannot allocate memory)",
        "there is not enough memory for a mapping of the process, or overcommit (vm.overcommit_memory) forbids it",
        "give the container at least the memory limit that it had, and see that the node has as much free",
    ),
    Cause(
        "locked-memory",
        r"Can't restore 0x[0-9a-f]+ mapping with 0xfffffffffffffff5",
        "a process had locked memory (mlock), and the limit of locked memory (RLIMIT_MEMLOCK) is too small here",
        "raise LimitMEMLOCK of containerd's service, or give the container CAP_IPC_LOCK",
    ),
    Cause(
        "cpuset",
        r"cg: Can't move .*into (?P<path>cpuset\S*).*: No space left on device",
        "the new container's cpuset cgroup has no processors or memory nodes set (cpuset.cpus, cpuset.mems)",
        "set cpus and mems for the container or for the cgroup above it",
    ),
    Cause(
        "cgroup",
        r"cg: (?:Can't move|Can't mount|Failed closing|couldn't mount) (?P<what>.*)",
        "CRIU could not put the processes into their cgroups ({what})",
        'set `manage-cgroups = "ignore"` in [criu.options] of config.toml: runc has made the cgroup already',
    ),
    Cause(
        "disk-full",
        r"(?P<what>.*): No space left on device",
        "the disk is full where CRIU writes ({what})",
        "free space: a snapshot takes as much as the processes' memory plus their changed files",
    ),
    Cause(
        "descriptor-limit",
        r"Can't retrieve FDs from socket",
        "CRIU could not take over a process's descriptors; most often its own limit of open files is smaller",
        "raise LimitNOFILE of containerd's service",
        vague=True,
    ),
    # --- images
    Cause(
        "images-missing",
        r"Unexpected EOF on \(?(?P<image>empty-image|[\w./-]+)",
        "the snapshot's image {image} is missing or empty, so this is no whole dump",
        "see that all of the snapshot's directory was copied; take it again",
    ),
    Cause(
        "image-damaged",
        r"(?:Head magic|Magic) doesn't match for (?P<image>\S+)",
        "the snapshot's image {image} is damaged or of another kind",
        "copy the snapshot's directory again; take it again",
    ),
    Cause(
        "image-short",
        r"Read (?P<found>\d+) bytes while (?P<expected>\d+) expected from (?P<image>\S+?):",
        "the snapshot's image {image} ends too early",
        "copy the snapshot's directory again; take it again",
    ),
    Cause(
        "pages-short",
        r"(?:Unexpected EOF reading pages data|Can't read pages data)",
        "the memory pages in the snapshot (pages-N.img) are missing or end too early",
        "copy the snapshot's directory again; take it again",
    ),
    # --- CRIU itself
    Cause(
        "script",
        r"Script (?P<path>.*) exited with (?P<status>-?\d+)",
        "the action script {path} failed, and CRIU stops when one does",
        "look for the script's own message before this line in the log",
    ),
    Cause(
        "program-missing",
        r"execvp\(\"(?P<program>[^\"]*)\", \.\.\.\) failed: (?P<error>.*)",
        "CRIU could not run {program} ({error})",
        "install it on the node (iptables for iptables-restore), or mend the path in the CRIU configuration",
    ),
    Cause(
        "plugin",
        r"Unable to load (?P<path>.*?): (?P<error>.*)",
        "CRIU could not load the plugin {path} ({error})",
        "take `libdir` out of the container's own CRIU configuration: fermata gives CRIU an empty plugin directory",
    ),
    Cause(
        "plugin-directory",
        r"Unable to open directory (?P<path>.*): No such file or directory",
        "the plugin directory {path} that the configuration names does not exist",
        "make it, or take `libdir` out of the container's own CRIU configuration",
    ),
    Cause(
        "compression",
        r"Memory page compression requires CRIU built with LZ4",
        "the configuration asks for compressed images, and this CRIU was built without LZ4",
        "take `compress` out of the configuration, or install a CRIU with LZ4 (`criu check --feature compress`)",
    ),
    Cause(
        "option-unknown",
        r"criu: unrecognized option '--(?P<option>[^']*)'",
        "this CRIU is too old for the option {option}, or there is none of that name",
        "take it out of the CRIU configuration, or install a newer criu",
        level=TEXT,
    ),
    Cause(
        "uninterruptible",
        r"Unseizable non-zombie (?P<pid>\d+) found, state (?P<state>\w),",
        "process {pid} could not be stopped (state {state}): it waits in the kernel (a disk, a network share, vfork)",
        "try again; if it stays so, see /proc/{pid}/stack, or set a larger `timeout` in [criu.options] of config.toml",
    ),
    Cause(
        "timeout",
        r"Timeout reached\. Try to interrupt",
        "the processes could not be stopped within CRIU's timeout (10 s unless set)",
        "try again, or set a larger `timeout` (seconds) in [criu.options] of config.toml",
        vague=True,
    ),
    Cause(
        "killed",
        r"(?P<pid>\d+) killed by signal (?P<signal>9)\b",
        "process {pid} was killed while it was restored, mostly for going over the container's memory limit",
        "give the new container at least the old one's memory limit; `dmesg` names a process killed for memory",
        vague=True,
    ),
    Cause(
        "crashed",
        r"(?P<pid>\d+) killed by signal (?P<signal>11|4|7)\b",
        "process {pid} crashed while it was restored (signal {signal}): mostly another processor, kernel or CRIU",
        "restore on a node like the one of the dump, or with a newer criu; `criu cpuinfo check` compares processors",
        vague=True,
    ),
    Cause(
        "criu-ended",
        r"read unixpacket .*EOF",
        "CRIU itself crashed or was killed in the middle",
        "look for criu in `dmesg`; before 4.3 CRIU crashes on network-lock in a configuration file",
        level=TEXT,
    ),
)

# Consequences: what CRIU says of a failure on its way out. Never the cause.
CONSEQUENCES = (
    r"(?:Pre-dumping|Dumping|Restoring|Lazy pages transfer) FAILED",
    r"\S+(?: \S+){0,6} \(pid: \d+\) failed with -?\d+$",
    r"Dump mappings|Dumping file-locks",
    r"Can't (?:make|obtain) \w+ ?(?:ns)? id$",
    r"Can't make \w+ id$",
    r"Unable to open fd=-?\d+ id=",
    r"`- Can't open vma",
    r"Can't open (?:cwd|root)$",
    r"Can't open \d+'s mapfile link",
    r"Failed fstatat on map",
    r"Can't open file .*: (?!.* on restore)[A-Z][\w ]+$",
    r"handle_device_vma plugin failed",
    r"(?:\S+ )?exited, status=\d+$",
    r"\d+ (?:exited|stopped by|killed by)",
    r"Task \d+ (?:exited|is in unexpected state)",
    r"Task stopped with \d+",
    r"Unable to detach from \d+",
    r"cg: cgroupd: ",
    r"Killing processes because of failure",
    r"Can't (?:catch|stop) all tasks",
    r"Can't dump page with parasite",
    r"Can't wait",
    r"Child (?:exited with an error|wasn't terminated|\d+ died too early)",
    r"Failed to (?:wait|switch restore stage)",
    r"(?:mnt: )?Can't remove the directory",
    r"Couldn't unlink remap",
    r"Restorer (?:fail|abnormal)",
    r"BUG at ",
    r"Message reply from daemon is trimmed",
    r"Communication error, this is not the ack",
    r"One of more action scripts failed",
    r"(?:Pre dump script failed|Aborting restore due to|P\w+-resume script ret code)",
    r"Namespaces dumping finished with error",
    r"Can't (?:create|restore|unshare) (?:net|mnt|net_ns|net-namespace|mntns)\b",
    r"In-flight connections can be ignored",
    r"For Go programs, consider using",
    r"\w+ (?:has )?failed when initializing kerndat",
    r"Failed to check binfmt_misc sandboxing support",
    r"Could not initialize kernel features detection",
    r"(?:inet|tcp): Failed to (?:un)?lock",
    r"Error parsing proc status file",
)

# Said in many logs of operations that succeed.
HARMLESS = (
    r"(?:rlimi[rt]: )?Can't setup RLIMIT_NOFILE for self",
    r"Unable to create the binfmt_misc file system",
    r"Failed to unshare namespaces to check binfmt_misc",
    r"binfmt_misc isn't mount",
    r"irmap: Can't stat /no-such-path",
    r"Write \d+ to /proc/self/loginuid failed",
    r"Can't open sysctl ",
    r"tun: Unable to create tun",
    r"fsnotify: Can't open file handle for",
    r"exited, status=\d+$",
)
