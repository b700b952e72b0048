"""The library in one file: what a process has opened stays what it imports, whatever becomes of the files."""

from __future__ import annotations

import marshal
import os
import shutil
import subprocess
import sys

import pytest

from node.stack import PROJECT
from shim import library


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    made = tmp_path_factory.mktemp("compiled")
    for package in library.PACKAGES:
        shutil.copytree(PROJECT / package, made / package, ignore=shutil.ignore_patterns("__pycache__"))
    compile_(made)
    return made


@pytest.fixture
def installed(compiled, tmp_path):
    """A library as `make install` leaves it."""
    return shutil.copytree(compiled, tmp_path / "fermata")


def compile_(made):
    subprocess.run([sys.executable, "-I", str(made / "shim/library.py")], check=True, timeout=60)


def says(made, program, *, before="pass"):
    """What a process prints that holds the library, runs `before`, then `program`."""
    text = (
        f"import sys; sys.path.insert(0, {str(made)!r})\nfrom shim import library\n{before}\n"
        f"print(library.hold())\n{program}\n"
    )
    command = [sys.executable, "-I", "-S", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


HELD = "import shim.state; print(type(shim.state.__spec__.loader).__name__)"
REMOVE = "import shutil; shutil.rmtree({path!r})"


def test_modules_come_from_the_one_file_and_know_where_they_are(installed):
    program = "import shim.take, layerwriter.tree, criuconf\nprint(shim.take.HOOK, layerwriter.__path__[0])"
    assert says(installed, program) == ["True", f"{installed}/shim/hook.sh", f"{installed}/layerwriter"]
    assert says(installed, HELD) == ["True", "Archive"]


def test_what_is_imported_later_is_of_the_same_version_although_it_is_replaced(installed):
    replaced = REMOVE.format(path=str(installed))
    replaced += f"\nimport os; os.makedirs({str(installed / 'shim')!r})"
    replaced += f"\nopen({str(installed / 'shim/take.py')!r}, 'w').write('HOOK = 1')"
    program = f"{replaced}\nimport shim.take, shim.check, layerwriter.tree; print(len(shim.take.HOOK) > 1)"
    assert says(installed, program) == ["True", "True"]


def test_every_module_of_the_packages_is_in_it(installed):
    # But for those whose import runs them, or needs another package.
    names = [
        str(path.relative_to(PROJECT)).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for package in library.PACKAGES
        for path in sorted((PROJECT / package).glob("*.py"))
        if path.stem != "__main__" and package != "differ"
    ]
    program = f"{REMOVE.format(path=str(installed))}\nimport importlib\n"
    program += f"print(all(importlib.import_module(name) for name in {names!r}))"
    assert says(installed, program) == ["True", "True"]


def test_a_module_that_was_changed_by_hand_counts(installed):
    with (installed / "shim/take.py").open("a") as file:
        file.write("\nHOOK = 'mine'\n")
    assert says(installed, "import shim.take; print(shim.take.HOOK)") == ["False", "mine"]
    compile_(installed)
    assert says(installed, "import shim.take; print(shim.take.HOOK)") == ["True", "mine"]


def test_while_a_package_manager_replaces_modules_the_former_version_counts(installed):
    (installed / ".changing").touch()
    for name in ("take", "snapshot"):
        (installed / f"shim/{name}.py").write_text("HOOK = 'half'")
    (installed / "shim/state.py").unlink()
    (installed / "shim/__init__.py").write_text("")
    program = "import shim.take, shim.snapshot; print(shim.take.HOOK != 'half', shim.__version__ > '')"
    assert says(installed, program) == ["True", "True", "True"]


@pytest.mark.parametrize("kept", [0, 10, 30, 2000])
def test_one_that_was_cut_off_is_as_none(installed, kept):
    archive = library.path_in(str(installed))
    os.truncate(archive, kept)
    assert says(installed, "import shim.take; print(shim.take.__spec__.loader.path[-7:])") == ["False", "take.py"]


@pytest.mark.parametrize("lost", [1, 50_000])
def test_one_that_lacks_its_end_is_as_none(installed, lost):
    """The index is whole then, and only a module that is imported days later would not be."""
    archive = library.path_in(str(installed))
    os.truncate(archive, os.stat(archive).st_size - lost)
    assert says(installed, HELD) == ["False", "SourceFileLoader"]


@pytest.mark.parametrize("index", [(), {"shim": 5}, {"shim": ("shim/__init__.py", True, 0, "", 0, -1)}])
def test_one_whose_index_is_none_is_as_none(installed, index):
    with open(library.path_in(str(installed)), "r+b") as file:
        head = file.read(len(library.MAGIC) + 16).partition(library.MAGIC)[2][:4]
        packed = marshal.dumps(index)
        file.truncate(0)
        file.seek(0)
        file.write(library.MAGIC + head + len(packed).to_bytes(4, "little") + packed)
    assert says(installed, HELD) == ["False", "SourceFileLoader"]


def test_one_whose_code_is_damaged_is_as_none(installed):
    archive = library.path_in(str(installed))
    size = os.stat(archive).st_size
    with open(archive, "r+b") as file:
        file.seek(len(library.MAGIC))
        length = int.from_bytes(file.read(8)[4:], "little")
        start = len(library.MAGIC) + 8 + length
        file.seek(start)
        file.write(b"\xff" * (size - start))
    assert says(installed, HELD) == ["False", "SourceFileLoader"]


def test_one_of_another_python_is_as_none(installed):
    archive = library.path_in(str(installed))
    with open(archive, "r+b") as file:
        file.seek(len(library.MAGIC))
        file.write(b"\0\0")
    assert says(installed, HELD) == ["False", "SourceFileLoader"]


def test_without_one_modules_are_imported_as_usual(installed):
    os.unlink(library.path_in(str(installed)))
    assert says(installed, HELD) == ["False", "SourceFileLoader"]


def test_the_program_beside_the_library_is_of_the_version_that_is_held(installed):
    program = "import subprocess\nargv = [sys.executable, '-I', '-S', *library.program('shim.hook')]\n"
    program += "done = subprocess.run(argv, capture_output=True, text=True, env={})\n"
    program += "print(done.returncode, 'KeyError' in done.stderr)"
    assert says(installed, program) == ["True", "1", "True"]
    os.rename(library.path_in(str(installed)), installed / "aside")
    assert says(installed, program) == ["False", "1", "True"]
    os.rename(installed / "aside", library.path_in(str(installed)))
    assert says(installed, f"{REMOVE.format(path=str(installed))}\n{program}") == ["True", "1", "True"]


def test_a_new_library_takes_the_place_of_the_old_one(installed, tmp_path):
    new = tmp_path / "fermata.new"
    shutil.copytree(installed, new, ignore=shutil.ignore_patterns("__pycache__"))
    with (new / "shim/take.py").open("a") as file:
        file.write("\nHOOK = 'new'\n")
    subprocess.run(
        [sys.executable, "-I", str(new / "shim/library.py"), str(new), str(installed)], check=True, timeout=60
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fermata"]
    program = "import shim.take; print(shim.take.HOOK, shim.take.Take.run.__code__.co_filename)"
    assert says(installed, program) == ["True", "new", f"{installed}/shim/take.py"]


def test_a_process_that_starts_just_then_has_the_new_one_alone(installed, compiled, tmp_path):
    """Its archive was the old one's, and the sources that it is compared with are the new one's."""
    new = shutil.copytree(compiled, tmp_path / "new")
    with (new / "shim/state.py").open("a") as file:
        file.write("\nNEW = True\n")
    compile_(new)
    meanwhile = f"""
import os
fits = library._fits
def replaced(*arguments):
    if os.path.exists({str(new)!r}):
        os.rename({str(installed)!r}, {str(tmp_path / "old")!r})
        os.rename({str(new)!r}, {str(installed)!r})
    return fits(*arguments)
library._fits = replaced
"""
    assert says(installed, f"{HELD}\nprint(shim.state.NEW)", before=meanwhile) == ["True", "Archive", "True"]


def test_it_takes_a_place_that_is_empty(tmp_path):
    new = tmp_path / "fermata.new"
    for package in library.PACKAGES:
        shutil.copytree(PROJECT / package, new / package, ignore=shutil.ignore_patterns("__pycache__"))
    final = tmp_path / "fermata"
    subprocess.run([sys.executable, "-I", str(new / "shim/library.py"), str(new), str(final)], check=True, timeout=60)
    assert says(final, HELD) == ["True", "Archive"]


def test_a_process_that_holds_none_knows_when_another_version_has_come(installed):
    replaced = f"import os; path = {str(installed / 'shim/library.py')!r}\n"
    replaced += "text = open(path).read(); os.unlink(path); open(path, 'w').write(text)"
    asked = "print(library.changed())"
    assert says(installed, f"{asked}\n{replaced}\n{asked}") == ["True", "False", "False"]
    compile_(installed)
    os.unlink(library.path_in(str(installed)))
    removed = REMOVE.format(path=str(installed))
    assert says(installed, f"{asked}\n{replaced}\n{asked}\n{removed}\n{asked}") == ["False", "False", "True", "True"]
