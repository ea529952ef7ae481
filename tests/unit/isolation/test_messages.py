from __future__ import annotations

import gc
import json
import os
import struct
import threading
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ovmstrio.core.errors import ConfigError, Overloaded, Problem, ServerError
from ovmstrio.isolation.messages import (
    MALFORMED_MESSAGE_ERRORS,
    MAX_FREE_REGION_BYTES,
    MAX_INLINE_BYTES,
    Encoded,
    MessagePackets,
    RegionPool,
    decode,
    decode_error,
    encode_error,
    find_shared,
)
from ovmstrio.isolation.user_code import error_location
from ovmstrio.util.truncation import MOST_CAUSES, MOST_CHARACTERS

# Values


_NUMBERS = st.sampled_from(["?", "<i1", "<u1", "<i2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", ">i4", "<M8[s]"])
_ARRAYS = hnp.arrays(
    _NUMBERS.map(np.dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
) | hnp.arrays(st.sampled_from([np.dtype("<U5"), np.dtype("S3")]), hnp.array_shapes(max_dims=2, max_side=3))
_KEYS = st.text(max_size=3) | st.integers() | st.booleans()
_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
)
_VALUES = st.recursive(
    _PLAIN | _ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(_KEYS, max_size=3)
        | st.sets(_KEYS, max_size=3)
    ),
    max_leaves=8,
)


def _round_trip(value: Any) -> Any:
    encoded = Encoded(value)
    memory = bytearray(encoded.size)
    encoded.write(memoryview(memory))
    return decode(memoryview(memory))


def _assert_same(found: Any, given: Any) -> None:
    assert type(found) is type(given)
    if isinstance(given, np.ndarray):
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert found.tobytes() == given.tobytes()
    elif isinstance(given, dict):
        assert list(found) == list(given)
        for key, one in given.items():
            _assert_same(found[key], one)
    elif isinstance(given, list | tuple):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            _assert_same(one, other)
    elif isinstance(given, set | frozenset):
        assert found == given
    else:
        assert repr(found) == repr(given)


@given(_VALUES)
def test_values_survive_a_round_trip(value: Any) -> None:
    _assert_same(_round_trip(value), value)


def test_numpy_scalars_object_arrays_and_strided_arrays_survive_a_round_trip() -> None:
    _assert_same(_round_trip(np.float32(0.5)), np.float32(0.5))
    array = np.empty((2, 1), object)
    array[:, 0] = ["a", [1, 2]]
    found = _round_trip(array)
    assert (found.shape, found.tolist()) == ((2, 1), [["a"], [[1, 2]]])
    strided = _round_trip(np.arange(12).reshape(3, 4)[::2, ::-1])
    assert (strided.tolist(), strided.flags.carray) == ([[3, 2, 1, 0], [11, 10, 9, 8]], True)


def test_decoded_arrays_are_aligned_writable_views_that_own_the_memory() -> None:
    class Memory(bytearray):
        """Memory that supports weak references."""

    encoded = Encoded({"a": np.arange(3, dtype=np.int8), "b": np.arange(5.0)})
    memory = Memory(encoded.size)
    encoded.write(memoryview(memory))
    found = decode(memoryview(memory))
    found["b"] += 1
    assert decode(memoryview(memory))["b"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (found["b"].ctypes.data - found["a"].ctypes.data) % 64 == 0
    reference = weakref.ref(memory)
    gc.disable()
    try:
        del memory, found
        assert reference() is None
    finally:
        gc.enable()


class _Custom:
    """User-defined class."""


@pytest.mark.parametrize("value", [_Custom(), {"x": threading.Event()}, [lambda: None], np.zeros(1, "i4,f4")])
def test_value_that_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^(plain data and arrays, not|no arrays of) "):
        Encoded(value)


def _framed(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def _array_of(shape: list[int], kind: str = "<f4", row: tuple[int, int] = (0, 40)) -> bytes:
    return _framed([{"a": [0, kind, shape]}, [row]]) + bytes(164)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"1234567",
        b"\0" * 8,
        b"\xff" * 16,
        b"\xff" * 100,
        b"\2" + b"\0" * 7 + b"{}",
        _framed({}),
        _framed(5),
        _framed([{"q": 1}, []]),
        _framed([{"a": [0, "<f4", [10]]}, []]),
        _framed([{"a": [0, "<f4", [10]]}, [[0, 40]]]),
        _array_of([10], row=(-(2**62), 40)),
        _array_of([10], row=(2**62, 40)),
        _array_of([11]),
        _array_of([-7]),
        _array_of([0, 2**63]),
        _array_of([1], "nothing"),
        _array_of([5], "O"),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_invalid_encoding_is_refused(junk: bytes) -> None:
    with pytest.raises(MALFORMED_MESSAGE_ERRORS):
        decode(memoryview(bytearray(junk)))


# Errors


def _round_trip_error(error: BaseException) -> BaseException:
    return decode_error(_round_trip(encode_error(error)))


def _raised(error: BaseException) -> BaseException:
    try:
        raise error  # noqa: TRY301 - gives the error a traceback
    except BaseException as caught:  # noqa: BLE001 - returned, whatever its class
        return caught


class _Own(Overloaded):
    """A user's subclass of an error with a status."""


class _Odd(Exception):
    """Error that cannot be created from its ``args``."""

    def __init__(self, one: int, two: object) -> None:
        super().__init__(f"{one} and more")
        self.two = two


class _Mute(Exception):
    """Error whose text raises an error."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text"), KeyError("key"), ValueError(), SystemExit(3), KeyboardInterrupt(), StopIteration(5),
        OSError(2, "nothing", "/file"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ZeroDivisionError("by zero"),
        Overloaded("later", retry_after_seconds=9), ConfigError([Problem("wrong", "f", 3, found="x")]),
        ExceptionGroup("many", [ValueError("one"), ExceptionGroup("more", [KeyError(2)])]),
        ModuleNotFoundError("no x", name="x", path="p"), RuntimeError("two", 2, None, (1, "x")),
    ],
)  # fmt: skip
def test_error_keeps_class_text_attributes_and_traceback(error: BaseException) -> None:
    given_error = _raised(error)
    found = _round_trip_error(given_error)
    assert (type(found), str(found)) == (type(error), str(error))
    plain = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    assert {name: getattr(found, name) for name in plain} == plain
    assert getattr(found, "name", None) == getattr(error, "name", None)
    (line,) = traceback.extract_tb(found.__traceback__)
    (expected,) = traceback.extract_tb(given_error.__traceback__)
    assert (line.filename, line.lineno, line.name, line.line) == (
        expected.filename, expected.lineno, expected.name, expected.line,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (_Own("later", retry_after_seconds=7), Overloaded),
        (_Odd(1, object()), Exception),
        (_Mute(), Exception),
        (json.JSONDecodeError("bad", "{", 1), ValueError),
    ],
)
def test_unknown_error_class_becomes_a_subclass_of_its_nearest_known_base(
    error: BaseException, base: type[BaseException]
) -> None:
    found = _round_trip_error(error)
    assert type(found).__name__ == type(error).__name__
    assert type(found).__bases__ == (base,)
    assert getattr(found, "retry_after_seconds", None) == getattr(error, "retry_after_seconds", None)
    assert str(found) == ("_Mute" if isinstance(error, _Mute) else str(error))


def test_cause_and_notes_of_an_error_are_kept() -> None:
    try:
        try:
            raise KeyError("inner")  # noqa: TRY301 - the chain of errors is the subject
        except KeyError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as error:
        error.add_note("a note")
        found = _round_trip_error(error)
    assert isinstance(found.__cause__, KeyError)
    assert found.__suppress_context__
    assert found.__notes__ == ["a note"]
    assert error_location(Path(__file__).parent, found.__cause__) is not None


def test_long_texts_and_long_chains_of_causes_are_cut() -> None:
    error: BaseException = ValueError("x" * 10**6)
    for number in range(1000):
        outer = ValueError(number)
        outer.__cause__ = error
        error = outer
    assert Encoded(encode_error(error)).size < 10**5
    assert Encoded(encode_error(ValueError("x" * 10**6))).size < 4 * MOST_CHARACTERS
    chain, found = 0, _round_trip_error(error)
    while found.__cause__ is not None:
        chain, found = chain + 1, found.__cause__
    assert chain == MOST_CAUSES


def test_deep_traceback_is_cut_in_its_middle() -> None:
    def deep(left: int) -> None:
        if not left:
            raise ValueError("at the end")
        deep(left - 1)

    try:
        deep(500)
    except ValueError as error:
        lines = traceback.extract_tb(_round_trip_error(error).__traceback__)
    assert 10 < len(lines) < 100
    assert (lines[0].name, lines[-1].line) == (
        "test_deep_traceback_is_cut_in_its_middle",
        'raise ValueError("at the end")',
    )


_JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(st.fixed_dictionaries(dict.fromkeys(encode_error(ValueError()), _JUNK)))
def test_invalid_error_data_is_refused_or_decoded_to_an_error(data: dict[str, Any]) -> None:
    try:
        error = decode_error(data)
    except (ValueError, LookupError, TypeError, RecursionError, AttributeError):
        return
    assert isinstance(error, BaseException)
    assert not isinstance(error, ServerError)


# Regions


_LARGE = MAX_INLINE_BYTES + 1
_FILES_PER_REGION = 4
"""Both sides have the descriptor, and a copy that belongs to the mapping."""


class _Ends:
    """Two ends without a socket; descriptors are duplicated as a kernel does it."""

    def __init__(self) -> None:
        self.is_full = False
        self.one = MessagePackets(self._to_other)
        self.other = MessagePackets(self._to_one)

    def _to_other(self, packet: bytes) -> bool:
        if not self.is_full:
            assert self.other.read(packet, []) is None
        return not self.is_full

    def _to_one(self, packet: bytes) -> bool:
        if not self.is_full:
            assert self.one.read(packet, []) is None
        return not self.is_full

    def send(self, value: Any, *, back: bool = False) -> Any:
        sender, receiver = (self.other, self.one) if back else (self.one, self.other)
        message = sender.prepare(value)
        packet = message.write()
        received = receiver.read(bytes(packet), [os.dup(file) for file in message.files])
        sender.sent(message)
        for late in sender.backlog():
            assert receiver.read(late, []) is None
        assert received is not None
        return received.value

    def close(self) -> None:
        self.one.close()
        self.other.close()


@pytest.fixture(autouse=True, scope="module")
def _only_new_garbage() -> None:
    gc.freeze()


def _open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_region_is_reused_once_its_last_view_is_released() -> None:
    before, ends = _open_files(), _Ends()
    first = ends.send(np.full(_LARGE, 1, np.uint8))
    part = first[10:20]
    del first
    second = ends.send(np.full(_LARGE, 2, np.uint8))
    assert (set(part), set(second)) == ({1}, {2})
    address = part.__array_interface__["data"][0]
    del part
    third = ends.send(np.full(_LARGE, 3, np.uint8))
    span = third.__array_interface__["data"][0]
    assert span <= address < span + _LARGE
    assert set(second) == {2}
    del second, third
    ends.close()
    del ends
    assert _open_files() == before


def test_number_of_regions_is_that_of_views_held_at_once() -> None:
    before, ends = _open_files(), _Ends()
    kept: list[Any] = []
    for number in range(300):
        kept = [*kept[-2:], ends.send(np.full(_LARGE + number, number % 256, np.uint8))]
        assert [np.unique(each).tolist() for each in kept] == [[(number - back) % 256] for back in range(len(kept))][
            ::-1
        ]
    del kept
    gc.collect()
    assert _open_files() <= before + 4 * _FILES_PER_REGION
    ends.close()
    del ends
    assert _open_files() == before


def test_release_that_finds_no_room_is_sent_before_the_next_message() -> None:
    ends = _Ends()
    value = ends.send(np.zeros(_LARGE, np.uint8))
    ends.is_full = True
    del value
    files = _open_files()
    held = [ends.send(np.zeros(_LARGE, np.uint8))]
    assert _open_files() > files
    ends.is_full = False
    ends.send(1, back=True)
    files = _open_files()
    held.append(ends.send(np.zeros(_LARGE, np.uint8)))
    assert _open_files() == files
    ends.close()


def test_pool_keeps_a_bounded_number_of_bytes() -> None:
    before, ends = _open_files(), _Ends()
    for _ in range(3):
        values = [ends.send(np.zeros(MAX_FREE_REGION_BYTES // 3, np.uint8)) for _ in range(6)]
        del values
    assert _open_files() <= before + 3 * _FILES_PER_REGION
    ends.close()
    del ends
    assert _open_files() == before


@given(st.lists(st.integers(1, 2**22), max_size=30))
def test_region_is_at_most_four_times_as_large_as_requested(sizes: list[int]) -> None:
    pool = RegionPool(2**22)
    for size in sizes:
        region = pool.take(size)
        assert size <= region.size <= max(4 * size, 4 * 128 * 1024)
        pool.release(region)
        assert pool.free_bytes <= 2**22
    pool.close()


def test_received_array_is_forwarded_without_a_copy() -> None:
    first, second = _Ends(), _Ends()
    value = first.send(np.arange(2 * _LARGE, dtype=np.uint8))
    assert find_shared(value[3:]) is not None
    assert find_shared(np.zeros(_LARGE)) is None
    assert find_shared(value[::2]) is None
    passed = second.send({"all": value, "part": value[5 : 5 + _LARGE].reshape(-1, 1), "own": 1})
    value[7] = 99
    assert (passed["all"][7], passed["part"][2, 0]) == (99, 99)
    assert passed["part"].shape == (_LARGE, 1)
    del value
    # The second end may still look at the region, which is not used again.
    held = [first.send(np.zeros(2 * _LARGE, np.uint8))]
    assert (passed["all"][7], passed["part"][2, 0]) == (99, 99)
    del passed
    files = _open_files()
    held.append(first.send(np.zeros(2 * _LARGE, np.uint8)))
    assert _open_files() == files
    first.close()
    second.close()


_PACKETS = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=16).map(lambda rest: b"r" + rest),
    st.binary(max_size=16).map(lambda rest: b"d" + rest),
    st.tuples(*[st.integers(0, 2**20)] * 3, st.integers(0, 2), st.integers(0, 3)).map(
        lambda parts: b"f" + struct.pack("<QQQBB", *parts)
    ),
)


@given(st.lists(_PACKETS, max_size=5), st.integers(0, 3))
def test_invalid_packets_are_refused_and_leave_no_descriptor(packets: list[bytes], files: int) -> None:
    before, end = _open_files(), MessagePackets(lambda _: True)
    for packet in packets:
        descriptors = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(files)]
        for each in descriptors:
            os.ftruncate(each, 100)
        with suppress(*MALFORMED_MESSAGE_ERRORS):
            message = end.read(packet, descriptors)
            if message is not None and message.descriptor is not None:
                os.close(message.descriptor)
            del message
    end.close()
    assert _open_files() == before
