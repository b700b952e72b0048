"""What the fuzzer starts from, and what reached new lines of the reader once, is taken or refused as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.layers import CORPUS, Arena


@pytest.fixture(scope="module")
def arena(tmp_path_factory) -> Arena:
    return Arena(tmp_path_factory.mktemp("arena"))


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_an_input_of_the_corpus(arena: Arena, path: Path):
    taken = arena.attempt(path.read_bytes())
    # Those with a number are the fuzzer's own, and anything may be wrong with them.
    assert taken or path.name[0].isdigit()
