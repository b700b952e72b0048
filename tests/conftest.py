"""Shared by all tests: a node per stack, brought up once per session.

FERMATA_STACKS   the stacks to test, comma-separated (default: trixie,sid)
FERMATA_NODE     a node that is up already, to be used instead and left up: quick, for development
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from node import Node
from node.stack import RECIPES, Progress, cache

# Held, shared or alone, by tests that would see each other on this machine when they run at once.
LOCK_RULES = cache() / "lock-rules.lock"
STACKS = [stack for stack in os.environ.get("FERMATA_STACKS", ",".join(RECIPES)).split(",") if stack]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.workers import Shares

    config.option.loadscopereorder = False
    return Shares(config, log)


@contextlib.contextmanager
def held(how: int) -> Iterator[None]:
    LOCK_RULES.parent.mkdir(parents=True, exist_ok=True)
    with LOCK_RULES.open("w") as file:
        fcntl.flock(file, how)
        yield


@pytest.fixture
def leaves_lock_rules() -> Iterator[None]:
    """For tests that leave lock rules of CRIU's in a network namespace for a while."""
    with held(fcntl.LOCK_SH):
        yield


@pytest.fixture
def no_lock_rules_of_others() -> Iterator[None]:
    """For tests that look at, or sweep, the network namespaces of the whole machine."""
    with held(fcntl.LOCK_EX):
        yield


@pytest.fixture(scope="session", params=STACKS)
def stack_name(request: pytest.FixtureRequest) -> str:
    """For tests that bring up a node of their own on each stack."""
    return str(request.param)


@pytest.fixture(scope="session", params=[os.environ["FERMATA_NODE"]] if "FERMATA_NODE" in os.environ else STACKS)
def running_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("a node needs root")
    if "FERMATA_NODE" in os.environ:
        node = Node.open(request.param)
        node.install()
        yield node
        return
    # Building a root takes a minute the first time: say so, past pytest's capturing.
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        node = Node.up(stack_name=request.param, say=Progress())
    with node:
        node.import_image()
        yield node
        if request.session.testsfailed:
            sys.stderr.write(f"\ncontainerd of {node.name} ({node.stack}) last said:\n{node.log.read_text()[-4000:]}\n")
