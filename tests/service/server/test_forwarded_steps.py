"""Steps of sequences on their way to the process that has them."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from trio.testing import MockClock

from ovmstrio.core.errors import NotReady
from ovmstrio.core.sequence_owners import ForwardedStep, SequenceElsewhere
from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.models.sequences.owners import pack, unpack
from ovmstrio.server.workers.board import Board
from ovmstrio.server.workers.peers import Peers
from ovmstrio.server.workers.sequence_directory import BoardDirectory
from ovmstrio.server.workers.steps import SWIFT_STEP, PeerOwners
from ovmstrio.work.messages.message_packets import Swift, swift_packet
from tests.support.waits import WAIT_SECONDS


@given(
    st.lists(
        st.sampled_from([np.float32, np.int8, np.uint64, np.bool_]).flatmap(
            lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4))
        ),
        max_size=4,
    )
)
def test_arrays_come_as_they_were(arrays: list[Any]) -> None:
    """Of any type and shape, none or many; they may be written."""
    packed = pack((str(number), "told", array) for number, array in enumerate(arrays))
    assert packed is not None
    heads, buffers = packed
    found = list(unpack(heads, memoryview(b"".join(buffers))))
    assert [name for name, _, _ in found] == [str(number) for number in range(len(arrays))]
    for (_, told, array), sent in zip(found, arrays, strict=True):
        assert (told, array.dtype, array.shape) == ("told", sent.dtype, sent.shape)
        assert array.tobytes() == sent.tobytes()
        assert array.flags.writeable


def test_what_is_no_json_or_too_large_is_no_swift_message() -> None:
    """And goes as any other value; texts have no packed form."""
    assert swift_packet([1, "a", None], [b"xyz"]) is not None
    assert swift_packet([2**64], ()) is None
    assert swift_packet([1], [bytes(70_000)]) is None
    assert pack([("texts", "", np.array([b"a"], object))]) is None


@pytest.mark.parametrize(
    ("array", "is_swift"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3), True),
        (np.zeros((300, 300), np.float32), True),
        (np.array([[b"text"]], object), False),
    ],
)
@pytest.mark.parametrize("identity", [5, 2**64 - 1, "named"])
async def test_a_step_is_answered_by_the_process_that_has_its_sequence(
    array: Any, is_swift: bool, identity: int | str
) -> None:
    """Small ones and large ones, and those with texts."""
    asked: list[Any] = []

    async def answer(question: Any) -> Any:
        asked.append(question)
        if question[0] == SWIFT_STEP:
            heads, tail = question[-2:]
            packed = pack((name, "FP32", found + 1) for name, _, found in unpack(heads, tail))
            assert packed is not None
            return Swift([packed[0]], packed[1])
        return [["x", "BYTES", question[-2]["x"]]]

    secret = os.urandom(8).hex()
    async with AsyncExitStack() as opened:
        board = Board.create(2)
        opened.callback(board.close)
        nursery = await opened.enter_async_context(trio.open_nursery())
        made = [Peers(secret, 2, row) for row in range(2)]
        for peers in made:
            await nursery.start(peers.run, answer)
        step = ForwardedStep("acc", "3", identity, False, True, {"x": array}, math.inf if is_swift else 1e9)
        with trio.fail_after(WAIT_SECONDS):
            (output,) = await PeerOwners(made[0], BoardDirectory(board, 0, secret)).run_step(1, step)
        assert isinstance(output, Tensor)
        np.testing.assert_array_equal(output.array, array + 1 if is_swift else array)
        assert asked[0][1:6] == ["acc", "3", identity, False, True]
        assert (asked[0][0] == SWIFT_STEP) is is_swift
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _owners(*answers: Any) -> AsyncIterator[tuple[Board, list[Peers], PeerOwners, BoardDirectory]]:
    """Two processes, of which those that have an answer are there, and a directory of each."""
    secret = os.urandom(8).hex()
    async with AsyncExitStack() as opened:
        board = Board.create(2)
        opened.callback(board.close)
        made = [Peers(secret, 2, row) for row in range(2)]
        nursery = await opened.enter_async_context(trio.open_nursery())
        for peers, answer in zip(made, answers, strict=False):
            await nursery.start(peers.run, answer)
        here, there = (BoardDirectory(board, row, secret) for row in range(2))
        yield board, made, PeerOwners(made[0], here), there
        nursery.cancel_scope.cancel()


async def _nothing(_: Any) -> Any:
    return [[]]


def _step(*, start: bool = False) -> ForwardedStep:
    return ForwardedStep("m", "", 5, start, False, {}, math.inf)


async def test_a_step_waits_for_a_process_that_comes_back_and_for_no_other(autojump_clock: MockClock) -> None:
    """While it has the sequence, with a bound; when it has it no more, whoever asked looks again whose it is."""
    del autojump_clock
    async with _owners(_nothing) as (board, made, owners, there):
        there.begin("m", 1, 5, 500)
        assert owners.owner("m", 5) == 1
        with pytest.raises(NotReady, match="is being started"):
            await owners.run_step(1, _step())
        refused: list[bool] = []

        async def ask() -> None:
            with pytest.raises(SequenceElsewhere):
                await owners.run_step(1, _step())
            refused.append(owners.owner("m", 5) is None)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert not refused
            board.clear(1)
            made[0].announce()
        assert refused[-1]


async def test_steps_go_where_those_are_that_came_before_them() -> None:
    """As long as these are under way, though the sequence may have ended there meanwhile."""
    gate = trio.Event()

    async def answer(_: Any) -> Any:
        await gate.wait()
        return [[]]

    async with _owners(_nothing, answer) as (_, _, owners, there), trio.open_nursery() as nursery:
        there.begin("m", 1, 5, 500)
        nursery.start_soon(owners.run_step, 1, _step())
        await trio.testing.wait_all_tasks_blocked(0.05)
        there.end("m", 1, 5)
        assert owners.owner("m", 5) == 1
        nursery.start_soon(owners.run_step, 1, _step(start=True))
        await trio.testing.wait_all_tasks_blocked(0.05)
        gate.set()
        with trio.fail_after(WAIT_SECONDS):
            while owners.owner("m", 5) is not None:
                await trio.lowlevel.checkpoint()
