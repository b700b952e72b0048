"""Containers that share a shim, as those of a pod do."""

from __future__ import annotations

import os
import signal

from node.containers import pid, remove, start, status, wait_for
from node.shims import OUR_NAME, STOCK_NAME, Shim, daemons
from shim import task

# Named as its first container, as a pod's is: from that name the stock shim knows which sockets to remove at its end.
GROUP = ["--annotation", "io.containerd.runc.v2.group=one"]


def test_a_shim_that_was_asked_to_end_too_early_ends_with_its_last_container(node):
    """containerd 2 asks once, when the pod's first container goes, be there others or not."""
    for name in ("one", "two"):
        start(node, name, options=GROUP)
    assert len(daemons(node)) == 1
    shim = Shim(node, "one")
    for name in ("one", "two"):
        os.kill(pid(node, name), signal.SIGKILL)
        wait_for(lambda name=name: status(node, name) == "STOPPED", "its end")
    shim.call("Delete", task.ExecRequest(id="one"))
    shim.call("Shutdown", task.ShutdownRequest(id="one"))
    assert len(daemons(node)) == 1
    shim.call("Delete", task.ExecRequest(id="two"))
    wait_for(lambda: not daemons(node) and not daemons(node, STOCK_NAME), f"the end of {OUR_NAME}")
    for name in ("one", "two"):
        wait_for(lambda name=name: status(node, name) is None, "containerd to notice")
        remove(node, name)
