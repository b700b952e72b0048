"""An overlay's upper directory as a layer file, and back.

    write(upperdir, out)            upper directory -> layer file
    begin(upperdir, out)            the same in two steps, so that a container stands still for the first one only
    stream(upperdir, send)          upper directory -> layer of an image, in pieces
    full_diff(lowerdirs, merged, out)   the same layer from a comparison of the merged tree with the image below it
    apply(layer, upperdir)          layer file -> upper directory, all of it or none of it
    choose(mount_options)           which of the two writers a mount needs, and why
    measure(upperdir)               how large the layer will be, without reading a file
    record(root), compare(a, b)     everything that a program can see of a tree; how two trees differ
    read(layer)                     every entry of a layer file

The format is the OCI image layer (tar with pax headers); docs/layer.md describes it with our additions. Every error is
a LayerError whose text says what went wrong and where.

The names are loaded when they are first used: a shim imports this package in a process that lives as long as a
container, and needs at most one of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from layerwriter.diff import full_diff as full_diff
    from layerwriter.draft import Draft as Draft
    from layerwriter.layer import DEFAULT_LIMIT as DEFAULT_LIMIT
    from layerwriter.layer import HiddenChange as HiddenChange
    from layerwriter.layer import Layer as Layer
    from layerwriter.layer import LayerError as LayerError
    from layerwriter.layer import NotPortable as NotPortable
    from layerwriter.layer import Size as Size
    from layerwriter.overlay import Choice as Choice
    from layerwriter.overlay import choose as choose
    from layerwriter.reader import read as read
    from layerwriter.stream import stream as stream
    from layerwriter.tree import compare as compare
    from layerwriter.tree import record as record
    from layerwriter.unpack import Applied as Applied
    from layerwriter.unpack import apply as apply
    from layerwriter.unpack import bring_back as bring_back
    from layerwriter.unpack import discard as discard
    from layerwriter.upper import begin as begin
    from layerwriter.upper import measure as measure
    from layerwriter.upper import write as write

_MODULES = {
    "Applied": "unpack",
    "Choice": "overlay",
    "DEFAULT_LIMIT": "layer",
    "Draft": "draft",
    "HiddenChange": "layer",
    "Layer": "layer",
    "LayerError": "layer",
    "NotPortable": "layer",
    "Size": "layer",
    "apply": "unpack",
    "begin": "upper",
    "bring_back": "unpack",
    "choose": "overlay",
    "compare": "tree",
    "discard": "unpack",
    "full_diff": "diff",
    "measure": "upper",
    "read": "reader",
    "record": "tree",
    "stream": "stream",
    "write": "upper",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'layerwriter' has no attribute {name!r}")
    # __import__ and not importlib.import_module: importlib's own import costs more than this package.
    value: object = getattr(__import__(f"layerwriter.{module}", fromlist=[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
