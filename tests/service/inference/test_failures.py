from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ModelFailure
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.network import BlockingNetwork, Network
from ovmstrio.inference.tuner import Placement
from tests.support import ir
from tests.support.examples import examples
from tests.support.servables import EXACT

pytestmark = pytest.mark.compiles

Arrays = list[np.ndarray[Any, Any]]


class _Subject(NamedTuple):
    build: Callable[[], ov.Model]
    inputs: Callable[[int, float], Arrays]
    answer: Callable[[Arrays], Arrays | None]


def _rows(size: int, value: float) -> Arrays:
    return [np.full((2, 3), value, np.float32), np.full((size, 2), value + 1, np.float32)]


def _product(arrays: Arrays) -> Arrays | None:
    x, y = arrays
    return [x @ y] if x.shape[1] == y.shape[0] else None


def _in_two_parts() -> ov.Model:
    x = ir.parameter("x", [-1])
    square = op.reshape(op.exp(x), op.constant(np.array([2, 2], np.int64)), special_zero=False)
    return ir.named_model({"a": op.relu(op.add(x, op.constant(np.float32(1)))), "b": square}, [x], "parts")


def _only_fixed() -> ov.Model:
    x = ir.parameter("x", [-1])
    square = op.reshape(op.add(x, x), op.constant(np.array([2, 2], np.int64)), special_zero=False)
    return ir.named_model({"y": square}, [x], "fixed")


def _by_value() -> ov.Model:
    x, shape = ir.parameter("x", [-1]), ir.parameter("y", [2], "INT64")
    return ir.named_model({"z": op.reshape(op.add(x, x), shape, special_zero=False)}, [x, shape], "by_value")


def _numbers(size: int, value: float) -> Arrays:
    return [np.full(size, value, np.float32)]


_SUBJECTS = {
    "product": _Subject(ir.matmul, _rows, _product),
    "two parts": _Subject(
        _in_two_parts,
        _numbers,
        lambda a: [np.maximum(a[0] + 1, 0), np.exp(a[0]).reshape(2, 2)] if a[0].size == 4 else None,
    ),
    "fixed": _Subject(_only_fixed, _numbers, lambda a: [(2 * a[0]).reshape(2, 2)] if a[0].size == 4 else None),
    "by value": _Subject(
        _by_value,
        lambda size, value: [np.full(4, value, np.float32), np.array([size, 2], np.int64)],
        lambda a: [(2 * a[0]).reshape(2, 2)] if a[1][0] == 2 else None,
    ),
}
_CONFIGS = {
    "one thread": {"INFERENCE_NUM_THREADS": "1"},
    "two threads": {"INFERENCE_NUM_THREADS": "2"},
    "two streams": {"NUM_STREAMS": "2"},
}


@cache
def _compiled(subject: str, config: str) -> Compiled:
    folder = Path(tempfile.mkdtemp())
    base_path = ir.save(_SUBJECTS[subject].build(), folder, "model")
    spec = ModelSpec(name="model", base_path=base_path, plugin_config={**EXACT, **_CONFIGS[config]})
    return compile_model(ModelFile(base_path / "1" / "model.xml", spec))


@cache
def _network(subject: str, config: str, *, is_away: bool = False) -> Network:
    """Return one network for all examples, so that each meets what those before it left behind."""
    compiled = _compiled(subject, config)
    return Network(replace(compiled, placement=Placement.away()) if is_away else compiled)


async def _infer(network: Network, subject: _Subject, size: int, value: float) -> None:
    arrays = subject.inputs(size, value)
    expected = subject.answer(arrays)
    if expected is None:
        with pytest.raises(ModelFailure):
            await network.infer(arrays)
        return
    for output, expected_output in zip(await network.infer(arrays), expected, strict=True):
        np.testing.assert_allclose(output, expected_output, rtol=1e-5)


_SIZES = st.sampled_from([2, 3, 4, 5])
_WAVES = st.lists(
    st.tuples(st.lists(_SIZES, min_size=1, max_size=6), st.booleans(), st.booleans()), min_size=1, max_size=6
)


@pytest.mark.parametrize("config", _CONFIGS)
@pytest.mark.parametrize("subject", _SUBJECTS)
@settings(max_examples=examples(12), deadline=None)
@given(waves=_WAVES)
def test_each_of_many_requests_has_its_own_outputs_or_its_own_failure(
    subject: str, config: str, waves: list[tuple[list[int], bool, bool]]
) -> None:
    case, number = _SUBJECTS[subject], 0

    async def main() -> None:
        nonlocal number
        for sizes, inline, cancels in waves:
            network = _network(subject, config, is_away=not inline)
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    if cancels:
                        nursery.start_soon(_cancelled, network, case.inputs(4, 99))
                    for size in sizes:
                        number += 1
                        nursery.start_soon(_infer, network, case, size, float(number % 7))
            assert network.pool.active == 0

    trio.run(main)


async def _cancelled(network: Network, arrays: Arrays) -> None:
    with trio.move_on_after(0), suppress(ModelFailure):
        await network.infer(arrays)


@pytest.mark.parametrize("config", _CONFIGS)
def test_blocking_inferences_have_their_own_outputs_after_failures(config: str) -> None:
    subject = _SUBJECTS["product"]
    network = BlockingNetwork(_compiled("product", config))
    for number, size in enumerate([3, 5, 3, 3, 4, 5, 3, 3]):
        arrays = subject.inputs(size, number)
        expected = subject.answer(arrays)
        if expected is None:
            with pytest.raises(ModelFailure):
                network.infer(arrays)
        else:
            np.testing.assert_array_equal(network.infer(arrays)[0], expected[0])
