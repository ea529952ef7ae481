"""What the processes of a server ask each other."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.core.errors import NotReady, SequenceMissing
from ovmstrio.server.workers.peers import Peers

Answer = Callable[[Any], Awaitable[Any]]


async def _echo(value: Any) -> Any:
    return value


@asynccontextmanager
async def _running(peers: Peers, answer: Answer = _echo) -> AsyncIterator[Callable[[], None]]:
    async with trio.open_nursery() as nursery:
        await nursery.start(peers.run, answer)
        yield nursery.cancel_scope.cancel
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _several(*answers: Answer) -> AsyncIterator[list[Peers]]:
    secret = os.urandom(8).hex()
    made = [Peers(secret, len(answers), row) for row in range(len(answers))]
    async with AsyncExitStack() as opened:
        for peers, answer in zip(made, answers, strict=True):
            await opened.enter_async_context(_running(peers, answer))
        yield made


async def test_questions_are_answered_side_by_side() -> None:
    """In whatever order the answers come, each gets its own; arrays of any size come along."""
    gates = {number: trio.Event() for number in range(3)}

    async def answer(value: Any) -> Any:
        number, array = value
        await gates[number].wait()
        return [number, array + number]

    results: list[int] = []
    async with _several(_echo, answer) as (first, _), trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            array = np.zeros(200_000, np.float32)
            found, added = await first.ask(1, [number, array])
            assert found == number
            assert float(added.sum()) == number * 200_000
            results.append(number)
            if number:
                gates[number - 1].set()

        for number in range(3):
            nursery.start_soon(ask, number)
        gates[2].set()
    assert results == [2, 1, 0]


async def test_errors_are_raised_where_the_question_came_from() -> None:
    """With their class and text, and the connection goes on."""

    async def fail(value: Any) -> Any:
        if value == "good":
            return "fine"
        raise SequenceMissing("there is none")

    async with _several(_echo, fail) as (first, _):
        with pytest.raises(SequenceMissing, match="there is none"):
            await first.ask(1, "bad")
        assert await first.ask(1, "good") == "fine"


async def test_all_others_are_asked_and_those_that_are_not_there_left_out() -> None:
    """Whoever is being started begins with what there is then."""
    secret = os.urandom(8).hex()
    first, second, third = (Peers(secret, 4, row) for row in range(3))

    async def answer(value: Any) -> Any:
        return [*value, "answered"]

    async with _running(first), _running(second, answer), _running(third, answer):
        answers = await first.ask_all("question", 1, 2)
    assert answers == [["question", 1, 2, "answered"]] * 2


async def test_an_error_of_one_is_the_error_of_all() -> None:
    """The others have answered by then."""
    asked: list[Any] = []

    async def fail(_: Any) -> Any:
        raise NotReady("not now")

    async def note(value: Any) -> Any:
        await trio.testing.wait_all_tasks_blocked()
        asked.append(value)

    async with _several(_echo, fail, note) as (first, *_):
        with pytest.raises(NotReady, match="not now"):
            await first.ask_all("question")
    assert asked == [["question"]]


async def test_a_process_that_ends_is_told_of_and_its_successor_is_asked() -> None:
    """Whoever waits for an answer gets an error at once."""
    secret = os.urandom(8).hex()
    first, second = (Peers(secret, 2, row) for row in range(2))
    begun = trio.Event()

    async def stay(_: Any) -> Any:
        begun.set()
        await trio.sleep_forever()

    async with _running(first):
        async with _running(second, stay) as end, trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(NotReady, match="ended before it answered"):
                    await first.ask(1, "question")

            nursery.start_soon(ask)
            await begun.wait()
            end()
        with pytest.raises(NotReady, match="being started"):
            await first.ask(1, "question")
        async with _running(Peers(secret, 2, 1)):
            assert await first.ask(1, "question") == "question"


async def test_a_caller_that_leaves_ends_the_work_for_it() -> None:
    """And nobody else's."""
    begun, ended = trio.Event(), trio.Event()

    async def stay(value: Any) -> Any:
        if value == "short":
            return value
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with _several(_echo, stay) as (first, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.ask, 1, "long")
            await begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(30):
            await ended.wait()
        assert await first.ask(1, "short") == "short"


async def test_an_address_has_no_file_and_only_one_process() -> None:
    """The next one can have it as soon as the one before has ended."""
    secret = os.urandom(8).hex()
    async with _running(Peers(secret, 2, 0)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, pytest.raises(OSError, match="in use"):
            other.bind(f"\0ovmstrio-{secret}-0")
    async with _running(Peers(secret, 2, 0)):
        pass


async def test_questions_of_one_order_are_answered_one_after_the_other() -> None:
    """In the order in which they were asked, whatever their sizes; others pass them by."""
    begun: list[int] = []
    gate = trio.Event()

    async def answer(value: Any) -> Any:
        number, _ = value
        begun.append(number)
        if number == 0:
            await gate.wait()
        return number

    async with _several(_echo, answer) as (first, _), trio.open_nursery() as nursery:

        async def ask(number: int, size: int) -> None:
            assert await first.ask(1, [number, bytes(size)], ["m", 7]) == number

        for number, size in enumerate((400_000, 10, 300_000, 1)):
            nursery.start_soon(ask, number, size)
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert await first.ask(1, [9, b""], ["m", 8]) == 9
        gate.set()
    assert begun == [0, 9, 1, 2, 3]


async def test_questions_of_an_order_wait_for_the_successor_of_a_process_that_leaves() -> None:
    """What it is answering it answers; what comes then is not begun there."""
    secret = os.urandom(8).hex()
    first, second = (Peers(secret, 2, row) for row in range(2))
    begun, gate = trio.Event(), trio.Event()
    results: list[Any] = []

    async def old(value: Any) -> Any:
        begun.set()
        await gate.wait()
        return ["old", value]

    async def new(value: Any) -> Any:
        return ["new", value]

    async with trio.open_nursery() as nursery, _running(first):

        async def ask(number: int) -> None:
            results.append(await first.ask(1, number, ["m", number]))

        async with _running(second, old):
            nursery.start_soon(ask, 1)
            await begun.wait()
            nursery.start_soon(second.leave, set())
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.start_soon(ask, 2)
            await trio.testing.wait_all_tasks_blocked(0.05)
            gate.set()
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert results == [["old", 1]]
        async with _running(Peers(secret, 2, 1), new):
            first.announce()
            with trio.fail_after(30):
                while len(results) < 2:
                    await trio.testing.wait_all_tasks_blocked(0.01)
    assert results == [["old", 1], ["new", 2]]
