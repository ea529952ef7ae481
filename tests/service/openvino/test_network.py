from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
import trio.testing

from ovmstrio.core.datatypes import BY_NAME, to_bf16
from ovmstrio.core.errors import ConfigError, ModelFailure, PayloadTooLarge, Problem
from ovmstrio.openvino import compile as compile_module
from ovmstrio.openvino import network as network_module
from ovmstrio.openvino import slot as slot_module
from ovmstrio.openvino.completions import CompletionQueue
from ovmstrio.openvino.first_runs import Timing, warm_up
from ovmstrio.openvino.mending import replace_model
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.ov_tensors import from_tensor
from ovmstrio.openvino.slot import Slot
from ovmstrio.work.loop_load import LoopLoad
from ovmstrio.work.placement import Placement
from tests.support import ir
from tests.support.servables import RecordingHooks, network
from tests.support.waits import WAIT_SECONDS

pytestmark = pytest.mark.compiles

ONES = np.ones((1, 10), np.float32)


@pytest.fixture
def short_inferences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time inferences and the event loop by a clock of the test: on a busy machine short inferences look long."""
    ticks = itertools.count()

    def measure(compiled: Any, signature: Any, blocking: Any, clock: Any) -> Any:
        del clock
        return warm_up(compiled, signature, blocking, lambda: next(ticks) * 1e-6)

    monkeypatch.setattr(compile_module, "warm_up", measure)
    monkeypatch.setattr(network_module, "time", SimpleNamespace(perf_counter=lambda: 100.0, thread_time=lambda: 100.0))
    for name in ("is_full", "is_overdue"):
        monkeypatch.setattr(LoopLoad, name, property(lambda _: False))


def send_away(running: Network) -> Network:
    """Make a network run nothing on the event loop."""
    running._placement = Placement.away()
    return running


@pytest.mark.usefixtures("short_inferences")
@pytest.mark.parametrize("model", [ir.dummy(), ir.sum_of_two(), ir.scalar(), ir.dynamic(), ir.image_passthrough()])
async def test_inline_and_pooled_runs_agree(model: object, tmp_path: Path) -> None:
    """A request has the same answer on the event loop and through the pool."""
    running = network(model, tmp_path)
    assert running.runs_inline
    rng = np.random.default_rng(3)
    shapes = [[dim.low if dim.is_fixed else 3 for dim in spec.shape] for spec in running.signature.inputs]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    inline = await running.infer(arrays)
    pooled = await send_away(running).infer(arrays)
    for one, other in zip(inline, pooled, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("datatype", [name for name in BY_NAME if name != "BYTES"])
async def test_outputs_of_each_datatype_are_the_same_wherever_it_runs(datatype: str, tmp_path: Path) -> None:
    """On the event loop they are taken from what OpenVINO gives with the end of an inference, else from its tensors."""
    running = network(ir.passthrough(datatype), tmp_path)
    dtype = BY_NAME[datatype].numpy
    given = np.arange(6).reshape(2, 3).astype(np.float32)
    array = to_bf16(given) if datatype == "BF16" else given.astype(dtype)
    (inline,) = await running.infer([array])
    (bounded,) = await running.infer([array], most_bytes=array.nbytes)
    (pooled,) = await send_away(running).infer([array])
    for each in (inline, bounded, pooled):
        assert each.dtype == dtype
        np.testing.assert_array_equal(each, array)


async def test_python_knows_the_thread_that_calls_back_from_one_inference_to_the_next(tmp_path: Path) -> None:
    """What it knows of a thread is made and thrown away with memory of the system's otherwise, for each inference."""
    slot = send_away(network(ir.dummy(), tmp_path))._slots[0]
    completion, seen, remembered = slot._completion, threading.local(), list[bool]()

    def call_back(_: object) -> None:
        remembered.append(hasattr(seen, "before"))
        seen.before = True
        completion(_)

    slot.request.set_callback(call_back, None)
    for _ in range(4):
        slot.bind([ONES])
        done = slot.start(CompletionQueue(1))
        with trio.fail_after(WAIT_SECONDS):
            await done.wait()
        slot.unbind()
    assert remembered[1:] == [True] * 3


async def test_a_tensor_of_no_strings_comes_back_as_one(tmp_path: Path) -> None:
    """OpenVINO reads memory that is not its own where it is asked for the strings of an empty tensor."""
    running = network(ir.string_passthrough(), tmp_path)
    for _ in range(20):
        (inline,) = await running.infer([np.empty(0, object)])
        assert (inline.shape, inline.dtype) == ((0,), np.dtype(object))
    (pooled,) = await send_away(running).infer([np.empty(0, object)])
    assert (pooled.shape, pooled.dtype) == ((0,), np.dtype(object))
    (some,) = await running.infer([np.array([b"a", b""], object)])
    assert some.tolist() == [b"a", b""]


async def test_outputs_are_copies(tmp_path: Path) -> None:
    """An answer does not change when the next request runs."""
    running = network(ir.dummy(), tmp_path)
    first = await running.infer([ONES])
    await running.infer([ONES * 5])
    np.testing.assert_array_equal(first[0], ONES + 1)


async def test_inputs_are_released_after_the_call(tmp_path: Path) -> None:
    """No request of the pool holds the caller's memory once the call is over."""
    running = network(ir.dummy(), tmp_path)
    buffer = bytearray(ONES.tobytes())
    array = np.frombuffer(buffer, np.float32).reshape(1, 10)
    await running.infer([array])
    await send_away(running).infer([array])
    del array
    gc.collect()
    buffer.extend(b"more")  # raises BufferError while anything looks at the memory
    np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)


async def test_read_only_input_is_left_unchanged(tmp_path: Path) -> None:
    """Bytes are read where they are and never written."""
    running = network(ir.dummy(), tmp_path)
    raw = ONES.tobytes()
    await running.infer([np.frombuffer(raw, np.float32).reshape(1, 10)])
    assert raw == ONES.tobytes()


async def test_more_callers_than_requests_all_get_their_own_answer(tmp_path: Path) -> None:
    """Callers beyond nireq wait, and each gets the answer to its own input."""
    hooks = RecordingHooks()
    running = send_away(network(ir.dummy(), tmp_path, nireq=3, hooks=hooks))
    answers: dict[int, float] = {}

    async def call(number: int) -> None:
        answers[number] = float((await running.infer([ONES * number]))[0][0, 0])

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(call, number)
    assert answers == {number: number + 1.0 for number in range(100)}
    assert running.pool.active == 0
    assert max(active for _, active in hooks.pools) == 3
    assert hooks.pools[-1] == (3, 0)
    assert len(hooks.waits) == len(hooks.inferences) == 100
    assert max(hooks.waits) > 0


async def test_requests_are_given_first_come_first_served(tmp_path: Path) -> None:
    """Who waits longest gets the next free request."""
    pool = network(ir.dummy(), tmp_path, nireq=1).pool
    slot = await pool.acquire()
    order: list[int] = []

    async def wait(number: int) -> None:
        mine = await pool.acquire()
        order.append(number)
        pool.release(mine)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(wait, number)
            while pool.waiting <= number:
                await trio.lowlevel.checkpoint()
        pool.release(slot)
    assert order == [0, 1, 2, 3, 4]


async def refuses(running: Network, *shapes: tuple[int, int]) -> None:
    """Hold that a matrix product of these shapes fails with OpenVINO's reason."""
    with trio.fail_after(WAIT_SECONDS), pytest.raises(ModelFailure, match="incompatible"):
        await running.infer([np.ones(shape, np.float32) for shape in shapes])


async def multiplies(running: Network, rows: int, inner: int, columns: int) -> None:
    """Hold that a matrix product is right."""
    product = (await running.infer([np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)]))[0]
    np.testing.assert_array_equal(product, np.full((rows, columns), inner, np.float32))


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    "config", [{}, {"INFERENCE_NUM_THREADS": "1"}, {"INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "2"}]
)
async def test_failing_inference_is_reported_and_hurts_nobody_else(
    *, config: dict[str, str], inline: bool, tmp_path: Path
) -> None:
    """A failure inside OpenVINO becomes ModelFailure, costs no request, and requests of any shape work behind it."""
    running = network(ir.matmul(), tmp_path, nireq=2, plugin_config=config)
    if not inline:
        send_away(running)
    for rows, inner, columns in [(2, 3, 2), (1, 1, 1), (2, 2, 2), (4, 1, 3)]:
        await multiplies(running, rows, inner, columns)
        await refuses(running, (2, 3), (5, 2))
        await multiplies(running, rows, inner, columns)
        await refuses(running, (2, 3), (5, 2))
        await refuses(running, (1, 2), (1, 2))
        await multiplies(running, 2, 3, 2)
    assert running.pool.active == 0


@pytest.mark.parametrize("config", [{}, {"NUM_STREAMS": "2"}])
@pytest.mark.parametrize("inline", [True, False])
async def test_requests_beside_failing_ones_are_answered(
    *, config: dict[str, str], inline: bool, tmp_path: Path
) -> None:
    """Valid requests that run at the same time as failing ones all get right answers."""
    running = network(ir.matmul(), tmp_path, plugin_config=config)
    if not inline:
        send_away(running)
    for _ in range(10):
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(multiplies, running, 2, 3, 2)
                nursery.start_soon(multiplies, running, number + 1, 2, 1)
                if number % 4 == 0:
                    nursery.start_soon(refuses, running, (2, 3), (number % 2 + 4, 2))
    assert running.pool.active == 0


@pytest.mark.parametrize("config", [{"INFERENCE_NUM_THREADS": "1"}, {"NUM_STREAMS": "2"}])
async def test_models_that_may_fail_are_compiled_once_until_they_do(
    config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many streams and requests they have; a failure on one of several streams leaves a model of one.

    Beside several streams there is one of one thread for the event loop, which stays as it is.
    """
    compiled: list[int] = []
    build = compile_module._compile

    def count(*args: Any) -> ov.CompiledModel:
        compiled.append(1)
        return build(*args)

    monkeypatch.setattr(compile_module, "_compile", count)
    hooks = RecordingHooks()
    running = send_away(network(ir.matmul(), tmp_path, plugin_config=config, nireq=8, hooks=hooks))
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(multiplies, running, number % 3 + 1, 3, 2)
    several = hooks.streams > 1
    assert (running.pool.size, len(compiled)) == (8, 2 if several else 1)
    for _ in range(3):
        await refuses(running, (2, 3), (5, 2))
        await multiplies(running, 2, 3, 2)
    assert (hooks.streams, len(compiled)) == (1, 3 if several else 1)


async def test_models_that_fail_on_ones_recover_by_loading_again(tmp_path: Path) -> None:
    """A model that nothing is known to succeed on is compiled again after a failure."""
    running = network(ir.reshape_by_data(), tmp_path)
    assert not running.runs_inline
    numbers = np.arange(4, dtype=np.float32)
    for _ in range(3):
        with pytest.raises(ModelFailure):
            await running.infer([numbers, np.array([3, 3], np.int64)])
        result = (await running.infer([numbers, np.array([2, 2], np.int64)]))[0]
        np.testing.assert_array_equal(result, numbers.reshape(2, 2))


async def test_a_model_that_fails_on_ones_has_the_streams_that_it_was_told(tmp_path: Path) -> None:
    """As long as no request fails; what is told of them is what OpenVINO has."""
    hooks = RecordingHooks()
    settings = {"NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"}
    running = network(ir.reshape_by_data(), tmp_path, plugin_config=settings, hooks=hooks)
    numbers = np.arange(4, dtype=np.float32)
    result = (await running.infer([numbers, np.array([2, 2], np.int64)]))[0]
    np.testing.assert_array_equal(result, numbers.reshape(2, 2))
    assert (hooks.streams, running._model.get_property("NUM_STREAMS")) == (2, 2)
    with pytest.raises(ModelFailure):
        await running.infer([numbers, np.array([3, 3], np.int64)])
    assert (hooks.streams, running._model.get_property("NUM_STREAMS")) == (1, 1)


async def test_model_that_cannot_be_mended_refuses_until_it_can(tmp_path: Path) -> None:
    """While a failed model cannot be loaded again, nothing runs on it; once it can, it serves again."""
    running = network(ir.reshape_by_data(), tmp_path)
    numbers = np.arange(4, dtype=np.float32)
    good: list[np.ndarray[Any, Any]] = [numbers, np.array([2, 2], np.int64)]
    bad: list[np.ndarray[Any, Any]] = [numbers, np.array([3, 3], np.int64)]
    compile_again = running._compile_again

    def refuse() -> ov.CompiledModel:
        raise ConfigError([Problem("the disk is gone")])

    running._compile_again = refuse
    for _ in range(2):
        with pytest.raises(ModelFailure):
            await running.infer(bad)
    running._compile_again = compile_again
    with pytest.raises(ModelFailure, match="cannot be loaded again: the disk is gone"):
        await running.infer(good)
    np.testing.assert_array_equal((await running.infer(good))[0], numbers.reshape(2, 2))


@pytest.mark.usefixtures("short_inferences")
@pytest.mark.parametrize("threads", ["1", "2"])
async def test_short_models_that_may_fail_run_on_the_loop(
    threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with one thread, where OpenVINO's synchronous call loses failures: what failed goes through the pool."""
    running = network(ir.matmul(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": threads})
    away: list[int] = []
    infer = Network._infer_away

    def note(*args: Any) -> Any:
        away.append(len(away))
        return infer(*args)

    monkeypatch.setattr(Network, "_infer_away", note)
    running._placement = Placement(float("inf"))
    for rows in (1, 2, 3):
        await multiplies(running, rows, 1, 2)
    assert away == []
    await refuses(running, (2, 1), (2, 2))
    assert len(away) == (1 if threads == "1" else 0)
    for rows in (1, 2, 3):
        await multiplies(running, rows, 1, 2)
    assert len(away) == (1 if threads == "1" else 0)


@pytest.mark.parametrize("short_ones", [1, 100])
async def test_long_inferences_between_short_ones_are_learned_of(
    short_ones: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that takes long leaves the loop, also where most requests are of one that does not."""
    hooks = RecordingHooks()
    running = network(ir.dummy((-1, 10)), tmp_path, hooks=hooks)
    running._placement = Placement(float("inf"), learns=True)
    small, large = np.zeros((1, 10), np.float32), np.zeros((100, 10), np.float32)
    infer, now, rows = Slot.infer, 100.0, 0

    def infer_for_as_long_as_it_is_large(slot: Slot) -> None:
        nonlocal now
        infer(slot)
        now += 3e-3 if rows > 1 else 10e-6

    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(network_module, "time", clock)
    monkeypatch.setattr(Slot, "infer", infer_for_as_long_as_it_is_large)
    for given in [*[small] * 100, *[*[small] * short_ones, large] * 60]:
        rows = len(given)
        await running.infer([given])
    assert running._placement.is_inline(small.nbytes)
    # By OpenVINO's threads, which have another clock, it takes next to nothing, and comes back.
    assert (False, True) in hooks.places


async def test_an_inference_that_waited_for_the_processor_is_not_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it one for what the loop has worked before, in the same turn."""
    running = network(ir.dummy(), tmp_path)
    running._placement = Placement(float("inf"))
    assert not running._loop_load.busy  # It is watched from here on.
    learned: list[float] = []
    infer = Slot.infer

    waited, worked = 100.0, 100.0

    def infer_late(slot: Slot) -> None:
        nonlocal waited, worked
        infer(slot)
        waited += 0.05
        worked += 0.001

    clock = SimpleNamespace(perf_counter=lambda: waited, thread_time=lambda: worked)
    monkeypatch.setattr(network_module, "time", clock)
    monkeypatch.setattr(Network, "_learn", lambda _, __, seconds, **___: learned.append(seconds))
    monkeypatch.setattr(Slot, "infer", infer_late)
    waited += 0.03
    worked += 0.03
    await running.infer([np.ones((1, 10), np.float32)])
    assert learned == [pytest.approx(0.001)]


@pytest.mark.usefixtures("short_inferences")
async def test_outputs_without_elements_are_answered(tmp_path: Path) -> None:
    """An output of no elements looks like one that was not made, and is no failure."""
    running = network(ir.dynamic(1), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "1"})
    assert running.runs_inline
    for size in (3, 0, 0, 3, 2):
        (answer,) = await running.infer([np.ones(size, np.float32)])
        np.testing.assert_array_equal(answer, np.full(size, 2))


@pytest.mark.usefixtures("short_inferences")
async def test_nothing_runs_on_the_loop_beside_requests_that_may_fail(tmp_path: Path) -> None:
    """The loop would not know yet that one of them has spoiled the model."""
    running = network(ir.matmul(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "1"})
    assert running._loop_may_run()
    slot = await running.pool.acquire()
    assert not running._loop_may_run()
    running.pool.release(slot)
    assert running._loop_may_run()
    assert (await send_away(network(ir.dummy(), tmp_path, nireq=1)).pool.acquire()) is not None


@pytest.mark.usefixtures("short_inferences")
@pytest.mark.parametrize("config", [{"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": "2"}, {"NUM_STREAMS": "2"}])
async def test_a_small_model_of_several_streams_has_one_thread_for_the_loop(
    config: dict[str, str], tmp_path: Path
) -> None:
    """It infers there beside the streams, which keep their number, and neither is hurt by a failure of the other."""
    hooks = RecordingHooks()
    running = network(ir.matmul(), tmp_path, plugin_config=config, hooks=hooks)
    assert (running.runs_inline, hooks.streams, running.facts["streams"]) == (True, 2, 2)
    assert running._inline_slot.model is not running._model
    assert running._inline_slot.model.get_property("INFERENCE_NUM_THREADS") == 1
    slot = await running.pool.acquire()
    assert running._loop_may_run()
    running.pool.release(slot)
    for _ in range(3):
        await refuses(running, (2, 3), (5, 2))
        await multiplies(running, 2, 3, 2)
        await multiplies(running, 1, 3, 2)
    assert (hooks.streams, running._runs._generation) == (2, 0)
    short = running._placement
    send_away(running)
    await refuses(running, (2, 3), (5, 2))
    running._placement = short
    await multiplies(running, 2, 3, 2)
    assert hooks.streams == 1
    assert running._inline_slot.model.get_property("INFERENCE_NUM_THREADS") == 1
    await running.choose_cores()
    await multiplies(running, 2, 3, 2)


@pytest.mark.parametrize(("streams", "learned"), [("1", 3), ("2", 1)])
async def test_what_streams_take_says_nothing_of_the_loops_own_thread(
    streams: str, learned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has a model of its own, a size comes back to it by its own times only."""
    running = network(ir.dummy(), tmp_path, plugin_config={"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": streams})
    times: list[float] = []
    monkeypatch.setattr(Network, "_learn", lambda _, __, seconds, **___: times.append(seconds))
    await running.infer([ONES])
    send_away(running)
    for _ in range(2):
        await running.infer([ONES])
    assert len(times) == learned


async def test_the_loops_own_model_is_made_again_where_it_cannot_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile calls go to the streams, and those that run there have no part in it."""
    hooks = RecordingHooks()
    running = network(ir.matmul(), tmp_path, plugin_config={"NUM_STREAMS": "2"}, hooks=hooks)
    mends = Slot.mends
    monkeypatch.setattr(Slot, "mends", lambda slot: slot is not running._inline_slot and mends(slot))
    before, again = running._inline_slot.model, threading.Event()

    def replace_late(*args: Any) -> None:
        again.wait(WAIT_SECONDS)
        replace_model(*args)

    monkeypatch.setattr(network_module, "replace_model", replace_late)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuses, running, (2, 3), (5, 2))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not running._loop_may_run()
        await multiplies(running, 2, 3, 2)
        again.set()
    assert running._loop_may_run()
    assert running._inline_slot.model is not before
    assert hooks.streams == 2
    await multiplies(running, 2, 3, 2)


async def test_short_requests_of_a_model_that_may_fail_find_their_way_back_to_the_loop(tmp_path: Path) -> None:
    """They wait for the last of those that were sent away, so that a steady load does not keep all of them there."""
    running = network(ir.matmul(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "1"})
    inline = Placement(float("inf"))
    slot = await running.pool.acquire()
    running._placement = inline
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(multiplies, running, 2, 3, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert running.pool.active == 1
        running.pool.release(slot)
        running._look_for_idle()
    running._placement = Placement.away()
    large = [np.ones((700, 700), np.float32), np.ones((700, 700), np.float32)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.infer, large)
        await trio.testing.wait_all_tasks_blocked()
        running._placement = inline
        assert not running._is_worth_waiting()


async def test_who_leaves_does_not_make_others_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request of a model that may fail is stopped if it is alone, and else left to end."""
    running = send_away(network(ir.matmul(), tmp_path, nireq=4))
    mended: list[int] = []
    mend = Network._mend

    async def note(*args: Any, **options: Any) -> None:
        mended.append(1)
        await mend(*args, **options)

    monkeypatch.setattr(Network, "_mend", note)
    large = [np.ones((700, 700), np.float32), np.ones((700, 700), np.float32)]
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(running.infer, large)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0) as scope:
            await running.infer(large)
    assert scope.cancelled_caught
    assert (running.pool.active, mended) == (0, [])
    await multiplies(running, 2, 3, 2)


async def test_who_leaves_costs_the_model_no_stream(tmp_path: Path) -> None:
    """A request of several streams that may fail is left to end: a stopped one would have them be given up for one."""
    hooks = RecordingHooks()
    running = send_away(network(ir.matmul(), tmp_path, plugin_config={"NUM_STREAMS": "2"}, hooks=hooks))
    large = [np.ones((700, 700), np.float32), np.ones((700, 700), np.float32)]
    for _ in range(3):
        with trio.move_on_after(0.001) as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(running.infer, large)
        assert scope.cancelled_caught
    assert (running.pool.active, running.facts["streams"]) == (0, 2)
    assert hooks.streams == 2
    await multiplies(running, 2, 3, 2)


@pytest.mark.parametrize("streams", [1, 2])
async def test_an_inference_for_which_the_loop_only_waits_is_as_long_as_that(
    streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several streams each has a thread of its own, so that the loop's works next to nothing, and still waits."""
    monkeypatch.setattr(compile_module, "_is_small", lambda _: False)
    running = network(ir.dummy(), tmp_path, plugin_config={"NUM_STREAMS": str(streams)})
    running._placement = Placement(float("inf"), learns=True)
    infer, now = Slot.infer, 100.0

    def infer_elsewhere(slot: Slot) -> None:
        nonlocal now
        infer(slot)
        now += 1e-3

    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: 100.0)
    monkeypatch.setattr(network_module, "time", clock)
    monkeypatch.setattr(Slot, "infer", infer_elsewhere)
    for _ in range(100):
        await running.infer([ONES])
    assert running.runs_inline is (streams == 1)


async def test_cancelled_inference_gives_its_request_back(tmp_path: Path) -> None:
    """Cancelling stops the inference; the pool is full again and the next answer is right."""
    running = network(ir.slow(size=320, layers=60), tmp_path, nireq=2)
    assert not running.runs_inline
    x = np.eye(320, dtype=np.float32)
    expected = (await running.infer([x]))[0]
    for patience in (0.0, 0.001, 0.01):
        with trio.move_on_after(patience) as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(running.infer, [x * 2])
        assert scope.cancelled_caught
        assert running.pool.active == 0
        np.testing.assert_array_equal((await running.infer([x]))[0], expected)


async def test_cancelled_wait_takes_no_request(tmp_path: Path) -> None:
    """A caller that gives up while waiting leaves the pool as it was."""
    running = send_away(network(ir.dummy(), tmp_path, nireq=1))
    slot = await running.pool.acquire()
    with trio.move_on_after(0) as scope:
        await running.infer([ONES])
    assert scope.cancelled_caught
    running.pool.release(slot)
    np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)


async def test_many_shapes_in_turn(tmp_path: Path) -> None:
    """Two thousand requests of changing shapes on a dynamic model give right answers, in both placements."""
    running = network(ir.dynamic(), tmp_path)
    rng = np.random.default_rng(0)
    for number in range(2000):
        x = rng.random((int(rng.integers(0, 40)), int(rng.integers(1, 40)))).astype(np.float32)
        running._placement = Placement.away() if number % 2 else Placement(float("inf"))
        result = await running.infer([x])
        np.testing.assert_array_equal(result[0], x + np.float32(1))


@pytest.mark.usefixtures("short_inferences")
async def test_large_requests_of_a_dynamic_model_leave_the_event_loop(tmp_path: Path) -> None:
    """A model timed on a small input runs inline for small inputs only."""
    hooks = RecordingHooks()
    running = network(ir.dynamic(), tmp_path, hooks=hooks)
    assert running.runs_inline
    await running.infer([np.ones((1, 1), np.float32)])
    assert running._placement.is_inline(4)
    assert not running._placement.is_inline(4_000_000)
    large = (await running.infer([np.ones((1000, 1000), np.float32)]))[0]
    assert large[0, 0] == 2


async def test_what_weights_and_outputs_have_of_memory_is_told(tmp_path: Path) -> None:
    """A constant of four bytes, and the outputs of each request; those of open shapes have no size yet."""
    hooks = RecordingHooks()
    network(ir.dummy(), tmp_path / "fixed", nireq=3, hooks=hooks)
    assert hooks.memory == {"weights": 4, "outputs": (3 + 1) * 10 * 4}
    network(ir.dynamic(), tmp_path / "open", nireq=3, hooks=hooks)
    assert hooks.memory == {"weights": 4, "outputs": 0}


async def test_a_model_that_turns_out_to_be_slow_leaves_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is served; the change is told, and the answers are the same."""
    hooks = RecordingHooks()
    monkeypatch.setattr(compile_module, "warm_up", lambda *_: Timing(2e-6, 1e-6, 40))
    running = network(ir.dummy(), tmp_path, hooks=hooks)
    assert hooks.places == [(True, False)]
    monkeypatch.setattr(running, "_loop_load", SimpleNamespace(limit_of_work=1e-9))
    for _ in range(60):
        np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert hooks.places == [(True, False), (False, True)]
    monkeypatch.setattr(running, "_loop_load", SimpleNamespace(limit_of_work=1e9))
    for _ in range(60):
        np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert hooks.places[2:] == [(True, True)]


async def test_a_network_learns_how_long_its_inferences_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs far larger than the ones at the start occupy a thread at first, and none when they have become usual."""
    running = send_away(network(ir.matmul(), tmp_path))
    waited: list[int] = []
    wait_in_thread = running._wait_in_thread

    async def counted(slot: Slot) -> None:
        waited.append(len(waited))
        await wait_in_thread(slot)

    monkeypatch.setattr(running, "_wait_in_thread", counted)
    monkeypatch.setattr(network_module, "_LEAST_PATIENCE_SECONDS", 1e-6)
    running._usual_seconds = 1e-6
    large = [np.ones((400, 400), np.float32), np.ones((400, 400), np.float32)]

    async def runs_without_threads() -> bool:
        before = len(waited)
        for _ in range(10):
            await running.infer(large)
        return len(waited) == before

    assert not await runs_without_threads()
    # A busy machine may make inferences look longer for a while.
    with trio.fail_after(WAIT_SECONDS):
        while not await runs_without_threads():
            pass
    assert (await running.infer(large))[0][0, 0] == 400


async def test_network_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """Nothing keeps a dropped network alive, its callbacks included."""
    running = network(ir.dummy(), tmp_path)
    await send_away(running).infer([ONES])
    gone = weakref.ref(running)
    freed = weakref.ref(running.pool)
    del running
    gc.collect()
    assert gone() is None
    assert freed() is None


async def test_hooks_learn_the_streams(tmp_path: Path) -> None:
    """The number of streams is told once the model is compiled."""
    hooks = RecordingHooks()
    network(ir.dummy(), tmp_path, hooks=hooks, plugin_config={"NUM_STREAMS": "2"}, nireq=4)
    assert hooks.streams == 2
    assert hooks.pools == [(4, 0)]


@pytest.mark.parametrize("place", [lambda running: running, send_away], ids=["inline", "pool"])
async def test_outputs_that_are_too_large_are_refused_before_they_are_copied(
    place: Callable[[Network], Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers; the request goes back to the pool, and the next call is answered."""
    running = place(network(ir.dynamic(), tmp_path))
    await running.infer([ONES], most_bytes=40)
    with monkeypatch.context() as patched:
        patched.setattr(slot_module, "from_tensor", None)
        for _ in range(2 * running.pool.size):
            with pytest.raises(PayloadTooLarge, match=r"outputs have 80 bytes, the limit is 79 \(--max_message_size\)"):
                await running.infer([np.ones((2, 10), np.float32)], most_bytes=79)
    (answer,) = await running.infer([ONES], most_bytes=40)
    np.testing.assert_array_equal(answer, ONES + 1)


async def test_large_outputs_are_copied_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on meanwhile."""
    monkeypatch.setattr(network_module, "_COPIED_AT_ONCE", 40)
    threads = []
    copy = from_tensor

    def note(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return copy(*args)

    monkeypatch.setattr(slot_module, "from_tensor", note)
    running = send_away(network(ir.dynamic(), tmp_path))
    (small,), (large,) = await running.infer([ONES]), await running.infer([np.ones((2, 10), np.float32)])
    np.testing.assert_array_equal(small, ONES + 1)
    np.testing.assert_array_equal(large, np.full((2, 10), 2))
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


@pytest.mark.parametrize("away", [False, True])
async def test_each_answer_is_of_its_own_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, away: bool) -> None:
    """Small ones are copied to where the last ones were, others and those of other shapes are not; none is kept."""
    running = network(ir.dummy((-1, 10)), tmp_path)
    monkeypatch.setattr(Placement, "is_inline", lambda *_: not away)
    for rows, value in ((1, 1), (1, 2), (3, 3), (3, 4), (1, 5), (2000, 6), (2000, 7), (1, 8), (1, 9)):
        given = np.full((rows, 10), value, np.float32)
        (answer,) = await running.infer([given])
        given.fill(-1)
        np.testing.assert_array_equal(answer, np.full((rows, 10), value + 1))
        kept = weakref.ref(given)
        del given
        assert kept() is None
        with pytest.raises(ModelFailure):
            await running.infer([np.ones((1, 11), np.float32)])


async def test_an_inference_that_held_the_loop_up_keeps_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long one takes may be in what it is given; those that follow run on other threads for a while."""
    running = network(ir.dummy(), tmp_path)
    inline: list[int] = []
    infer = Network._infer_inline

    def note(*args: Any) -> Any:
        inline.append(len(inline))
        return infer(*args)

    monkeypatch.setattr(Network, "_infer_inline", note)
    await running.infer([ONES])
    for name in ("_SURELY_SHORT_SECONDS", "_LONG_INLINE_SECONDS"):
        monkeypatch.setattr(network_module, name, 0.0)
    monkeypatch.setattr(network_module, "_AWAY_FACTOR", 1e9)
    await running.infer([ONES])
    for _ in range(3):
        (answer,) = await running.infer([ONES])
        np.testing.assert_array_equal(answer, ONES + 1)
    assert inline == [0, 1]
    running._away_until = time.perf_counter()
    await running.infer([ONES])
    assert inline == [0, 1, 2]


@pytest.mark.usefixtures("short_inferences")
def test_a_model_whose_outputs_depend_on_values_runs_nothing_on_the_loop(tmp_path: Path) -> None:
    """Ones of a number that is asked for: the first request may take seconds, and nothing tells which."""
    assert not network(ir.ones(), tmp_path).runs_inline
    assert network(ir.dynamic(), tmp_path).runs_inline
