"""What the program registered, and the storages in it: modules, tensors, arrays, buffers, and containers of these.

Nothing is imported for it: an object of torch or numpy can only be there when its library is.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import sys
import weakref
from collections.abc import Mapping as AbstractMapping
from typing import Any, Callable, Iterator, NamedTuple

from . import host
from .errors import GuestError
from .pack import CudaPart, HostPart, Pack
from .wire import MOST_DESCRIPTORS


class Tensor(NamedTuple):
    """A torch tensor that was found, by the name that a person knows it by."""

    tensor: Any
    what: str


class Registration:
    """One call of exclude_from_snapshot. A module is held weakly: it may go, and its weights with it."""

    def __init__(self, thing: Any, name: str) -> None:
        self.name = name
        self._reference: Callable[[], Any] = weakref.ref(thing) if is_module(thing) else lambda: thing

    @property
    def thing(self) -> Any:
        """What was registered, or None when it is gone."""
        return self._reference()


def _torch() -> Any:
    return sys.modules.get("torch")


def is_module(thing: Any) -> bool:
    """Whether it is a torch.nn.Module."""
    torch = _torch()
    return torch is not None and isinstance(thing, torch.nn.Module)


def find(thing: Any, name: str) -> Iterator[Tensor | HostPart]:
    """Every tensor and every other buffer in it.

    Raises:
        TypeError: something in it is nothing that has weights.
        ValueError: something in it can only be read.
    """
    return _find(thing, name, set())


def _find(thing: Any, what: str, seen: set[int]) -> Iterator[Tensor | HostPart]:
    torch, numpy = _torch(), sys.modules.get("numpy")
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if torch is not None and isinstance(thing, torch.Tensor):
        yield from _tensors(thing, what)
    elif is_module(thing):
        for key, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            yield from _tensors(tensor, f"{what}.{key}")
    elif numpy is not None and isinstance(thing, numpy.ndarray):
        yield _array(thing, what)
    elif isinstance(thing, AbstractMapping):
        for key, value in thing.items():
            yield from _find(value, f"{what}[{key!r}]", seen)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for key, value in enumerate(thing):
            yield from _find(value, f"{what}[{key}]", seen)
    else:
        yield _buffer(thing, what)


def _tensors(tensor: Any, what: str) -> Iterator[Tensor]:
    # A subclass that wraps others (quantized weights, for one) has no storage of its own.
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for key in flatten()[0]:
            yield from _tensors(getattr(tensor, key), f"{what}.{key}")
        return
    if tensor.layout != _torch().strided:
        raise TypeError(
            f"{what} is a tensor of layout {tensor.layout}; only strided tensors can be kept out of a snapshot"
        )
    yield Tensor(tensor, what)


def _array(array: Any, what: str) -> HostPart:
    """The memory that an array is a view of."""
    if array.dtype.hasobject:
        raise TypeError(f"{what} is an array of Python objects, which cannot be kept out of a snapshot")
    numpy, torch = sys.modules["numpy"], _torch()
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    if array.base is None:
        address, read_only = array.__array_interface__["data"]
        if read_only:
            raise ValueError(f"{what} can only be read, so it could not be filled again")
        return HostPart(address, array.nbytes, array, what)
    if torch is not None and isinstance(array.base, torch.Tensor):
        storage = array.base.untyped_storage()
        return HostPart(storage.data_ptr(), storage.nbytes(), (storage, array), what)
    return _buffer(array.base, what)


def _buffer(thing: Any, what: str) -> HostPart:
    try:
        whole = memoryview(thing)
    except TypeError:
        raise TypeError(
            f"{what} is of type {type(thing).__name__}: only modules, tensors, arrays, writable buffers and containers"
            " of these can be kept out of a snapshot"
        ) from None
    if not whole.c_contiguous and whole.obj is not None:
        whole = memoryview(whole.obj)
    if whole.readonly:
        raise ValueError(f"{what} can only be read, so it could not be filled again")
    if not whole.c_contiguous:
        raise ValueError(f"{what} is a buffer with gaps, of an owner without one buffer")
    if not whole.nbytes:
        return HostPart(0, 0, None, what)
    # As long as this view lives, its owner can be neither moved nor closed.
    view = (ctypes.c_char * whole.nbytes).from_buffer(whole)
    return HostPart(ctypes.addressof(view), whole.nbytes, view, what)


def collect(registrations: list[Registration]) -> list[Pack]:
    """The packs of all registrations that are alive: each storage once, with the first that has it.

    Raises:
        GuestError: a storage is of a kind or in a place that cannot be kept out; names it.
    """
    taken = _Taken()
    packs = []
    for registration in registrations:
        thing = registration.thing
        if thing is None:
            continue
        devices: dict[str, list[Any]] = {}
        try:
            for one in find(thing, registration.name):
                device, part = ("cpu", one) if isinstance(one, HostPart) else _storage(one)
                devices.setdefault(device, []).extend(taken.rest(part))
        except (TypeError, ValueError, RuntimeError) as error:
            raise GuestError(f"weights {registration.name}: {error}") from error
        devices = {device: parts for device, parts in devices.items() if parts}
        for device, parts in devices.items():
            packs.append(
                Pack(registration.name if len(devices) == 1 else f"{registration.name} ({device})", device, parts)
            )
    if len(packs) > MOST_DESCRIPTORS:
        raise GuestError(
            f"the weights make {len(packs)} files, and {MOST_DESCRIPTORS} is the most: register them together"
        )
    return packs


def _storage(one: Tensor) -> tuple[str, Any]:
    tensor, what = one
    storage = tensor.untyped_storage()
    kind = storage.device.type
    size = storage.nbytes()
    if kind == "cpu":
        return "cpu", HostPart(storage.data_ptr(), size, storage, what)
    if kind != "cuda":
        raise TypeError(f"{what} is on {storage.device}; only memory of the process and of CUDA GPUs can be kept out")
    return str(storage.device), CudaPart(storage, size, what)


class _Taken:
    """Which storages and which stretches of memory are in a pack already."""

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._starts: list[int] = []
        self._ends: list[int] = []

    def rest(self, part: Any) -> list[Any]:
        """What of a part is in no pack yet: all, nothing, or what others that overlap it have left."""
        if not part.bytes:
            return []
        if isinstance(part, CudaPart):
            key = part.storage._cdata
            if key in self._storages:
                return []
            self._storages.add(key)
            return [part]
        found = []
        begin, end = part.address, part.address + part.bytes
        at = bisect.bisect_right(self._ends, begin)
        while begin < end:
            stop = min(end, self._starts[at]) if at < len(self._starts) else end
            if begin < stop:
                found.append(HostPart(begin, stop - begin, part.owner, part.what))
                self._starts.insert(at, begin)
                self._ends.insert(at, stop)
                at += 1
            if at >= len(self._starts):
                break
            begin = max(begin, self._ends[at])
            at += 1
        return found


def check(registrations: list[Registration], packs: list[Pack]) -> None:
    """Look for what makes it impossible to take these weights away and bring them back.

    Raises:
        GuestError: names it.
    """
    host.check([part for pack in packs if pack.device == "cpu" for part in pack.parts])
    torch = _torch()
    if torch is None:
        return
    on_gpu = any(pack.device != "cpu" for pack in packs)
    if on_gpu and _alive(torch.cuda.CUDAGraph):
        raise GuestError("the program holds a CUDA graph, and graphs know weights by their addresses, which change")
    for registration in registrations:
        thing = registration.thing
        if thing is None:
            continue
        if is_module(thing):
            for key, module in thing.named_modules(prefix=registration.name):
                if _compiled(module):
                    raise GuestError(f"{key} is compiled (torch.compile): its code may know weights by their addresses")
        for one in find(thing, registration.name):
            if isinstance(one, Tensor):
                _check_tensor(torch, one)


def _check_tensor(torch: Any, one: Tensor) -> None:
    tensor, what = one
    if tensor.grad_fn is not None or (tensor.is_leaf and tensor.grad is not None):
        raise GuestError(f"{what} has a gradient: weights that are being trained cannot be kept out")
    storage = tensor.untyped_storage()
    if storage.device.type == "cuda":
        if not storage.resizable():
            raise GuestError(f"{what} is in GPU memory that is not torch's to free")
        reductions = sys.modules.get("torch.multiprocessing.reductions")
        shared = getattr(reductions, "shared_cache", None)
        if shared and any(getattr(reference, "cdata", None) == storage._cdata for reference in list(shared.values())):
            raise GuestError(f"{what} is shared with other processes (CUDA IPC)")
    elif torch.cuda.is_initialized() and tensor.is_pinned():
        raise GuestError(f"{what} is in pinned memory, which cannot be dropped")


def _alive(kind: type) -> bool:
    # type(), not isinstance(): a proxy's __class__ may run anything.
    return any(issubclass(type(one), kind) for one in gc.get_objects())


def _compiled(module: Any) -> bool:
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)
