"""Layers of models, timed on copies of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ovmstrio.core.errors import ModelFailure
from tests.support import ir
from tests.support.servables import load, network

pytestmark = pytest.mark.compiles


async def test_each_layer_that_runs_has_a_time(tmp_path: Path) -> None:
    """With the name that the file has for it; what the device leaves out is no layer, and the model serves on."""
    running = network(ir.dummy(), tmp_path)
    times = await running.layer_times(0.05)
    assert times.runs >= 1
    assert [layer.seconds >= 0 for layer in times.layers] == [True]
    assert times.layers[0].name.startswith("Add")
    assert times.layers[0].runs_as
    (found,) = await running.infer([np.ones((1, 10), np.float32)])
    np.testing.assert_array_equal(found, np.full((1, 10), 2))


async def test_open_shapes_are_timed_where_their_dimensions_are_one(tmp_path: Path) -> None:
    """As models are warmed up."""
    times = await network(ir.dynamic(), tmp_path).layer_times(0.01)
    assert times.layers


async def test_a_servable_tells_the_times_of_its_model(tmp_path: Path) -> None:
    """No state of it is touched."""
    servable = await load(ir.dummy(), tmp_path)
    assert (await servable.layer_times(0.01)).layers
    await servable.aclose()


async def test_a_model_that_does_not_run_on_ones_has_none(tmp_path: Path) -> None:
    """It is told as such."""
    with pytest.raises(ModelFailure):
        await network(ir.reshape_by_data(), tmp_path).layer_times(0.01)
