"""Whether this node's containerd asks fermata-differ for diffs, and whether it answers: a line for `fermata doctor`."""

from __future__ import annotations

import os
import re
import socket

from differ.http2 import HEAD, PREFACE, SETTINGS, frame
from shim import grpcio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET = "/run/fermata-differ/differ.sock"
_BUILT_IN = frozenset(("walking", "erofs", "windows", "windows-lcow", "cimfs", "blockcim"))
"""containerd's own differs, up to 2.3."""
_OFF = "or, if it is not wanted any more, remove its file from containerd's conf.d, and systemctl restart containerd"


class Finding:
    """level "ok", "warning" or "problem"; text what was found; fix what mends it, or None."""

    __slots__ = ("fix", "level", "text")

    def __init__(self, level: str, text: str, fix: str | None = None) -> None:
        self.level = level
        self.text = text
        self.fix = fix

    def __repr__(self) -> str:
        return f"Finding({self.level!r}, {self.text!r}, {self.fix!r})"


def check(
    configuration: str | None,
    answers: Callable[[str], str | None] | None = None,
    quick: Callable[[], bool] | None = None,
) -> Finding:
    """What containerd's configuration says of a differ of ours, and whether that can be true.

    `configuration` is containerd's whole configuration as `containerd config dump` prints it; None if it is not known.
    `answers` tries the socket: what is wrong with it, or None. `quick` is whether gzip is made by ISA-L.
    """
    if configuration is None:
        return Finding("warning", "containerd's configuration is not known, so neither is who makes its diffs")
    plugins = _plugins(configuration)
    name, address = next(((name, at) for name, at, _ in plugins if "fermata" in at), ("", ""))
    order = _order(configuration)
    absent = [each for each in order if each not in _BUILT_IN and each not in [plugin[0] for plugin in plugins]]
    if absent:
        return Finding(
            "problem",
            f"containerd's diff service is to ask {', '.join(order)}, and there is no plugin {', '.join(absent)}: the "
            "service does not start, nor does what needs it (the CRI plugin, all diffs)",
            f"write [proxy_plugins.{absent[0]}] too (docs/differ.md), {_OFF}",
        )
    if not name:
        return Finding(
            "ok",
            "not switched on: containerd compares whole images for its diffs, which takes seconds for large ones",
            "see docs/differ.md to switch it on",
        )
    if name not in order:
        return Finding(
            "warning",
            f"configured as {name}, but containerd's diff service asks {', '.join(order) or 'others'} alone",
            f'put default = ["{name}", "walking"] under [plugins."io.containerd.service.v1.diff-service"]',
        )
    if order[0] != name or "walking" not in order[1:]:
        return Finding(
            "problem",
            f"containerd's diff service asks {', '.join(order)}: {name} has to be the first, and walking behind it",
            f'put default = ["{name}", "walking"] under [plugins."io.containerd.service.v1.diff-service"]',
        )
    wrong = (answers or _try)(address)
    if wrong is not None:
        return Finding(
            "problem",
            f"{wrong}, and containerd asks there first for every diff and every layer that it unpacks, and walking "
            "only after an answer: both fail",
            f"systemctl enable --now fermata-differ.socket; {_OFF}",
        )
    if next(platform for each, _, platform in plugins if each == name) != "unknown/unknown":
        return Finding(
            "warning",
            f"{name} has no platform of its own, so that containerd 2's transfer service can take it for what unpacks "
            "images, which it does not do",
            f'put platform = "unknown/unknown" under [proxy_plugins.{name}], and systemctl restart containerd',
        )
    try:
        grpcio.load()
    except ImportError as error:
        return Finding(
            "warning",
            f"what answers on {address} has no gRPC for Python that works, and leaves every diff to walking ({error})",
            "install python3-grpcio (on Ubuntu 22.04 by pip), and systemctl restart fermata-differ",
        )
    if not (quick or _isal)():
        return Finding(
            "ok",
            f"fermata-differ answers on {address}, and takes up to five times as long for gzip as with ISA-L",
            "install libisal2 (isa-l), and systemctl restart fermata-differ",
        )
    return Finding("ok", f"fermata-differ answers on {address}")


def _plugins(configuration: str) -> list[tuple[str, str, str]]:
    """Name, address and platform of every proxy plugin that makes diffs."""
    found = []
    for name, body in re.findall(r"(?m)^\s*\[proxy_plugins\.([^\]]+)\]\n((?:(?!\s*\[).*\n?)*)", configuration):
        values = dict(re.findall(r"(?m)^\s*(\w+)\s*=\s*['\"]([^'\"]*)['\"]", body))
        if values.get("type") in ("diff", "io.containerd.differ.v1"):
            found.append((name.strip("'\""), values.get("address", ""), values.get("platform", "")))
    return found


def _order(configuration: str) -> list[str]:
    """The names in `default` of the diff service."""
    found = re.search(
        r"\[plugins\.['\"]io\.containerd\.service\.v1\.diff-service['\"]\]\n(?:(?!\s*\[plugins).*\n)*?"
        r"\s*default\s*=\s*\[([^\]]*)\]",
        configuration,
    )
    return re.findall(r"['\"]([^'\"]*)['\"]", found[1]) if found else []


def _isal() -> bool:
    from layerwriter.compression import isal

    return isal() is not None


def _try(address: str) -> str | None:
    """Connect, and wait for the first bytes that every gRPC server sends: its HTTP/2 settings (RFC 9113, 3.4)."""
    try:
        mode = os.stat(address).st_mode
    except OSError as failure:
        return f"{address}: {failure.strerror}"
    if mode & 0o077 and os.stat(os.path.dirname(address)).st_mode & 0o011:
        return f"{address} is open to others than root"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(10)
        try:
            probe.connect(address)
            probe.sendall(PREFACE + frame(SETTINGS))
            head = probe.recv(HEAD)
        except OSError as failure:
            return f"{address} does not answer: {failure.strerror or failure}"
    return None if len(head) == HEAD and head[3] == SETTINGS else f"what answers on {address} is no gRPC server"
