from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ovmstrio.encoding import json_reader, number_arrays
from ovmstrio.encoding.json_reader import (
    JsonLimitExceeded,
    JsonLimits,
    JsonSyntaxError,
    check_arrays,
    parse_as_python,
    parse_strictly,
    read_json,
    without_arrays,
)
from ovmstrio.encoding.number_arrays import NumberArray, NumberKind, read_numbers
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
def test_document_has_the_values_of_orjson(text: bytes, size: int) -> None:
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
def test_document_with_arrays_has_the_values_of_orjson(text: bytes, size: int, shortest_run: int) -> None:
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
def test_document_of_user_code_has_the_values_of_python(words: list[str], text: bytes, size: int) -> None:
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
    limits, at_limit, beyond = _LIMITED[name]
    with _small_slices(32, 512):
        read = run_to_end(read_json(at_limit.encode(), limits, arrays=[] if has_arrays else None))
        assert read == json.loads(at_limit)
        with pytest.raises(JsonLimitExceeded) as caught:
            run_to_end(read_json(beyond.encode(), limits, arrays=[] if has_arrays else None))
    assert caught.value.is_depth == (name == "depth")


def test_numbers_of_arrays_do_not_count_as_values() -> None:
    text = b'{"data":[%b]}' % b",".join([b"0"] * 5000)
    limits = NO_LIMITS._replace(values=100)
    arrays: list[NumberArray] = []
    assert run_to_end(read_json(text, limits, arrays=arrays)) == {"data": arrays[0]}
    with pytest.raises(JsonLimitExceeded):
        run_to_end(read_json(text, limits))


def test_a_limit_is_checked_before_a_value_is_built() -> None:
    calls: list[int] = []

    def parse(text: Any) -> Any:
        calls.append(len(text))
        return orjson.loads(text)

    with pytest.raises(JsonLimitExceeded):
        run_to_end(read_json(b"[%b]" % b",".join([b"[]"] * 300_000), parse=parse))
    with pytest.raises(JsonSyntaxError):
        run_to_end(read_json(b"[" + b"[]," * 100_000, parse=parse))
    assert calls == []


# Arrays of numbers


DTYPES: dict[NumberKind, Any] = {"d": np.float64, "i": np.int64, "u": np.uint64}


def _array_of(text: str) -> NumberArray:
    return NumberArray(memoryview(text.encode()))


@pytest.mark.parametrize("kind", DTYPES)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), size=st.sampled_from([64, 200]), indent=st.sampled_from([None, 1]))
def test_numbers_and_shape_are_those_of_numpy(
    kind: NumberKind, data: st.DataObject, size: int, indent: int | None
) -> None:
    elements = {"allow_nan": False, "allow_infinity": False} if kind == "d" else None
    shapes = hnp.array_shapes(min_dims=1, max_dims=4, max_side=6)
    expected = data.draw(hnp.arrays(DTYPES[kind], shapes, elements=elements))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_arrays, "SLICE_BYTES", size)
        array = _array_of(json.dumps(expected.tolist(), indent=indent))
        numbers, shape = array.numbers(kind), array.shape()
        several = read_numbers([array, _array_of(json.dumps(expected.tolist()))], kind)
    assert numbers is not None
    assert several is not None
    assert shape == expected.shape
    assert np.array_equal(numbers, expected.ravel())
    assert np.array_equal(several, np.stack([expected, expected]))


@pytest.mark.parametrize("text", ["[[1],[2,3]]", "[1,[2]]", "[[1],2]", "[[[1]],[2]]", "[[1,2],[3]]", "[[1],[[2]]]"])
def test_lists_that_are_no_array_have_no_shape(text: str) -> None:
    assert _array_of(text).shape() is None
    assert read_numbers(_array_of(text), "d") is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[1.5]", "i"),
        ("[-1]", "u"),
        ("[18446744073709551615]", "i"),
        ("[true]", "d"),
        ("[null]", "d"),
        ("[1,,2]", "d"),
        ("[1,]", "d"),
        ("[]", "d"),
        ("[01]", "d"),
        (f"[{'1' * 1_000_000}]", "d"),
    ],
)
def test_text_that_is_no_list_of_numbers_of_a_kind_is_refused(text: str, kind: NumberKind) -> None:
    array = _array_of(text)
    assert array.numbers(kind) is None
    assert not array.is_checked
