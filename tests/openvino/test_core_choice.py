"""Models whose threads are bound to cores, or are not, and those that are compiled again for that."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.openvino import compile as compile_module
from ovmstrio.openvino import network as network_module
from ovmstrio.openvino.compile import PINNING
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.runtime import core
from ovmstrio.work.cores import CoreShare
from ovmstrio.work.placement import Placement
from tests.support import ir
from tests.support.servables import RecordingHooks, network

ONES = np.ones((1, 10), np.float32)
ONE_THREAD = {"INFERENCE_NUM_THREADS": "1"}
"""What a model is given that is not to be made for the event loop."""


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> CoreShare:
    """A share of the cores that no model of another test is counted in."""
    share = CoreShare()
    for module in (compile_module, network_module):
        monkeypatch.setattr(module, "CORES", share)
    return share


def _away(running: Network) -> Network:
    running._placement = Placement.away()
    return running


def _by_itself() -> bool:
    """Whether OpenVINO binds the threads of a model here that nothing is said of."""
    compiled = core().compile_model(ir.dummy(), "CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"})
    return bool(compiled.get_property(PINNING))


def test_a_model_that_is_alone_is_left_to_openvino(cores: CoreShare, tmp_path: Path) -> None:
    """Nothing is said of its cores, and it counts as one that computes."""
    cores.services = 1
    alone = network(ir.dummy(), tmp_path, plugin_config=ONE_THREAD)

    assert alone.is_pinned is _by_itself()
    assert list(cores.users) == [alone]


def test_models_that_are_not_alone_are_bound_to_no_core(cores: CoreShare, tmp_path: Path) -> None:
    """As soon as two are configured, also the first one that is loaded; the user's word stands."""
    cores.services = 2
    first = network(ir.dummy(), tmp_path, "first", plugin_config=ONE_THREAD)
    told = network(ir.dummy(), tmp_path, "told", plugin_config={**ONE_THREAD, PINNING: "YES"})

    assert first.is_pinned is False
    assert first.facts["bound to cores"] == "no"
    assert told.is_pinned is None
    assert told.facts["bound to cores"] == ("yes" if _by_itself() else told.facts["bound to cores"])


def test_what_the_event_loop_runs_is_bound_to_no_core_and_never_compiled_again(
    cores: CoreShare, tmp_path: Path
) -> None:
    """Nothing is to be chosen for it, alone or not."""
    inline = network(ir.dummy(), tmp_path)

    assert inline.is_pinned is None
    assert inline.facts["bound to cores"] == "no"


def test_hints_streams_and_requests_of_the_user_stay(cores: CoreShare, tmp_path: Path) -> None:
    """Whether threads are bound changes nothing else."""
    settings = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"}
    alone = network(ir.dummy(), tmp_path, "alone", plugin_config=settings, nireq=3)
    cores.services = 2
    beside = network(ir.dummy(), tmp_path, "beside", plugin_config=settings, nireq=3)

    for name in ("streams", "threads", "performance hint", "infer requests"):
        assert beside.facts[name] == alone.facts[name]
    assert beside.facts["streams"] == 2
    assert beside.facts["infer requests"] == 3


@pytest.mark.parametrize("model", [ir.dummy(), ir.dynamic()], ids=["fixed", "dynamic"])
async def test_a_model_changes_its_cores_under_its_calls(model: Any, cores: CoreShare, tmp_path: Path) -> None:
    """Calls that come meanwhile are answered, all requests are of the new model then, and the old one is let go."""
    hooks = RecordingHooks()
    running = _away(network(model, tmp_path, hooks=hooks, plugin_config=ONE_THREAD))
    before = weakref.ref(running._model)
    expected = await running.infer([ONES])
    answered = 0

    async def call(until: trio.Event) -> None:
        nonlocal answered
        while not until.is_set():
            (found,) = await running.infer([ONES])
            np.testing.assert_array_equal(found, expected[0])
            answered += 1

    cores.services = 2
    chosen = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(2 * running.pool.size):
            nursery.start_soon(call, chosen)
        await running.choose_cores()
        chosen.set()

    assert answered
    assert running.is_pinned is False
    assert hooks.bounds == [(_by_itself(), False), (False, True)]
    assert {id(slot.model) for slot in [*running._slots, running._inline_slot]} == {id(running._model)}
    assert running.pool.active == 0
    gc.collect()
    assert before() is None


async def test_a_model_that_fails_is_mended_after_its_change(cores: CoreShare, tmp_path: Path) -> None:
    """A request that fails harms no other one, also on the model that was compiled again."""
    running = _away(network(ir.matmul(), tmp_path, plugin_config=ONE_THREAD))
    cores.services = 2
    await running.choose_cores()
    fits = [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)]
    with pytest.raises(ModelFailure):
        await running.infer([fits[0], fits[0]])
    (found,) = await running.infer(fits)

    np.testing.assert_array_equal(found, np.full((2, 2), 3, np.float32))


async def test_a_model_that_cannot_be_compiled_again_stays_as_it_is(cores: CoreShare, tmp_path: Path) -> None:
    """As where its file is gone; it answers as before."""
    running = _away(network(ir.dummy(), tmp_path, plugin_config=ONE_THREAD))
    pinned, (expected,) = running.is_pinned, await running.infer([ONES])

    def refuse() -> ov.CompiledModel:
        raise ConfigError([Problem("no memory")])

    running._chosen_anew = refuse
    await running.choose_cores()
    (found,) = await running.infer([ONES])

    np.testing.assert_array_equal(found, expected)
    assert running.is_pinned is pinned
