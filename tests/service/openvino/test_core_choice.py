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
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.openvino import compile as compile_module
from ovmstrio.openvino import network as network_module
from ovmstrio.openvino.compile import PINNING, ModelFile, compile_model
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.first_runs import Timing
from ovmstrio.openvino.lost_streams import LostStreams
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.runtime import core
from ovmstrio.openvino.slot import Slot
from ovmstrio.work import cores as cores_module
from ovmstrio.work.cores import CoreShare
from ovmstrio.work.placement import FEW_CORES_THRESHOLD_SECONDS, FILLING_THRESHOLD_SECONDS, Placement
from tests.support import ir
from tests.support.servables import RecordingHooks, network
from tests.support.waits import WAIT_SECONDS

pytestmark = pytest.mark.compiles

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

    assert alone.is_pinned is (True if _by_itself() else None)
    assert list(cores.users) == [alone]


def test_what_openvino_binds_to_no_core_by_itself_is_never_compiled_again(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to choose once it is alone; what it would do beside others is not known."""
    known = compile_module._property

    def unbound(model: ov.CompiledModel, name: str, default: int) -> int:
        return 0 if name == PINNING else known(model, name, default)

    monkeypatch.setattr(compile_module, "_property", unbound)
    assert network(ir.dummy(), tmp_path, "alone", plugin_config=ONE_THREAD).is_pinned is None
    cores.services = 2
    assert network(ir.dummy(), tmp_path, "beside", plugin_config=ONE_THREAD).is_pinned is False


def test_a_model_whose_requests_remember_by_themselves_keeps_its_cores(cores: CoreShare, tmp_path: Path) -> None:
    """What they remember is lost with them; sequences are the server's own to remember."""
    cores.services = 2
    by_itself = network(ir.accumulator(), tmp_path, "by_itself", plugin_config=ONE_THREAD)
    sequences = network(ir.accumulator(), tmp_path, "sequences", plugin_config=ONE_THREAD, stateful=True)

    assert by_itself.is_pinned is None
    assert sequences.is_pinned is False


def test_what_runs_before_a_model_is_no_reason_to_give_up_its_cores(cores: CoreShare, tmp_path: Path) -> None:
    """As the tokenizer of a model of embeddings."""
    repository = ir.save(ir.dummy(), tmp_path, "model")
    compiled = compile_model(ModelFile(repository / "1" / "model.xml", ModelSpec(name="model", base_path=repository)))
    before = Network(compiled, fills_cores=False)
    assert (list(cores.users), cores.is_shared) == ([], False)
    assert before.is_pinned is None


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


async def test_a_model_of_one_stream_since_a_failure_does_not_get_several_again(
    cores: CoreShare, tmp_path: Path
) -> None:
    """A failure on one of several is mended another way, and would harm requests of others."""
    hooks = RecordingHooks()
    running = _away(network(ir.matmul(), tmp_path, hooks=hooks, plugin_config={"NUM_STREAMS": "2"}))
    fits = [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)]
    with pytest.raises(ModelFailure):
        await running.infer([fits[0], fits[0]])
    assert hooks.streams == running._model.get_property("NUM_STREAMS") == 1

    cores.services = 2
    await running.choose_cores()
    assert running._model.get_property("NUM_STREAMS") == 1
    assert running.is_pinned is None


@pytest.mark.parametrize("error", [ConfigError([Problem("no file")]), MemoryError()])
async def test_a_model_that_cannot_be_compiled_again_stays_as_it_is(
    error: Exception, cores: CoreShare, tmp_path: Path
) -> None:
    """As where its file is gone, or memory is short; it answers as before, and the server goes on."""
    running = _away(network(ir.dummy(), tmp_path, plugin_config=ONE_THREAD))
    pinned, (expected,) = running.is_pinned, await running.infer([ONES])

    def refuse(_at_once: int) -> Compiled:
        raise error

    running._chosen_anew = refuse
    await running.choose_cores()
    (found,) = await running.infer([ONES])

    np.testing.assert_array_equal(found, expected)
    assert running.is_pinned is pinned


async def test_a_request_that_cannot_be_made_anew_is_not_lost(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls meanwhile is told; afterwards the whole pool answers, on what was compiled again."""
    running = _away(network(ir.dummy(), tmp_path, plugin_config={**ONE_THREAD, "PERFORMANCE_HINT": "LATENCY"}))
    (expected,) = await running.infer([ONES])
    attach = Slot.attach

    def refuse(slot: Slot, model: ov.CompiledModel) -> None:
        if slot is not running._inline_slot:
            raise MemoryError
        attach(slot, model)

    cores.services = 2
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "attach", refuse)
        await running.choose_cores()
        for _ in range(2 * running.pool.size):
            with trio.fail_after(60), pytest.raises(ModelFailure, match="no request"):
                await running.infer([ONES])
    assert running.pool.active == 0

    with trio.fail_after(60):
        taken = [await running._acquire() for _ in range(running.pool.size)]
    assert {id(slot.model) for slot in taken} == {id(running._model)}
    for slot in taken:
        running.pool.release(slot)
    (found,) = await running.infer([ONES])
    np.testing.assert_array_equal(found, expected)


def _short(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(compile_module, "warm_up", lambda *_: Timing(2 * seconds, seconds, 40))


async def test_on_few_cores_what_fills_them_runs_on_the_loop(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its weights are, bound to no core, and with the results of any other way."""
    cores.are_few = True
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    monkeypatch.setattr(compile_module, "_is_small", lambda _: False)
    _short(monkeypatch, FILLING_THRESHOLD_SECONDS / 2)
    filling = network(ir.dummy(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "2"})
    assert filling.runs_inline
    assert not filling._model.get_property(PINNING)
    (given,) = await filling.infer([ONES])
    np.testing.assert_array_equal(given, ONES + 1)


@pytest.mark.parametrize(
    ("settings", "are_few", "seconds"),
    [
        ({"INFERENCE_NUM_THREADS": "1"}, True, FEW_CORES_THRESHOLD_SECONDS),
        ({"INFERENCE_NUM_THREADS": "1"}, False, FEW_CORES_THRESHOLD_SECONDS / 2),
        ({"INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "2"}, True, FILLING_THRESHOLD_SECONDS / 2),
        ({"INFERENCE_NUM_THREADS": "2"}, True, FILLING_THRESHOLD_SECONDS),
        ({"INFERENCE_NUM_THREADS": "2"}, False, FILLING_THRESHOLD_SECONDS / 2),
    ],
)
def test_what_does_not_fill_few_cores_or_takes_longer_leaves_the_loop(
    cores: CoreShare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    are_few: bool,
    seconds: float,
) -> None:
    """One of several streams or threads, a long one, and any where cores are many."""
    cores.are_few = are_few
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    _short(monkeypatch, seconds)
    assert not network(ir.dummy(), tmp_path, plugin_config=settings).runs_inline


def test_on_few_cores_what_one_thread_does_stays_on_the_loop_for_longer(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To leave takes as much there as it saves."""
    cores.are_few = True
    _short(monkeypatch, 0.9 * FEW_CORES_THRESHOLD_SECONDS)
    assert network(ir.dummy(), tmp_path, plugin_config=ONE_THREAD).runs_inline


@pytest.mark.parametrize(("seconds", "are_few"), [(0.3e-3, True), (0.3e-3, False), (0.4e-3, True)])
def test_a_small_model_has_one_thread_on_few_cores_though_loading_makes_it_slow(
    seconds: float, are_few: bool, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the shortest of its runs; one that is not so small, or has cores enough, has several."""
    cores.are_few = are_few
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    _short(monkeypatch, seconds)
    threads = network(ir.dummy(), tmp_path)._model.get_property("INFERENCE_NUM_THREADS")
    assert (threads == 1) is (are_few and seconds < 0.35e-3)


@pytest.mark.parametrize("hint", ["", "LATENCY"])
@pytest.mark.parametrize("model", [ir.dummy(), ir.matmul()], ids=["fixed", "dynamic"])
async def test_a_small_model_that_is_asked_for_what_takes_long_has_all_cores(
    model: Any, hint: str, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is asked for what is short again; a hint of the user's says whether several share them."""
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    hooks = RecordingHooks()
    running = network(model, tmp_path, hooks=hooks, plugin_config={"PERFORMANCE_HINT": hint} if hint else {})
    given = [
        np.ones(shape, np.float32)
        for shape in ([(1, 10)] if model.inputs[0].partial_shape.is_static else [(2, 3), (3, 2)])
    ]
    (expected,) = await running.infer(given)
    assert not running.wants_others()
    for at_once, chosen, streams in ((1, 1, 1), (2, 1 if hint else 2, 1 if hint else 2), (0, 0, 1)):
        assert running._demand is not None
        running._demand._long_at -= 100 if not at_once else 0
        for _ in range(10):
            running._demand.note(at_once or 1, 1.0 if at_once else 1e-4)
        assert running.wants_others() is (running._demand.chosen != chosen)
        await running.choose_cores()
        threads = running._model.get_property("INFERENCE_NUM_THREADS")
        assert (running._demand.chosen, hooks.streams, threads) == (chosen, streams, 2 if chosen else 1)
        for placement in (Placement.away(), Placement(float("inf"))):
            running._placement = placement
            np.testing.assert_array_equal((await running.infer(given))[0], expected)


async def test_who_waits_for_the_pool_goes_on_when_the_loop_gets_a_stream_for_itself(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would wake it: calls of the loop's own stream wait for no other."""
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    running = network(ir.matmul(), tmp_path)
    slot = await running.pool.acquire()
    running._placement = Placement(float("inf"))
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.infer, [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)])
            await trio.testing.wait_all_tasks_blocked()
            running._at_once = 1
            nursery.start_soon(running.choose_cores)
            while running._loop_again is None or len(nursery.child_tasks) > 1:
                await trio.lowlevel.checkpoint()
            running.pool.release(slot)


async def test_a_small_model_that_failed_is_sound_again_with_any_number_of_threads(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests of the pool, which were made for other threads, tell of failures as before."""
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    running = network(ir.matmul(), tmp_path)
    fits = [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)]
    for chosen in (1, 0):
        running._at_once = chosen
        await running.choose_cores()
        for placement in (Placement.away(), Placement(float("inf"))):
            for _ in range(3):
                running._placement = placement
                with pytest.raises(ModelFailure):
                    await running.infer([fits[0], fits[0]])
                running._placement = placement
                np.testing.assert_array_equal((await running.infer(fits))[0], np.full((2, 2), 3, np.float32))
        assert running.pool.active == 0


def _shared_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: ov.Model, hooks: RecordingHooks, **options: Any
) -> Network:
    """A network on two cores whose model is too large to be made for the event loop."""
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 2)
    monkeypatch.setattr(compile_module, "_is_small", lambda _: False)
    return _away(network(model, tmp_path, hooks=hooks, **options))


def _ask_side_by_side(running: Network, at_once: int) -> bool:
    """Have it look at as many calls at once, which keep the device busy; gives whether it wants to change."""
    assert running._demand is not None
    running._demand.look()
    running._demand._few_since -= 1000
    running._demand.note(at_once, 1000.0)
    return running.wants_others()


@pytest.mark.parametrize("model", [ir.dummy(), ir.dynamic()], ids=["fixed", "dynamic"])
async def test_a_model_whose_calls_come_side_by_side_shares_the_cores_out_among_them(
    model: Any, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has them for one call at a time again once they come one by one; calls meanwhile are answered."""
    cores.are_few = True
    hooks = RecordingHooks()
    running = _shared_out(monkeypatch, tmp_path, model, hooks)
    before, size = weakref.ref(running._model), running.pool.size
    (expected,) = await running.infer([ONES])
    answered = 0

    async def call(until: trio.Event) -> None:
        nonlocal answered
        while not until.is_set():
            (found,) = await running.infer([ONES])
            np.testing.assert_array_equal(found, expected)
            answered += 1
            await trio.lowlevel.checkpoint()

    assert not _ask_side_by_side(running, 1)
    for at_once in (2, 1):
        assert _ask_side_by_side(running, at_once)
        chosen = trio.Event()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(call, chosen)
                await running.choose_cores()
                chosen.set()
        assert running.facts["streams"] == running._model.get_property("NUM_STREAMS") == at_once
        assert hooks.streams == running.side_by_side == running._completions.side_by_side == at_once
        assert running.pool.size == len(running._slots) == at_once * size
        assert {id(slot.model) for slot in [*running._slots, running._inline_slot]} == {id(running._model)}
        assert (running.pool.active, running._completions.running) == (0, 0)
        _away(running)

    assert answered
    gc.collect()
    assert before() is None


@pytest.mark.parametrize(
    "settings",
    [{"PERFORMANCE_HINT": "LATENCY"}, {"NUM_STREAMS": "1"}, {"INFERENCE_NUM_THREADS": "2"}],
    ids=lambda settings: next(iter(settings)),
)
async def test_what_the_user_says_of_streams_stands(
    settings: dict[str, str], cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its calls come."""
    cores.are_few = True
    running = _shared_out(monkeypatch, tmp_path, ir.dummy(), RecordingHooks(), plugin_config=settings)
    assert running._demand is None
    assert not running.wants_others()


@pytest.mark.parametrize("is_told", [False, True], ids=["by calls", "by its user"])
async def test_a_model_that_failed_on_one_of_several_streams_has_one_for_a_while(
    is_told: bool, cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which of them it has spoiled, and it may fail again; each time after a failure the pause begins."""
    cores.are_few, fits = True, [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)]
    hooks, now = RecordingHooks(), 0.0
    settings = {"plugin_config": {"NUM_STREAMS": "2"}} if is_told else {}
    running = _shared_out(monkeypatch, tmp_path, ir.matmul(), hooks, **settings)
    running._lost = LostStreams(lambda: now)
    if not is_told:
        assert _ask_side_by_side(running, 2)
        await running.choose_cores()
    for pause in (30, 60, 30):
        assert (hooks.streams, running.wants_others()) == (2, False)
        for _ in range(2):
            with pytest.raises(ModelFailure):
                await _away(running).infer([fits[0], fits[0]])
            (found,) = await running.infer(fits)
            np.testing.assert_array_equal(found, np.full((2, 2), 3, np.float32))
            assert (hooks.streams, running.wants_others()) == (1, False)
            now += pause - 1
        assert not running.wants_others()
        now += 1
        assert running.wants_others()
        await running.choose_cores()
        (found,) = await _away(running).infer(fits)
        np.testing.assert_array_equal(found, np.full((2, 2), 3, np.float32))
        now += 601 if pause == 60 else 1
    assert hooks.streams == running._model.get_property("NUM_STREAMS") == 2


async def test_a_model_that_fails_while_it_gets_its_streams_back_does_not_get_them(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that cannot be compiled then; both are tried again later."""
    cores.are_few, now = True, 0.0
    hooks = RecordingHooks()
    running = _shared_out(monkeypatch, tmp_path, ir.matmul(), hooks, plugin_config={"NUM_STREAMS": "2"})
    running._lost = LostStreams(lambda: now)
    anew, numbers = running._chosen_anew, np.ones((2, 3), np.float32)

    def fail(at_once: int) -> Compiled:
        made = anew(at_once)
        trio.from_thread.run(_fails, running, [numbers, numbers])
        return made

    def refuse(_at_once: int) -> Compiled:
        raise MemoryError

    await _fails(running, [numbers, numbers])
    for build in (fail, refuse, anew):
        now += 1000
        assert running.wants_others()
        running._chosen_anew = build
        await running.choose_cores()
        assert (hooks.streams, running.wants_others()) == (2 if build is anew else 1, False)


async def test_who_leaves_does_not_keep_a_model_from_its_streams(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone call that is stopped for that ends as a failure, and is none."""
    cores.are_few, now = True, 0.0
    settings = {"NUM_STREAMS": "2"}
    running = _shared_out(monkeypatch, tmp_path, ir.matmul(), RecordingHooks(), plugin_config=settings)
    running._lost = LostStreams(lambda: now)
    await _fails(running, [np.ones((2, 3), np.float32)] * 2)
    stopped, mend = [], running._mend

    async def note(*args: Any, is_stopped: bool = False) -> None:
        stopped.append(is_stopped)
        await mend(*args, is_stopped=is_stopped)

    monkeypatch.setattr(running, "_mend", note)
    now = 30.0
    large = [np.ones((700, 700), np.float32)] * 2
    for _ in range(20):
        with trio.move_on_after(0.001):
            await running.infer(large)
        assert running.wants_others()
    assert stopped
    assert all(stopped)
    await _fails(running, [np.ones((2, 3), np.float32)] * 2)
    assert not running.wants_others()


async def _fails(running: Network, arrays: list[Any]) -> None:
    with pytest.raises(ModelFailure):
        await _away(running).infer(arrays)


async def test_a_model_that_cannot_be_compiled_for_its_calls_is_not_asked_again(
    cores: CoreShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be tried at every look; it answers as before."""
    cores.are_few = True
    running = _shared_out(monkeypatch, tmp_path, ir.dummy(), RecordingHooks())
    (expected,) = await running.infer([ONES])

    def refuse(_at_once: int) -> Compiled:
        raise MemoryError

    running._chosen_anew = refuse
    assert _ask_side_by_side(running, 2)
    await running.choose_cores()
    (found,) = await running.infer([ONES])

    np.testing.assert_array_equal(found, expected)
    assert not running.wants_others()
