"""What `fermata doctor` says of the differ, from configurations as containerd 1.7 and 2.x print them."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from differ.check import _try, check

VERSION_2 = """
[plugins]

  [plugins."io.containerd.service.v1.diff-service"]
    default = [{order}]

  [plugins."io.containerd.service.v1.tasks-service"]
    default = ["not this one"]

[proxy_plugins]

  [proxy_plugins.other]
    address = "/run/other.sock"
    type = "snapshot"

  [proxy_plugins.fermata]
    address = "/run/fermata-differ/differ.sock"
    capabilities = []
    platform = "unknown/unknown"
    type = "diff"

    [proxy_plugins.fermata.exports]
"""
VERSION_3 = VERSION_2.replace('"', "'")
BOTH = pytest.mark.parametrize("printed", [VERSION_2, VERSION_3], ids=["version 2", "version 3"])


def configured(printed, *order):
    quote = '"' if '"' in printed else "'"
    return printed.replace("{order}", ", ".join(f"{quote}{name}{quote}" for name in order))


@BOTH
def test_first_and_answering_is_well(printed):
    tried = []
    found = check(configured(printed, "fermata", "walking"), lambda path: tried.append(path), lambda: True)
    assert (found.level, found.fix, tried) == ("ok", None, ["/run/fermata-differ/differ.sock"])


def test_without_the_fast_gzip_it_is_well_and_could_be_better():
    found = check(configured(VERSION_3, "fermata", "walking"), lambda path: None, lambda: False)
    assert found.level == "ok"
    assert "libisal2" in found.fix


@BOTH
def test_first_and_silent_is_a_problem_for_every_image(printed):
    found = check(configured(printed, "fermata", "walking"), lambda path: f"{path} does not answer")
    assert found.level == "problem"
    assert "does not answer" in found.text
    assert "fermata-differ.socket" in found.fix


@BOTH
@pytest.mark.parametrize("order", [("walking", "fermata"), ("fermata",)])
def test_an_order_that_cannot_work_is_a_problem(printed, order):
    assert check(configured(printed, *order), lambda path: None).level == "problem"


@BOTH
@pytest.mark.parametrize("order", [("fermata", "walking"), ("walking", "fermata")])
def test_an_order_that_names_no_plugin_stops_containerds_services(printed, order):
    alone = configured(printed, *order).partition("[proxy_plugins]")[0]
    found = check(alone, lambda path: None)
    assert found.level == "problem"
    assert "there is no plugin fermata" in found.text
    assert "proxy_plugins.fermata" in found.fix
    assert "conf.d" in found.fix


@BOTH
def test_differs_of_others_are_none_of_ours(printed):
    others = configured(printed, "erofs", "walking").replace("fermata", "others")
    assert check(others, lambda path: "not asked").level == "ok"


@BOTH
def test_the_platform_keeps_the_transfer_service_away(printed):
    wrong = configured(printed, "fermata", "walking").replace("unknown/unknown", "linux/amd64")
    assert check(wrong, lambda path: None, lambda: True).level == "warning"


@BOTH
def test_a_differ_that_is_never_asked_is_a_warning(printed):
    assert check(configured(printed, "walking"), lambda path: None).level == "warning"


def test_not_switched_on_is_not_wrong():
    assert check("[plugins]\n").level == "ok"
    assert check(None).level == "warning"


def test_a_socket_is_tried_as_far_as_the_first_frame(tmp_path):
    path = str(tmp_path / "differ.sock")
    assert "No such file" in _try(path)
    tmp_path.chmod(0o700)
    for said, wrong in ((bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), None), (b"HTTP/1.1 4", "no gRPC server")):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()

            def answer(listener=listener, said=said):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(said)
                    connection.recv(100)

            serving = threading.Thread(target=answer)
            serving.start()
            found = _try(path)
            serving.join()
        os.unlink(path)
        assert found is None if wrong is None else wrong in found
