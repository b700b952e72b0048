"""CRIU's configuration for one container, and CRIU's logs in a person's words.

    probe(criu, cache_dir)     -> Criu         which CRIU this is and which options it has
    render(criu, Request(...)) -> Rendered     the configuration file of one dump or restore
    explain(log)               -> Explanation  what stopped it, what that means, what to do

Knows nothing of containerd, runc or GPUs. Everything raises CriuConfError and nothing else of its own.

The names are bound on first use: a shim is started for every container, and most of them never meet CRIU.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .causes import Cause as Cause
    from .errors import CriuConfError as CriuConfError
    from .explanation import Explanation as Explanation
    from .explanation import explain as explain
    from .installed import Criu as Criu
    from .installed import probe as probe
    from .rendering import Conflict as Conflict
    from .rendering import Rendered as Rendered
    from .rendering import Request as Request
    from .rendering import render as render

_HOME = {
    "Cause": "causes",
    "Conflict": "rendering",
    "Criu": "installed",
    "CriuConfError": "errors",
    "Explanation": "explanation",
    "Rendered": "rendering",
    "Request": "rendering",
    "explain": "explanation",
    "probe": "installed",
    "render": "rendering",
}

__all__ = [  # noqa: RUF022 - in the order in which they are used
    "probe",
    "Criu",
    "render",
    "Request",
    "Rendered",
    "Conflict",
    "explain",
    "Explanation",
    "Cause",
    "CriuConfError",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # __import__ and not importlib.import_module: importlib.util and friends cost more than this package does.
    module = __import__(f"{__name__}.{home}", fromlist=[name])
    value = getattr(module, name)
    globals()[name] = value
    return value
