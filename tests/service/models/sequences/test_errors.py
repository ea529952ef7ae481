"""The table of errors: every row with OVMS's text and statuses, and what each of them leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from grpclib.const import Status

from ovmstrio.core import errors
from ovmstrio.core.request import Contents, InferInput, InferRequest
from ovmstrio.runtimes.models.sequences import SequenceManager
from ovmstrio.runtimes.models.sequences.sequence_requests import Control, read_control
from ovmstrio.runtimes.models.stateful import StatefulServable
from ovmstrio.wire.statuses import status_of
from tests.support import ir
from tests.support.servables import load_managed, load_stateful, sequence_request

START, END = 1, 2
ONES = {"x": np.ones((1, 2), np.float32)}

Change = Callable[[InferRequest], InferRequest]


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
        (InferRequest("model"), "Sequence ID has not been provided in request inputs"),
        (_id((1,), [0]), "Sequence ID has not been provided in request inputs"),
        (_control((1,), [END]), "Sequence ID has not been provided in request inputs"),
        (_control((1,), [3]), "Unexpected value of sequence control input - Expected: 0, 1 (start) or 2 (end); Actual"),
        (_id((1,), []), "Could not find sequence id in expected tensor proto field uint64_val"),
        (_id((1,), [1, 2]), "Could not find sequence id in expected tensor proto field uint64_val"),
        (_id((1,), [1], "INT32"), "Could not find sequence id in expected tensor proto field uint64_val"),
        (_id((1,), [-1]), "Could not find sequence id in expected tensor proto field uint64_val"),
        (_control((1,), []), "Could not find sequence control input in expected tensor proto field uint32_val"),
        (_control((1,), [1], "UINT64"), "Could not find sequence control input in expected tensor proto field"),
        (_control((1,), [2**32]), "Could not find sequence control input in expected tensor proto field uint32_val"),
        (_id((), [1]), "Special input proto does not contain tensor shape information"),
        (_control((), [1]), "Special input proto does not contain tensor shape information"),
        (
            _id((1, 1), [1]),
            "Invalid number of shape dimensions - Expected: (1); Actual: (1,1); input name: sequence",
        ),
        (
            _control((2,), [1, 1]),
            "Invalid input shape - Expected: (1); Actual: (2); input name: sequence_control",
        ),
        (_id((0,), []), "Invalid input shape - Expected: (1); Actual: (0); input name: sequence_id"),
        (
            _parameters(sequence_id="x" * 257, sequence_start=True),
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
            "the input sequence_id is 3, and the parameter sequence_id 4",
        ),
    ],
)
def test_what_cannot_be_read(request_: InferRequest, text: str) -> None:
    """A special input of another form or value is refused with OVMS's text, as the caller's mistake."""
    with pytest.raises(errors.InvalidRequest) as error:
        read_control(request_)
    assert error.value.message.startswith(text)
    assert status_of(error.value) == (Status.INVALID_ARGUMENT, 400)


def test_the_id_is_complained_of_before_the_control_and_both_before_their_values() -> None:
    """With several mistakes the first one read is told."""
    request = _control((), [7])
    request.inputs += _id((), [1]).inputs
    with pytest.raises(errors.InvalidRequest, match=r"input name: sequence_id$"):
        read_control(request)
    with pytest.raises(errors.InvalidRequest, match=r"^Unexpected value of sequence control input"):
        read_control(_control((1,), [7]))


@pytest.mark.parametrize(
    ("request_", "control"),
    [
        (_id((1,), [2**64 - 1]), Control(2**64 - 1)),
        (_control((1,), [START]), Control(0, start=True)),
        (sequence_request(ONES, number=5, control=0), Control(5)),
        (sequence_request(ONES, number=5, control=START), Control(5, start=True)),
        (sequence_request(ONES, number=2**64 - 1, control=END), Control(2**64 - 1, end=True)),
        (_parameters(sequence_id=3, sequence_start=True), Control(3, start=True)),
        (_parameters(sequence_id="18446744073709551615", sequence_end=True), Control(2**64 - 1, end=True)),
        (_parameters(sequence_id="soon", sequence_start=True), Control("soon", start=True)),
        (_parameters(sequence_id=3, sequence_start=True, sequence_end=True), Control(3, start=True, end=True)),
        (_parameters(sequence_start=True), Control(0, start=True)),
        (replace(_id((1,), [3]), parameters={"sequence_id": 3, "other": 1.5}), Control(3)),
    ],
)
def test_both_forms_are_read(request_: InferRequest, control: Control) -> None:
    """Values one by one, raw ones and Triton's parameters say the same; the model does not see them."""
    found, plain = read_control(request_)
    assert found == control
    assert [given.name for given in plain.inputs] == [g.name for g in request_.inputs if g.name == "x"]
    assert list(plain.raw_inputs) == [ONES["x"].tobytes()] * len(plain.inputs)


@asynccontextmanager
async def _busy(manager: SequenceManager, control: Control) -> AsyncIterator[None]:
    """Hold a sequence as a request does that takes its time."""
    async with manager.turn(control):
        yield


async def _refused(servable: StatefulServable, number: int | None, control: int | None) -> errors.ServerError:
    with pytest.raises(errors.ServerError) as error:
        await servable.infer(sequence_request(ONES, number=number, control=control))
    return error.value


@pytest.mark.parametrize("control", [None, 0, END])
async def test_unknown_and_ended_sequences(control: int | None, tmp_path: Path) -> None:
    """What was never started, and what has ended, does not exist."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    error = await _refused(servable, 9, control)
    assert isinstance(error, errors.SequenceMissing)
    assert error.message == "Sequence with provided ID does not exist"
    assert status_of(error) == (Status.NOT_FOUND, 404)
    await servable.infer(sequence_request(ONES, number=9, control=START))
    await servable.infer(sequence_request(ONES, number=9, control=END))
    assert isinstance(await _refused(servable, 9, control), errors.SequenceMissing)


async def test_live_ids_are_taken(tmp_path: Path) -> None:
    """An id can be started once, also while its sequence is busy, which is not waited for."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    await servable.infer(sequence_request(ONES, number=9, control=START))
    async with _busy(manager, Control(9)):
        error = await _refused(servable, 9, START)
    assert isinstance(error, errors.SequenceExists)
    assert error.message == "Sequence with provided ID already exists"
    assert status_of(error) == (Status.ALREADY_EXISTS, 409)
    await servable.infer(sequence_request(ONES, number=9))


async def test_while_the_last_request_is_processed(tmp_path: Path) -> None:
    """The id of an ending sequence can neither be started nor used; afterwards it is free."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path)
    await servable.infer(sequence_request(ONES, number=9, control=START))
    async with _busy(manager, Control(9, end=True)):
        error = await _refused(servable, 9, START)
        assert isinstance(await _refused(servable, 9, None), errors.SequenceMissing)
        assert isinstance(await _refused(servable, 9, END), errors.SequenceMissing)
    assert isinstance(error, errors.SequenceEnding)
    assert error.message == "Sequence last request is being processed and it's not available anymore"
    assert status_of(error) == (Status.FAILED_PRECONDITION, 412)
    response = await servable.infer(sequence_request(ONES, number=9, control=START))
    assert response.outputs[0].array.tolist() == [[1, 1]]  # type: ignore[union-attr]


async def test_no_more_than_the_maximum(tmp_path: Path) -> None:
    """The room is looked at before the id, and ending sequences still take it."""
    servable, manager = await load_managed(ir.accumulator(), tmp_path, max_sequence_number=1)
    await servable.infer(sequence_request(ONES, number=9, control=START))
    for number in (None, 9, 10):
        error = await _refused(servable, number, START)
        assert isinstance(error, errors.TooManySequences)
        assert error.message == "Max sequence number has been reached. Could not create new sequence."
        assert status_of(error) == (Status.UNAVAILABLE, 503)
    async with _busy(manager, Control(9, end=True)):
        assert isinstance(await _refused(servable, 10, START), errors.TooManySequences)
    await servable.infer(sequence_request(ONES, number=10, control=START))


async def test_a_maximum_of_zero_refuses_every_start(tmp_path: Path) -> None:
    """Zero is a number of sequences like any other."""
    servable = await load_stateful(ir.accumulator(), tmp_path, max_sequence_number=0)
    assert isinstance(await _refused(servable, 1, START), errors.TooManySequences)


async def test_the_order_of_the_checks(tmp_path: Path) -> None:
    """Control comes before shapes, and shapes before whether the sequence exists; a refused request leaves no trace."""
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
    """They are in no metadata and in no number of inputs; a second one of a name is one input too many."""
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
    with pytest.raises(errors.InvalidRequest, match="must hold one buffer an input"):
        await servable.infer(short)


@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
async def test_models_may_not_use_the_names(name: str, tmp_path: Path) -> None:
    """A model whose own tensor has a special name is refused when it is loaded."""
    with pytest.raises(errors.ConfigError, match=f"the input '{name}' has a name that requests need"):
        await load_stateful(ir.passthrough("FP32", input_name=name), tmp_path)


async def test_closed_servable_refuses(tmp_path: Path) -> None:
    """Behind its end a servable gives no answers."""
    servable = await load_stateful(ir.accumulator(), tmp_path)
    await servable.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await servable.infer(sequence_request(ONES, number=9, control=START))
