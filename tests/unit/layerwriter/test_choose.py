"""Which writer a mount needs."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerwriter

PLAIN = ["workdir=/w", "upperdir=/u", "lowerdir=/a:/b"]


@pytest.fixture
def parameters(tmp_path: Path):
    """A function that makes a directory of the overlay module's parameters."""

    def make(**on: str) -> str:
        for name in ("redirect_dir", "metacopy", "index", "nfs_export"):
            (tmp_path / name).write_text(on.get(name, "N") + "\n")
        return str(tmp_path)

    return make


def test_a_plain_mount_is_written_from_its_upper_directory(parameters):
    choice = layerwriter.choose([*PLAIN, "index=off"], parameters())
    assert (choice.made_by, choice.reason, choice.xattr_prefix) == ("upperdir", None, "trusted.")


@pytest.mark.parametrize("option", ["redirect_dir=on", "metacopy=on", "index=on", "nfs_export=on", "verity=on"])
def test_an_option_that_hides_changes_needs_the_full_comparison(parameters, option):
    choice = layerwriter.choose([*PLAIN, option], parameters())
    assert choice.made_by == "full-diff"
    assert option in choice.reason


@pytest.mark.parametrize(
    "option",
    [
        "redirect_dir=off",
        "redirect_dir=follow",
        "redirect_dir=nofollow",
        "metacopy=off",
        "index=off",
        "nfs_export=off",
        "verity=off",
        "xino=on",
        "volatile",
        "ro",
    ],
)
def test_an_option_that_hides_nothing_does_not(parameters, option):
    assert layerwriter.choose([*PLAIN, option], parameters()).made_by == "upperdir"


@pytest.mark.parametrize("name", ["redirect_dir", "metacopy", "index", "nfs_export"])
def test_a_default_of_the_kernel_counts_where_no_option_speaks(parameters, name):
    on = parameters(**{name: "Y"})
    choice = layerwriter.choose(PLAIN, on)
    assert choice.made_by == "full-diff"
    assert f"parameter {name}" in choice.reason
    assert layerwriter.choose([*PLAIN, f"{name}=off"], on).made_by == "upperdir"


def test_the_last_of_two_options_counts(parameters):
    assert layerwriter.choose([*PLAIN, "index=on", "index=off"], parameters()).made_by == "upperdir"
    assert layerwriter.choose([*PLAIN, "index=off", "index=on"], parameters()).made_by == "full-diff"


def test_userxattr_names_the_prefix_and_has_no_redirects(parameters):
    choice = layerwriter.choose([*PLAIN, "userxattr"], parameters(redirect_dir="Y", metacopy="Y"))
    assert (choice.made_by, choice.xattr_prefix) == ("upperdir", "user.")
    assert layerwriter.choose([*PLAIN, "userxattr"], parameters(index="Y")).made_by == "full-diff"


def test_a_mount_without_an_upper_directory_is_compared(parameters):
    choice = layerwriter.choose(["rbind", "rw"], parameters())
    assert choice.made_by == "full-diff"
    assert "upper directory" in choice.reason


def test_a_kernel_without_the_parameters_has_them_off(tmp_path):
    assert layerwriter.choose(PLAIN, str(tmp_path / "none")).made_by == "upperdir"
