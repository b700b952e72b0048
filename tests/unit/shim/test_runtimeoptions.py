"""runc's options as the CRI plugin writes them for a runtime that it does not know."""

from __future__ import annotations

import pytest

from shim.errors import ShimError
from shim.runtimeoptions import NAMES, parse, read
from shim.task import GenericOptions, RuncOptions

WHOLE = """BinaryName = ''
CriuWorkPath = ""
IoGid = 7
NoNewKeyring = false
Root = '/run/my runc'  # a place
ShimCgroup = "/a\\"b"
SystemdCgroup = true
TypeUrl = ''
"""


def test_a_table_of_containerds_becomes_runcs_options():
    options = parse(WHOLE, "here")
    assert (options.systemd_cgroup, options.io_gid, options.root) == (True, 7, "/run/my runc")
    assert options.shim_cgroup == '/a"b'
    assert parse("", "here").encode() == RuncOptions().encode()


def test_every_option_that_we_know_can_be_given():
    assert {name.replace("_", ""): name for name, _ in RuncOptions.FIELDS.values()} == NAMES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SystemdGroup = true", "here: 'SystemdGroup = true' is no option of runc's; there are .*systemdcgroup"),
        ("SystemdCgroup = 'true'", "here: SystemdCgroup is 'true', it must be true or false"),
        ("SystemdCgroup", "here: 'SystemdCgroup' is no option of runc's"),
        ("IoUid = [1]", r"here: IoUid is \[1\], it must be a number"),
        ("IoUid = true", "here: IoUid is true, it must be a number"),
        ("Root = '/a", "here: Root is '/a, it must be text in quotes"),
        ("Root = '/a' b", "here: Root is '/a' b, it must be text in quotes"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text, said):
    with pytest.raises(ShimError, match=said):
        parse(text, "here")


def test_the_options_may_be_in_a_file_of_their_own(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("SystemdCgroup = true\n")
    assert read(GenericOptions(config_path=str(file))).systemd_cgroup
    with pytest.raises(ShimError, match=r"cannot read the runtime options in .*gone.toml: No such file"):
        read(GenericOptions(config_path=str(tmp_path / "gone.toml")))
    # The text is what containerd's configuration says; the path then only says where it has it from.
    assert read(GenericOptions(config_path="/gone", config_body=b"IoUid = 3")).io_uid == 3
