"""Keep a program's weights out of the snapshots that fermata takes of its container.

Outside a container that was made for it (annotation `fermata/guest: "on"`) every function here does nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, TypeVar

__all__ = ["__version__", "exclude_from_snapshot", "on_prepare", "on_restore", "snapshot_ready", "using"]
__version__ = "0.1.0"

C = TypeVar("C", bound=Callable[[], Any])


def exclude_from_snapshot(model_or_tensors: Any, *, name: str | None = None) -> None:
    """Keep these weights out of every snapshot; they are back before the program uses them again.

    Args:
        model_or_tensors: a torch.nn.Module (its parameters and buffers), a torch.Tensor, a numpy.ndarray, any object
            with a writable buffer, or lists, tuples, sets and dictionaries of these. The whole storage of a view is
            meant, and each storage once. A module may go away at any time; everything else is kept alive from here on.
        name: how the weights are called in logs and snapshots.

    What calls a module (`module(...)`) waits while its weights are away. Use `using()` around any other use.

    Raises:
        TypeError: something in it has no memory that could be kept out.
        ValueError: something in it can only be read, or the name is none.
    """
    if _listening():
        from . import guest

        guest.current().register(model_or_tensors, name)


def using() -> contextlib.AbstractContextManager[None]:
    """A context in which the weights stay where they are: a snapshot waits for its end, and it waits for a restore.

    It may be entered again inside itself. A module's forward does this on its own.
    """
    if _listening():
        from . import guest

        return guest.current().gate
    return contextlib.nullcontext()


def on_prepare(callback: C) -> C:
    """Call this before a snapshot, while no one uses the weights: to drop caches, close connections.

    The callbacks run in the order of registration, in a thread of this library, and may use the weights. One that
    raises stops it: the snapshot is taken with the weights inside. Returns the callback (it is a decorator too).
    """
    if _listening():
        from . import guest

        if callback not in guest.current().on_prepare:
            guest.current().on_prepare.append(callback)
    return callback


def on_restore(callback: C) -> C:
    """Call this when the weights are back, in the same process or in a restored one, before anyone uses them.

    It runs too when a snapshot that was prepared is not taken. One that raises in a restored process ends it. Returns
    the callback (it is a decorator too).
    """
    if _listening():
        from . import guest

        if callback not in guest.current().on_restore:
            guest.current().on_restore.append(callback)
    return callback


def snapshot_ready() -> None:
    """Say that the program is warm: `fermata checkpoint --when-ready` waits for it."""
    if _listening():
        from . import guest

        guest.current().ready = True


def _listening() -> bool:
    """Whether this is a fermata container; the first time there, start to listen for the shim."""
    from . import place

    folder = place.directory()
    if folder is None:
        return False
    from . import channel

    return channel.start(folder)
