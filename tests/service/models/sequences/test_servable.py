from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from grpclib.const import Status

from ovmstrio.config.specs import AllVersions, LatestVersions, ModelSpec
from ovmstrio.core import errors
from ovmstrio.core.errors import ConfigError, SequenceExists, SequenceMissing
from ovmstrio.core.request import Contents, InferInput, InferRequest
from ovmstrio.core.service import SequenceServable
from ovmstrio.core.tensor import BY_NAME, Array, Tensor
from ovmstrio.core.worker_peers import ForwardedStep, StepResult
from ovmstrio.inference.tuner import Placement
from ovmstrio.models.loading import load_model
from ovmstrio.models.sequences import SequenceControl, SequenceManagers
from ovmstrio.models.sequences.requests import read_control
from ovmstrio.models.stateful import StatefulServable
from ovmstrio.serving.records import VersionState
from ovmstrio.transport.statuses import error_status
from tests.support import ir
from tests.support.servables import (
    EXACT,
    load,
    load_managed,
    load_stateful,
    raw_request,
    sequence_request,
    stateful_over,
    tensors,
)
from tests.support.stub_registry import registry_of, running

START, END = 1, 2
ONES = {"x": np.ones((1, 2), np.float32)}


def _special(name: str, datatype: str, shape: tuple[int, ...], contents: Contents | None) -> InferRequest:
    return InferRequest("model", inputs=[InferInput(name, datatype, shape, contents)])


def _id(shape: tuple[int, ...], values: list[Any], datatype: str = "UINT64") -> InferRequest:
    return _special("sequence_id", datatype, shape, Contents("uint64_contents", values))


def _control(shape: tuple[int, ...], values: list[Any], datatype: str = "UINT32") -> InferRequest:
    return _special("sequence_control_input", datatype, shape, Contents("uint_contents", values))


def _parameters(**parameters: Any) -> InferRequest:
    return InferRequest("model", parameters=parameters)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (_id((1,), []), "Could not find sequence id in expected tensor proto field uint64_val"),
        (_id((1,), [-1]), "Could not find sequence id in expected tensor proto field uint64_val"),
        (_control((1,), [1], "UINT64"), "Could not find sequence control input in expected tensor proto field"),
        (_control((1,), [2**32]), "Could not find sequence control input in expected tensor proto field uint32_val"),
        (_control((), [1]), "Special input proto does not contain tensor shape information"),
        (_id((0,), []), "Invalid input shape - Expected: (1); Actual: (0); input name: sequence_id"),
        (
            _parameters(sequence_id="x" * 257, sequence_start=True),
            "the parameter sequence_id must be an integer of 0 to",
        ),
        (
            _parameters(sequence_id="a\ud800", sequence_start=True),
            "the parameter sequence_id must be an integer of 0 to",
        ),
        (_parameters(sequence_id="", sequence_end=True), "Sequence ID has not been provided"),
        (_parameters(sequence_id=-1), "the parameter sequence_id must be an integer of 0 to"),
        (_parameters(sequence_id=2**64), "the parameter sequence_id must be an integer of 0 to"),
        (_parameters(sequence_id=True), "the parameter sequence_id must be an integer of 0 to"),
        (_parameters(sequence_id=1.5), "the parameter sequence_id must be an integer of 0 to"),
        (_parameters(sequence_id=1, sequence_end=1), "the parameter sequence_end must be true or false"),
        (
            replace(_id((1,), [3]), parameters={"sequence_id": 4}),
            "input sequence_id 3 contradicts parameter sequence_id 4",
        ),
    ],
)
def test_invalid_special_inputs_are_refused_with_the_text_of_ovms(request_: InferRequest, text: str) -> None:
    with pytest.raises(errors.InvalidRequest) as error:
        read_control(request_)
    assert error.value.message.startswith(text)
    assert error_status(error.value) == (Status.INVALID_ARGUMENT, 400)


def test_id_is_checked_before_the_control_and_both_before_their_values() -> None:
    request = _control((), [7])
    request.inputs += _id((), [1]).inputs
    with pytest.raises(errors.InvalidRequest, match=r"input name: sequence_id$"):
        read_control(request)
    with pytest.raises(errors.InvalidRequest, match=r"^Unexpected value of sequence control input"):
        read_control(_control((1,), [7]))


@pytest.mark.parametrize(
    ("request_", "control"),
    [
        (_id((1,), [2**64 - 1]), SequenceControl(2**64 - 1)),
        (_control((1,), [START]), SequenceControl(0, start=True)),
        (sequence_request(ONES, number=5, control=0), SequenceControl(5)),
        (sequence_request(ONES, number=5, control=START), SequenceControl(5, start=True)),
        (sequence_request(ONES, number=2**64 - 1, control=END), SequenceControl(2**64 - 1, end=True)),
        (_parameters(sequence_id=3, sequence_start=True), SequenceControl(3, start=True)),
        (_parameters(sequence_id="18446744073709551615", sequence_end=True), SequenceControl(2**64 - 1, end=True)),
        (_parameters(sequence_id="soon", sequence_start=True), SequenceControl("soon", start=True)),
        (_parameters(sequence_id=3, sequence_start=True, sequence_end=True), SequenceControl(3, start=True, end=True)),
        (_parameters(sequence_start=True), SequenceControl(0, start=True)),
        (replace(_id((1,), [3]), parameters={"sequence_id": 3, "other": 1.5}), SequenceControl(3)),
    ],
)
def test_special_inputs_and_parameters_are_read(request_: InferRequest, control: SequenceControl) -> None:
    found, plain = read_control(request_)
    assert found == control
    assert [given.name for given in plain.inputs] == [g.name for g in request_.inputs if g.name == "x"]
    assert list(plain.raw_inputs) == [ONES["x"].tobytes()] * len(plain.inputs)


_MISSING = (errors.SequenceMissing, "Sequence with provided ID does not exist", Status.NOT_FOUND, 404)
_EXISTS = (errors.SequenceExists, "Sequence with provided ID already exists", Status.ALREADY_EXISTS, 409)
_ENDING = (
    errors.SequenceEnding,
    "Sequence last request is being processed and it's not available anymore",
    Status.FAILED_PRECONDITION,
    412,
)
_TOO_MANY = (
    errors.TooManySequences,
    "Max sequence number has been reached. Could not create new sequence.",
    Status.UNAVAILABLE,
    503,
)


@pytest.mark.parametrize(
    ("number", "control", "maximum", "expected"),
    [
        pytest.param(8, None, 9, _MISSING, id="unknown"),
        pytest.param(7, None, 9, _MISSING, id="ending"),
        pytest.param(9, START, 9, _EXISTS, id="live"),
        pytest.param(7, START, 9, _ENDING, id="start while ending"),
        *(pytest.param(number, START, maximum, _TOO_MANY) for number, maximum in ((None, 2), (9, 2), (10, 2), (10, 0))),
    ],
)
async def test_refused_sequences_have_messages_and_statuses_of_ovms(
    number: int | None, control: int | None, maximum: int, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    servable, manager = await load_managed(ir.accumulator(), tmp_path, max_sequence_number=2)
    for live in (7, 9):
        await servable.infer(sequence_request(ONES, number=live, control=START))
    manager.capacity = maximum
    async with manager.turn(SequenceControl(7, end=True)), manager.turn(SequenceControl(9)):
        with pytest.raises(errors.ServerError) as caught:
            await servable.infer(sequence_request(ONES, number=number, control=control))
    assert (type(caught.value), caught.value.message, *error_status(caught.value)) == expected


async def test_control_is_checked_before_shapes_and_shapes_before_the_sequence(tmp_path: Path) -> None:
    servable = await load_stateful(ir.accumulator(), tmp_path)
    wrong = {"x": np.ones((1, 3), np.float32)}
    with pytest.raises(errors.InvalidRequest, match="Unexpected value"):
        await servable.infer(sequence_request(wrong, number=9, control=5))
    for control in (START, 0, END):
        with pytest.raises(errors.InvalidRequest, match="Invalid input shape"):
            await servable.infer(sequence_request(wrong, number=9, control=control))
    assert servable.sequences() == []
    await servable.infer(sequence_request(ONES, number=9, control=START))
    with pytest.raises(errors.InvalidRequest, match="Invalid input shape"):
        await servable.infer(sequence_request(wrong, number=9, control=END))
    response = await servable.infer(sequence_request(ONES, number=9))
    assert response.outputs[0].array.tolist() == [[2, 2]]  # type: ignore[union-attr]


async def test_special_inputs_do_not_count_as_inputs(tmp_path: Path) -> None:
    servable = await load_stateful(ir.accumulator(), tmp_path)
    assert [spec.name for spec in servable.metadata.inputs] == ["x"]
    assert [spec.name for spec in servable.metadata.outputs] == ["y"]
    with pytest.raises(errors.InvalidRequest, match="Invalid number of inputs - Expected: 1; Actual: 0"):
        await servable.infer(sequence_request({}, number=9, control=START))
    twice = sequence_request(ONES, number=9, control=START)
    twice.inputs.append(twice.inputs[0])
    twice.raw_inputs.append(twice.raw_inputs[0])
    with pytest.raises(errors.InvalidRequest, match="Invalid number of inputs - Expected: 1; Actual: 2"):
        await servable.infer(twice)
    short = sequence_request(ONES, number=9, control=START)
    short.raw_inputs.pop()
    with pytest.raises(errors.InvalidRequest, match="must contain one buffer per input"):
        await servable.infer(short)


@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
async def test_model_with_an_input_of_a_special_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=f"the input '{name}' has a reserved name of the sequence protocol"):
        await load_stateful(ir.passthrough("FP32", input_name=name), tmp_path)


START, END = 1, 2


async def _output(servable: StatefulServable, x: Array, number: int | None = None, control: int | None = None) -> Array:
    return tensors(await servable.infer(sequence_request({"x": x}, number=number, control=control)))[0].array


async def step(
    servable: StatefulServable, value: float, *, number: int | None = None, control: int | None = None
) -> float:
    return float((await _output(servable, np.full((1, 2), value, np.float32), number, control))[0, 0])


class _OtherWorker:
    """Owns the sequence 7."""

    last_id = 0

    def __init__(self) -> None:
        self.steps: list[ForwardedStep] = []

    def owner(self, model: str, identity: int | str) -> int | None:
        return 1 if identity == 7 else None

    async def run_step(self, owner: int, step: ForwardedStep) -> StepResult:
        assert owner == 1
        self.steps.append(step)
        return StepResult([Tensor("y", BY_NAME["FP32"], np.full((1, 2), 9, np.float32))])

    def begin(self, model: str, version: int, most: float) -> None: ...

    def end(self, model: str, version: int) -> None: ...

    def count(self, model: str, version: int) -> int:
        return 0


async def test_steps_run_in_the_worker_that_owns_their_sequence(tmp_path: Path) -> None:
    other = _OtherWorker()
    servable = await load_stateful(ir.accumulator(), tmp_path, owners=other)
    assert await step(servable, 1, number=7, control=START) == 9
    assert await step(servable, 2, number=8, control=START) == 2
    assert await step(servable, 2, number=8) == 4
    ((name, version, identity, start, end),) = [
        (each.model, each.version, each.id, each.start, each.end) for each in other.steps
    ]
    assert (name, version, identity, start, end) == (servable.name, "", 7, True, False)
    arrays = {"x": np.ones((1, 2), np.float32)}
    outputs, restored = await servable.run_step(ForwardedStep(servable.name, "", 8, False, True, arrays, math.inf))
    assert ([each.name for each in outputs], restored) == (["y", "sequence_id"], None)
    with pytest.raises(SequenceMissing):
        await step(servable, 2, number=8)


@pytest.mark.parametrize("width", [2, 2 * 4096], ids=["small", "large"])
async def test_interleaved_sequences_have_separate_states(tmp_path: Path, width: int) -> None:
    servable = await load_stateful(ir.accumulator(width), tmp_path)
    for count in (1, 2, 3, 4):
        for number in (1, 2, 3):
            control = START if count == 1 else None
            y = await _output(servable, np.full((1, width), 10**number, np.float32), number, control)
            assert (y == 10**number * count).all()


async def test_stateful_lstm_agrees_bit_for_bit_with_explicit_states(tmp_path: Path) -> None:
    stateful = await load_stateful(ir.lstm(), tmp_path)
    explicit = await load(ir.lstm(explicit=True), tmp_path, "explicit")
    random = np.random.default_rng(3)
    states = {number: {name: np.zeros((1, 8), np.float32) for name in ("hidden", "cell")} for number in (1, 2, 3)}
    for turn in range(12):
        for number in map(int, random.permutation([1, 2, 3])):
            x = random.normal(size=(1, 4)).astype(np.float32)
            response = await explicit.infer(raw_request({"x": x, **states[number]}))
            expected = {output.name: output.array for output in tensors(response)}
            states[number] = {name: expected[f"next_{name}"] for name in ("hidden", "cell")}
            found = await _output(stateful, x, number, START if turn == 0 else None)
            np.testing.assert_array_equal(found, expected["y"])


async def test_generated_ids_wrap_around_and_skip_live_ones(tmp_path: Path) -> None:
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    for number in (1, 2**64 - 1):
        await step(servable, 1, number=number, control=START)
    manager.next_id = 2**64 - 1
    response = await servable.infer(sequence_request({"x": np.ones((1, 2), np.float32)}, control=START))
    assert tensors(response)[1].array.tolist() == [2]


async def test_model_without_variables_has_sequences(tmp_path: Path) -> None:
    servable = await load_stateful(ir.dummy(), tmp_path)
    b = {"b": np.ones((1, 10), np.float32)}
    for control in (START, 0, END):
        response = await servable.infer(sequence_request(b, number=5, control=control))
        assert tensors(response)[0].array.tolist() == [[2] * 10]
    with pytest.raises(SequenceMissing):
        await servable.infer(sequence_request(b, number=5))


@pytest.mark.parametrize(("is_transformed", "expected"), [(True, [1, 3, 6]), (False, [1, 2, 3])])
async def test_low_latency_transformation_keeps_the_state_of_loops(
    is_transformed: bool, expected: list[float], tmp_path: Path
) -> None:
    servable = await load_stateful(ir.summing_loop(), tmp_path, low_latency_transformation=is_transformed)
    outputs = [await _output(servable, np.full((1, 1, 2), n, np.float32), 9, int(n == 1)) for n in (1, 2, 3)]
    assert [output[0, 0] for output in outputs] == expected


async def test_tiny_stateful_model_runs_without_a_checkpoint(tmp_path: Path) -> None:
    servable = await load_stateful(ir.accumulator(), tmp_path)
    await step(servable, 1, number=5, control=START)
    with trio.testing.assert_no_checkpoints():
        assert await step(servable, 1, number=5) == 2


async def test_parallel_sequences_share_infer_requests(tmp_path: Path) -> None:
    model = ir.slow_accumulator(128, 40)
    servable = stateful_over(model, tmp_path, lambda network: network, placement=Placement.away(), nireq=2)

    async def run(number: int) -> None:
        for count in range(1, 6):
            y = await _output(servable, np.full((128, 128), number, np.float32), number, int(count == 1))
            assert (y == number * count).all()

    async with trio.open_nursery() as nursery:
        for number in range(1, 7):
            nursery.start_soon(run, number)


async def test_cancelled_requests_change_no_sequence(tmp_path: Path) -> None:
    servable = await load_stateful(ir.slow_accumulator(320), tmp_path, nireq=1)

    async def total(value: float, control: int | None = None) -> float:
        return float((await _output(servable, np.full((320, 320), value, np.float32), 5, control))[0, 0])

    async def cancelled(control: int | None) -> None:
        with trio.move_on_after(0.005) as scope:
            await total(100, control)
        assert scope.cancelled_caught

    await cancelled(START)
    assert servable.sequences() == []
    assert await total(2, START) == 2
    await cancelled(None)
    assert await total(1) == 3
    await cancelled(END)
    assert await total(1) == 4
    assert await total(1, END) == 5
    assert servable.sequences() == []
    await servable.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await total(1, START)


async def test_listed_sequences_have_age_idle_time_and_requests(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    servable = await load_stateful(ir.accumulator(), tmp_path)
    assert isinstance(servable, SequenceServable)
    await step(servable, 1, number=20, control=START)
    await trio.sleep(30)
    await step(servable, 1, number=3, control=START)
    await step(servable, 1, number=20)
    await trio.sleep(10)
    sequences = servable.sequences()
    assert [(each.id, each.requests) for each in sequences] == [(3, 1), (20, 2)]
    assert [each.age_seconds for each in sequences] == pytest.approx([10, 40], abs=1)
    assert [each.idle_seconds for each in sequences] == pytest.approx([10, 10], abs=1)


async def test_failing_low_latency_transformation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("ovmstrio.inference.compile.Manager.run_passes", refuse)
    with pytest.raises(ConfigError, match=r"low_latency_transformation: the low latency transformation fails: no"):
        await load_stateful(ir.accumulator(), tmp_path, low_latency_transformation=True)


class _Server:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.width = 2
        self.nireq = 1
        self.managers = SequenceManagers()
        self.registry = registry_of(partial(load_model, managers=self.managers), poll_seconds=0)

    async def reload(self) -> Any:
        self.nireq += 1
        return await self.apply(nireq=self.nireq)

    async def apply(self, **settings: Any) -> Any:
        spec = ModelSpec(name="m", base_path=self.base / "m", plugin_config=EXACT, **{"stateful": True, **settings})
        return await self.registry.apply([spec])

    async def remove(self, version: int) -> None:
        shutil.rmtree(self.base / "m" / str(version))
        await self.registry.rescan()

    async def step(self, value: float, number: int = 5, control: int | None = None, version: str = "") -> float:
        request = sequence_request({"x": np.full((1, self.width), value, np.float32)}, number=number, control=control)
        request.model_version = version
        with await self.registry.lease("m", version) as lease:
            return float(tensors(await lease.servable.infer(request))[0].array[0, 0])

    async def new_id(self) -> int:
        with await self.registry.lease("m") as lease:
            x = np.ones((1, self.width), np.float32)
            response = await lease.servable.infer(sequence_request({"x": x}, control=START))
        return int(tensors(response)[-1].array[0])


@asynccontextmanager
async def serving(base: Path) -> AsyncIterator[_Server]:
    server = _Server(base)
    ir.save(ir.accumulator(), base, "m")
    async with running(server.registry):
        await server.apply()
        yield server


async def test_sequences_continue_after_a_reload_with_the_new_settings(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        before = server.registry.peek("m")
        await server.step(1, control=START)
        await server.apply(nireq=3, max_sequence_number=1)
        assert server.registry.peek("m") is not before
        assert await server.step(1) == 2
        ir.save(ir.accumulator(offset=100), tmp_path, "m")
        await server.reload()
        assert await server.step(1) == 103
        assert await server.step(1, control=END) == 104
        assert await server.step(1, control=START) == 101


async def test_requests_in_flight_end_on_the_old_instance(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        old = server.registry.peek("m")
        for number in (5, 6):
            await server.step(1, number, control=START)
        (manager,) = server.managers
        sums: list[float] = []

        async def send(value: float) -> None:
            sums.append(await server.step(value))

        async with trio.open_nursery() as nursery, manager.turn(SequenceControl(5)) as sequence:
            nursery.start_soon(send, 10)
            await trio.testing.wait_all_tasks_blocked()
            ir.save(ir.accumulator(offset=100), tmp_path, "m")
            await server.reload()
            assert server.registry.peek("m") is not old
            nursery.start_soon(send, 1000)
            assert await server.step(1, 6) == 102
            sequence.advance({"total": np.full((1, 2), 5, np.float32)})
            assert sums == []
        assert sums == [15, 1115]


async def test_model_of_other_variables_drops_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, control=START)
        ir.save(ir.accumulator(3), tmp_path, "m")
        await server.reload()
        server.width = 3
        with pytest.raises(SequenceMissing):
            await server.step(1)


async def test_failed_load_leaves_the_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, control=START)
        (tmp_path / "m" / "1" / "model.xml").write_text("<net")
        assert (await server.reload()).failures
        assert await server.step(1) == 2


async def test_sequences_follow_the_default_version_and_return_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for number in (5, 6, 7):
            await server.step(1, number, control=START)
        ir.save(ir.accumulator(offset=100), tmp_path, "m", version=2)
        await server.registry.rescan()
        assert server.registry.available_versions("m") == [2]
        assert await server.step(1, 5) == 102
        assert await server.step(1, 6) == 102
        with pytest.raises(SequenceExists):
            await server.step(1, 7, control=START)
        await server.remove(2)
        assert server.registry.available_versions("m") == [1]
        assert [await server.step(1, number) for number in (5, 6, 7)] == [3, 3, 2]
        assert len(list(server.managers)) == 1


async def test_sequences_of_a_named_version_stay_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        ir.save(ir.accumulator(offset=100), tmp_path, "m", version=2)
        await server.apply(version_policy=AllVersions())
        assert await server.step(1, 5, START, "1") == 1
        assert await server.step(2, 5, START, "2") == 102
        with pytest.raises(SequenceExists):
            await server.step(1, 5, START, "1")
        assert await server.step(1, 5, None, "1") == 2
        assert await server.step(1, 6, START, "1") == 1
        with pytest.raises(SequenceMissing):
            await server.step(1, 6)
        with pytest.raises(SequenceMissing):
            await server.step(1, 6, None, "2")


async def test_retired_model_drops_its_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, control=START)
        await server.registry.apply([])
        await trio.testing.wait_all_tasks_blocked()
        assert list(server.managers) == []
        await server.apply()
        with pytest.raises(SequenceMissing):
            await server.step(1)


@pytest.mark.parametrize("stateful", [True, False])
async def test_served_model_cannot_become_stateful_or_stateless(stateful: bool, tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.registry.apply([])
        assert (await server.apply(stateful=stateful)).failures == ()
        before = server.registry.peek("m")
        (failure,) = (await server.apply(stateful=not stateful)).failures
        assert "Model type cannot be changed after it is loaded" in failure.reason
        assert server.registry.peek("m") is before
        assert [status.state for status in server.registry.statuses()["m"]] == [VersionState.AVAILABLE]
        assert (await server.apply(stateful=stateful, version_policy=LatestVersions(num_versions=2))).failures == ()
        await server.registry.apply([])
        assert (await server.apply(stateful=not stateful)).failures == ()


async def test_generated_ids_are_unique_over_versions(tmp_path: Path) -> None:
    # A late request of a sequence that ended must not reach another client's.
    async with serving(tmp_path) as server:
        assert [await server.new_id(), await server.new_id()] == [1, 2]
        await server.step(1, 1, END)
        ir.save(ir.accumulator(), tmp_path, "m", version=2)
        await server.apply(version_policy=AllVersions())
        assert await server.new_id() == 3
        assert await server.step(1, 2) == 2
        await server.remove(2)
        await server.step(1, 3, END)
        assert await server.new_id() == 4


async def test_ids_of_the_old_default_version_are_taken_in_the_new_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, 5, START)
        ir.save(ir.accumulator(offset=100), tmp_path, "m", version=2)
        await server.apply(version_policy=AllVersions())
        with pytest.raises(SequenceExists):
            await server.step(50, 5, START, "2")
        assert await server.step(1, 5) == 102
        assert await server.step(7, 5, START, "1") == 7
        assert await server.step(1, 5) == 103


async def test_sequences_do_not_move_to_a_version_that_is_not_loaded(tmp_path: Path) -> None:
    managers = SequenceManagers()
    servable = await load_stateful(ir.accumulator(), tmp_path, managers=managers, version=2)
    (manager,) = managers
    restored = managers.add("model", 1, manager.variables)
    x = {"x": np.ones((1, 2), np.float32)}
    await servable.infer(sequence_request(x, number=5, control=START))
    await servable.aclose()
    assert 5 not in restored
