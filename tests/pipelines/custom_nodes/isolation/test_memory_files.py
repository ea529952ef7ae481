"""Messages as files in memory."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ovmstrio.runtimes.pipelines.custom_nodes.isolation import memory_files
from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import PRECISIONS

ARRAYS = st.sampled_from(sorted(PRECISIONS, key=str)).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4), st.dictionaries(st.text(), st.text(max_size=200)))
def test_what_is_written_is_read(tensors: dict[str, np.ndarray[Any, Any]], message: dict[str, Any]) -> None:
    """Names, types, shapes and bits; each array is aligned and the reader's own."""
    read_message, read_tensors = memory_files.read(memory_files.write(message, tensors))
    assert read_message == message
    assert list(read_tensors) == list(tensors)
    for name, array in tensors.items():
        got = read_tensors[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert got.flags.carray


def test_an_array_of_any_layout_is_written_in_row_major_order() -> None:
    """It need not be contiguous."""
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T[::2]
    _, tensors = memory_files.read(memory_files.write({}, {"x": array}))
    assert tensors["x"].tolist() == [[0, 4, 8], [2, 6, 10]]


def file_of(content: bytes) -> int:
    """Make a file in memory."""
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(file, content)
    return file


def framed(value: object) -> bytes:
    """Put the JSON of a value behind its length."""
    text = orjson.dumps(value)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 100,
        framed({}),
        framed(5),
        framed([{}, [["x", "FP32", [10], 0]]]),
        framed([{}, [["x", "FP32", [-1], -64]]]) + bytes(100),
        framed([{}, [["x", "FP32", [1], -(2**62)]]]),
        framed([{}, [["x", "FP32", [0, 2**63], 0]]]),
        framed([{}, [["x", "nothing", [1], 0]]]) + bytes(100),
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    """Nothing outside the file is read, and the descriptor is closed."""
    file = file_of(content)
    with pytest.raises((ValueError, LookupError, TypeError)):
        memory_files.read(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_memory_that_is_in_use_cannot_be_taken_away() -> None:
    """The writer may have kept the file open."""
    file = memory_files.write({}, {"x": np.ones(5, np.float32)})
    kept = os.dup(file)
    _, tensors = memory_files.read(file)
    assert fcntl.fcntl(kept, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(kept, 0)
    os.close(kept)
    assert tensors["x"].sum() == 5
