"""Answers are written on the loop if that is quick, in a thread if it is not, and not at all if they are too large."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.api.doors import KSERVE_GRPC, KSERVE_REST
from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.events import Door
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import Array, RawTensor, Tensor
from ovmstrio.dataplane.rendering import Renderer
from tests.support.waits import WAIT_SECONDS


def _response(elements: int) -> InferResponse:
    return InferResponse("m", "1", [Tensor("out", BY_NAME["FP32"], np.zeros(elements, np.float32))])


def _thread(response: InferResponse) -> int:
    del response
    return threading.get_ident()


@pytest.mark.parametrize(
    ("elements", "door", "here"),
    [
        (1000, KSERVE_GRPC, True),
        (500_000, KSERVE_GRPC, True),
        (1_000_000, KSERVE_GRPC, False),
        (1000, KSERVE_REST, True),
        (500_000, KSERVE_REST, False),
    ],
)
async def test_large_answers_are_written_in_a_thread(elements: int, door: Door, here: bool) -> None:
    """Text takes longer than bytes."""
    writer = await Renderer().render(_thread, _response(elements), door)
    assert (writer == threading.get_ident()) is here


@pytest.mark.parametrize(
    ("array", "door", "here"),
    [
        (np.zeros((1000, 1000), np.float32), KSERVE_GRPC, True),
        (np.zeros((1000, 1000), np.float32), KSERVE_REST, False),
        (np.zeros((1000, 1000), np.float32).T, KSERVE_GRPC, False),
        (np.full((400, 1000), b"12345678", object), KSERVE_GRPC, False),
    ],
)
async def test_what_is_sent_from_where_it_lies_is_written_at_once(array: Array, door: Door, here: bool) -> None:
    """Large outputs that nobody else has, and whose elements lie as they are sent."""
    datatype = BYTES if array.dtype == object else BY_NAME["FP32"]
    response = InferResponse("m", "1", [Tensor("out", datatype, array)], is_private=True)
    writer = await Renderer().render(_thread, response, door)
    assert (writer == threading.get_ident()) is here


@pytest.mark.parametrize("door", [KSERVE_GRPC, KSERVE_REST])
async def test_what_is_too_large_is_not_written(door: Door) -> None:
    """The refusal has the numbers."""

    def write(response: InferResponse) -> None:
        raise AssertionError(response)

    with pytest.raises(PayloadTooLarge, match=r"outputs have 4000 bytes, the limit is 3999 \(--max_message_size\)"):
        await Renderer(3999).render(write, _response(1000), door)
    assert await Renderer(4000).render(_thread, _response(1000), door)


def test_the_size_of_outputs_is_that_of_their_bytes() -> None:
    """Those of numbers, of elements behind their lengths, and of what user code gave as bytes."""
    words = np.array([[b"ab", b""], [b"cde", b"f"]], object)
    outputs: list[Tensor | RawTensor] = [
        Tensor("numbers", BY_NAME["INT16"], np.zeros((2, 3), np.int16)),
        Tensor("words", BYTES, words),
        RawTensor("raw", "FP32", (2,), b"12345678"),
        RawTensor("view", "FP32", (2,), np.zeros(2, np.float32).data),
    ]
    assert [output.nbytes for output in outputs] == [12, 4 * 4 + 6, 8, 8]
    assert InferResponse("m", "1", outputs).nbytes == 50


async def test_few_answers_are_written_at_a_time_and_who_waits_can_leave() -> None:
    """Threads that write take the interpreter's lock from the loop in turn."""
    renderer, gate = Renderer(), threading.Event()

    def write(response: InferResponse) -> None:
        gate.wait(WAIT_SECONDS)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(renderer.render, write, _response(1_000_000), KSERVE_GRPC)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.05) as scope:
            await renderer.render(write, _response(1_000_000), KSERVE_GRPC)
        assert scope.cancelled_caught
        gate.set()
