"""`fermata doctor`: what each look says. tests/node/test_doctor.py has it look at real nodes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from shim import doctor
from shim.cli import main
from shim.config import Config
from shim.errors import ShimError
from shim.weights import Store


@pytest.fixture
def parameters(tmp_path):
    """The overlay module's parameters."""
    for name in ("redirect_dir", "metacopy", "index", "nfs_export"):
        (tmp_path / name).write_text("N\n")
    return tmp_path


@pytest.fixture
def lines(monkeypatch):
    """Have the command see these lines alone."""

    def give(*given):
        monkeypatch.setattr(doctor, "examine", lambda address, directories: iter(given))

    return give


def test_an_overlay_that_shows_every_change_is_ok(parameters):
    [line] = doctor._overlay(str(parameters))
    assert (line.level, line.fix, line.mend) == ("ok", None, None)


def test_overlay_options_that_force_the_slow_path_are_named_and_turned_off(parameters):
    (parameters / "metacopy").write_text("Y\n")
    [line] = doctor._overlay(str(parameters))
    assert line.level == "warning"
    assert "the overlay module's parameter metacopy is on" in line.text
    assert line.fix.startswith(f"echo N >{parameters}/metacopy (for containers created from then on; ")
    line.mend()
    assert (parameters / "metacopy").read_text() == "N"
    assert [line.level for line in doctor._overlay(str(parameters))] == ["ok"]


@pytest.mark.parametrize(("text", "level"), [("always [madvise] never", "ok"), ("[always] madvise never", "warning")])
def test_transparent_huge_pages_at_always_are_a_warning(tmp_path, text, level):
    path = tmp_path / "enabled"
    path.write_text(text)
    [line] = doctor._huge_pages(str(path), driver=lambda: False)
    assert line.level == level
    if line.mend:
        line.mend()
        assert path.read_text() == "madvise"


def test_weights_that_no_snapshot_needs_are_a_warning(tmp_path):
    config = Config()
    config.weights_directory = str(tmp_path / "store")
    assert list(doctor._weights(config)) == []
    store = Store(config.weights_directory)
    assert [line.level for line in doctor._weights(config)] == ["ok"]
    (tmp_path / "store" / f"{'a' * 64}.weights").write_bytes(bytes(4096))
    (tmp_path / "store" / "draft-1-a").write_bytes(bytes(4096))
    [line] = doctor._weights(config)
    assert (line.level, line.fix) == ("warning", "fermata prune")
    assert "8.0 KiB of it no snapshot needs" in line.text
    (tmp_path / "fermata.json").write_text("{")
    store.refer("a" * 64, "one", str(tmp_path))
    (tmp_path / "store" / "draft-1-a").unlink()
    assert [line.level for line in doctor._weights(config)] == ["ok"]


def test_a_containerd_that_does_not_listen_is_a_problem(tmp_path):
    path = str(tmp_path / "no.sock")
    assert doctor.Containerd.find(path) is None
    [line] = doctor._containerd(None, path)
    assert (line.level, line.text) == ("problem", f"none listens at {path}")


@pytest.mark.parametrize(
    ("installed", "fix"),
    [(True, "systemctl start containerd, or"), (False, "install containerd 1.7 or newer (there is none on PATH), or")],
)
def test_a_containerd_that_is_not_installed_is_not_told_to_start(tmp_path, monkeypatch, installed, fix):
    monkeypatch.setenv("PATH", str(tmp_path))
    if installed:
        (tmp_path / "containerd").touch(mode=0o755)
    [line] = doctor._containerd(None, "/no.sock")
    assert line.fix == f"{fix} name its socket with --address"


@pytest.mark.parametrize(("kernel", "fix"), [("6.15.2", False), ("6.16.0-1-amd64", True)])
def test_where_criu_is_missing_the_version_that_this_kernel_needs_is_named(monkeypatch, kernel, fix):
    config = Config()
    config.criu_path = "/no/criu"
    monkeypatch.setattr(doctor.os, "uname", lambda: SimpleNamespace(release=kernel))
    [line] = doctor._criu(config)
    assert (line.level, line.fix is not None) == ("problem", fix)
    assert not fix or line.fix.startswith("install CRIU 4.2 or newer")


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["containerd"], "/etc/containerd/config.toml"),
        (["containerd", "--config", "/a"], "/a"),
        (["containerd", "-c", "/a"], "/a"),
        (["containerd", "--config=/a", "-l", "debug"], "/a"),
    ],
)
def test_the_configuration_file_is_the_running_containerds_own(words, path):
    assert doctor._config_file(words) == path


def test_the_files_that_name_the_runtime_are_found(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "config.toml").write_text("version = 3\n")
    (tmp_path / "conf.d/fermata.toml").write_text('runtime_type = "io.containerd.fermata.v1"\n')
    found = doctor._files_naming_the_runtime(str(tmp_path / "config.toml"))
    assert found == [str(tmp_path / "conf.d/fermata.toml")]


def test_a_look_that_fails_becomes_a_problem_and_the_others_go_on(monkeypatch):
    def fails():
        raise ShimError("the disk is gone")

    monkeypatch.setattr(doctor, "_runc", fails)
    monkeypatch.setattr(doctor, "_criu", lambda config: iter(()))
    monkeypatch.setattr(doctor, "_lock_rules", lambda: iter(()))
    found = list(doctor.examine("/no.sock", []))
    assert [line.text for line in found if line.name == "runc"] == ["could not be looked at: the disk is gone"]
    assert found[-1].name == "operator's command"


def test_a_stock_shim_that_the_configuration_names_wrongly_is_a_problem():
    config = Config()
    config.stock_shim = "/nowhere/shim"
    [line] = doctor._stock_shim(None, config)
    assert line.level == "problem"
    assert "/nowhere/shim" in line.text


def test_warnings_alone_are_a_good_end_and_problems_are_not(lines, capsys):
    lines(doctor.Line("ok", "a", "fine"), doctor.Line("warning", "b", "slow", "hurry"))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == (
        "ok       a: fine\nwarning  b: slow\n         -> hurry\n2 lines, 0 problems, 1 warnings.\n"
    )
    lines(doctor.Line("problem", "c", "broken"))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "healthy": False,
        "lines": [{"level": "problem", "name": "c", "text": "broken", "fix": None}],
        "fixed": [],
    }


def test_nothing_is_mended_without_fix_and_with_it_what_was_done_is_said(lines, capsys):
    done = []
    lines(doctor.Line("warning", "b", "slow", "hurry", mend=lambda: done.append("b")))
    main(["doctor"])
    assert done == []
    main(["doctor", "--fix"])
    assert done == ["b"]
    assert capsys.readouterr().out.endswith(
        "fixed    b: hurry\nwarning  b: slow\n         -> hurry\n1 lines, 0 problems, 1 warnings.\n"
    )


def test_a_mend_that_fails_is_said_and_the_next_one_is_tried(lines, capsys):
    done = []

    def fails():
        raise PermissionError(13, "Permission denied")

    lines(
        doctor.Line("warning", "a", "bad", "x", mend=fails),
        doctor.Line("warning", "b", "bad", "y", mend=lambda: done.append("b")),
    )
    main(["doctor", "--fix"])
    assert done == ["b"]
    assert "fermata: a: `x` failed: [Errno 13] Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("text, level", [("always [madvise] never", "warning"), ("[always] madvise never", "ok")])
def test_on_a_node_with_a_gpu_huge_pages_at_always_are_best(tmp_path, text, level):
    path = tmp_path / "enabled"
    path.write_text(f"{text}\n")
    [line] = doctor._huge_pages(str(path), driver=lambda: True)
    assert line.level == level
    if line.mend:
        line.mend()
        assert path.read_text() == "always"


DUMPED = """
    [plugins.{q}io.containerd.cri.v1.runtime{q}.containerd]
      default_runtime_name = {q}runc{q}
        [plugins.{q}io.containerd.cri.v1.runtime{q}.containerd.runtimes.{name}]
          runtime_type = {q}{kind}{q}
          runtime_path = {q}{path}{q}
          [plugins.{q}io.containerd.cri.v1.runtime{q}.containerd.runtimes.{name}.options]
            BinaryName = {q}{q}
            {driver}
        [plugins.{q}io.containerd.cri.v1.runtime{q}.containerd.runtimes.runc]
          runtime_type = {q}io.containerd.runc.v2{q}
          [plugins.{q}io.containerd.cri.v1.runtime{q}.containerd.runtimes.runc.options]
            SystemdCgroup = true
    [plugins.other]
      SystemdCgroup = false
"""


@pytest.mark.parametrize("quote", ["'", '"'])  # containerd 2's and 1.7's way to write it
@pytest.mark.parametrize(
    ("kind", "path"),
    [("io.containerd.fermata.v1", ""), ("io.containerd.runc.v2", "/usr/bin/containerd-shim-fermata-v1")],
)
def test_a_runtime_of_ours_with_another_cgroup_driver_is_a_problem(quote, kind, path):
    def findings(driver, kind=kind, path=path):
        text = DUMPED.format(q=quote, name="mine", kind=kind, path=path, driver=driver)
        return [(line.level, line.fix) for line in doctor._cgroup_driver(text)]

    wrong = [
        ("problem", "set SystemdCgroup = true in the options of the runtime mine, then systemctl restart containerd")
    ]
    assert findings("SystemdCgroup = false") == wrong
    assert findings("") == wrong
    assert findings("SystemdCgroup = true") == []
    assert findings("SystemdCgroup = false", "io.containerd.kata.v2", "") == []


@pytest.mark.parametrize(
    ("criu", "kernel", "able"),
    [
        ((4, 1, 1), "6.18.44-fc", False),
        ((4, 1, 1), "6.16.0", False),
        ((4, 1, 1), "6.15.9-amd64", True),
        ((4, 1, 1), "7.0.0", False),
        ((4, 2), "6.18.44", True),
        ((4, 3), "6.18.44", True),
    ],
)
def test_which_criu_can_dump_an_internet_socket_on_which_kernel_is_known(criu, kernel, able):
    assert doctor.dumps_internet_sockets(criu, kernel) == able


def test_shims_of_an_earlier_version_are_told_from_those_of_this_one(tmp_path):
    shim = "python3\0-I\0-S\0/usr/local/bin/../lib/fermata/shim/containerd-shim-fermata-v1\0-id\0a\0"
    library = "/usr/local/lib/fermata/__pycache__/library.cpython-311"
    for pid, (command, held) in enumerate(
        [(shim, library), (shim, f"{library} (deleted)"), ("sleep\0001", f"{library} (deleted)"), (shim, "/dev/null")]
    ):
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/cmdline").write_text(command)
        (tmp_path / f"{pid}/fd/3").symlink_to(held)
    [line] = doctor._running_shims(str(tmp_path))
    assert line.level == "ok"
    assert line.text == "3, 1 of them of an earlier version, which their containers keep until they end"
    assert list(doctor._running_shims(str(tmp_path / "none"))) == []
