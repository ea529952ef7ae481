from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.inference import compile as compile_module
from ovmstrio.inference import network as network_module
from ovmstrio.inference import tuner as tuner_module
from ovmstrio.inference.compile import CPU_PINNING, ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled, Timing
from ovmstrio.inference.infer_requests import Slot
from ovmstrio.inference.network import Network
from ovmstrio.inference.runtime import core
from ovmstrio.inference.tuner import (
    FEW_CORES_THRESHOLD_SECONDS,
    FILLING_THRESHOLD_SECONDS,
    Placement,
    TunerState,
)
from ovmstrio.telemetry.loop_utilization import LoopUtilization
from ovmstrio.util import cores as cores_module
from ovmstrio.util.cores import CoreShare
from tests.support import ir
from tests.support.servables import RecordingHooks, network
from tests.support.waits import WAIT_SECONDS

pytestmark = pytest.mark.compiles

ONES = np.ones((1, 10), np.float32)
ONE_THREAD = {"INFERENCE_NUM_THREADS": "1"}
TWO_THREADS = {"INFERENCE_NUM_THREADS": "2"}
FACTORS = [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> CoreShare:
    share = CoreShare()
    for module in (compile_module, network_module, tuner_module):
        monkeypatch.setattr(module, "CORES", share)
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    return share


def _away(running: Network) -> Network:
    running.tuner.place(Placement.away())
    return running


def _binds_by_default() -> bool:
    """Return whether OpenVINO binds the threads of a model on this machine by default."""
    compiled = core().compile_model(ir.dummy(), "CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"})
    return bool(compiled.get_property(CPU_PINNING))


async def _multiplies(running: Network) -> None:
    np.testing.assert_array_equal((await running.infer(FACTORS))[0], np.full((2, 2), 3, np.float32))


async def _fails(running: Network) -> None:
    with pytest.raises(ModelFailure):
        await running.infer([FACTORS[0], FACTORS[0]])


def _refuse(_at_once: int) -> Compiled:
    raise MemoryError


async def _call_until(stop: trio.Event, running: Network, answers: list[Any]) -> None:
    while not stop.is_set():
        answers += await running.infer([ONES])
        await trio.lowlevel.checkpoint()


def test_single_model_is_bound_as_openvino_chooses(cores: CoreShare, tmp_path: Path) -> None:
    cores.services = 1
    alone = network(ir.dummy(), tmp_path, plugin_config=ONE_THREAD)
    assert alone.tuner.is_pinned is (True if _binds_by_default() else None)
    assert alone.facts["bound to cores"] == ("yes" if _binds_by_default() else "no")
    assert list(cores.users) == [alone.tuner]


@pytest.mark.parametrize(
    ("model", "settings", "is_pinned"),
    [
        pytest.param(ir.dummy(), {"plugin_config": ONE_THREAD}, False, id="one of several models"),
        pytest.param(ir.dummy(), {"plugin_config": {**ONE_THREAD, CPU_PINNING: "YES"}}, None, id="bound by its user"),
        pytest.param(ir.dummy(), {}, None, id="on the event loop"),
        pytest.param(ir.accumulator(), {"plugin_config": ONE_THREAD}, None, id="state in its requests"),
        pytest.param(ir.accumulator(), {"plugin_config": ONE_THREAD, "stateful": True}, False, id="sequences"),
    ],
)
def test_models_of_several_services_are_bound_to_no_core(
    model: ov.Model, settings: dict[str, Any], is_pinned: bool | None, cores: CoreShare, tmp_path: Path
) -> None:
    cores.services = 2
    assert network(model, tmp_path, **settings).tuner.is_pinned is is_pinned


def test_model_that_openvino_does_not_bind_is_never_compiled_again(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = compile_module._property
    monkeypatch.setattr(compile_module, "_property", lambda *args: 0 if args[1] == CPU_PINNING else known(*args))
    assert network(ir.dummy(), tmp_path, "alone", plugin_config=ONE_THREAD).tuner.is_pinned is None
    cores.services = 2
    assert network(ir.dummy(), tmp_path, "other", plugin_config=ONE_THREAD).tuner.is_pinned is False


def test_network_that_does_not_fill_cores_is_not_counted(cores: CoreShare, tmp_path: Path) -> None:
    repository = ir.save(ir.dummy(), tmp_path, "model")
    compiled = compile_model(ModelFile(repository / "1" / "model.xml", ModelSpec(name="model", base_path=repository)))
    tokenizer = Network(compiled, uses_all_cores=False)
    assert (list(cores.users), cores.is_shared, tokenizer.tuner.is_pinned) == ([], False, None)


def test_binding_changes_no_other_setting_of_the_user(cores: CoreShare, tmp_path: Path) -> None:
    settings = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"}
    alone = network(ir.dummy(), tmp_path, "alone", plugin_config=settings, nireq=3)
    cores.services = 2
    other = network(ir.dummy(), tmp_path, "other", plugin_config=settings, nireq=3)
    for name in ("streams", "threads", "performance hint", "infer requests"):
        assert other.facts[name] == alone.facts[name]
    assert (other.facts["streams"], other.facts["infer requests"], other.facts["bound to cores"]) == (2, 3, "no")


@pytest.mark.parametrize("model", [ir.dummy(), ir.dynamic()], ids=["fixed", "dynamic"])
async def test_calls_are_answered_while_a_model_is_compiled_for_other_cores(
    model: Any, cores: CoreShare, tmp_path: Path
) -> None:
    hooks = RecordingHooks()
    running = _away(network(model, tmp_path, hooks=hooks, plugin_config=ONE_THREAD))
    before = weakref.ref(running._model)
    cores.services, answers, chosen = 2, list[Any](), trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(2 * running.pool.size):
            nursery.start_soon(_call_until, chosen, running, answers)
        await running.recompile()
        chosen.set()
    assert answers
    assert all((each == ONES + 1).all() for each in answers)
    assert running.tuner.is_pinned is False
    assert hooks.bounds == [(_binds_by_default(), False), (False, True)]
    assert {id(slot.model) for slot in [*running._slots, running._inline_slot]} == {id(running._model)}
    assert running.pool.active == 0
    gc.collect()
    assert before() is None


async def test_change_of_cores_does_not_return_streams_lost_to_a_failure(cores: CoreShare, tmp_path: Path) -> None:
    hooks = RecordingHooks()
    running = _away(network(ir.matmul(), tmp_path, hooks=hooks, plugin_config={"NUM_STREAMS": "2"}))
    await _fails(running)
    assert hooks.streams == running._model.get_property("NUM_STREAMS") == 1
    cores.services = 2
    await running.recompile()
    assert (running._model.get_property("NUM_STREAMS"), running.tuner.is_pinned) == (1, None)


@pytest.mark.parametrize("error", [ConfigError([Problem("no file")]), MemoryError()])
async def test_model_that_cannot_be_recompiled_continues_unchanged(
    error: Exception, cores: CoreShare, tmp_path: Path
) -> None:
    running = _away(network(ir.dummy(), tmp_path, plugin_config=ONE_THREAD))
    pinned = running.tuner.is_pinned

    def refuse(_at_once: int) -> Compiled:
        raise error

    running._recompile = refuse
    await running.recompile()
    np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert running.tuner.is_pinned is pinned


async def test_infer_requests_that_cannot_be_made_again_are_not_lost(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = _away(network(ir.dummy(), tmp_path, plugin_config={**ONE_THREAD, "PERFORMANCE_HINT": "LATENCY"}))
    attach = Slot.attach

    def refuse(slot: Slot, model: ov.CompiledModel) -> None:
        if slot is not running._inline_slot:
            raise MemoryError
        attach(slot, model)

    cores.services = 2
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "attach", refuse)
        await running.recompile()
        for _ in range(2 * running.pool.size):
            with trio.fail_after(WAIT_SECONDS), pytest.raises(ModelFailure, match="cannot create an infer request"):
                await running.infer([ONES])
    assert running.pool.active == 0
    with trio.fail_after(WAIT_SECONDS):
        slots = [await running._acquire() for _ in range(running.pool.size)]
    assert {id(slot.model) for slot in slots} == {id(running._model)}
    for slot in slots:
        running.pool.release(slot)
    np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)


def _short(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(compile_module, "warm_up", lambda *_: Timing(2 * seconds, seconds, 40))


@pytest.mark.parametrize(
    ("settings", "is_small", "are_few", "seconds", "runs_inline"),
    [
        (ONE_THREAD, True, True, 0.9 * FEW_CORES_THRESHOLD_SECONDS, True),
        (ONE_THREAD, True, True, FEW_CORES_THRESHOLD_SECONDS, False),
        (ONE_THREAD, True, False, FEW_CORES_THRESHOLD_SECONDS / 2, False),
        (TWO_THREADS, False, True, FILLING_THRESHOLD_SECONDS / 2, True),
        (TWO_THREADS, True, True, FILLING_THRESHOLD_SECONDS, False),
        (TWO_THREADS, True, False, FILLING_THRESHOLD_SECONDS / 2, False),
        ({**TWO_THREADS, "NUM_STREAMS": "2"}, True, True, FILLING_THRESHOLD_SECONDS / 2, False),
    ],
)
async def test_threads_and_duration_decide_whether_a_model_runs_inline(
    cores: CoreShare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    is_small: bool,
    are_few: bool,
    seconds: float,
    runs_inline: bool,
) -> None:
    cores.are_few = are_few
    monkeypatch.setattr(compile_module, "_is_small", lambda _: is_small)
    _short(monkeypatch, seconds)
    running = network(ir.dummy(), tmp_path, plugin_config=settings)
    assert running.runs_inline is runs_inline
    np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)


@pytest.mark.parametrize("settings", [{}, {"NUM_STREAMS": "1"}])
async def test_model_of_a_worker_with_one_core_stays_on_a_full_loop(
    settings: dict[str, str], cores: CoreShare, tmp_path: Path
) -> None:
    cores.are_few, cores.processes = True, 2
    load = LoopUtilization()
    load.busy = 1.0
    running = network(ir.dummy(), tmp_path, plugin_config=settings)
    running.tuner._load = load
    for _ in range(3):
        np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert (running.tuner.fills_cores, running.tuner.state) == (False, TunerState.LOOP)


@pytest.mark.parametrize(("seconds", "are_few", "threads"), [(0.3e-3, True, 1), (0.3e-3, False, 2), (0.4e-3, True, 2)])
def test_small_model_on_few_cores_has_one_thread_by_its_shortest_run(
    seconds: float, are_few: bool, threads: int, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores.are_few = are_few
    _short(monkeypatch, seconds)
    assert (network(ir.dummy(), tmp_path)._model.get_property("INFERENCE_NUM_THREADS") == 1) is (threads == 1)


@pytest.mark.parametrize("hint", ["", "LATENCY"])
@pytest.mark.parametrize("model", [ir.dummy(), ir.matmul()], ids=["fixed", "dynamic"])
async def test_small_model_has_all_cores_while_its_requests_are_long(
    model: Any, hint: str, cores: CoreShare, tmp_path: Path
) -> None:
    hooks = RecordingHooks()
    running = network(model, tmp_path, hooks=hooks, plugin_config={"PERFORMANCE_HINT": hint} if hint else {})
    given = [ONES] if model.inputs[0].partial_shape.is_static else FACTORS
    (expected,) = await running.infer(given)
    tuner = running.tuner
    assert not tuner.wants_recompilation()
    for at_once, chosen, streams in ((1, 1, 1), (2, 1 if hint else 2, 1 if hint else 2), (0, 0, 1)):
        assert tuner.max_concurrency
        tuner._long_at -= 100 if not at_once else 0
        for _ in range(10):
            tuner.record_concurrency(at_once or 1, 1.0 if at_once else 1e-4)
        assert tuner.wants_recompilation() is (tuner.concurrency != chosen)
        await running.recompile()
        threads = running._model.get_property("INFERENCE_NUM_THREADS")
        assert (tuner.concurrency, hooks.streams, threads) == (chosen, streams, 2 if chosen else 1)
        for placement in (Placement.away(), Placement(float("inf"))):
            tuner.place(placement)
            np.testing.assert_array_equal((await running.infer(given))[0], expected)


async def test_call_that_waits_for_the_pool_continues_when_the_loop_gets_its_own_stream(
    cores: CoreShare, tmp_path: Path
) -> None:
    running = network(ir.matmul(), tmp_path)
    (expected,) = await running.infer(FACTORS)
    slot = await running.pool.acquire()
    running.tuner.place(Placement(float("inf")))

    async def infer() -> None:
        (found,) = await running.infer(FACTORS)
        np.testing.assert_array_equal(found, expected)

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(infer)
            await trio.testing.wait_all_tasks_blocked()
            running.tuner.target = 1
            nursery.start_soon(running.recompile)
            while running._compile_inline_replacement is None or len(nursery.child_tasks) > 1:
                await trio.lowlevel.checkpoint()
            running.pool.release(slot)


async def test_small_model_recovers_from_failures_with_any_number_of_threads(cores: CoreShare, tmp_path: Path) -> None:
    running = network(ir.matmul(), tmp_path)
    for chosen in (1, 0):
        running.tuner.target = chosen
        await running.recompile()
        for placement in (Placement.away(), Placement(float("inf"))):
            for _ in range(3):
                running.tuner.place(placement)
                await _fails(running)
                running.tuner.place(placement)
                await _multiplies(running)
        assert running.pool.active == 0


def _shared_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: ov.Model, hooks: RecordingHooks, **options: Any
) -> Network:
    monkeypatch.setattr(compile_module, "_is_small", lambda _: False)
    return _away(network(model, tmp_path, hooks=hooks, **options))


def _note_parallel_calls(running: Network, at_once: int) -> bool:
    """Note calls in parallel that keep the device busy; return whether the model is to be compiled again."""
    tuner = running.tuner
    assert tuner.max_concurrency
    tuner.wants_recompilation()
    tuner._few_since -= 1000
    tuner.record_concurrency(at_once, 1000.0)
    return running.tuner.wants_recompilation()


@pytest.mark.parametrize("model", [ir.dummy(), ir.dynamic()], ids=["fixed", "dynamic"])
async def test_model_has_as_many_streams_as_parallel_calls(
    model: Any, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores.are_few = True
    hooks = RecordingHooks()
    running = _shared_out(monkeypatch, tmp_path, model, hooks)
    before = weakref.ref(running._model)
    answers: list[Any] = []
    assert not _note_parallel_calls(running, 1)
    for at_once in (2, 1):
        assert _note_parallel_calls(running, at_once)
        chosen = trio.Event()
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(_call_until, chosen, running, answers)
                await running.recompile()
                chosen.set()
        assert running.facts["streams"] == running._model.get_property("NUM_STREAMS") == at_once
        assert hooks.streams == running.concurrency == running._completions.concurrency == at_once
        # The pool of short inferences is larger, and how long one takes depends on what else the machine does.
        assert running.pool.size == len(running._slots)
        assert running.pool.size // at_once in {2, 8}
        assert {id(slot.model) for slot in [*running._slots, running._inline_slot]} == {id(running._model)}
        assert (running.pool.active, running._completions.running) == (0, 0)
        _away(running)
    assert answers
    assert all((each == ONES + 1).all() for each in answers)
    gc.collect()
    assert before() is None


@pytest.mark.parametrize(
    "settings", [{"PERFORMANCE_HINT": "LATENCY"}, {"NUM_STREAMS": "1"}, {"INFERENCE_NUM_THREADS": "2"}]
)
def test_streams_of_the_user_are_kept_however_calls_come(
    settings: dict[str, str], cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores.are_few = True
    running = _shared_out(monkeypatch, tmp_path, ir.dummy(), RecordingHooks(), plugin_config=settings)
    assert (running.tuner.max_concurrency, running.tuner.wants_recompilation()) == (0, False)


@pytest.mark.parametrize("is_configured", [False, True], ids=["streams of calls", "streams of its user"])
async def test_failure_on_one_of_several_streams_leaves_one_for_a_growing_while(
    is_configured: bool, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores.are_few = True
    hooks = RecordingHooks()
    settings = {"plugin_config": {"NUM_STREAMS": "2"}} if is_configured else {}
    running = _shared_out(monkeypatch, tmp_path, ir.matmul(), hooks, **settings)
    if not is_configured:
        assert _note_parallel_calls(running, 2)
        await running.recompile()
    now = running.tuner._clock()
    running.tuner._clock = lambda: now
    for pause in (30, 60, 30):
        # Without parallel calls, streams that are not configured end after a minute.
        running.tuner.record_concurrency(2, 1000.0)
        assert (hooks.streams, running.tuner.wants_recompilation()) == (2, False)
        for _ in range(2):
            await _fails(_away(running))
            await _multiplies(running)
            assert (hooks.streams, running.tuner.wants_recompilation()) == (1, False)
            assert running.facts["state"] == "reduced"
            now += pause - 1
        assert not running.tuner.wants_recompilation()
        now += 1
        assert running.tuner.wants_recompilation()
        await running.recompile()
        await _multiplies(_away(running))
        now += 601 if pause == 60 else 1
    assert hooks.streams == running._model.get_property("NUM_STREAMS") == 2


async def test_streams_are_not_returned_when_that_fails_or_a_request_fails_meanwhile(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores.are_few, now = True, 0.0
    hooks = RecordingHooks()
    running = _shared_out(monkeypatch, tmp_path, ir.matmul(), hooks, plugin_config={"NUM_STREAMS": "2"})
    running.tuner._clock = lambda: now
    compile_replacement = running._recompile

    def fail_meanwhile(at_once: int) -> Compiled:
        made = compile_replacement(at_once)
        trio.from_thread.run(_fails, _away(running))
        return made

    await _fails(running)
    for build in (fail_meanwhile, _refuse, compile_replacement):
        now += 1000
        assert running.tuner.wants_recompilation()
        running._recompile = build
        await running.recompile()
        assert (hooks.streams, running.tuner.wants_recompilation()) == (2 if build is compile_replacement else 1, False)


async def test_cancelled_call_does_not_delay_the_return_of_streams(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A single call that is stopped ends as a failure, and is none.
    cores.are_few, now = True, 0.0
    settings = {"NUM_STREAMS": "2"}
    running = _shared_out(monkeypatch, tmp_path, ir.matmul(), RecordingHooks(), plugin_config=settings)
    running.tuner._clock = lambda: now
    await _fails(running)
    stopped, recover = [], running._recover

    async def note(*args: Any, is_stopped: bool = False) -> None:
        stopped.append(is_stopped)
        await recover(*args, is_stopped=is_stopped)

    monkeypatch.setattr(running, "_recover", note)
    now = 30.0
    for _ in range(20):
        with trio.move_on_after(0.001):
            await running.infer([np.ones((700, 700), np.float32)] * 2)
        assert running.tuner.wants_recompilation()
    assert stopped
    assert all(stopped)
    await _fails(_away(running))
    assert not running.tuner.wants_recompilation()
