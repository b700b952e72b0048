"""Our own part of moving GPU state: planning, order, putting back, sentences. The driver here is a model of its states;
that the real one behaves so is what tests/gpu shows on a GPU."""

import os

import pytest

from shim import gpu
from shim.config import Config
from shim.errors import ShimError
from shim.manifest import Manifest

GIB = 1 << 30
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
A, B, C, D = ("GPU-" + letter * 8 for letter in "abcd")


def card(uuid=A, model="H200", minor=0, free=100 * GIB, processes=None):
    return {
        "uuid": uuid,
        "model": model,
        "minor": minor,
        "total": 140 * GIB,
        "used": 0,
        "free": free,
        "processes": processes or {},
    }


class World:
    """Processes with their driver states, in a /proc of their own."""

    def __init__(self, proc, pids, cards):
        self.proc = proc
        self.states = {}
        self.cards = cards
        self.fail = {}  # (op, pid) -> (error, code)
        self.die_in = {}  # op: the session is killed by it, once
        self.log = []
        self.opened = 0
        self.version = "580.1"
        self.missing = []
        self.paused = False
        for pid in pids:
            self.add(pid)

    def add(self, pid, *, cuda=True, state=RUNNING):
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "root/dev").mkdir(parents=True)
        os.mknod(folder / "root/dev/nvidia0", 0o20600, os.makedev(195, 0))
        (folder / "cmdline").write_bytes(b"python\0train.py\0")
        (folder / "status").write_text(f"Name:\tpython\nNSpid:\t{pid}\t{pid - 100}\n")
        (folder / "maps").write_text("7f0-7f1 r-xp 0 0:0 1 /usr/lib/libcuda.so.580.1\n" if cuda else "")
        if state == RUNNING:
            self.open_device(pid)
        if cuda:
            self.states[pid] = state

    def open_device(self, pid):
        os.symlink("/dev/nvidiactl", self.proc / str(pid) / "fd/9")

    def close_device(self, pid):
        (self.proc / str(pid) / "fd/9").unlink()

    # as a container's processes

    id = "box"

    def pids(self):
        return sorted(int(path.name) for path in self.proc.iterdir())

    def is_paused(self):
        return self.paused

    def pause(self):
        self.log.append("pause")
        self.paused = True

    def resume(self):
        self.log.append("resume")
        self.paused = False

    # as a session with the driver

    def open(self):
        self.opened += 1
        return Session(self)


class Tree:
    def __init__(self, world):
        self.id = world.id
        self.pids = world.pids
        self.paused = world.is_paused
        self.pause = world.pause
        self.resume = world.resume


class Session:
    def __init__(self, world):
        self.world = world
        self.version = world.version
        self.missing = world.missing

    def end(self):
        self.world.log.append("end")

    def kill(self):
        self.world.log.append("kill")

    def call(self, op, pids=(), **fields):
        world = self.world
        assert not world.paused, "the driver would wait for ever for a frozen process"
        if op == "inventory":
            return {"gpus": world.cards}
        if op in ("lock", "checkpoint", "restore"):
            world.log.append((op, list(pids)))
        results = []
        for pid in pids:
            result = {"pid": pid, "seconds": 0.1}
            if pid not in world.states:
                result.update(error="CUDA_ERROR_NOT_INITIALIZED", code=3)
            elif (op, pid) in world.fail:
                error, code = world.fail[op, pid]
                result.update(error=error, code=code)
            else:
                result["value"] = self.step(op, pid)
            results.append(result)
        if op in world.die_in:
            del world.die_in[op]
            raise ShimError("the program that moves GPU state was killed")
        return {"results": results}

    def step(self, op, pid):
        states = self.world.states
        before = states[pid]
        if op == "state":
            return before
        allowed = {"lock": RUNNING, "checkpoint": LOCKED, "restore": CHECKPOINTED, "unlock": LOCKED}
        if op != "running":
            assert before == allowed[op], f"{op} of {pid} in state {before}"
        after = {"lock": LOCKED, "checkpoint": CHECKPOINTED, "restore": LOCKED, "unlock": RUNNING, "running": RUNNING}[
            op
        ]
        if op == "checkpoint":
            self.world.close_device(pid)
        if before == CHECKPOINTED and op in ("restore", "running"):
            self.world.open_device(pid)
        states[pid] = after
        return before


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "proc", [111, 112, 113, 114], [card(processes={"111": 3 * GIB, "112": GIB})])


def quiet(level, message, **fields):
    pass


def take_out(world, config=None):
    return gpu.take_out(Tree(world), config or Config(), quiet, open_driver=world.open, proc=str(world.proc))


def bring_back(world, record):
    return gpu.bring_back(Tree(world), record, Config(), open_driver=world.open, proc=str(world.proc))


def test_a_container_without_gpu_processes_does_not_start_the_program_that_loads_the_driver(tmp_path):
    world = World(tmp_path / "proc", [], [])
    (tmp_path / "proc/5/fd").mkdir(parents=True)
    (tmp_path / "proc/5/maps").write_text("")
    assert take_out(world) is None
    assert world.opened == 0


def test_all_are_locked_before_any_is_moved(world):
    out = take_out(world)
    pids = [111, 112, 113, 114]
    assert [entry for entry in world.log if entry != "end"] == [("lock", pids), ("checkpoint", pids)]
    assert set(world.states.values()) == {CHECKPOINTED}
    assert out.bytes == 4 * GIB


def test_the_record_names_processes_by_their_pid_in_the_container(world):
    record = take_out(world).record
    assert record["processes"][0] == {"pid": 11, "command": "python train.py", "bytes": 3 * GIB, "by_gpu": {A: 3 * GIB}}
    assert record["gpus"] == [{"uuid": A, "model": "H200", "memory": 140 * GIB}]
    assert record["driver"] == "580.1"


def test_a_paused_container_is_resumed_for_the_move_and_paused_after_it(world):
    world.paused = True
    take_out(world)
    assert world.log[0] == "resume" and world.log[-1] == "pause"


def test_a_paused_container_is_paused_after_a_failure_too(world):
    world.paused = True
    world.fail["checkpoint", 113] = ("CUDA_ERROR_UNKNOWN", 999)
    with pytest.raises(ShimError):
        take_out(world)
    assert world.paused and set(world.states.values()) == {RUNNING}


@pytest.mark.parametrize("op", ["lock", "checkpoint"])
def test_when_one_process_fails_all_go_back_to_running(world, op):
    world.fail[op, 113] = ("CUDA_ERROR_UNKNOWN", 999)
    with pytest.raises(ShimError, match=r"process 113 \(13 in the container\), `python train.py`: CUDA_ERROR_UNKNOWN"):
        take_out(world)
    assert set(world.states.values()) == {RUNNING}


@pytest.mark.parametrize("op", ["lock", "checkpoint", "state"])
def test_when_the_program_is_killed_another_one_brings_all_back(world, op):
    world.die_in[op] = True
    with pytest.raises(ShimError, match="killed"):
        take_out(world)
    assert set(world.states.values()) == {RUNNING}


def test_when_the_second_program_is_killed_too_a_third_one_brings_all_back(world):
    world.die_in = {"checkpoint": True, "running": True}
    with pytest.raises(ShimError, match="killed"):
        take_out(world)
    assert set(world.states.values()) == {RUNNING}


def test_a_process_that_cannot_be_put_back_is_named(world):
    world.fail["checkpoint", 113] = ("CUDA_ERROR_UNKNOWN", 999)
    world.fail["running", 114] = ("CUDA_ERROR_DEINITIALIZED", 4)
    with pytest.raises(ShimError, match=r"process 114 .*CUDA_ERROR_DEINITIALIZED: end this container"):
        take_out(world)


def test_a_lock_that_times_out_says_for_how_long_and_what_to_set(world):
    world.fail["lock", 112] = ("CUDA_ERROR_NOT_READY", 600)
    with pytest.raises(ShimError, match=r"did not end in 10 s .*\[gpu\] lock_timeout"):
        take_out(world)


def test_state_that_the_driver_cannot_move_is_refused_by_name(world):
    world.fail["checkpoint", 112] = ("CUDA_ERROR_NOT_SUPPORTED", 801)
    with pytest.raises(ShimError, match=r"process 112 .*CUDA IPC, NCCL"):
        take_out(world)


def test_a_forked_child_is_named_with_its_descriptor_and_the_cure_before_anything_moves(world):
    world.add(115, cuda=False)
    with pytest.raises(ShimError, match=r"process 115 .*descriptor 9 \(/dev/nvidiactl\).*forked.*spawn"):
        take_out(world)
    assert set(world.states.values()) == {RUNNING}
    assert not [entry for entry in world.log if entry[0] == "checkpoint"]


def test_a_process_that_keeps_a_device_open_after_the_move_is_named_and_all_go_back(world):
    os.symlink("/dev/nvidiactl", world.proc / "113/fd/12")  # beside the driver's own
    with pytest.raises(ShimError, match=r"process 113 .*still holds descriptor 12 \(/dev/nvidiactl\).*NVML"):
        take_out(world)
    assert set(world.states.values()) == {RUNNING}


def test_a_process_that_starts_to_use_the_gpu_meanwhile_is_moved_in_a_further_round(world):
    session = world.open

    def open_driver():
        opened = session()
        call = opened.call

        def spying(op, **fields):
            answer = call(op, **fields)
            if op == "checkpoint" and 116 not in world.states:
                world.add(116)
            return answer

        opened.call = spying
        return opened

    world.open = open_driver
    out = take_out(world)
    assert [user.pid for user in out.holders] == [111, 112, 113, 114, 116]
    assert set(world.states.values()) == {CHECKPOINTED}


def test_what_was_out_before_stays_out_when_the_others_are_put_back(world):
    world.add(110, state=CHECKPOINTED)
    world.fail["checkpoint", 113] = ("CUDA_ERROR_UNKNOWN", 999)
    with pytest.raises(ShimError):
        take_out(world)
    assert world.states.pop(110) == CHECKPOINTED
    assert set(world.states.values()) == {RUNNING}


def test_a_process_that_uses_the_gpu_memory_of_another_one_is_refused_before_anything_is_locked(world):
    # 112 gives memory away: its own pid in its container is 12, hexadecimal c. 113 uses it.
    for pid in (112, 113):
        with (world.proc / f"{pid}/maps").open("a") as file:
            file.write("7f2-7f3 rw-s 0 0:31 6 /dev/shm/cuda.shm.0.c.1\n")
    with pytest.raises(ShimError, match=r"process 113 \(13 .* uses GPU memory of process 112 .*CUDA IPC"):
        take_out(world)
    assert not [entry for entry in world.log if entry[0] == "lock"]


def test_a_process_whose_gpu_memory_nobody_uses_any_more_is_moved(world):
    with (world.proc / "112/maps").open("a") as file:
        file.write("7f2-7f3 rw-s 0 0:31 6 /dev/shm/cuda.shm.0.c.1 (deleted)\n")
    take_out(world)
    assert set(world.states.values()) == {CHECKPOINTED}


def test_a_driver_without_the_calls_is_refused_with_the_version_that_has_them(world):
    world.missing, world.version = ["Lock"], "550.54"
    with pytest.raises(ShimError, match=r"driver 550.54 cannot move GPU state: that came with driver 570"):
        take_out(world)


def test_back_restores_all_and_then_unlocks_all(world):
    out = take_out(world)
    bring_back(world, out.record)
    assert set(world.states.values()) == {RUNNING}


@pytest.mark.parametrize("free, enough", [(5 * GIB, True), (5 * GIB - 1, False)])
def test_back_needs_the_recorded_size_and_one_gib(world, free, enough):
    out = take_out(world)
    world.cards[0]["free"] = free
    if enough:
        bring_back(world, out.record)
        return
    with pytest.raises(
        gpu.NoRoom, match=r"5120 MiB free and needs 5120 MiB \(4096 MiB and 1024 MiB .*1 MiB are missing"
    ):
        bring_back(world, out.record)
    assert set(world.states.values()) == {CHECKPOINTED}
    world.cards[0]["free"] = 6 * GIB
    bring_back(world, out.record)


def test_when_one_cannot_move_back_the_others_go_out_again_so_that_a_retry_finds_them_all(world):
    out = take_out(world)
    world.fail["restore", 112] = ("CUDA_ERROR_OUT_OF_MEMORY", 2)
    with pytest.raises(ShimError, match="process 112"):
        bring_back(world, out.record)
    assert set(world.states.values()) == {CHECKPOINTED}
    world.fail.clear()
    bring_back(world, out.record)
    assert set(world.states.values()) == {RUNNING}


# Which GPU to which


def test_one_gpu_to_another_one_needs_no_map():
    assert gpu.pair([card(A)], [card(B)], "570.1", "it") == []


def test_the_same_gpus_need_no_map():
    assert gpu.pair([card(A), card(B)], [card(B), card(A)], "570.1", "it") == []


def test_gpus_that_are_still_there_keep_their_place_and_the_others_are_paired_in_order():
    assert gpu.pair([card(A), card(B), card(C)], [card(D), card(B), card(A)], "580.1", "it") == [[A, A], [B, B], [C, D]]


@pytest.mark.parametrize(
    "then, now, driver, sentence",
    [
        ([card(A)], [], "580.1", "taken with 1 × H200, and this container has none"),
        ([card(A), card(B)], [card(A)], "580.1", "taken with 2 × H200, and this container has 1 × H200"),
        ([card(A)], [card(B, "A100")], "580.1", "taken with 1 × H200, and this container has 1 × A100"),
        ([card(A), card(B)], [card(C), card(D)], "570.8", "needs the NVIDIA driver 580 or newer, this node has 570.8"),
    ],
)
def test_gpus_that_do_not_fit_are_refused(then, now, driver, sentence):
    with pytest.raises(ShimError, match=sentence):
        gpu.pair(then, now, driver, "it")


def manifest(cards):
    return Manifest({"gpu": {"gpus": cards, "processes": [{"pid": 1, "bytes": 5, "by_gpu": {A: 5}}]}})


def test_a_snapshot_without_gpu_state_asks_for_no_driver():
    def open_driver():
        raise AssertionError

    assert gpu.missing(Manifest({"gpu": None}), {}, open_driver=open_driver) == []
    assert gpu.missing(Manifest({"gpu": {"processes": []}}), {}, open_driver=open_driver) == []


def test_a_node_without_a_driver_is_refused_before_the_restore(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "CONTROL_DEVICE", str(tmp_path / "none"))
    (sentence,) = gpu.missing(manifest([card()]), {}, open_driver=lambda: None)
    assert "this node has no NVIDIA driver" in sentence


def test_a_container_without_a_gpu_is_refused_before_the_restore(monkeypatch):
    monkeypatch.setattr(gpu, "CONTROL_DEVICE", "/dev/null")
    (sentence,) = gpu.missing(manifest([card()]), {}, open_driver=lambda: None)
    assert "taken with 1 × H200, and this container has none" in sentence


def spec(*numbers, env=()):
    devices = [{"path": f"/dev/nvidia{number}", "minor": number} for number in numbers]
    return {"linux": {"devices": [{"path": "/dev/nvidiactl", "minor": 255}, *devices]}, "process": {"env": list(env)}}


def test_the_gpus_of_a_specification_are_compared_with_the_recorded_ones(monkeypatch, world):
    monkeypatch.setattr(gpu, "CONTROL_DEVICE", "/dev/null")
    world.cards = [card(A, minor=0), card(B, "A100", minor=1)]
    assert gpu.missing(manifest([card(C)]), spec(0), open_driver=world.open) == []
    (sentence,) = gpu.missing(manifest([card(C)]), spec(1), open_driver=world.open)
    assert "this container has 1 × A100" in sentence
    (sentence,) = gpu.missing(manifest([card(C)]), spec(0, 1), open_driver=world.open)
    assert "give it as many" in sentence


def test_where_nvidias_hook_gives_the_devices_the_node_is_looked_at():
    assert gpu.spec_minors(spec(env=["NVIDIA_VISIBLE_DEVICES=all"])) is None
    assert gpu.spec_minors(spec(env=["NVIDIA_VISIBLE_DEVICES=void"])) == set()
    assert gpu.spec_minors(spec(0, 3)) == {0, 3}


# Looking at /proc


def test_a_process_counts_by_an_open_device_or_by_the_mapped_library(world):
    world.close_device(112)
    (world.proc / "113/maps").write_text("")
    world.close_device(114)
    (world.proc / "114/maps").write_text("")
    assert [user.pid for user in gpu.users(world.pids(), str(world.proc))] == [111, 112, 113]


def test_a_process_that_has_ended_is_no_user(world):
    assert gpu.users([999], str(world.proc)) == []


def test_the_containers_gpus_are_the_devices_in_its_root(world):
    os.mknod(world.proc / "111/root/dev/nvidia7", 0o20600, os.makedev(195, 7))
    (world.proc / "111/root/dev/nvidia-uvm").touch()
    assert gpu.minors(111, str(world.proc)) == {0, 7}


# The program that loads the driver


@pytest.mark.skipif(gpu.node_has_driver(), reason="this machine has an NVIDIA driver")
def test_where_there_is_no_driver_library_the_sentence_says_what_to_set():
    helper = gpu.Helper(Config())
    with pytest.raises(ShimError, match=r"libnvidia-ml.so.1: cannot open shared object.*\[gpu\] libcuda"):
        helper.call("inventory")


def test_a_configured_library_is_the_only_one_looked_for(tmp_path):
    config = Config()
    config.gpu_libcuda = str(tmp_path / "libcuda.so.1")
    helper = gpu.Helper(config)
    with pytest.raises(ShimError, match=str(tmp_path)):
        helper.call("inventory")


def test_the_program_that_is_killed_leaves_no_child_and_no_descriptor(tmp_path):
    config = Config()
    config.gpu_libcuda = str(tmp_path / "libcuda.so.1")
    before = os.listdir("/proc/self/fd")
    helper = gpu.Helper(config)
    helper.kill()
    with pytest.raises(ShimError):
        helper.call("inventory")
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(helper.pid, os.WNOHANG)
