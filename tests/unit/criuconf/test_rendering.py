"""The configuration of one dump or restore."""

from __future__ import annotations

import pytest

from criuconf import Criu, CriuConfError, Request, render
from criuconf.options import UNLISTED

# What `criu --help` lists of the options that matter here; 4.1.1 and 4.3.
LISTED = {
    "action-script",
    "config",
    "cpu-cap",
    "daemon",
    "enable-fs",
    "evasive-devices",
    "external",
    "file-locks",
    "force-irmap",
    "freeze-cgroup",
    "ghost-limit",
    "help",
    "images-dir",
    "leave-running",
    "libdir",
    "link-remap",
    "log-file",
    "manage-cgroups",
    "mntns-compat-mode",
    "network-lock",
    "root",
    "skip-file-rwx-check",
    "skip-in-flight",
    "skip-mnt",
    "tcp-close",
    "tcp-established",
    "timeout",
    "tree",
    "verbosity",
    "version",
    "work-dir",
}


def criu(version=(4, 3), *, without=(), **features):
    options = LISTED | {name for name, since in UNLISTED.items() if version >= since}
    if version >= (4, 3):
        options |= {"image-io-mode", "plugin-option"}
    known = {"network_lock_nftables": True, "compress": False} | features
    return Criu("/usr/sbin/criu", version, options - set(without), features=known)


def lines(rendered):
    return [line for line in rendered.text.splitlines() if not line.startswith("#")]


def test_a_dump_has_every_default():
    assert lines(render(criu(), Request("dump", "/run/x/lib"))) == [
        "libdir /run/x/lib",
        "verbosity=4",
        "link-remap",
        "ghost-limit 1073741824",
        "tcp-established",
        "file-locks",
        "network-lock nftables",
    ]


def test_a_restore_has_what_the_stock_shim_cannot_pass():
    assert lines(render(criu(), Request("restore", "/run/x/lib", ext_unix_sk=True))) == [
        "libdir /run/x/lib",
        "verbosity=4",
        "tcp-established",
        "file-locks",
        "ext-unix-sk",
        "skip-file-rwx-check",
    ]


def test_what_the_request_asks_for_is_written():
    request = Request(
        "dump",
        "/l",
        log_file="dump.log",
        verbosity=2,
        action_script="/run/x/hook",
        ghost_limit=5,
        tcp="close",
        skip_in_flight=True,
        ext_unix_sk=True,
        file_locks=False,
    )
    text = lines(render(criu(), request))
    assert text == [
        "libdir /l",
        "verbosity=2",
        "log-file dump.log",
        "link-remap",
        "ghost-limit 5",
        "tcp-close",
        "skip-in-flight",
        "ext-unix-sk",
        "action-script /run/x/hook",
        "network-lock nftables",
    ]


def test_network_lock_is_left_out_where_reading_it_from_a_file_ends_criu():
    assert "network-lock" not in render(criu((4, 1, 1)), Request("dump", "/l")).text


def test_network_lock_is_left_out_where_the_kernel_or_the_build_lacks_nftables():
    assert "network-lock" not in render(criu(network_lock_nftables=False), Request("dump", "/l")).text


def test_the_operators_choice_of_a_network_lock_replaces_ours():
    assert render(criu(), Request("dump", "/l", extra={"network-lock": "skip"})).value("network-lock") == "skip"
    with pytest.raises(CriuConfError, match=r"needs criu >= 4\.3.*4\.1\.1"):
        render(criu((4, 1, 1)), Request("dump", "/l", extra={"network-lock": "nftables"}))


def test_a_missing_option_that_is_only_wished_for_is_left_out():
    assert "rwx" not in render(criu(without=["skip-file-rwx-check"]), Request("restore", "/l")).text


def test_a_missing_option_that_is_needed_is_refused_with_the_version():
    with pytest.raises(CriuConfError, match=r"CRIU 4\.3\) has no option link-remap"):
        render(criu(without=["link-remap"]), Request("dump", "/l"))


def test_the_operators_options_in_each_form():
    extra = {
        "timeout": 60,
        "evasive-devices": True,
        "file-locks": False,
        "ghost-limit": "2G",
        "manage-cgroups": "ignore",
        "skip-mnt": ["/a", "/b"],
        "image-io-mode": "direct",
    }
    text = lines(render(criu(), Request("dump", "/l", extra=extra)))
    for expected in ("timeout 60", "evasive-devices", "no-file-locks", "ghost-limit 2G", "manage-cgroups=ignore"):
        assert expected in text
    assert "file-locks" not in text
    assert "ghost-limit 1073741824" not in text
    assert [each for each in text if each.startswith("skip-mnt")] == ["skip-mnt /a", "skip-mnt /b"]
    assert "image-io-mode direct" in text


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"gost-limit": 1}, "no option gost-limit"),
        ({"Ghost": 1}, "no name of a CRIU option"),
        ({"ghost-limit": True}, "needs a value"),
        ({"ghost-limit": False}, "cannot be switched off"),
        ({"ghost-limit": [1, 2]}, "one value, not a list"),
        ({"file-locks": "yes"}, "true or false"),
        ({"images-dir": "/x"}, "decided for each operation"),
        ({"no-daemon": True}, "decided for each operation"),
        ({"compress": True}, "built with LZ4"),
        ({"log-file": "a\nlibdir /evil"}, "control character"),
        ({"log-file": 'a"'}, 'a "'),
    ],
)
def test_an_operators_option_that_cannot_be_is_refused_by_name(extra, said):
    with pytest.raises(CriuConfError) as refused:
        render(criu(), Request("dump", "/l", extra=extra))
    assert said in str(refused.value)
    assert next(iter(extra)) in str(refused.value)


def test_an_option_of_a_newer_criu_is_refused_with_that_version():
    with pytest.raises(CriuConfError, match=r"image-io-mode.* needs criu >= 4\.3; /usr/sbin/criu is 4\.1\.1"):
        render(criu((4, 1, 1)), Request("dump", "/l", extra={"image-io-mode": "direct"}))


def test_compress_is_written_for_a_dump_by_a_criu_that_was_built_with_it():
    able = criu(compress=True)
    assert "compress" in lines(render(able, Request("dump", "/l", extra={"compress": True})))
    assert "compress" not in lines(render(able, Request("restore", "/l", extra={"compress": True})))


def test_an_option_that_the_other_operation_refuses_is_left_out_there():
    extra = {"mntns-compat-mode": True}
    assert "mntns-compat-mode" in render(criu(), Request("restore", "/l", extra=extra)).text
    assert "mntns-compat-mode" not in render(criu(), Request("dump", "/l", extra=extra)).text


def test_the_containers_own_settings_win_and_conflicts_are_listed_by_name():
    own = "libdir /its/own\ntcp-close\nno-file-locks\nlink-remap\ntimeout 20\naction-script /its/hook\n"
    rendered = render(criu(), Request("dump", "/l", action_script="/our/hook", container_text=own))
    text = lines(rendered)
    assert {"libdir /its/own", "tcp-close", "no-file-locks", "link-remap", "timeout 20"} <= set(text)
    assert {"libdir /l", "tcp-established", "file-locks"}.isdisjoint(text)
    assert text.count("link-remap") == 1
    # CRIU runs both scripts.
    assert {"action-script /our/hook", "action-script /its/hook"} <= set(text)
    assert [(each.name, each.ours, each.theirs) for each in rendered.conflicts] == [
        ("libdir", "libdir /l", "libdir /its/own"),
        ("tcp-close", "tcp-established", "tcp-close"),
        ("no-file-locks", "file-locks", "no-file-locks"),
    ]
    assert str(rendered.conflicts[0]) == "libdir: the container's own 'libdir /its/own' is used instead of 'libdir /l'"


def test_the_containers_own_file_conflicts_under_an_abbreviated_name_too():
    rendered = render(criu(), Request("dump", "/l", container_text="libd /its/own"))
    assert [each.name for each in rendered.conflicts] == ["libdir"]
    assert rendered.value("libdir") == "/its/own"


@pytest.mark.parametrize("own", ["nonsense-option", "images-dir /x", "leave-running", "frobnicate 5"])
def test_the_containers_own_file_cannot_set_what_criu_lacks_or_runc_decides(own):
    with pytest.raises(CriuConfError, match=r"^/etc/its\.conf: "):
        render(criu(), Request("dump", "/l", container_text=own, container_source="/etc/its.conf"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"operation": "pre-dump"},
        {"tcp": "maybe"},
        {"verbosity": 5},
        {"ghost_limit": -1},
        {"libdir": "lib"},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(arguments):
    with pytest.raises(CriuConfError):
        Request(**({"operation": "dump", "libdir": "/l"} | arguments))


@pytest.mark.parametrize("field", ["libdir", "action_script", "log_file"])
def test_no_value_of_a_request_can_carry_a_second_option(field):
    arguments = {"libdir": "/l", field: "/x\naction-script /evil"}
    with pytest.raises(CriuConfError):
        render(criu(), Request("dump", **arguments))
