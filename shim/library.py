"""fermata's library in one file, which a daemon holds open for as long as it lives.

A daemon loads what a snapshot needs when one is taken, days after its own start. By then another version may have been
installed, and modules of two versions in one process fit together by luck only. So what a shim imports comes from one
file that it has opened at its start: a file that is replaced or removed stays readable for whoever holds it, whichever
way fermata is installed, and goes from the disk with the last one that does.

The file is `__pycache__/library.CACHE_TAG` in the library's directory, made where the compiled modules are made:

    python3 -I shim/library.py [NEW LIBRARY]    compile the library that this file is part of, or the one in NEW, which
                                                then takes the place of LIBRARY in one step

Without it, or when a module beside it is another than the one that went into it, modules are imported as usual. While a
package manager replaces them one by one there is a file `.changing` beside the packages, and the archive counts.
Its form: `MAGIC`, Python's own magic number, the length of the index (u32, little-endian), the index, the code. The
index is a dict, marshalled: a module's name -> (path in the library, whether it is a package, modification time in
nanoseconds and size of its source, position behind the index and length of its marshalled code).
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Entry = tuple[str, bool, int, int, int, int]

MAGIC = b"fermata library 1\n"
CHANGING = ".changing"
PACKAGES = ("shim", "layerwriter", "criuconf", "differ")
_NUMBER = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER  # importlib.util has it too, and takes 10 ms to import
_IMPORTED = (os.stat(__file__).st_ino, os.stat(__file__).st_mtime_ns)
_ATTEMPTS = 20
_HEAD = len(MAGIC) + len(_NUMBER) + 4


class Archive:
    """An open library: finds and loads its modules, as importlib asks for them."""

    def __init__(self, fd: int, library: str, index: dict[str, Entry], code: int) -> None:
        self.fd = fd
        self.library = library
        self.index = index
        self.code = code  # where it begins

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's specification; None for one that is not ours."""
        entry = self.index.get(name)
        if entry is None:
            return None
        file = f"{self.library}/{entry[0]}"
        spec: ModuleSpec = type(__spec__)(name, self, origin=file, is_package=entry[1])  # type: ignore[arg-type]
        spec.has_location = True
        if entry[1]:
            spec.submodule_search_locations = [os.path.dirname(file)]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module object will do."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        *_, at, length = self.index[module.__name__]
        exec(marshal.loads(os.pread(self.fd, length, self.code + at)), module.__dict__)


def path_in(library: str) -> str:
    """Where a library has its archive for the Python that runs."""
    return f"{library}/__pycache__/library.{sys.implementation.cache_tag}"


def hold() -> bool:
    """From now on import from the archive of the library that this file is part of. False: there is none that fits."""
    library = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for _ in range(_ATTEMPTS):
        before = _identity(library)
        if _hold(library):
            return True
        if _identity(library) == before:
            break
        # Another library has taken this one's place since: the archive was of the one, the sources of the other.
    return False


def _identity(library: str) -> tuple[int, int] | None:
    try:
        status = os.stat(library)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _hold(library: str) -> bool:
    try:
        fd = os.open(path_in(library), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        head = os.pread(fd, _HEAD, 0)
        if head.startswith(MAGIC + _NUMBER):
            length = int.from_bytes(head[-4:], "little")
            index: dict[str, Entry] = marshal.loads(os.pread(fd, length, _HEAD))
            if _fits(library, index) or os.path.exists(f"{library}/{CHANGING}"):
                archive = Archive(fd, library, index, _HEAD + length)
                if os.fstat(fd).st_size == archive.code + sum(entry[-1] for entry in index.values()):
                    archive.exec_module(sys.modules["shim"])  # this very package, which may be the next version's
                    sys.meta_path.insert(0, archive)
                    return True
    except Exception:
        pass  # one that is damaged in whatever way, or a library that is being replaced now: as if there were none
    os.close(fd)
    return False


def _fits(library: str, index: dict[str, Entry]) -> bool:
    """Whether the sources are those of the archive: somebody may have changed one. 75 calls take 0.2 ms."""
    for file, _, modified, size, _, _ in index.values():
        try:
            status = os.stat(f"{library}/{file}")
        except OSError:
            return False
        if status.st_mtime_ns != modified or status.st_size != size:
            return False
    return True


def changed() -> bool:
    """Whether what this process has not imported yet would be another version's: it holds no archive, and this very
    file has been replaced or removed since it was imported."""
    if any(isinstance(finder, Archive) for finder in sys.meta_path):
        return False
    try:
        status = os.stat(__file__)
    except OSError:
        return True
    return (status.st_ino, status.st_mtime_ns) != _IMPORTED


def program(module: str) -> list[str]:
    """The words after `python3 -I -S` that run a module as a program, which imports none of ours."""
    held = next((finder for finder in sys.meta_path if isinstance(finder, Archive)), None)
    if held is None:
        return [f"{os.path.dirname(os.path.dirname(os.path.realpath(__file__)))}/{module.replace('.', '/')}.py"]
    file, *_, at, length = held.index[module]
    return [
        "-c",
        f"import marshal, os; __file__ = {file!r}; fd = os.open('/proc/{os.getpid()}/fd/{held.fd}', os.O_RDONLY)\n"
        f"code = os.pread(fd, {length}, {held.code + at}); os.close(fd); exec(marshal.loads(code))",
    ]


# Making it ----------------------------------------------------------------------------------------------------------


def write(library: str, final: str) -> None:
    """Write the archive of the library in the directory `library`, which is going to be at `final`. Raises OSError."""
    index: dict[str, Entry] = {}
    code = []
    position = 0
    for file in _sources(library):
        status = os.stat(f"{library}/{file}")
        with open(f"{library}/{file}", "rb") as source:
            made = marshal.dumps(compile(source.read(), f"{final}/{file}", "exec", dont_inherit=True))
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package = file.endswith("/__init__.py")
        index[name] = (file, package, status.st_mtime_ns, status.st_size, position, len(made))
        code.append(made)
        position += len(made)
    packed = marshal.dumps(index)
    path = path_in(library)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.new", "wb") as out:
        out.write(MAGIC + _NUMBER + len(packed).to_bytes(4, "little") + packed)
        out.writelines(code)
        out.flush()
        os.fsync(out.fileno())
    os.rename(f"{path}.new", path)


def _sources(library: str) -> Iterator[str]:
    for package in PACKAGES:
        for name in sorted(os.listdir(f"{library}/{package}")):
            if name.endswith(".py"):
                yield f"{package}/{name}"


def replace(new: str, library: str) -> None:
    """Put the directory `new` where `library` is, and remove that; no moment without a library. Raises OSError."""
    import shutil

    from layerwriter import syscalls

    parent, name = os.path.split(os.path.abspath(library))
    if os.path.exists(library):
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            syscalls.exchange(fd, os.path.basename(new), name)
        except OSError:  # a file system that cannot
            os.rename(library, f"{new}.old")
            os.rename(new, library)
            os.rename(f"{new}.old", new)
        finally:
            os.close(fd)
        shutil.rmtree(new)
    else:
        os.rename(new, library)


def main(words: Sequence[str]) -> int:
    """Carry out the command of the module's description."""
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    new, library = words or (here, here)
    import compileall

    if not compileall.compile_dir(new, quiet=1, stripdir=new, prependdir=library):
        return 1
    write(new, library)
    if words:
        sys.path.insert(0, here)
        replace(new, library)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
