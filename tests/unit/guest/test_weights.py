"""What counts as weights: which memory of which object, and what is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import importlib.util
import mmap
import os

import pytest
from fermata import host, weights
from fermata.errors import GuestError
from fermata.pack import CudaPart
from fermata.weights import Registration


def packs(*things):
    return weights.collect([Registration(thing, f"w{number}") for number, thing in enumerate(things)])


def sizes(*things):
    return [[part.bytes for part in pack.parts] for pack in packs(*things)]


def refused(*things):
    registrations = [Registration(thing, f"w{number}") for number, thing in enumerate(things)]
    with pytest.raises(GuestError) as caught:
        weights.check(registrations, weights.collect(registrations))
    sentence = str(caught.value)
    del registrations, caught
    gc.collect()  # the error's frames have views of the buffers, which could not be closed
    return sentence


def test_every_kind_of_buffer_and_container_counts():
    things = {"a": bytearray(5000), "b": [array.array("d", [1.0] * 10), (memoryview(bytearray(7)),)]}
    assert sizes(things) == [[5000, 80, 7]]
    assert sizes([]) == []
    assert sizes([bytearray()]) == []


def test_what_has_no_memory_is_refused_by_name():
    with pytest.raises(TypeError, match=r"w\['a'\]\[1\] is of type str"):
        list(weights.find({"a": [bytearray(1), "text"]}, "w"))


def test_what_can_only_be_read_is_refused():
    with pytest.raises(ValueError, match="can only be read"):
        list(weights.find(b"bytes", "w"))


def test_a_container_that_holds_itself_ends():
    loop = [bytearray(10)]
    loop.append(loop)
    assert sizes(loop) == [[10]]


def test_memory_is_taken_once_however_often_it_is_named():
    whole = bytearray(10000)
    view = memoryview(whole)
    assert sizes([whole, view, view[100:200]], whole) == [[10000]]
    # The view of a view is of the whole owner's memory only where it has gaps.
    assert sizes([view[100:200], view[150:300], whole]) == [[100, 100, 100, 9700]]
    assert sizes(view[::2]) == [[10000]]


def test_a_buffer_cannot_be_resized_while_its_weights_are_away():
    one = bytearray(10)
    taken = packs(one)
    with pytest.raises(BufferError):
        one.append(1)
    del taken
    one.append(1)


def test_a_file_that_is_mapped_shared_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        assert f"shared with the file {path}" in refused(mapped)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE) as mapped:
        weights.check([], packs(mapped))


def test_locked_memory_is_refused():
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        view = (ctypes.c_char * 8192).from_buffer(mapped)
        if libc.mlock(ctypes.byref(view), ctypes.c_size_t(8192)):
            pytest.skip(f"mlock: {os.strerror(ctypes.get_errno())}")
        del view
        assert "locked" in refused(mapped)


def test_a_storage_of_a_gpu_is_taken_once():
    class Storage:
        def __init__(self, pointer):
            self._cdata = pointer

    taken = weights._Taken()
    first = CudaPart(Storage(1), 10, "a")
    assert taken.rest(first) == [first]
    assert taken.rest(CudaPart(Storage(1), 10, "the same by another wrapper")) == []
    second = CudaPart(Storage(2), 10, "b")
    assert taken.rest(second) == [second]


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
def test_whole_pages_are_dropped_from_anonymous_memory(flags):
    with mmap.mmap(-1, 1 << 20, flags=flags | mmap.MAP_ANONYMOUS) as mapped:
        mapped[:] = b"x" * (1 << 20)
        part = memoryview(mapped)[100 : (1 << 20) - 100]
        notes = []
        (pack,) = packs(part)
        assert host.release(pack, notes) == (1 << 20) - 8192
        assert notes == []
        assert mapped[:4096] == b"x" * 4096
        assert mapped[4096:-4096] == bytes((1 << 20) - 8192)
        assert mapped[-4096:] == b"x" * 4096
        del part, pack
        gc.collect()


def library(name):
    """A library, or None: a missing one skips the tests of its class alone."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@pytest.mark.skipif(library("numpy") is None, reason="numpy is not installed")
class TestArrays:
    numpy = library("numpy")

    def test_views_and_gaps_mean_the_owners_memory(self):
        whole = self.numpy.zeros((100, 100), dtype="f4")
        assert sizes([whole.T[3:, ::2], whole[1], whole]) == [[40000]]
        assert sizes(self.numpy.asfortranarray(whole)) == [[40000]]

    def test_arrays_over_buffers_are_the_buffers(self):
        owner = bytearray(1000)
        assert sizes(self.numpy.frombuffer(owner, dtype="u1", count=10), owner) == [[1000]]

    def test_arrays_of_objects_and_read_only_arrays_are_refused(self):
        with pytest.raises(TypeError, match="Python objects"):
            list(weights.find(self.numpy.array([None]), "w"))
        with pytest.raises(ValueError, match="can only be read"):
            list(weights.find(self.numpy.frombuffer(b"bytes", dtype="u1"), "w"))


@pytest.mark.skipif(library("torch") is None, reason="torch is not installed")
class TestTensors:
    torch = library("torch")

    def model(self):
        torch = self.torch
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))

    def test_a_module_is_its_parameters_and_buffers_with_tied_ones_once(self):
        model = self.model()
        model[2].weight = model[0].weight
        expected = [64 * 64 * 4, 256, 256, 256, 256, 256, 256, 8]
        assert sorted(sizes(model)[0]) == sorted(expected)

    def test_views_mean_the_whole_storage(self):
        whole = self.torch.zeros(100, 100)
        assert sizes([whole.t()[5:, ::3], whole[2:4]]) == [[40000]]

    def test_a_tensor_and_the_array_over_it_are_one_memory(self):
        whole = self.torch.zeros(100, 100)
        assert sizes(whole.numpy()[3:], whole) == [[40000]]
        array = self.array(1000)
        assert sizes(self.torch.from_numpy(array), array) == [[1000]]

    def array(self, size):
        numpy = pytest.importorskip("numpy", reason="numpy is not installed")
        return numpy.zeros(size, dtype="u1")

    def test_models_that_share_weights_share_them_in_the_snapshot(self):
        one, two = self.model(), self.model()
        two[0] = one[0]
        first, second = packs(one, two)
        assert first.bytes > second.bytes
        assert {part.address for part in first.parts}.isdisjoint(part.address for part in second.parts)

    def test_a_module_that_is_gone_is_forgotten(self):
        model = self.model()
        registration = Registration(model, "w")
        assert weights.collect([registration])
        del model
        gc.collect()
        assert weights.collect([registration]) == []

    def test_parameters_that_were_replaced_after_the_registration_count(self):
        model = self.model()
        registration = Registration(model, "w")
        model[0] = self.torch.nn.Linear(64, 128)
        assert max(part.bytes for part in weights.collect([registration])[0].parts) == 64 * 128 * 4

    def test_other_devices_and_layouts_are_refused(self):
        with pytest.raises(GuestError, match="is on meta"):
            packs(self.torch.zeros(3, device="meta"))
        with pytest.raises(TypeError, match="layout"):
            list(weights.find(self.torch.zeros(3, 3).to_sparse(), "w"))

    def test_gradients_are_refused(self):
        model = self.model()
        model(self.torch.ones(2, 64)).sum().backward()
        assert "has a gradient" in refused(model)
        leaf = self.torch.ones(3, requires_grad=True)
        assert "has a gradient" in refused(leaf * 2)
        with self.torch.inference_mode():
            weights.check([Registration(self.torch.ones(3), "w")], packs(self.torch.ones(3)))

    def test_compiled_modules_are_refused(self):
        model = self.model()
        model[0].compile()
        assert "w0.0 is compiled" in refused(model)
        assert "w0 is compiled" in refused(self.torch.compile(self.model()))

    def test_tensors_in_files_shared_with_others_are_refused(self):
        assert "is shared with the file" in refused(self.torch.zeros(10000).share_memory_())

    def test_tensors_that_wrap_others_are_what_they_wrap(self):
        torch = self.torch

        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

            def __init__(self, inner):
                self.inner = inner

            def __tensor_flatten__(self):
                return ["inner"], None

            @classmethod
            def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
                raise NotImplementedError

        assert sizes(Wrapper(torch.zeros(1000, dtype=torch.int8))) == [[1000]]
