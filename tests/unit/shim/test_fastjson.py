from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shim import fastjson

TOP = Path(__file__).resolve().parents[3]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_values_are_read_and_written_as_json_does(value):
    assert fastjson.dumps(value) == json.dumps(value)
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert fastjson.loads(text.encode()) == value


@given(st.text() | VALUES.map(json.dumps), st.binary(max_size=3), st.integers(0, 50))
@example("", b"", 0)
@example('{"a": 1} x', b"", 0)
@example(" \n{}\t ", b"", 0)
@example('{"a":1,"a":2}', b"", 0)
@example('"\\ud800"', b"", 0)
@example("[1e999, NaN, -Infinity]", b"", 0)
@example('"a\nb"', b"", 0)
@example("[" * 100_000, b"", 0)
@example("9" * 5000, b"", 0)
def test_any_bytes_are_taken_and_refused_as_json_does(text, noise, at):
    data = text.encode("utf-8", "surrogatepass")
    data = data[:at] + noise + data[at:]
    try:
        expected = json.loads(data)
    except (ValueError, RecursionError) as error:
        with pytest.raises(type(error)) as refused:
            fastjson.loads(data)
        assert str(refused.value) == str(error)
    else:
        assert repr(fastjson.loads(data)) == repr(expected)


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf{}", '{"a": "ä"}'.encode("utf-16"), "[1]".encode("utf-32")])
def test_encodings_are_found_out_as_json_does(data):
    try:
        expected = json.loads(data)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)[:20]):
            fastjson.loads(data)
    else:
        assert fastjson.loads(data) == expected


def test_what_json_cannot_hold_is_refused_in_its_words():
    cycle: list = []
    cycle.append(cycle)
    for value in ({1, 2}, cycle, {(1, 2): 3}, [b""]):
        with pytest.raises((TypeError, ValueError)) as theirs:
            json.dumps(value)
        with pytest.raises(type(theirs.value)) as ours:
            fastjson.dumps(value)
        assert str(ours.value) == str(theirs.value)


def test_neither_reading_nor_writing_imports_json():
    program = (
        "import sys; from shim import fastjson\n"
        'assert fastjson.dumps(fastjson.loads(b\'{"a": [1, 2.5, null, "\\u00e4"]}\'))\n'
        "print(sorted({'json', 're', 'enum'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=TOP, env={"PYTHONPATH": str(TOP)}, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
