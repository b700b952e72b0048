"""What moves GPU storages, run on torch's storages in ordinary memory: everything but streams, pinning and caches."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from fermata import cuda  # noqa: E402
from fermata.errors import GuestError  # noqa: E402
from fermata.file import File  # noqa: E402
from fermata.pack import CudaPart, Pack  # noqa: E402


class Moment:
    """A stream or an event where everything is done at once."""

    def record(self, stream):
        pass

    def synchronize(self):
        pass


class Engine(cuda.Engine):
    def __init__(self):
        super().__init__("cpu")
        self.pinned = {}

    def stream(self):
        return Moment()

    def event(self):
        return Moment()

    def on(self, stream):
        return contextlib.nullcontext()

    def use(self, stream):
        pass

    def register(self, address, length):
        self.pinned[address] = length
        return True

    def unregister(self, address):
        del self.pinned[address]

    def synchronize(self):
        pass

    def give_back(self):
        return []

    def kept(self):
        return 0


SIZES = [100, 5 << 20, (9 << 20) + 7, 3, 2 << 20, 4096, 10]
CHUNK = 8 << 20


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    assert engine.pinned == {}, "buffers are still pinned"


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def pack_of(tensors):
    parts = [CudaPart(one.untyped_storage(), one.untyped_storage().nbytes(), "t") for one in tensors]
    return Pack("m", "cpu", parts, chunk=CHUNK)


def limit():
    return time.monotonic() + 60


@pytest.fixture(params=[(3, 3 << 20, 2), (1, 12 << 20, 1)], ids=["several", "one"])
def options(request):
    threads, buffer, flight = request.param
    return cuda.Options(threads=threads, buffer=buffer, flight=flight)


def written(pack, engine, options, path):
    take = cuda.Take([(pack, engine)], options, limit())
    take.digests()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, pack.bytes)
    file = File(descriptor, by="write", writable=True)
    file.open(pack)
    take.write([file])
    file.close()


def opened(pack, path, by="read"):
    file = File(
        os.open(path, os.O_RDONLY | (os.O_DIRECT if by == "direct" else 0)), by="read" if by == "direct" else by
    )
    file.open(pack)
    return file


def brought_back(pack, engine, options, file):
    load = cuda.Load([(pack, engine, file)], options, limit())
    load.go()
    load.finish()
    file.close()


@pytest.mark.parametrize("by", ["read", "direct", "mmap"])
def test_storages_are_emptied_and_filled_with_what_they_had(tensors, engine, options, tmp_path, by):
    copies = [one.clone() for one in tensors]
    pack = pack_of(tensors)
    written(pack, engine, options, tmp_path / "w")
    notes = []
    assert cuda.release([(pack, engine)], notes) == sum(SIZES)
    assert [one.untyped_storage().nbytes() for one in tensors] == [0] * len(SIZES)
    brought_back(pack, engine, options, opened(pack, tmp_path / "w", by))
    assert all(torch.equal(one, copy) for one, copy in zip(tensors, copies))


def test_the_digests_are_those_of_the_file(tensors, engine, options, tmp_path):
    import hashlib

    pack = pack_of(tensors)
    written(pack, engine, options, tmp_path / "w")
    data = (tmp_path / "w").read_bytes()
    chunks = [hashlib.sha256(data[at : at + pack.chunk]).hexdigest() for at in range(0, len(data), pack.chunk)]
    assert pack.chunks == chunks
    used = sorted((offset, offset + part.bytes) for offset, part in zip(pack.offsets, pack.parts))
    gaps = [data[end:begin] for (_, end), (begin, _) in zip(used, [*used[1:], (len(data), 0)])]
    assert not any(b"".join(gaps)), "what lies between the storages is zeros"


@pytest.mark.parametrize("place", [0, 99, 4096 + (5 << 20) - 1, 12 << 20], ids=["first", "tail", "end", "middle"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_that_is_wrong_is_found(tensors, engine, tmp_path, place, bit):
    options = cuda.Options(threads=2)
    pack = pack_of(tensors)
    written(pack, engine, options, tmp_path / "w")
    with (tmp_path / "w").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    cuda.release([(pack, engine)], [])
    with pytest.raises(GuestError, match=f"chunk {place // pack.chunk} "):
        brought_back(pack, engine, options, opened(pack, tmp_path / "w"))


def test_words_that_changed_places_are_found(engine, tmp_path):
    tensor = torch.arange(1 << 20, dtype=torch.int32)
    pack = pack_of([tensor])
    options = cuda.Options(threads=1)
    written(pack, engine, options, tmp_path / "w")
    with (tmp_path / "w").open("r+b") as file:
        eight = file.read(8)
        file.seek(0)
        file.write(eight[4:] + eight[:4])
    with pytest.raises(GuestError, match="damaged"):
        brought_back(pack, engine, options, opened(pack, tmp_path / "w"))


def test_the_coefficients_are_odd_all_different_and_the_same_for_ever():
    table = cuda.coefficients(torch, "cpu", 2 << 20)
    assert table.numel() == 2 << 20
    assert bool((table & 1 == 1).all())
    assert table.unique().numel() == table.numel()
    assert table[[0, 1, -1]].tolist() == [999619762027135979, 233145362414220757, 6603854935661676317]


def test_autograd_sees_nothing_of_it(engine, tmp_path):
    parameter = torch.nn.Parameter(torch.randn(1000))
    with torch.inference_mode():
        inference = torch.randn(1000)
    copies = parameter.detach().clone(), inference.clone()
    version = parameter._version
    pack = pack_of([parameter, inference])
    written(pack, engine, cuda.Options(), tmp_path / "w")
    cuda.release([(pack, engine)], [])
    brought_back(pack, engine, cuda.Options(), opened(pack, tmp_path / "w"))
    assert torch.equal(parameter, copies[0]) and torch.equal(inference, copies[1])
    assert (parameter._version, parameter.grad, parameter.requires_grad) == (version, None, True)


def test_nothing_of_the_gpu_is_touched_before_it_is_there(tensors, engine, tmp_path):
    pack = pack_of(tensors)
    written(pack, engine, cuda.Options(), tmp_path / "w")
    cuda.release([(pack, engine)], [])
    file = opened(pack, tmp_path / "w")
    load = cuda.Load([(pack, engine, file)], cuda.Options(threads=2), limit())
    time.sleep(0.2)
    assert engine.pinned == {}
    assert pack.parts[0].storage.nbytes() == 0
    load.cancel()
    with pytest.raises(GuestError, match="given up"):
        load.finish()
    file.close()


def test_a_file_that_cannot_be_read_is_told_and_leaves_no_thread(tensors, engine, tmp_path):
    pack = pack_of(tensors)
    written(pack, engine, cuda.Options(), tmp_path / "w")
    cuda.release([(pack, engine)], [])
    file = opened(pack, tmp_path / "w")
    os.truncate(tmp_path / "w", 1 << 20)
    load = cuda.Load([(pack, engine, file)], cuda.Options(threads=2), limit())
    load.go()
    with pytest.raises(GuestError, match="ends at byte"):
        load.finish()
    file.close()
