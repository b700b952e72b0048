"""The node's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from shim import config
from shim.errors import ShimError

TOP = Path(__file__).resolve().parents[3]


def written(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_no_file_is_needed(tmp_path):
    loaded = config.load(str(tmp_path / "missing"))
    assert {setting.attribute: getattr(loaded, setting.attribute) for setting in config.SETTINGS} == {
        setting.attribute: setting.default for setting in config.SETTINGS
    }


def test_what_is_written_holds(tmp_path):
    text = '[criu]\nghost_limit = 5\n[criu.options]\nnetwork-lock = "iptables"\n[layer]\ncompression = "zstd"\n'
    loaded = config.load(written(tmp_path, text))
    assert (loaded.ghost_limit, loaded.layer_compression) == (5, "zstd")
    assert loaded.criu_options == {"network-lock": "iptables"}
    assert loaded.layer_limit == 8 << 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[crui]\n", r"unknown section \[crui\]; there are shim, criu, "),
        ("limit = 5\n", r"unknown section \[limit\]"),
        ("[layer]\nlimt = 5\n", r"unknown key limt in \[layer\]; there are limit, compression"),
        ("[layer]\nlimit = '5'\n", r"\[layer\] limit = '5'; it must be a whole number"),
        ("[layer]\nlimit = true\n", "it must be a whole number"),
        ("[layer]\nlimit = -1\n", "it cannot be negative"),
        ("[layer]\ncompression = 'lz4'\n", "it can be none or zstd"),
        ("[criu]\noptions = 5\n", "it must be a table"),
        ("[layer\n", "config.toml: "),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(ShimError, match=words):
        config.load(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ShimError, match="cannot read"):
        config.load(str(tmp_path))


def test_every_setting_is_an_attribute_with_a_type():
    assert {setting.attribute for setting in config.SETTINGS} == set(config.Config.__annotations__)


def test_the_documentation_is_what_the_code_says():
    assert (TOP / "docs/config.md").read_text() == config.document(), "run: python3 -m shim.config > docs/config.md"
