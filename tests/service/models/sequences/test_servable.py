"""Stateful models with real states: numbers step by step, order, parallelism, and what failures leave behind."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.core.begun import telling_begin
from ovmstrio.core.errors import ConfigError, ModelFailure, SequenceExists, SequenceMissing
from ovmstrio.core.request import InferResponse
from ovmstrio.core.sequence_owners import ForwardedStep, SequenceElsewhere
from ovmstrio.core.servable import SequenceServable
from ovmstrio.core.tensor import Array, RawTensor, Tensor
from ovmstrio.openvino.network import Network
from ovmstrio.runtimes.models.sequences import SequenceManager
from ovmstrio.runtimes.models.sequences.sequence_requests import Control
from ovmstrio.runtimes.models.stateful import StatefulServable
from ovmstrio.server.workers.board import Board
from ovmstrio.server.workers.sequence_directory import BoardDirectory
from ovmstrio.work.placement import Placement
from tests.support import ir
from tests.support.servables import (
    load,
    load_managed,
    load_stateful,
    network,
    raw_request,
    sequence_request,
    stateful_over,
)

START, END = 1, 2


def array_of(response: InferResponse, name: str = "y") -> Array:
    """Give an output's array."""
    (found,) = (out for out in response.outputs if out.name == name)
    assert isinstance(found, Tensor)
    return found.array


async def step(
    servable: StatefulServable, value: float, *, number: int | None = None, control: int | None = None
) -> float:
    """Send one request to an accumulator; gives the sum so far."""
    request = sequence_request({"x": np.full((1, 2), value, np.float32)}, number=number, control=control)
    return float(array_of(await servable.infer(request))[0, 0])


async def test_steps_are_not_made_again_by_others(tmp_path: Path) -> None:
    """Nobody would know how often they count, so whoever might make them again is told."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    told: list[str] = []
    with telling_begin(lambda: told.append("begun")):
        await step(servable, 1, control=START)
    assert told == ["begun"]


class _Another:
    """Another process, which has all ids until it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | str, bool]] = []

    def owner(self, model: str, identity: int | str) -> int | None:
        """Have it once."""
        del model, identity
        return None if self.asked else 1

    async def run_step(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        """Have it no more."""
        self.asked.append((owner, step.id, step.start))
        raise SequenceElsewhere


async def test_a_sequence_that_another_process_has_no_more_begins_here(tmp_path: Path) -> None:
    """Whoever was asked has ended; from then on nobody is asked, as it is here."""
    another = _Another()
    servable = await load_stateful(ir.accumulator(), tmp_path, owners=another)
    assert await step(servable, 1, number=7, control=START) == 1
    assert await step(servable, 2, number=7) == 3
    assert another.asked == [(1, 7, True)]


async def test_a_start_that_came_too_late_is_told_that_there_is_such_a_sequence(tmp_path: Path) -> None:
    """Where it ended while the start was on its way from another process, and a third one was faster."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    board = Board.create(2)
    try:
        here, there = (BoardDirectory(board, row, "secret") for row in range(2))
        manager.directory = here
        there.begin(servable.name, 1, 7, 500)
        arrays = {"x": np.ones((1, 2), np.float32)}
        with pytest.raises(SequenceExists):
            await servable.run_step(ForwardedStep(servable.name, "", 7, True, False, arrays, math.inf))
        there.end(servable.name, 1, 7)
        outputs = await servable.run_step(ForwardedStep(servable.name, "", 7, True, False, arrays, math.inf))
        assert [each.name for each in outputs] == ["y", "sequence_id"]
    finally:
        board.close()


async def test_lstm_as_with_explicit_state(tmp_path: Path) -> None:
    """Three interleaved sequences give, bit for bit, what a model without memory gives that is handed its state."""
    stateful = await load_stateful(ir.lstm(), tmp_path)
    explicit = await load(ir.lstm(explicit=True), tmp_path, "explicit")
    random = np.random.default_rng(3)
    states = {number: np.zeros((2, 1, 8), np.float32) for number in (1, 2, 3)}
    for round_ in range(12):
        for number in random.permutation([1, 2, 3]):
            x = random.normal(size=(1, 4)).astype(np.float32)
            hidden, cell = states[number]
            expected = await explicit.infer(raw_request({"x": x, "hidden": hidden, "cell": cell}))
            states[number] = np.stack([array_of(expected, "next_hidden"), array_of(expected, "next_cell")])
            control = START if round_ == 0 else None
            response = await stateful.infer(sequence_request({"x": x}, number=int(number), control=control))
            np.testing.assert_array_equal(array_of(response), array_of(expected))


@pytest.mark.parametrize("width", [2, 2 * 4096], ids=["small", "large"])
async def test_sequences_that_share_a_request_do_not_share_a_state(tmp_path: Path, width: int) -> None:
    """Steps of three sequences in turn each go on from where their own has ended, however large the state is."""
    servable = await load_stateful(ir.accumulator(width), tmp_path)
    sums: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for round_ in range(4):
        for number, found in sums.items():
            x = {"x": np.full((1, width), 10**number, np.float32)}
            control = START if round_ == 0 else None
            y = array_of(await servable.infer(sequence_request(x, number=number, control=control)))
            assert (y == y[0, 0]).all()
            found.append(float(y[0, 0]))
    assert sums == {number: [10**number * count for count in (1, 2, 3, 4)] for number in sums}


async def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    """Start without an id, go on with the one that came back, end with it; then it is gone."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    x = {"x": np.ones((1, 2), np.float32)}
    response = await servable.infer(sequence_request(x, control=START))
    assert [(out.name, out.datatype.name, out.shape) for out in response.outputs if isinstance(out, Tensor)] == [
        ("y", "FP32", (1, 2)),
        ("sequence_id", "UINT64", (1,)),
    ]
    number = int(array_of(response, "sequence_id")[0])
    assert number == 1
    assert array_of(await servable.infer(sequence_request(x, number=number))).tolist() == [[2, 2]]
    last = await servable.infer(sequence_request(x, number=number, control=END))
    assert (array_of(last).tolist(), array_of(last, "sequence_id").tolist()) == ([[3, 3]], [1])
    with pytest.raises(SequenceMissing):
        await servable.infer(sequence_request(x, number=number))
    assert (response.model_name, response.model_version) == ("model", "1")


async def test_a_sequence_of_one_request(tmp_path: Path) -> None:
    """With Triton's parameters a request may start and end its sequence."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    request = raw_request({"x": np.ones((1, 2), np.float32)})
    request.parameters = {"sequence_id": "7", "sequence_start": True, "sequence_end": True}
    for _ in range(2):
        response = await servable.infer(request)
        assert (array_of(response).tolist(), array_of(response, "sequence_id").tolist()) == ([[1, 1]], [7])
    assert servable.sequences() == []


async def test_ids_are_handed_out_once(tmp_path: Path) -> None:
    """Ids start at 1, pass over those that are taken, wrap around without 0, and do not come back at once."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)

    async def new_id() -> int:
        request = sequence_request({"x": np.ones((1, 2), np.float32)}, control=START)
        return int(array_of(await servable.infer(request), "sequence_id")[0])

    await step(servable, 1, number=2, control=START)
    assert [await new_id(), await new_id()] == [1, 3]
    await step(servable, 1, number=3, control=END)
    assert await new_id() == 4
    manager.next_id = 2**64 - 1
    await step(servable, 1, number=2**64 - 1, control=START)
    await step(servable, 1, number=1, control=END)
    assert await new_id() == 1


async def test_a_model_without_variables_has_sequences_all_the_same(tmp_path: Path) -> None:
    """Bookkeeping does not need a state."""
    servable = await load_stateful(ir.dummy(), tmp_path)
    b = {"b": np.ones((1, 10), np.float32)}
    for control in (START, 0, END):
        response = await servable.infer(sequence_request(b, number=5, control=control))
        assert array_of(response, "a").tolist() == [[2] * 10]
    with pytest.raises(SequenceMissing):
        await servable.infer(sequence_request(b, number=5))


async def test_low_latency_transformation(tmp_path: Path) -> None:
    """A loop of one step keeps its sum between requests only if it is asked to."""
    for asked, expected in ((True, [1, 3, 6]), (False, [1, 2, 3])):
        model = ir.summing_loop()
        servable = await load_stateful(model, tmp_path, f"loop_{asked}", low_latency_transformation=asked)
        sums = []
        for number, value in enumerate((1, 2, 3)):
            x = {"x": np.full((1, 1, 2), value, np.float32)}
            response = await servable.infer(sequence_request(x, number=9, control=int(number == 0)))
            sums.append(array_of(response)[0, 0])
        assert sums == expected


async def test_tiny_models_run_on_the_event_loop(tmp_path: Path) -> None:
    """State does not send a short inference away: a free sequence is served without a checkpoint."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    await step(servable, 1, number=5, control=START)
    with trio.testing.assert_no_checkpoints():
        assert await step(servable, 1, number=5) == 2


async def test_requests_of_one_sequence_run_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    """However many wait, none overtakes another, and no state is lost."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    await step(servable, 0, number=5, control=START)
    sums: list[float] = []

    async def send(value: int) -> None:
        sums.append(await step(servable, value, number=5))

    async with trio.open_nursery() as nursery, manager.turn(Control(5)):
        for value in range(1, 21):
            nursery.start_soon(send, value)
            await trio.testing.wait_all_tasks_blocked()
        assert sums == []
    assert sums == [sum(range(1, value + 1)) for value in range(1, 21)]


async def test_sequences_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """While one sequence is busy and others queue behind it, every other one goes on."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    for number in (1, 2):
        await step(servable, number, number=number, control=START)
    async with trio.open_nursery() as nursery, manager.turn(Control(1)):
        nursery.start_soon(step_into, servable, 1, [])
        await trio.testing.wait_all_tasks_blocked()
        assert await step(servable, 1, number=2) == 3
        assert await step(servable, 7, number=3, control=START) == 7
        assert await step(servable, 1, number=2, control=END) == 4


async def step_into(servable: StatefulServable, number: int, sums: list[float]) -> None:
    """Send one request of value 1, and note the sum."""
    sums.append(await step(servable, 1, number=number))


async def test_steps_before_the_end_run_before_it(tmp_path: Path) -> None:
    """What came before the last request is served; what comes behind it is refused at once."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    await step(servable, 0, number=5, control=START)
    sums: list[float] = []

    async def end() -> None:
        sums.append(await step(servable, 10, number=5, control=END))

    async with trio.open_nursery() as nursery, manager.turn(Control(5)):
        nursery.start_soon(step_into, servable, 5, sums)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(end)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(SequenceMissing):
            await step(servable, 1, number=5)
    assert sums == [1, 11]
    assert servable.sequences() == []


async def test_slow_sequences_side_by_side(tmp_path: Path) -> None:
    """Sequences share the infer requests of the pool, and each gets its own sums."""
    servable = stateful_over(
        ir.slow_accumulator(128, 40), tmp_path, lambda network: network, placement=Placement.away(), nireq=2
    )

    async def run(number: int) -> None:
        for count in range(1, 6):
            x = {"x": np.full((128, 128), number, np.float32)}
            response = await servable.infer(sequence_request(x, number=number, control=int(count == 1)))
            assert (array_of(response) == number * count).all()

    async with trio.open_nursery() as nursery:
        for number in range(1, 7):
            nursery.start_soon(run, number)


async def _cancelled(servable: StatefulServable, value: float, number: int, control: int | None) -> None:
    x = {"x": np.full((320, 320), value, np.float32)}
    with trio.move_on_after(0.005) as scope:
        await servable.infer(sequence_request(x, number=number, control=control))
    assert scope.cancelled_caught


async def test_cancelled_requests_leave_no_trace(tmp_path: Path) -> None:
    """A cancelled start creates nothing, a cancelled step changes nothing, a cancelled end ends nothing."""
    servable = await load_stateful(ir.slow_accumulator(320), tmp_path, nireq=1)

    async def total(value: float, control: int | None = None) -> float:
        x = {"x": np.full((320, 320), value, np.float32)}
        return float(array_of(await servable.infer(sequence_request(x, number=5, control=control)))[0, 0])

    await _cancelled(servable, 1, 5, START)
    assert servable.sequences() == []
    assert await total(2, START) == 2
    await _cancelled(servable, 100, 5, None)
    assert await total(1) == 3
    await _cancelled(servable, 100, 5, END)
    assert await total(1) == 4
    assert await total(1, END) == 5
    assert servable.sequences() == []


class Failing:
    """A network that fails while it is told to, in the place of a real one."""

    def __init__(self, real: Network) -> None:
        self.real = real
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def infer(self, *args: Any) -> Any:
        """Infer, or fail behind an inference that has succeeded."""
        outputs = await self.real.infer(*args)
        if self.fails:
            raise ModelFailure("told to")
        return outputs


async def test_failed_requests_leave_no_trace(tmp_path: Path) -> None:
    """As cancelled ones: the sequence is as it was before, and who waited for a start that failed is refused."""
    made: list[Failing] = []

    def wrap(real: Network) -> Failing:
        made.append(Failing(real))
        return made[-1]

    servable = stateful_over(ir.accumulator(), tmp_path, wrap)
    (failing,) = made

    async def fail(control: int | None) -> None:
        failing.fails = True
        with pytest.raises(ModelFailure):
            await step(servable, 100, number=5, control=control)
        failing.fails = False

    await fail(START)
    assert servable.sequences() == []
    assert await step(servable, 1, number=5, control=START) == 1
    await fail(None)
    await fail(END)
    assert await step(servable, 1, number=5) == 2
    assert await step(servable, 1, number=5, control=END) == 3


async def test_a_step_that_fails_does_not_take_back_the_end_behind_it(tmp_path: Path) -> None:
    """While an end waits its turn the sequence takes no requests, whatever became of the one before."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    await step(servable, 1, number=5, control=START)
    failing = manager.turn(Control(5))
    sequence = await failing.__aenter__()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end, servable)
        await trio.testing.wait_all_tasks_blocked()
        await failing.__aexit__(ModelFailure)
        assert sequence.ending
        with pytest.raises(SequenceMissing):
            await step(servable, 1, number=5)
    assert servable.sequences() == []


async def test_who_waits_for_a_start_that_fails_is_refused(tmp_path: Path) -> None:
    """The sequence never came to be, so that requests queued behind its start do not exist for it."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    refused: list[BaseException] = []

    async def wait() -> None:
        with pytest.raises(SequenceMissing) as error:
            await step(servable, 1, number=5)
        refused.append(error.value)

    async with trio.open_nursery() as nursery:
        with pytest.raises(ModelFailure):
            await _failing_start(manager, nursery, wait)
    assert len(refused) == 1


async def _failing_start(
    manager: SequenceManager, nursery: trio.Nursery, meanwhile: Callable[[], Awaitable[None]]
) -> None:
    async with manager.turn(Control(5, start=True)):
        nursery.start_soon(meanwhile)
        await trio.testing.wait_all_tasks_blocked()
        raise ModelFailure("the start")


async def test_a_cancelled_wait_gives_up_the_place(tmp_path: Path) -> None:
    """Who is cancelled in the queue is left out, and an end in the queue leaves the sequence alive."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    await step(servable, 1, number=5, control=START)
    async with trio.open_nursery() as nursery, manager.turn(Control(5)):
        nursery.start_soon(_end, servable)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert await step(servable, 1, number=5) == 2


async def _end(servable: StatefulServable) -> None:
    await step(servable, 1, number=5, control=END)


async def test_the_list_of_sequences(autojump_clock: trio.testing.MockClock, tmp_path: Path) -> None:
    """Each live sequence is told with its age, how long it is idle, and how many of its requests succeeded."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    assert isinstance(servable, SequenceServable)
    await step(servable, 1, number=20, control=START)
    await trio.sleep(30)
    await step(servable, 1, number=3, control=START)
    await step(servable, 1, number=20)
    await trio.sleep(10)
    told = servable.sequences()
    assert [(each.id, each.requests) for each in told] == [(3, 1), (20, 2)]
    assert [each.age_seconds for each in told] == pytest.approx([10, 40], abs=1)
    assert [each.idle_seconds for each in told] == pytest.approx([10, 10], abs=1)


def test_variables_are_found_after_the_transformations(tmp_path: Path) -> None:
    """What a network remembers is described by name, type and shape; without the option nothing is."""
    found = network(ir.lstm(), tmp_path, stateful=True).variables
    assert [(each.name, str(each)) for each in found] == [("cell", "FP32 [1,8]"), ("hidden", "FP32 [1,8]")]
    assert network(ir.lstm(), tmp_path).variables == ()


async def test_low_latency_transformation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's refusal is a failure of the load that names the option."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("ovmstrio.openvino.compile.Manager.run_passes", refuse)
    with pytest.raises(ConfigError, match=r"low_latency_transformation: the low latency transformation fails: no"):
        await load_stateful(ir.accumulator(), tmp_path, low_latency_transformation=True)
