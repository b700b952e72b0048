"""A node with this machine's GPU, and containers that see this machine's own Python, torch and driver.

The containers' image is a few empty directories; /usr, /opt and /etc are the machine's, bind-mounted. So nothing has to
be packed, and the node needs no registry.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from node import Node, image
from node.stack import choose

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
HOST = "/host"  # where the node has the machine's directories
IMAGE = "fermata-gpu:latest"
TREES = ("/usr", "/opt", "/etc")
DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")


def driver_folder() -> str:
    """Where libcuda.so.1 is on this machine."""
    for folder in DRIVER_FOLDERS:
        if Path(folder, "libcuda.so.1").exists():
            return folder
    raise FileNotFoundError(f"no libcuda.so.1 in {', '.join(DRIVER_FOLDERS)}")


def mounts() -> list[str]:
    """The directories that containers get, each mount below them on its own: CRIU refuses what comes with an rbind."""
    trees = [tree for tree in (*TREES, sys.prefix, sys.base_prefix) if Path(tree).is_dir()]
    trees = [tree for tree in dict.fromkeys(trees) if not any(tree.startswith(f"{other}/") for other in trees)]
    below = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4]
        if Path(point).is_dir() and any(point.startswith(f"{tree}/") for tree in trees):
            below.append(point)
    return [*trees, *sorted(set(below))]


def devices() -> list[str]:
    """The driver's devices that a computing container needs."""
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    names += [path.name for path in Path("/dev").glob("nvidia[0-9]*")]
    return [f"/dev/{name}" for name in names if Path("/dev", name).exists()]


class Machine:
    """The node, and a folder that it shares with this process: `folder` here is /srv there."""

    def __init__(self) -> None:
        chosen = "sid" if os.environ.get("FERMATA_ROOT") else choose("auto")[0]
        self.node = Node.up(stack_name=chosen)
        try:
            self.folder = self.node.directory / "private" / "srv"
            self._give_host_directories()
            self._import_image()
            (self.node.path("/etc/fermata")).mkdir(exist_ok=True)
            library = f"{HOST}{driver_folder()}/libcuda.so.1" if chosen != "host" else ""
            self.settings = f'[gpu]\nlibcuda = "{library}"\n' if library else ""
            self.configure(self.settings)
        except BaseException:
            self.node.down()
            raise

    def configure(self, text: str) -> None:
        self.node.path("/etc/fermata/config.toml").write_text(text)

    def _give_host_directories(self) -> None:
        self.trees = mounts()
        self.graft(*(word for tree in self.trees for word in (tree, f"{HOST}{tree}")))

    def graft(self, *pairs: str) -> None:
        """Bind directories of this machine into the node: source, target, source, target…"""
        subprocess.run([sys.executable, str(HERE / "graft.py"), str(self.node.pid), *pairs], check=True, timeout=30)

    def _import_image(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.node.directory) as scratch:
            root = Path(scratch, "root")
            for name in ("io", "tests", "tmp", "root", "run", "var/tmp", "proc", "sys", "dev", *TREES):
                (root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for tree in self.trees:
                if not any(tree == top or tree.startswith(f"{top}/") for top in TREES):
                    (root / tree.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for name in ("bin", "sbin", "lib", "lib64"):
                if Path("/", name).is_symlink():
                    (root / name).symlink_to(f"usr/{name}")
            (root / "tmp").chmod(0o1777)
            archive = Path(scratch, "image.tar")
            self.image = self.node.import_image(image.from_directory(root, archive, IMAGE))

    def share(self, *parts: str) -> Path:
        """A new folder of the shared one, as this process sees it."""
        path = self.folder.joinpath(*parts)
        path.mkdir(parents=True)
        return path

    def inside(self, path: Path) -> str:
        """The same file as the node sees it."""
        return f"/srv/{path.relative_to(self.folder)}"

    def create_arguments(self, io: str) -> list[str]:
        """What `ctr run` needs for a container with a GPU; `io` is the folder of the node that it shares."""
        words = ["--runtime", "io.containerd.fermata.v1"]
        for device in devices():
            words += ["--device", device]
        for tree in self.trees:
            words += ["--mount", f"type=bind,src={HOST}{tree},dst={tree},options=bind:ro"]
        words += ["--mount", f"type=bind,src={io},dst=/io,options=bind:rw"]
        words += ["--mount", "type=bind,src=/srv/programs,dst=/tests,options=bind:ro"]
        environment = {
            "LD_LIBRARY_PATH": driver_folder(),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/root",
            "PYTHONUNBUFFERED": "1",
            "CUDA_CACHE_PATH": "/tmp/cuda",
        }
        for name, value in environment.items():
            words += ["--env", f"{name}={value}"]
        return words

    def programs(self) -> None:
        """Put the test programs where containers see them."""
        target = self.folder / "programs"
        target.mkdir(exist_ok=True)
        for path in (HERE / "programs").glob("*.py"):
            (target / path.name).write_bytes(path.read_bytes())

    def start(self, name: str, io: Path, *command: str, annotations: dict[str, str] | None = None) -> None:
        """Run a container in the background; its output goes to /tmp/log in it."""
        self.programs()
        words = self.create_arguments(self.inside(io))
        for key, value in (annotations or {}).items():
            words += ["--annotation", f"{key}={value}"]
        self.run(name, words, list(command))

    def run(self, name: str, words: list[str], command: list[str]) -> None:
        """`ctr run` with these arguments, of a Python program or, without one, of what is restored."""
        # In the writable layer: an open file of a shared folder would have to be of the same size at the restore.
        shell = 'exec "$0" "$@" </dev/null >/tmp/log 2>&1'
        argv = ["sh", "-c", shell, sys.executable, *command] if command else []
        self.node.ctr("run", "-d", "--null-io", *words, self.image, name, *argv, timeout=120)

    def remove(self, name: str) -> None:
        """Kill and delete a container, whatever is left of it."""
        self.node.ctr("task", "kill", "-s", "SIGKILL", name, check=False)
        until = time.monotonic() + 20
        while self.node.ctr("task", "delete", "-f", name, check=False).returncode and time.monotonic() < until:
            if "not found" in self.node.ctr("task", "ls", check=False).stdout or not self.task(name):
                break
            time.sleep(0.1)
        self.node.ctr("container", "delete", name, check=False)

    def task(self, name: str) -> str:
        """A task's state in ctr's words; empty when there is none."""
        for line in self.node.ctr("task", "ls").stdout.splitlines()[1:]:
            words = line.split()
            if words and words[0] == name:
                return words[2]
        return ""

    def log_of(self, name: str) -> str:
        """The kept logs' last fatal lines, for a case that failed."""
        text = ""
        for path in sorted((self.node.logs / "fermata" / "default" / name).glob("*/*.log"))[-2:]:
            lines = path.read_text(errors="replace").splitlines()
            text += f"{path.parent.name}/{path.name}:\n" + "\n".join(
                line for line in lines if "Error" in line or "Warn" in line
            )
        return text[-3000:]

    def pid(self, name: str) -> int:
        """The container's first process."""
        for line in self.node.ctr("task", "ls").stdout.splitlines()[1:]:
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
        raise LookupError(f"no task {name}")

    def output(self, name: str) -> str:
        """What a container's program printed."""
        try:
            return Path(f"/proc/{self.pid(name)}/root/tmp/log").read_text(errors="replace")[-2000:]
        except (OSError, LookupError) as error:
            return f"(no output: {error})"

    def down(self) -> None:
        self.node.down()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.down()
