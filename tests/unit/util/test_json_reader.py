"""JSON read in slices: the values and refusals of parsers that read at once, within limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.util import json_reader, number_arrays
from ovmstrio.util.json_reader import (
    JsonLimitExceeded,
    JsonLimits,
    JsonSyntaxError,
    check_arrays,
    parse_as_python,
    parse_strictly,
    read_json,
    without_arrays,
)
from ovmstrio.util.number_arrays import NumberArray
from ovmstrio.util.slices import run_to_end
from tests.support.examples import examples

NO_LIMITS = JsonLimits(10**9, 10**9, 10**9, 500, 10**9)

_STRINGS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(['a\\"b', "\\" * 7, '"[{,:', "\n\t[1,2", "k", ""]),
    st.builds(
        lambda text, count: text * count, st.sampled_from(["一\N{GRINNING FACE}", "x", "\\", "é"]), st.integers(1, 120)
    ),
)
_NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False)
)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _STRINGS | st.lists(st.sampled_from([1, 0.5, -3, 7e3]), max_size=60),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(_STRINGS, inner, max_size=6),
    max_leaves=25,
)
_EDITS = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.one_of(
            st.just(b""),
            st.sampled_from([b",", b"[", b"]", b"{", b"}", b'"', b"\\", b":", b"1", b" ", b"[]", b"{}", b",,"]),
            st.binary(min_size=1, max_size=2),
        ),
        st.integers(0, 2),
    ),
    max_size=2,
)


@st.composite
def _texts(draw: st.DrawFn) -> bytes:
    """Return the text of a document, as it was written or with a few bytes changed."""
    is_ascii, indent = draw(st.booleans()), draw(st.sampled_from([None, None, 1]))
    written = json.dumps(draw(_VALUES), ensure_ascii=is_ascii, indent=indent)
    text = bytearray(written.encode(errors="surrogatepass"))
    for place, added, removed in draw(_EDITS):
        at = place % (len(text) + 1)
        text[at : at + removed] = added
    return bytes(text)


@contextmanager
def _small_slices(size: int, shortest_run: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (json_reader, number_arrays):
            patch.setattr(module, "SLICE_BYTES", size)
            patch.setattr(module, "SHORTEST_RUN_BYTES", shortest_run)
        yield


def _result(read: Any) -> Any:
    """Return what a call returns, as JSON that shows types and the order of keys, or that the call refuses a text."""
    try:
        return json.dumps(read())
    except ValueError:
        return "refused"


_SIZES = st.sampled_from([25, 33, 64, 200])
"""Slices that are as long as any number."""
_RUNS = st.sampled_from([8, 32])


@settings(max_examples=examples(150), deadline=None)
@given(text=_texts(), size=_SIZES)
def test_a_document_has_the_values_of_a_parser_that_reads_at_once(text: bytes, size: int) -> None:
    """Also the order of keys, the last of equal keys, and what is refused."""
    with _small_slices(size, 8):
        read = _result(lambda: run_to_end(read_json(text, NO_LIMITS, parse=parse_strictly)))
    assert read == _result(lambda: orjson.loads(text))


def _read_with_arrays(text: bytes) -> Any:
    arrays: list[NumberArray] = []
    document = run_to_end(read_json(text, NO_LIMITS, parse=parse_strictly, arrays=arrays))
    run_to_end(check_arrays(arrays))
    return without_arrays(document)


@settings(max_examples=examples(150), deadline=None)
@given(text=_texts(), size=_SIZES, shortest_run=_RUNS)
def test_arrays_stand_for_the_lists_of_a_document(text: bytes, size: int, shortest_run: int) -> None:
    """A list that is no JSON is refused, also one that a later member of the same name replaces."""
    with _small_slices(size, shortest_run):
        read = _result(lambda: _read_with_arrays(text))
    assert read == _result(lambda: orjson.loads(text))


_PYTHON_WORDS = st.sampled_from(
    [
        "NaN",
        "-Infinity",
        "Infinity",
        "1e400",
        "-1e400",
        "123456789012345678901234567890",
        '"\\ud800"',
        "1.0",
        "-0",
        "1E5",
    ]
)


@settings(max_examples=examples(100), deadline=None)
@given(words=st.lists(_PYTHON_WORDS, max_size=30), text=_texts(), size=st.sampled_from([33, 64, 200]))
def test_documents_of_user_code_have_the_values_of_pythons_parser(words: list[str], text: bytes, size: int) -> None:
    """Large integers, numbers that are not finite, and halves of surrogate pairs."""
    document = b'{"words": [%b], "document": %b}' % (",".join(words).encode(), text)
    with _small_slices(size, 8):
        read = _result(lambda: run_to_end(read_json(document, NO_LIMITS, parse=parse_as_python)))
    assert read == _result(lambda: json.loads(document))


_LIMITED: dict[str, tuple[JsonLimits, str, str]] = {
    "members": (NO_LIMITS._replace(members=3), '{"a":1,"b":{"c":2}}', '{"a":1,"b":{"c":2,"d":3}}'),
    "objects": (NO_LIMITS._replace(members=3), "[{},{},{}]", "[{},{},{},{}]"),
    "values": (NO_LIMITS._replace(values=4), '[1,[2,"x"]]', '[1,[2,"x",3]]'),
    "containers": (NO_LIMITS._replace(containers=3), '[[1],{"a":2}]', '[[1],{"a":[]}]'),
    "depth": (NO_LIMITS._replace(depth=3), '[{"a":[1]}]', '[{"a":[[1]]}]'),
    "bytes of a string": (NO_LIMITS._replace(string_bytes=40), f'["{"x" * 38}"]', f'["{"x" * 39}"]'),
}


@pytest.mark.parametrize("name", _LIMITED)
@pytest.mark.parametrize("has_arrays", [False, True])
def test_a_document_at_a_limit_is_read_and_one_beyond_is_refused(name: str, *, has_arrays: bool) -> None:
    """Documents are equal with and without arrays for lists of numbers."""
    limits, at_limit, beyond = _LIMITED[name]
    with _small_slices(32, 512):
        read = run_to_end(read_json(at_limit.encode(), limits, arrays=[] if has_arrays else None))
        assert read == json.loads(at_limit)
        with pytest.raises(JsonLimitExceeded) as caught:
            run_to_end(read_json(beyond.encode(), limits, arrays=[] if has_arrays else None))
    assert caught.value.is_depth == (name == "depth")


def test_numbers_of_arrays_do_not_count_as_values() -> None:
    """More numbers than values are read, and refused without arrays."""
    text = b'{"data":[%b]}' % b",".join([b"0"] * 5000)
    limits = NO_LIMITS._replace(values=100)
    arrays: list[NumberArray] = []
    assert run_to_end(read_json(text, limits, arrays=arrays)) == {"data": arrays[0]}
    with pytest.raises(JsonLimitExceeded):
        run_to_end(read_json(text, limits))


def test_a_limit_is_checked_before_a_value_is_built() -> None:
    """The parser of parts is not called for a document beyond a limit."""
    calls: list[int] = []

    def parse(text: Any) -> Any:
        calls.append(len(text))
        return orjson.loads(text)

    with pytest.raises(JsonLimitExceeded):
        run_to_end(read_json(b"[%b]" % b",".join([b"[]"] * 300_000), parse=parse))
    with pytest.raises(JsonSyntaxError):
        run_to_end(read_json(b"[" + b"[]," * 100_000, parse=parse))
    assert calls == []
