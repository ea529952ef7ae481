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

from ovmstrio.core.errors import ConfigError, ModelFailure, PayloadTooLarge, Problem
from ovmstrio.core.tensor import BY_NAME, to_bf16
from ovmstrio.inference import compile as compile_module
from ovmstrio.inference import infer_requests as slot_module
from ovmstrio.inference import network as network_module
from ovmstrio.inference import tuner as tuner_module
from ovmstrio.inference.compiled import Timing, warm_up
from ovmstrio.inference.infer_requests import Slot, replace_model
from ovmstrio.inference.network import Network
from ovmstrio.inference.tensors import from_tensor
from ovmstrio.inference.tuner import ModelTuner, Placement
from ovmstrio.telemetry.loop_utilization import LoopUtilization
from tests.support import ir
from tests.support.servables import RecordingHooks, network
from tests.support.waits import WAIT_SECONDS

pytestmark = pytest.mark.compiles

ONES = np.ones((1, 10), np.float32)
LARGE = [np.ones((700, 700), np.float32)] * 2
NUMBERS = np.arange(4, dtype=np.float32)
RESHAPED: list[Any] = [NUMBERS, np.array([2, 2], np.int64)]
UNSHAPED: list[Any] = [NUMBERS, np.array([3, 3], np.int64)]
INLINE = Placement(float("inf"))


@pytest.fixture
def short_inferences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time inferences and the event loop by a clock of the test: on a busy machine short inferences look long."""
    ticks = itertools.count()

    def measure(compiled: Any, signature: Any, blocking: Any, clock: Any) -> Any:
        del clock
        return warm_up(compiled, signature, blocking, lambda: next(ticks) * 1e-6)

    monkeypatch.setattr(compile_module, "warm_up", measure)
    monkeypatch.setattr(network_module, "time", SimpleNamespace(perf_counter=lambda: 100.0, thread_time=lambda: 100.0))
    monkeypatch.setattr(tuner_module, "_FULL", 1.0)
    monkeypatch.setattr(LoopUtilization, "is_overdue", property(lambda _: False))


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.processor = 100.0
        self._monkeypatch = monkeypatch
        clock = SimpleNamespace(perf_counter=lambda: self.wall, thread_time=lambda: self.processor)
        for module in (network_module, tuner_module):
            monkeypatch.setattr(module, "time", clock)

    def each_inference_takes(self, wall: Callable[[], float], processor: Callable[[], float]) -> None:
        infer = Slot.infer

        def infer_and_pass(slot: Slot) -> None:
            infer(slot)
            self.wall += wall()
            self.processor += processor()

        self._monkeypatch.setattr(Slot, "infer", infer_and_pass)


def _calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    function = getattr(owner, name)

    def note(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        calls.append(result)
        return result

    monkeypatch.setattr(owner, name, note)
    return calls


def send_away(running: Network) -> Network:
    running.tuner.place(Placement.away())
    return running


@pytest.mark.usefixtures("short_inferences")
@pytest.mark.parametrize("model", [ir.dummy(), ir.sum_of_two(), ir.scalar(), ir.dynamic(), ir.image_passthrough()])
async def test_inline_and_pooled_inferences_have_equal_outputs(model: object, tmp_path: Path) -> None:
    running = network(model, tmp_path)
    assert running.runs_inline
    shapes = [[dim.low if dim.is_fixed else 3 for dim in spec.shape] for spec in running.signature.inputs]
    arrays = [np.random.default_rng(3).standard_normal(shape).astype(np.float32) for shape in shapes]
    inline = await running.infer(arrays)
    for one, other in zip(inline, await send_away(running).infer(arrays), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("datatype", [name for name in BY_NAME if name != "BYTES"])
async def test_outputs_of_each_datatype_are_exact_inline_bounded_and_pooled(datatype: str, tmp_path: Path) -> None:
    running = network(ir.passthrough(datatype), tmp_path)
    dtype = BY_NAME[datatype].numpy
    values = np.arange(6).reshape(2, 3).astype(np.float32)
    array = to_bf16(values) if datatype == "BF16" else values.astype(dtype)
    outputs = await running.infer([array]) + await running.infer([array], max_output_bytes=array.nbytes)
    for each in outputs + await send_away(running).infer([array]):
        assert each.dtype == dtype
        np.testing.assert_array_equal(each, array)


async def test_empty_tensor_of_strings_stays_empty(tmp_path: Path) -> None:
    running = network(ir.string_passthrough(), tmp_path)
    for _ in range(20):
        (inline,) = await running.infer([np.empty(0, object)])
        assert (inline.shape, inline.dtype) == ((0,), np.dtype(object))
    (pooled,) = await send_away(running).infer([np.empty(0, object)])
    assert (pooled.shape, pooled.dtype) == ((0,), np.dtype(object))
    (some,) = await running.infer([np.array([b"a", b""], object)])
    assert some.tolist() == [b"a", b""]


async def test_callers_beyond_nireq_wait_and_get_their_own_answers(tmp_path: Path) -> None:
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
    assert hooks.pools[0] == hooks.pools[-1] == (3, 0)
    assert len(hooks.waits) == len(hooks.inferences) == 100
    assert max(hooks.waits) > 0


async def test_infer_requests_are_lent_in_order_of_arrival(tmp_path: Path) -> None:
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
    with trio.fail_after(WAIT_SECONDS), pytest.raises(ModelFailure, match="incompatible"):
        await running.infer([np.ones(shape, np.float32) for shape in shapes])


async def multiplies(running: Network, rows: int, inner: int, columns: int) -> None:
    product = (await running.infer([np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)]))[0]
    np.testing.assert_array_equal(product, np.full((rows, columns), inner, np.float32))


@pytest.mark.parametrize("config", [{"INFERENCE_NUM_THREADS": "1"}, {"NUM_STREAMS": "2"}])
async def test_model_that_may_fail_is_compiled_once_until_it_fails(
    config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model of several streams has a second one of one thread for the event loop, which a failure leaves as it is.
    compiled = _calls_of(monkeypatch, compile_module, "_compile")
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


@pytest.mark.parametrize("config", [{}, {"NUM_STREAMS": "2"}])
@pytest.mark.parametrize("inline", [True, False])
async def test_requests_concurrent_with_failing_ones_are_answered(
    *, config: dict[str, str], inline: bool, tmp_path: Path
) -> None:
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


async def test_model_that_fails_on_ones_keeps_configured_streams_until_a_request_fails(tmp_path: Path) -> None:
    hooks = RecordingHooks()
    settings = {"NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"}
    running = network(ir.reshape_by_data(), tmp_path, plugin_config=settings, hooks=hooks)
    np.testing.assert_array_equal((await running.infer(RESHAPED))[0], NUMBERS.reshape(2, 2))
    assert (hooks.streams, running._model.get_property("NUM_STREAMS")) == (2, 2)
    with pytest.raises(ModelFailure):
        await running.infer(UNSHAPED)
    assert (hooks.streams, running._model.get_property("NUM_STREAMS")) == (1, 1)


async def test_failed_model_refuses_requests_until_it_can_be_loaded_again(tmp_path: Path) -> None:
    running = network(ir.reshape_by_data(), tmp_path)
    compile_replacement = running._compile_replacement

    def refuse() -> ov.CompiledModel:
        raise ConfigError([Problem("the disk is missing")])

    running._compile_replacement = refuse
    for _ in range(2):
        with pytest.raises(ModelFailure):
            await running.infer(UNSHAPED)
    running._compile_replacement = compile_replacement
    with pytest.raises(ModelFailure, match="cannot be reloaded: the disk is missing"):
        await running.infer(RESHAPED)
    np.testing.assert_array_equal((await running.infer(RESHAPED))[0], NUMBERS.reshape(2, 2))


@pytest.mark.usefixtures("short_inferences")
@pytest.mark.parametrize("threads", ["1", "2"])
async def test_short_model_that_may_fail_runs_inline(
    threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # OpenVINO's synchronous call loses failures of one thread: a failed inference is run again through the pool.
    running = network(ir.matmul(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": threads})
    away = _calls_of(monkeypatch, Network, "_infer_on_device")
    running.tuner.place(INLINE)
    for rows in (1, 2, 3):
        await multiplies(running, rows, 1, 2)
    assert away == []
    await refuses(running, (2, 1), (2, 2))
    for rows in (1, 2, 3):
        await multiplies(running, rows, 1, 2)
    assert len(away) == (1 if threads == "1" else 0)


async def test_time_of_an_inference_leaves_out_waiting_for_the_processor_and_earlier_work_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = network(ir.dummy(), tmp_path)
    running.tuner.place(INLINE)
    learned: list[float] = []
    monkeypatch.setattr(ModelTuner, "record", lambda _, __, seconds, **___: learned.append(seconds))
    clock = _Clock(monkeypatch)
    clock.each_inference_takes(lambda: 0.05, lambda: 0.001)
    clock.wall += 0.03
    clock.processor += 0.03
    await running.infer([ONES])
    assert learned == [pytest.approx(0.001)]


@pytest.mark.usefixtures("short_inferences")
async def test_outputs_without_elements_are_no_failures(tmp_path: Path) -> None:
    running = network(ir.dynamic(1), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "1"})
    assert running.runs_inline
    for size in (3, 0, 0, 3, 2):
        (answer,) = await running.infer([np.ones(size, np.float32)])
        np.testing.assert_array_equal(answer, np.full(size, 2))


@pytest.mark.usefixtures("short_inferences")
async def test_nothing_runs_inline_while_the_pool_runs_requests_that_may_fail(tmp_path: Path) -> None:
    running = network(ir.matmul(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "1"})
    assert running._loop_may_run()
    slot = await running.pool.acquire()
    assert not running._loop_may_run()
    running.pool.release(slot)
    assert running._loop_may_run()
    assert (await send_away(network(ir.dummy(), tmp_path, nireq=1)).pool.acquire()) is not None


@pytest.mark.usefixtures("short_inferences")
@pytest.mark.parametrize("config", [{"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": "2"}, {"NUM_STREAMS": "2"}])
async def test_small_model_of_several_streams_has_a_separate_model_of_one_thread_for_the_loop(
    config: dict[str, str], tmp_path: Path
) -> None:
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
    assert (hooks.streams, running.tuner.failures) == (2, 0)
    send_away(running)
    await refuses(running, (2, 3), (5, 2))
    running.tuner.place(INLINE)
    await multiplies(running, 2, 3, 2)
    assert hooks.streams == 1
    assert running._inline_slot.model.get_property("INFERENCE_NUM_THREADS") == 1
    await running.recompile()
    await multiplies(running, 2, 3, 2)


@pytest.mark.parametrize(("streams", "learned"), [("1", 3), ("2", 1)])
async def test_times_of_streams_do_not_count_for_the_loops_own_model(
    streams: str, learned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = network(ir.dummy(), tmp_path, plugin_config={"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": streams})
    times: list[float] = []
    monkeypatch.setattr(ModelTuner, "record", lambda _, __, seconds, **___: times.append(seconds))
    await running.infer([ONES])
    send_away(running)
    for _ in range(2):
        await running.infer([ONES])
    assert len(times) == learned


async def test_loops_own_model_is_compiled_again_while_streams_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = RecordingHooks()
    running = network(ir.matmul(), tmp_path, plugin_config={"NUM_STREAMS": "2"}, hooks=hooks)
    verify = Slot.verify
    monkeypatch.setattr(Slot, "verify", lambda slot: slot is not running._inline_slot and verify(slot))
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


async def test_short_requests_of_a_model_that_may_fail_return_to_the_loop(tmp_path: Path) -> None:
    running = network(ir.matmul(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "1"})
    slot = await running.pool.acquire()
    running.tuner.place(INLINE)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(multiplies, running, 2, 3, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert running.pool.active == 1
        running.pool.release(slot)
        running._wake_waiting_calls()
    send_away(running)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.infer, LARGE)
        await trio.testing.wait_all_tasks_blocked()
        running.tuner.place(INLINE)
        assert not running._is_loop_free_soon()


async def test_cancelled_request_among_others_does_not_recover_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is stopped if it is alone, and otherwise left to end.
    running = send_away(network(ir.matmul(), tmp_path, nireq=4))
    recoveries = _calls_of(monkeypatch, Network, "_recover")
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(running.infer, LARGE)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0) as scope:
            await running.infer(LARGE)
    assert scope.cancelled_caught
    assert (running.pool.active, recoveries) == (0, [])
    await multiplies(running, 2, 3, 2)


async def test_cancelled_requests_leave_the_number_of_streams(tmp_path: Path) -> None:
    hooks = RecordingHooks()
    running = send_away(network(ir.matmul(), tmp_path, plugin_config={"NUM_STREAMS": "2"}, hooks=hooks))
    for _ in range(3):
        with trio.move_on_after(0.001) as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(running.infer, LARGE)
        assert scope.cancelled_caught
    assert (running.pool.active, running.facts["streams"]) == (0, 2)
    assert hooks.streams == 2
    await multiplies(running, 2, 3, 2)


@pytest.mark.parametrize("streams", [1, 2])
async def test_inference_on_the_thread_of_a_stream_counts_the_time_that_the_loop_waits(
    streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "_is_small", lambda _: False)
    running = network(ir.dummy(), tmp_path, plugin_config={"NUM_STREAMS": str(streams)})
    running.tuner.place(Placement(float("inf"), input_bytes=ONES.nbytes, learns=True))
    _Clock(monkeypatch).each_inference_takes(lambda: 1e-3, lambda: 0.0)
    for _ in range(100):
        await running.infer([ONES])
    assert running.runs_inline is (streams == 1)


async def test_cancelled_inference_returns_its_request_to_the_pool(tmp_path: Path) -> None:
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


async def test_memory_of_weights_and_outputs_is_reported(tmp_path: Path) -> None:
    hooks = RecordingHooks()
    network(ir.dummy(), tmp_path / "fixed", nireq=3, hooks=hooks)
    assert hooks.memory == {"weights": 4, "outputs": (3 + 1) * 10 * 4}
    network(ir.dynamic(), tmp_path / "open", nireq=3, hooks=hooks)
    assert hooks.memory == {"weights": 4, "outputs": 0}


async def test_model_leaves_the_loop_and_returns_with_the_measured_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = RecordingHooks()
    monkeypatch.setattr(compile_module, "warm_up", lambda *_: Timing(2e-6, 1e-6, 40))
    running = network(ir.dummy(), tmp_path, hooks=hooks)
    assert hooks.places == [(True, False)]
    monkeypatch.setattr(running.tuner, "_load", LoopUtilization())
    monkeypatch.setattr(running.tuner, "_limit", 1e-9)
    for _ in range(60):
        np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert hooks.places == [(True, False), (False, True)]
    monkeypatch.setattr(running.tuner, "_limit", 1e9)
    for _ in range(60):
        np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert hooks.places[2:] == [(True, True)]


async def test_network_waits_in_a_thread_for_inferences_of_unusual_length_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = send_away(network(ir.matmul(), tmp_path))
    waited = _calls_of(monkeypatch, running, "_wait_in_thread")
    monkeypatch.setattr(network_module, "_MIN_CALLBACK_WAIT_SECONDS", 1e-6)
    large = [np.ones((400, 400), np.float32)] * 2

    async def runs_without_threads(*, expected_seconds: float | None = None) -> bool:
        before = len(waited)
        for _ in range(10):
            running._average_seconds = expected_seconds or running._average_seconds
            await running.infer(large)
        return len(waited) == before

    # On a busy machine an inference may end before the loop looks at its clock, or look longer than it is.
    with trio.fail_after(WAIT_SECONDS):
        while await runs_without_threads(expected_seconds=1e-6):
            pass
        while not await runs_without_threads():
            pass
    assert (await running.infer(large))[0][0, 0] == 400


async def test_network_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    running = network(ir.dummy(), tmp_path)
    await send_away(running).infer([ONES])
    network_reference = weakref.ref(running)
    pool_reference = weakref.ref(running.pool)
    del running
    gc.collect()
    assert network_reference() is None
    assert pool_reference() is None


@pytest.mark.parametrize("place", [lambda running: running, send_away], ids=["inline", "pool"])
async def test_too_large_outputs_are_refused_before_they_are_copied(
    place: Callable[[Network], Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = place(network(ir.dynamic(), tmp_path))
    await running.infer([ONES], max_output_bytes=40)
    with monkeypatch.context() as patched:
        patched.setattr(slot_module, "from_tensor", None)
        for _ in range(2 * running.pool.size):
            with pytest.raises(PayloadTooLarge, match=r"outputs have 80 bytes, the limit is 79 \(--max-message-size\)"):
                await running.infer([np.ones((2, 10), np.float32)], max_output_bytes=79)
    (answer,) = await running.infer([ONES], max_output_bytes=40)
    np.testing.assert_array_equal(answer, ONES + 1)


async def test_large_outputs_are_copied_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "_MAX_INLINE_COPY_BYTES", 40)
    threads: list[bool] = []

    def note(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return from_tensor(*args)

    monkeypatch.setattr(slot_module, "from_tensor", note)
    running = send_away(network(ir.dynamic(), tmp_path))
    (small,), (large,) = await running.infer([ONES]), await running.infer([np.ones((2, 10), np.float32)])
    np.testing.assert_array_equal(small, ONES + 1)
    np.testing.assert_array_equal(large, np.full((2, 10), 2))
    assert threads == [True, False]


@pytest.mark.parametrize("away", [False, True])
async def test_outputs_are_copies_and_inputs_are_neither_changed_nor_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, away: bool
) -> None:
    # Small inputs are copied to the place of the last ones; large ones and those of other shapes are read in place.
    running = network(ir.dummy((-1, 10)), tmp_path)
    monkeypatch.setattr(ModelTuner, "is_inline", lambda *_: not away)
    answers = []
    for rows, value in ((1, 1), (1, 2), (3, 3), (3, 4), (1, 5), (2000, 6), (2000, 7), (1, 8), (1, 9)):
        array = np.full((rows, 10), value, np.float32)
        array.flags.writeable = False
        (answer,) = await running.infer([array])
        answers.append((answer, value + 1))
        assert (array == value).all()
        array.flags.writeable = True
        array.fill(-1)
        reference = weakref.ref(array)
        del array
        assert reference() is None
        with pytest.raises(ModelFailure):
            await running.infer([np.ones((1, 11), np.float32)])
    for answer, expected in answers:
        assert (answer == expected).all()


async def test_inference_that_blocked_the_loop_sends_the_next_ones_away_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = network(ir.dummy(), tmp_path)
    inline = _calls_of(monkeypatch, Network, "_infer_inline")
    await running.infer([ONES])
    monkeypatch.setattr(network_module, "SURELY_SHORT_SECONDS", 0.0)
    monkeypatch.setattr(tuner_module, "_LONG_INLINE_SECONDS", 0.0)
    monkeypatch.setattr(tuner_module, "_LOOP_BLOCK_FACTOR", 1e9)
    for _ in range(4):
        np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    assert len(inline) == 2
    assert running.facts["state"] == "blocked"
    running.tuner.block_loop(time.perf_counter())
    await running.infer([ONES])
    assert len(inline) == 3


@pytest.mark.usefixtures("short_inferences")
def test_model_whose_output_shapes_depend_on_values_never_runs_inline(tmp_path: Path) -> None:
    assert not network(ir.ones(), tmp_path).runs_inline
    assert network(ir.dynamic(), tmp_path).runs_inline


@pytest.mark.parametrize("model", [ir.dummy(), ir.dynamic()], ids=["fixed", "open"])
async def test_each_layer_that_runs_has_a_time(model: ov.Model, tmp_path: Path) -> None:
    running = network(model, tmp_path)
    times = await running.layer_times(0.05)
    assert times.runs >= 1
    assert [(layer.name[:3], layer.seconds >= 0, bool(layer.runs_as)) for layer in times.layers] == [
        ("Add", True, True)
    ]
    np.testing.assert_array_equal((await running.infer([ONES]))[0], ONES + 1)
    with pytest.raises(ModelFailure):
        await network(ir.reshape_by_data(), tmp_path, "fails").layer_times(0.01)
