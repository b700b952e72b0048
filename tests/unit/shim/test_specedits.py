"""Edits of a container's specification that make it possible to take a snapshot of it."""

from __future__ import annotations

import copy
import os
import subprocess

import pytest

from shim.specedits import GUEST, IO_URING, SHM, VALUES, VLLM_WORKERS, apply, mounts_as_given

CALLS = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
ALLOW = "SCMP_ACT_ALLOW"
ERRNO = "SCMP_ACT_ERRNO"


def spec(seccomp=None, env=("PATH=/bin",), annotations=None):
    linux = {} if seccomp is None else {"seccomp": seccomp}
    return {"process": {"env": list(env)}, "linux": linux, "annotations": annotations or {}}


def rule(*names, action=ALLOW, **more):
    return {"names": list(names), "action": action, **more}


def refused(found):
    return rule(*CALLS, action=ERRNO, errnoRet=38) == found["linux"]["seccomp"]["syscalls"][0]


def test_without_a_profile_all_else_stays_allowed_on_every_architecture_of_the_machine():
    found = spec()
    edits = apply(found, machine="x86_64")
    assert found["linux"]["seccomp"] == {
        "defaultAction": ALLOW,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [rule(*CALLS, action=ERRNO, errnoRet=38)],
    }
    assert [edit.annotation for edit in edits] == [IO_URING, VLLM_WORKERS]


def test_without_a_profile_an_unknown_machine_gets_none():
    found = spec()
    assert [edit.annotation for edit in apply(found, machine="sparc64")] == [VLLM_WORKERS]
    assert "seccomp" not in found["linux"]


def test_a_profile_keeps_all_that_it_had_behind_the_new_rule():
    profile = {
        "defaultAction": ERRNO,
        "defaultErrnoRet": 1,
        "architectures": ["SCMP_ARCH_X86_64"],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"],
        "syscalls": [rule("read", "io_uring_setup", "io_uring_enter", "io_uring_register"), rule("write")],
    }
    found = spec(copy.deepcopy(profile))
    apply(found)
    assert refused(found)
    assert found["linux"]["seccomp"]["syscalls"][1:] == profile["syscalls"]
    assert {key: value for key, value in found["linux"]["seccomp"].items() if key != "syscalls"} == {
        key: value for key, value in profile.items() if key != "syscalls"
    }


@pytest.mark.parametrize("default", [ALLOW, "SCMP_ACT_LOG"])
def test_a_profile_that_lets_what_it_does_not_name_happen_gets_the_rule(default):
    found = spec({"defaultAction": default, "syscalls": [rule("mount", action=ERRNO)]})
    apply(found)
    assert refused(found)


@pytest.mark.parametrize(
    "profile",
    [
        {"defaultAction": ERRNO, "syscalls": [rule("read")]},
        {"defaultAction": "SCMP_ACT_KILL"},
        {"defaultAction": ALLOW, "syscalls": [rule(*CALLS, action=ERRNO, errnoRet=1)]},
        {"defaultAction": ALLOW, "syscalls": [rule(*CALLS, action="SCMP_ACT_NOTIFY")]},
        # of two rules for one call the first one counts
        {"defaultAction": ERRNO, "syscalls": [rule(*CALLS, action="SCMP_ACT_KILL"), rule(*CALLS)]},
    ],
)
def test_a_profile_that_refuses_io_uring_already_stays_as_it_is(profile):
    found = spec(copy.deepcopy(profile))
    assert IO_URING not in [edit.annotation for edit in apply(found)]
    assert found["linux"]["seccomp"] == profile


def test_only_the_calls_that_would_happen_are_refused():
    found = spec({"defaultAction": ERRNO, "syscalls": [rule("io_uring_enter")]})
    apply(found)
    assert found["linux"]["seccomp"]["syscalls"][0] == rule("io_uring_enter", action=ERRNO, errnoRet=38)


def test_a_call_that_happens_for_some_arguments_is_refused_for_all():
    some = rule("io_uring_setup", args=[{"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}])
    found = spec({"defaultAction": ERRNO, "syscalls": [some]})
    apply(found)
    assert found["linux"]["seccomp"]["syscalls"] == [rule("io_uring_setup", action=ERRNO, errnoRet=38), some]
    # A rule without conditions counts over it wherever it stands.
    found = spec({"defaultAction": ALLOW, "syscalls": [some, rule(*CALLS, action=ERRNO)]})
    assert IO_URING not in [edit.annotation for edit in apply(found)]


def test_vllm_starts_its_workers_by_spawn_unless_something_else_is_set():
    found = spec()
    apply(found)
    assert found["process"]["env"] == ["PATH=/bin", "VLLM_WORKER_MULTIPROC_METHOD=spawn"]
    found = spec(env=["VLLM_WORKER_MULTIPROC_METHOD=fork"])
    assert VLLM_WORKERS not in [edit.annotation for edit in apply(found)]
    assert found["process"]["env"] == ["VLLM_WORKER_MULTIPROC_METHOD=fork"]


def test_each_edit_is_switched_off_by_its_annotation():
    found = spec(annotations={IO_URING: "allow", VLLM_WORKERS: "keep"})
    before = copy.deepcopy(found)
    assert apply(found) == []
    assert found == before
    assert [edit.annotation for edit in apply(spec(annotations={IO_URING: "allow"}))] == [VLLM_WORKERS]
    assert [edit.annotation for edit in apply(spec(annotations={VLLM_WORKERS: "keep"}))] == [IO_URING]
    assert {name: values[0] for name, values in VALUES.items()} == {
        IO_URING: "refuse",
        VLLM_WORKERS: "spawn",
        SHM: "own",
        GUEST: "off",
    }


def test_a_second_time_changes_nothing():
    found = spec()
    apply(found)
    before = copy.deepcopy(found)
    assert apply(found) == []
    assert found == before


@pytest.mark.parametrize("empty", [{}, {"linux": None, "process": None}, {"process": {}}])
def test_a_specification_without_the_parts_is_left_alone(empty):
    apply(empty)
    assert "seccomp" not in (empty.get("linux") or {})


@pytest.fixture
def tmpfs(tmp_path):
    """The root of a tmpfs of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = tmp_path / "shm"
    made.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "shm", made], check=True, timeout=10)
    yield str(made)
    subprocess.run(["umount", made], check=True, timeout=10)


def in_pod(source, kind="container", destination="/dev/shm", **annotations):
    found = spec(annotations={"io.kubernetes.cri.container-type": kind, **annotations})
    found["mounts"] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": destination, "type": "bind", "source": source, "options": ["rbind"]},
    ]
    return found


def test_a_container_of_a_pod_gets_a_dev_shm_of_its_own_as_large_as_the_pods(tmpfs):
    found = in_pod(tmpfs)
    assert SHM in [edit.annotation for edit in apply(found)]
    options = ["nosuid", "noexec", "nodev", "mode=1777", "size=8192k"]
    assert found["mounts"][1] == {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": options}
    assert SHM not in [edit.annotation for edit in apply(found)]


def test_a_dev_shm_that_is_no_tmpfs_of_the_pods_stays(tmpfs, tmp_path):
    given = [in_pod(str(tmp_path)), in_pod("/dev/shm"), in_pod(tmpfs, "sandbox"), in_pod(tmpfs, destination="/data")]
    for found in (*given, in_pod(tmpfs, **{SHM: "pod"}), in_pod(f"{tmpfs}/gone")):
        before = copy.deepcopy(found["mounts"])
        apply(found)
        assert found["mounts"] == before


def test_mounts_are_recorded_as_given_but_where_their_type_was_changed(tmpfs):
    found = in_pod(tmpfs)
    original = copy.deepcopy(found)
    apply(found)
    found["mounts"][0]["source"] = "a copy of ours"
    assert mounts_as_given(original, found) == [original["mounts"][0], found["mounts"][1]]
