from __future__ import annotations

import gc
import json
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ovmstrio.work.messages.value_codec import Encoded, decode
from ovmstrio.work.processes import NO_MESSAGE

NUMBERS = st.sampled_from(["?", "<i1", "<u1", "<i2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", ">i4", "<M8[s]"])
ARRAYS = hnp.arrays(
    NUMBERS.map(np.dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
) | hnp.arrays(st.sampled_from([np.dtype("<U5"), np.dtype("S3")]), hnp.array_shapes(max_dims=2, max_side=3))
KEYS = st.text(max_size=3) | st.integers() | st.booleans()
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
)
VALUES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(KEYS, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=8,
)


def turned(value: Any) -> Any:
    """Write a value and read it."""
    encoded = Encoded(value)
    memory = bytearray(encoded.size)
    encoded.write(memoryview(memory))
    return decode(memoryview(memory))


def assert_same(found: Any, given: Any) -> None:
    """Compare values that may hold arrays, by their types, too."""
    assert type(found) is type(given)
    if isinstance(given, np.ndarray):
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert found.tobytes() == given.tobytes()
    elif isinstance(given, dict):
        assert list(found) == list(given)
        for key, one in given.items():
            assert_same(found[key], one)
    elif isinstance(given, list | tuple):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    elif isinstance(given, set | frozenset):
        assert found == given
    else:
        assert repr(found) == repr(given)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    """Plain data and arrays of every type, nested anyhow."""
    assert_same(turned(value), value)


def test_numbers_of_numpy_and_arrays_of_objects_come_back() -> None:
    """As what they were."""
    assert_same(turned(np.float32(0.5)), np.float32(0.5))
    array = np.empty((2, 1), object)
    array[:, 0] = ["a", [1, 2]]
    found = turned(array)
    assert (found.shape, found.tolist()) == ((2, 1), [["a"], [[1, 2]]])
    assert turned(np.arange(12).reshape(3, 4)[::2, ::-1]).tolist() == [[3, 2, 1, 0], [11, 10, 9, 8]]


def test_an_array_of_any_layout_is_written_in_row_major_order() -> None:
    """It need not be contiguous."""
    array = turned(np.arange(12, dtype=np.int32).reshape(3, 4).T[::2])
    assert array.tolist() == [[0, 4, 8], [2, 6, 10]]
    assert array.flags.carray


def test_arrays_can_be_changed_and_lie_where_they_were_read() -> None:
    """Nothing is copied, borders are aligned, and the memory goes with the last array."""

    class Memory(bytearray):
        """Memory whose end can be seen."""

    encoded = Encoded({"a": np.arange(3, dtype=np.int8), "b": np.arange(5.0)})
    memory = Memory(encoded.size)
    encoded.write(memoryview(memory))
    found = decode(memoryview(memory))
    found["b"] += 1
    assert decode(memoryview(memory))["b"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (found["b"].ctypes.data - found["a"].ctypes.data) % 64 == 0
    gone = weakref.ref(memory)
    gc.disable()
    try:
        del memory, found
        assert gone() is None
    finally:
        gc.enable()


class Custom:
    """Something of a script."""


@pytest.mark.parametrize("value", [Custom(), {"x": threading.Event()}, [lambda: None], np.zeros(1, "i4,f4")])
def test_what_is_no_data_is_refused(value: Any) -> None:
    """No code travels between processes."""
    with pytest.raises(TypeError, match=r"^(plain data and arrays, not|no arrays of) "):
        Encoded(value)


def framed(value: object) -> bytes:
    """Put the JSON of a value behind its length."""
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def array_of(shape: list[int], kind: str = "<f4", row: tuple[int, int] = (0, 40)) -> bytes:
    """Give what says that it is an array of a hundred bytes."""
    return framed([{"a": [0, kind, shape]}, [row]]) + bytes(164)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"1234567",
        b"\0" * 8,
        b"\xff" * 16,
        b"\xff" * 100,
        b"\2" + b"\0" * 7 + b"{}",
        framed({}),
        framed(5),
        framed([{"q": 1}, []]),
        framed([{"a": [0, "<f4", [10]]}, []]),
        framed([{"a": [0, "<f4", [10]]}, [[0, 40]]]),
        array_of([10], row=(-(2**62), 40)),
        array_of([10], row=(2**62, 40)),
        array_of([11]),
        array_of([-7]),
        array_of([0, 2**63]),
        array_of([1], "nothing"),
        array_of([5], "O"),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_junk_is_refused(junk: bytes) -> None:
    """With an error that whoever reads it expects; nothing outside the memory is read."""
    with pytest.raises(NO_MESSAGE):
        decode(memoryview(bytearray(junk)))
