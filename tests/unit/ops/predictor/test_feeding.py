"""From feeds to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec
from ovmstrio.runtimes.ops.predictor.model_config import check_fetch, prepare
from ovmstrio.runtimes.ops.predictor.protocol import FeedMismatch, FeedTypeError

ROWS = TensorSpec("x", BY_NAME["FP32"], (ANY_SIZE, Dim.fixed(3)))
TEXTS = TensorSpec("text", BY_NAME["BYTES"], (ANY_SIZE,))


def test_casts_and_orders() -> None:
    """Arrays are cast to the model's types and come in its order; row offsets are left out."""
    number = TensorSpec("n", BY_NAME["INT64"], (ANY_SIZE,))

    arrays = prepare({"x": np.ones((2, 3)), "n": np.array([7.9]), "x.lod": 0}, [number, ROWS], batch=True)

    assert [array.dtype for array in arrays] == [np.int64, np.float32]
    assert arrays[0].tolist() == [7]
    assert arrays[1].tolist() == [[1, 1, 1]] * 2


def test_puts_the_batch_axis_before() -> None:
    """One sample without a batch axis gets one."""
    (array,) = prepare({"x": np.ones(3)}, [ROWS], batch=False)

    assert array.shape == (1, 3)


def test_takes_arrays_that_are_not_contiguous() -> None:
    """A transposed array arrives with its values in place."""
    array = np.arange(6, dtype=np.float32).reshape(3, 2).T

    (given,) = prepare({"x": array}, [ROWS], batch=True)

    assert given.flags.c_contiguous
    assert given.tolist() == array.tolist()


def test_takes_texts() -> None:
    """A list of texts becomes an array of their bytes."""
    (array,) = prepare({"text": ["a", "ä"]}, [TEXTS], batch=True)

    assert array.tolist() == [b"a", b"\xc3\xa4"]


@pytest.mark.parametrize(
    ("feed", "error", "message"),
    [
        (
            {"y": np.ones((1, 3), np.int16)},
            FeedMismatch,
            r"missing \['x'\]; unknown \['y'\]\. Expected x: FP32 \[-1,3\]; given y: int16 \[1,3\]",
        ),
        ({"x": np.ones((1, 3)), "id": "7"}, FeedMismatch, r"unknown \['id'\]\. .*given x: float64 \[1,3\], id: str"),
        ({}, FeedMismatch, r"missing \['x'\]\. Expected .*; given nothing"),
        ({"x": np.ones((1, 4))}, FeedMismatch, r"shapes do not fit .*FP32 \[-1,3\]; given x: float64 \[1,4\]$"),
        ({"x": np.ones(3)}, FeedMismatch, "Is the batch axis of x missing"),
        ({"x": 3.0}, FeedTypeError, "'x' is float"),
        ({"x": [1.0, 2.0, 3.0]}, FeedTypeError, r"'x' is list\[float\]"),
        ({"x": ["a", "b", "c"]}, FeedTypeError, r"FP32 \[-1,3\]; given x: list\[str\] of 3"),
        ({"x": np.array([["a", "b", "c"]])}, FeedTypeError, "cannot be made FP32"),
        ({"x": np.array([[None, {}, 1]])}, FeedTypeError, "cannot be made FP32"),
    ],
)
def test_refuses_with_both_sides(feed: dict[str, Any], error: type[Exception], message: str) -> None:
    """What does not fit is refused with what was expected and what came."""
    with pytest.raises(error, match=message):
        prepare(feed, [ROWS], batch=True)


def test_refuses_unknown_outputs() -> None:
    """A name to fetch that the model does not give is refused with those it gives."""
    with pytest.raises(FeedMismatch, match=r"unknown \['c'\]\. The model gives \['a', 'b'\]"):
        check_fetch(["a", "c"], ["a", "b"])
