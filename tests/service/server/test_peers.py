"""What the processes of a server ask each other."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.core.errors import FailedPrecondition, NotReady, NotSupported, SequenceMissing, ServiceMissing
from ovmstrio.server.workers.peers import LEFT, Peers
from ovmstrio.server.workers.steps import answer_step
from ovmstrio.work.messages.message_packets import Swift
from tests.support.waits import WAIT_SECONDS

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


async def test_what_is_answered_without_waiting_needs_no_task_of_its_own() -> None:
    """One task hears and answers; one that has to wait leaves the hearing to another one, and keeps nobody waiting."""
    gate = trio.Event()
    tasks: list[str | int] = []

    async def answer(value: Any) -> Any:
        tasks.append(id(trio.lowlevel.current_task()))
        if value[0] == "wait":
            await gate.wait()
        return Swift(["done", value[0]])

    async with _several(_echo, answer) as (first, _), trio.open_nursery() as nursery:
        order = ["m", 7]
        with trio.fail_after(60):
            for number in range(3):
                assert (await first.ask(1, Swift([number]), order))[:2] == ["done", number]
            held: list[Any] = []

            async def wait() -> None:
                held.extend(await first.ask(1, Swift(["wait"]), ["m", 8]))

            nursery.start_soon(wait)
            while len(tasks) < 4:
                await trio.lowlevel.checkpoint()
            for number in range(3):
                assert (await first.ask(1, Swift([number]), order))[:2] == ["done", number]
            assert not held
            gate.set()
            while not held:
                await trio.lowlevel.checkpoint()
            assert held[:2] == ["done", "wait"]
    assert (len(set(tasks[:4])), len(set(tasks[4:])), len(set(tasks))) == (1, 1, 2)


async def test_those_are_left_out_that_do_not_answer_soon(autojump_clock: MockClock) -> None:
    """One that is stuck, one that fails and one that is not there keep nobody from what the others tell."""

    async def fail(value: Any) -> Any:
        raise ValueError(value)

    async def wait(value: Any) -> Any:
        await trio.sleep(60)

    async with _several(_echo, _echo, fail, wait) as (first, *_):
        asked = {row: ["who", row] for row in (1, 2, 3, 4)}
        begun = trio.current_time()
        assert await first.ask_soon(asked, 0.5) == {1: ["who", 1]}
        assert trio.current_time() - begun == 0.5


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
        with trio.fail_after(WAIT_SECONDS):
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
            nursery.start_soon(second.leave, None)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.start_soon(ask, 2)
            await trio.testing.wait_all_tasks_blocked(0.05)
            gate.set()
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert results == [["old", 1]]
        async with _running(Peers(secret, 2, 1), new):
            first.announce()
            with trio.fail_after(WAIT_SECONDS):
                while len(results) < 2:
                    await trio.testing.wait_all_tasks_blocked(0.01)
    assert results == [["old", 1], ["new", 2]]


@pytest.mark.parametrize("size", [0, 100_000])
async def test_questions_of_an_order_that_wait_for_a_process_are_sent_in_their_order(size: int) -> None:
    """Small ones and large ones, and those that come later behind them; one that leaves lets others go."""
    secret = os.urandom(8).hex()
    first = Peers(secret, 2, 0)
    heard: list[Any] = []

    async def new(value: Any) -> Any:
        heard.append([value[0], sum(map(len, value[1:]))])
        return None

    async with trio.open_nursery() as nursery, _running(first):
        scopes = [trio.CancelScope() for _ in range(10)]

        async def ask(number: int) -> None:
            with scopes[number]:
                await first.ask(1, Swift([number], [bytes(size)]), ["m", 7])

        for number in range(8):
            nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
        scopes[0].cancel()
        scopes[4].cancel()
        await trio.testing.wait_all_tasks_blocked()
        async with _running(Peers(secret, 2, 1), new):
            nursery.start_soon(ask, 8)
            await trio.testing.wait_all_tasks_blocked()
            first.announce()
            nursery.start_soon(ask, 9)
            with trio.fail_after(60):
                while len(heard) < 8:
                    await trio.lowlevel.checkpoint()
    assert heard == [[number, size] for number in (1, 2, 3, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("size", [0, 100_000])
async def test_questions_that_a_process_does_not_begin_are_sent_to_its_successor_as_they_were(size: int) -> None:
    """In their order, and with the same bytes, once."""
    secret = os.urandom(8).hex()
    first, second = (Peers(secret, 2, row) for row in range(2))
    begun, gate = trio.Event(), trio.Event()
    heard: list[Any] = []

    async def old(_: Any) -> Any:
        begun.set()
        await gate.wait()

    async def new(value: Any) -> Any:
        heard.append([value[0], sum(map(len, value[1:]))])
        return None

    async with trio.open_nursery() as nursery, _running(first):
        async with _running(second, old):
            nursery.start_soon(first.ask, 1, Swift([0]), ["m", 8])
            await begun.wait()
            nursery.start_soon(second.leave, None)
            await trio.testing.wait_all_tasks_blocked(0.05)
            for number in range(6):
                nursery.start_soon(first.ask, 1, Swift([number], [bytes(size)]), ["m", 7])
                await trio.testing.wait_all_tasks_blocked(0.05)
            gate.set()
            await trio.testing.wait_all_tasks_blocked(0.05)
        async with _running(Peers(secret, 2, 1), new):
            first.announce()
            with trio.fail_after(60):
                while len(heard) < 6:
                    await trio.lowlevel.checkpoint()
    assert heard == [[number, size] for number in range(6)]


async def test_a_process_that_waits_for_none_tells_those_that_may_wait_for_it() -> None:
    """As when it holds another one for not ready while all end; one that ends alone tells nobody."""
    told: list[Any] = []

    async def note(value: Any) -> None:
        told.append(value)

    async with _several(note, _echo, _echo) as (_, alone, last):
        with trio.fail_after(WAIT_SECONDS):
            await alone.leave(None)
            await last.leave(set())
    assert told == [[LEFT, 2]]


# Bad luck


async def test_a_caller_that_leaves_before_its_turn_lets_nobody_pass_another_one() -> None:
    """What comes after it waits for what comes before it; the order goes on when that has ended."""
    begun: list[int] = []
    gate = trio.Event()

    async def answer(value: Any) -> Any:
        begun.append(value)
        if value == 0:
            await gate.wait()
        return value

    async with _several(_echo, answer) as (first, _):
        scopes = [trio.CancelScope() for _ in range(5)]

        async def ask(number: int) -> None:
            with scopes[number]:
                assert await first.ask(1, number, ["m", 7]) == number

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
                await trio.testing.wait_all_tasks_blocked(0.05)
            scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert begun == [0]
            # The last one leaves, and the next one finds those that are still there.
            scopes[2].cancel()
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.start_soon(ask, 3)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert begun == [0]
            gate.set()
        assert begun == [0, 3]
        await ask(4)
    assert begun == [0, 3, 4]


async def test_the_end_of_one_process_ends_no_other() -> None:
    """Which had begun to answer its questions of one order."""
    secret = os.urandom(8).hex()
    first, second, third = (Peers(secret, 3, row) for row in range(3))
    begun = trio.Event()

    async def stay(value: Any) -> Any:
        if value != "short":
            begun.set()
            await trio.sleep_forever()
        return value

    async with _running(second, stay), _running(third):
        async with _running(first) as end, trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(_fails, first, NotReady)
            await begun.wait()
            await trio.testing.wait_all_tasks_blocked(0.05)
            end()
        assert await third.ask(1, "short", ["m", 7]) == "short"


async def _fails(peers: Peers, error: type[Exception]) -> None:
    with pytest.raises(error):
        await peers.ask(1, "long", ["m", 7])


async def test_an_answer_that_cannot_be_sent_is_an_error_of_its_question() -> None:
    """And of no other."""

    async def answer(value: Any) -> Any:
        return object() if value == "odd" else value

    async with _several(_echo, answer) as (first, _):
        with pytest.raises(TypeError, match="plain data"):
            await first.ask(1, "odd")
        assert await first.ask(1, "even") == "even"


async def test_nonsense_ends_its_connection_and_nothing_else() -> None:
    """Whoever of the same user has sent it."""
    secret = os.urandom(8).hex()
    first, second = (Peers(secret, 2, row) for row in range(2))
    async with _running(first), _running(second):
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            await other.connect(f"\0ovmstrio-{secret}-1")
            await other.send(b"nonsense")
            with trio.fail_after(WAIT_SECONDS):
                assert await other.recv(10) == b""
        assert await first.ask(1, "question") == "question"


async def test_nonsense_for_an_answer_is_told_to_whoever_waits() -> None:
    """As the end of the process that it came from."""
    secret = os.urandom(8).hex()
    first = Peers(secret, 2, 0)
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        await other.bind(f"\0ovmstrio-{secret}-1")
        other.listen(1)
        async with _running(first), trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(NotReady, match="ended before it answered"):
                    await first.ask(1, "question")

            nursery.start_soon(ask)
            accepted, _ = await other.accept()
            with accepted:
                await accepted.recv(1000)
                await accepted.send(b"nonsense")
                with trio.fail_after(WAIT_SECONDS):
                    assert await accepted.recv(10) == b""


async def test_an_answer_may_take_longer_than_a_process_takes_to_start(autojump_clock: MockClock) -> None:
    """Only the way to a process that is not there is bounded."""
    del autojump_clock

    async def answer(value: Any) -> Any:
        await trio.sleep(1000)
        return value

    async with _several(_echo, answer) as (first, _):
        assert await first.ask(1, "slow", ["m", 7]) == "slow"


async def test_a_process_that_is_not_started_again_is_waited_for_with_a_bound(autojump_clock: MockClock) -> None:
    """Its callers are told to come again."""
    del autojump_clock
    first = Peers(os.urandom(8).hex(), 2, 0)
    async with _running(first):
        with pytest.raises(NotReady, match="send it again"):
            await first.ask(1, "question", ["m", 7])


async def test_a_process_that_ends_meanwhile_is_left_out_of_the_answers_of_all() -> None:
    """As one that was not there from the beginning."""
    secret = os.urandom(8).hex()
    first, second, third = (Peers(secret, 3, row) for row in range(3))
    begun, answers = trio.Event(), list[Any]()

    async def stay(_: Any) -> Any:
        begun.set()
        await trio.sleep_forever()

    async def ask() -> None:
        answers.extend(await first.ask_all("question"))

    async with _running(first), _running(third), trio.open_nursery() as nursery, _running(second, stay) as end:
        nursery.start_soon(ask)
        await begun.wait()
        end()
    assert answers == [["question"]]


async def test_the_error_of_another_process_tells_which_one() -> None:
    """With its class; one that does not answer in time is told of likewise."""

    async def fail(_: Any) -> Any:
        raise FailedPrecondition("the file is odd")

    async with _several(_echo, _echo, fail) as (first, *_):
        with pytest.raises(FailedPrecondition, match=r"^worker 2: the file is odd$") as caught:
            await first.ask_all("question")
        assert caught.value.message == "worker 2: the file is odd"


async def test_a_process_that_does_not_answer_in_time_is_named(autojump_clock: MockClock) -> None:
    """Unless there is no limit."""
    del autojump_clock

    async def stay(value: Any) -> Any:
        await trio.sleep(1000)
        return value

    async with _several(_echo, _echo, stay) as (first, *_):
        with pytest.raises(NotReady, match=r"of the server's 3 workers, 2 did not answer in 60 s"):
            await first.ask_all("question")
        assert await first.ask_all("question", limit_seconds=float("inf")) == [["question"]] * 2


async def test_an_address_that_somebody_else_has_taken_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may take one that is free for a moment."""
    secret = os.urandom(8).hex()
    first = Peers(secret, 2, 0)
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        await other.bind(f"\0ovmstrio-{secret}-1")
        other.listen(1)
        async with _running(first):
            monkeypatch.setattr(os, "geteuid", lambda: -2)
            with trio.fail_after(WAIT_SECONDS), pytest.raises(NotReady, match="being started"):
                await first.ask(1, "question")
            accepted, _ = await other.accept()
            with accepted:
                assert await accepted.recv(10) == b""


class _LoadingRegistry:
    has_loaded = False

    def lease_now(self, name: str, version: str) -> None:
        """Have none."""

    async def wait_loaded(self) -> None:
        self.has_loaded = True

    async def lease(self, name: str, version: str) -> Any:
        if not self.has_loaded:
            raise ServiceMissing(f"no {name} {version}")
        return _NoSequences()


class _NoSequences:
    servable = object()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


async def test_steps_wait_for_a_process_that_has_not_begun_to_load() -> None:
    """Whoever asks has the model already."""
    registry: Any = _LoadingRegistry()
    with pytest.raises(NotSupported, match="'m' has no sequences"):
        await answer_step(registry, ["m", "", 7, False, False, {}, float("inf")])
