"""The commands of the documentation: where they stand, which test runs them, and which ones none can run.

An indented block is commands, or data that DATA knows. Each command is in a section that SCENARIOS names, and is run by
tests/node/test_documentation.py (a pod's by tests/node/test_cri.py); or it is a line of NOT_RUN, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from node.containers import IMAGE
from node.stack import PROJECT

RUN_OURS = "ctr run -d --runtime io.containerd.fermata.v1 IMAGE {} sleep 1000"
SYNTAX = ("docs/cli.md:The command `fermata`", "docs/layer.md:The layer: a container's own files in a snapshot")
"""Sections whose block is the syntax of commands: tests/unit/project/test_documentation.py compares it with parsers."""

DATA = re.compile(
    r"\[|# /etc/fermata|metadata:|level=|sys\.path|state  |containerd ──|fermata_\w+\{|fermata_\w+ |\{|import "
)
"""How the first line of a block begins that holds no commands: configuration, YAML, Python, output, pictures."""

PROGRAMS = frozenset(
    [
        *("fermata", "ctr", "make", "python3", "python", "cp", "mkdir", "tar", "systemctl", "kubectl", "ls", "ln"),
        *("rm", "dpkg", "sh", "journalctl", "pipx", "apt", "prometheus-node-exporter", "nerdctl", "checkpointctl"),
    ]
)


class Command(NamedTuple):
    """A command, without its comment, and the page (a path in the project) and the heading under which it stands."""

    page: str
    section: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.section}"

    @property
    def program(self) -> str:
        """What it runs, after variables of the environment."""
        words = (word for word in self.text.split() if not re.match(r"[A-Z_]+=", word))
        return next(words, "").rpartition("/")[2]


class Scenario(NamedTuple):
    """Sections of a page whose commands are run one after the other, in one place (all of the source tree in one go).

    `place`: a node, a bare machine (without containerd running, with fermata in /usr/local), the source tree, or a
    cluster. `words`: what stands for a placeholder. `before` and `after` are run around the commands, likewise.
    `running`: the containers that then run, and are removed.
    """

    place: str
    page: str
    sections: tuple[str, ...]
    words: dict[str, str] = {}
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    running: tuple[str, ...] = ()

    def commands(self) -> list[Command]:
        """Those to be run, in the page's order."""
        named = [one for one in commands() if one.page == self.page and one.section in self.sections]
        return [one for one in named if (one.page, one.text) not in NOT_RUN]

    def filled(self, text: str, **more: object) -> str:
        """A command with its placeholders replaced, those of `words` first."""
        for word, meant in [*self.words.items(), ("IMAGE", IMAGE), *more.items()]:
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", str(meant), text)
        return text


SCENARIOS = [
    Scenario(
        "node", "README.md", ("Use",), {"IMAGE song": "IMAGE song sleep 1000"}, running=("song", "song-2", "song-3")
    ),
    Scenario(
        *("node", "docs/operator.md", ("A first snapshot", "Installing")),
        running=("song", "song-2", "song-3", "song-4"),
    ),
    Scenario(
        *("node", "docs/cli.md", ("checkpoint", "restore", "check")),
        before=(RUN_OURS.format("web"),),
        running=("web", "web-2"),
    ),
    Scenario(
        *("node", "docs/gpu.md", ("GPU state",)),
        before=(RUN_OURS.format("model"),),
        running=("model", "model-2"),
    ),
    Scenario(
        *("node", "docs/network.md", ("Lock rules",)),
        {"X": "doc-x"},
        before=("ip netns add doc-x",),
        after=("ip netns delete doc-x",),
    ),
    Scenario(
        *("node", "docs/troubleshooting.md", ("Looking closer",)),
        {"ID": "song", "DIR": "/srv/snapshots/song", "NAMESPACE": "default", "restore.log": "LOG"},
        before=(RUN_OURS.format("song"), "fermata checkpoint song /srv/snapshots/song"),
        running=("song",),
    ),
    Scenario("bare", "docs/differ.md", ("Switching it on",)),
    Scenario("bare", "docs/operator.md", ("ctr and nerdctl",)),
    Scenario("bare", "docs/kubernetes.md", ("A node",), before=("mkdir -p /etc/containerd/conf.d /etc/modprobe.d",)),
    Scenario(
        "tree", "docs/node.md", ("The node: a private containerd for demonstrations and tests",), {"mine": "NODE"}
    ),
    Scenario("tree", "README.md", ("Working on it",), {"mine": "NODE"}),
    Scenario(
        *("tree", "CONTRIBUTING.md", ("One node test in 20 seconds",)),
        {"mine": "NODE", ".venv/bin/python": "PYTHON"},
    ),
    Scenario("tree", "docs/criu-errors.md", ("What CRIU's errors mean",), {"LOGFILE": "LOG"}),
    Scenario("cluster", "docs/kubernetes.md", ("Taking a snapshot",)),
]

_CLUSTER = "there is no Kubernetes here; tests/unit/project/test_kubernetes.py looks at the files"
_SYSTEMD = "no systemd runs in a node"
_SUITE = "it is what runs this test, or a part of it"
_LONG = "it takes minutes, and has checks of its own"
_GUEST = "it needs a program with the library `fermata`; tests/node/test_guest.py"
NOT_RUN = {
    ("README.md", "make demo"): _LONG,
    ("README.md", "make test"): _SUITE,
    ("README.md", "make install"): "a node has what it installs",
    ("README.md", "make unit"): _SUITE,
    ("README.md", "make node"): _SUITE,
    ("README.md", "make torture"): _LONG,
    ("README.md", "make bench"): _LONG,
    ("CONTRIBUTING.md", "make test"): _SUITE,
    ("CONTRIBUTING.md", "make unit"): _SUITE,
    ("CONTRIBUTING.md", "make demo"): _LONG,
    ("CONTRIBUTING.md", "make unit PYTHON=python3.10 VENV=.venv-3.10"): "not every machine has another Python",
    ("CONTRIBUTING.md", "make deb-check"): "it makes roots of five distributions; tests/node/test_distributions.py",
    ("docs/operator.md", "make deb && apt install ./dist/fermata_0.1.0_all.deb"): "tests/node/test_deb.py uses dpkg",
    ("docs/operator.md", "systemctl restart containerd"): _SYSTEMD,
    ("docs/differ.md", "systemctl enable --now fermata-differ.socket"): _SYSTEMD,
    ("docs/differ.md", "systemctl restart containerd"): _SYSTEMD,
    ("docs/differ.md", "journalctl -u fermata-differ"): _SYSTEMD,
    (
        "docs/observability.md",
        "prometheus-node-exporter --collector.textfile.directory=/run/fermata-metrics",
    ): "it does not end, and is another's",
    (
        "docs/weights.md",
        "ctr run -d --runtime io.containerd.fermata.v1 --annotation fermata/guest=on IMAGE server",
    ): _GUEST,
    ("docs/weights.md", "fermata checkpoint --when-ready server /srv/snapshots/server"): _GUEST,
    (
        "docs/weights.md",
        "ctr run -d --runtime io.containerd.fermata.v1 --annotation fermata/restore-from=/srv/snapshots/server IMAGE "
        "server-2",
    ): _GUEST,
    ("docs/weights.md", "fermata rm /srv/snapshots/server"): _GUEST,
    ("docs/weights.md", "fermata prune --dry-run"): _GUEST,
    ("docs/weights.md", "fermata prune"): _GUEST,
    (
        "docs/guest.md",
        "python3 -m pip install ./guest",
    ): "tests/unit/guest/test_outside.py makes the wheel and looks at it",
    (
        "docs/guest.md",
        "python3 -m fermata.bench /dev/shm/weights --device cuda:0 --threads 8,16 --buffer-mib 4,8 --flight 2,3",
    ): "it needs a GPU; tests/unit/guest/test_bench.py runs it without one",
    ("docs/gpu.md", "fermata park model"): "it needs a GPU; tests/gpu/test_gpu.py",
    ("docs/gpu.md", "fermata unpark model"): "it needs a GPU; tests/gpu/test_gpu.py",
    ("docs/network.md", "fermata flush-locks --all"): "it sweeps all of the machine; tests/node/test_network.py",
    ("docs/kubernetes.md", "systemctl restart containerd"): _SYSTEMD,
    ("docs/kubernetes.md", "kubectl label node NODE fermata/node=yes"): _CLUSTER,
    ("docs/kubernetes.md", "kubectl apply -f packaging/kubernetes/runtimeclass.yaml"): _CLUSTER,
    (
        "docs/kubernetes.md",
        "kubectl create --raw /api/v1/nodes/NODE/proxy/checkpoint/NAMESPACE/POD/CONTAINER -f /dev/null",
    ): _CLUSTER,
    ("docs/kubernetes.md", "kubectl apply -f packaging/kubernetes/daemonset.yaml"): _CLUSTER,
    (
        "docs/kubernetes.md",
        "kubectl -n kube-system create configmap fermata-node --from-file=fermata.deb=dist/fermata_0.1.0_all.deb "
        "--from-file=packaging/kubernetes/node-setup.sh",
    ): _CLUSTER,
}


def pages() -> list[str]:
    """The documentation, but what only tells of changes."""
    found = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md")])
    return [str(path.relative_to(PROJECT)) for path in found if path.name != "CHANGELOG.md"]


def blocks(page: str) -> Iterator[tuple[str, list[str]]]:
    """(heading, lines) of each indented block; lines that end with a backslash are joined with the next."""
    heading, block, blank = "", [], True
    for line in [*(PROJECT / page).read_text().splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("    ") and line.strip() and (blank or block):
            if block and block[-1].endswith("\\"):
                block[-1] = f"{block[-1][:-1].rstrip()} {line.strip()}"
            else:
                block.append(line.strip())
        elif block:
            yield heading, block
            block = []
        blank = not line.strip()


def commands() -> list[Command]:
    """Every command of every page but the syntax of SYNTAX: each line of a block that is no data."""
    found = []
    for page in pages():
        for section, lines in blocks(page):
            if DATA.match(lines[0]) or f"{page}:{section}" in SYNTAX:
                continue
            # With prompts, the lines without are what the commands print.
            prompts = [line.removeprefix("# ") for line in lines if line.startswith("# fermata ")]
            for line in prompts or lines:
                text = re.sub(r"\s+# .*", "", line)
                if text.startswith("# "):
                    continue
                found.append(Command(page, section, text))
    return found
