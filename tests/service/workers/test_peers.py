from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.core.errors import FailedPrecondition, NotReady, NotSupported, SequenceMissing, ServiceMissing
from ovmstrio.core.tensor import Tensor
from ovmstrio.core.worker_peers import ForwardedStep, SequenceMoved
from ovmstrio.isolation.messages import PackedMessage, encode_packed
from ovmstrio.models.sequences.requests import decode_arrays, encode_arrays
from ovmstrio.workers.rpc import FAREWELL, WorkerRpc
from ovmstrio.workers.sequence_forwarding import PACKED_STEP, SequenceForwarder, SharedSequenceDirectory, run_plain_step
from ovmstrio.workers.shared_state import SharedState
from tests.support.waits import WAIT_SECONDS, until_async

Answer = Callable[[Any], Awaitable[Any]]


async def _echo(value: Any) -> Any:
    return value


async def _fail(_: Any) -> Any:
    raise FailedPrecondition("the file is odd")


async def _never(_: Any) -> Any:
    await trio.sleep_forever()


def _peers(count: int) -> list[WorkerRpc]:
    secret = os.urandom(8).hex()
    return [WorkerRpc(secret, count, row) for row in range(count)]


@asynccontextmanager
async def _running(peers: WorkerRpc, answer: Answer = _echo) -> AsyncIterator[Callable[[], None]]:
    async with trio.open_nursery() as nursery:
        await nursery.start(peers.run, answer)
        yield nursery.cancel_scope.cancel
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _several(*answers: Answer) -> AsyncIterator[list[WorkerRpc]]:
    made = _peers(len(answers))
    async with AsyncExitStack() as opened:
        for peers, answer in zip(made, answers, strict=True):
            await opened.enter_async_context(_running(peers, answer))
        yield made


class _Blocking:
    """Handler that records the numbers of requests, and answers the first one after its gate opens."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended = trio.Event()
        self.gate = trio.Event()
        self.has_begun = trio.Event()

    async def answer(self, value: Any) -> Any:
        number = value[0]
        self.begun.append(number)
        if number == 0:
            self.has_begun.set()
            try:
                await self.gate.wait()
            finally:
                self.ended.set()
        return number


async def _settle() -> None:
    await wait_all_tasks_blocked(0.05)


async def test_questions_are_answered_concurrently() -> None:
    gates = {number: trio.Event() for number in range(3)}

    async def answer(value: Any) -> Any:
        number, array = value
        await gates[number].wait()
        return [number, array + number]

    results: list[int] = []
    async with _several(_echo, answer) as (first, _), trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            found, added = await first.ask(1, [number, np.zeros(200_000, np.float32)])
            assert found == number
            assert float(added.sum()) == number * 200_000
            results.append(number)
            if number:
                gates[number - 1].set()

        for number in range(3):
            nursery.start_soon(ask, number)
        gates[2].set()
    assert results == [2, 1, 0]


async def test_ask_soon_leaves_out_peers_that_fail_or_do_not_answer_in_time(autojump_clock: MockClock) -> None:
    async with _several(_echo, _echo, _fail, _never) as (first, *_):
        begin = trio.current_time()
        assert await first.ask_soon({row: ["who", row] for row in (1, 2, 3, 4)}, 0.5) == {1: ["who", 1]}
        assert trio.current_time() - begin == 0.5


async def test_errors_of_answers_are_raised_to_the_asking_peer() -> None:
    async def answer(value: Any) -> Any:
        if value == "missing":
            raise SequenceMissing("there is none")
        return object() if value == "unsendable" else value

    async with _several(_echo, answer) as (first, _):
        with pytest.raises(SequenceMissing, match="there is none"):
            await first.ask(1, "missing")
        with pytest.raises(TypeError, match="plain data"):
            await first.ask(1, "unsendable")
        assert await first.ask(1, "good") == "good"


async def test_ask_all_leaves_out_peers_that_have_not_started_or_end_meanwhile() -> None:
    first, ending, other, _ = _peers(4)
    has_begun, answers = trio.Event(), list[Any]()

    async def never(_: Any) -> Any:
        has_begun.set()
        await trio.sleep_forever()

    async def ask() -> None:
        answers.extend(await first.ask_all("question", 1, 2))

    async with (
        _running(first),
        _running(other),
        trio.open_nursery() as nursery,
        _running(ending, never) as end,
    ):
        nursery.start_soon(ask)
        await has_begun.wait()
        end()
    assert answers == [["question", 1, 2]]


async def test_ask_all_raises_the_error_of_a_peer_once_the_others_have_answered() -> None:
    answered: list[Any] = []

    async def answer(value: Any) -> Any:
        await wait_all_tasks_blocked()
        answered.append(value)

    async with _several(_echo, _fail, answer) as (first, *_):
        with pytest.raises(FailedPrecondition, match=r"^worker 1: the file is odd$") as caught:
            await first.ask_all("question")
    assert caught.value.message == "worker 1: the file is odd"
    assert answered == [["question"]]


async def test_ask_all_names_peers_that_do_not_answer_in_time(autojump_clock: MockClock) -> None:
    async def answer(value: Any) -> Any:
        await trio.sleep(1000)
        return value

    async with _several(_echo, _echo, answer) as (first, *_):
        with pytest.raises(NotReady, match=r"workers 2 of 3 timed out after 60 s"):
            await first.ask_all("question")
        assert await first.ask_all("question", limit_seconds=math.inf) == [["question"]] * 2


async def test_question_fails_if_its_peer_ends_and_the_successor_answers() -> None:
    secret = os.urandom(8).hex()
    first, second, successor = (WorkerRpc(secret, 2, row) for row in (0, 1, 1))
    blocking = _Blocking()

    async def ask() -> None:
        with pytest.raises(NotReady, match="exited before it answered"):
            await first.ask(1, [0])

    async with _running(first):
        async with _running(second, blocking.answer) as end, trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await blocking.has_begun.wait()
            end()
        with pytest.raises(NotReady, match="is starting"):
            await first.ask(1, "question")
        async with _running(successor):
            assert await first.ask(1, "question") == "question"


async def test_cancelled_question_cancels_its_answer_only() -> None:
    blocking = _Blocking()
    async with _several(_echo, blocking.answer) as (first, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.ask, 1, [0])
            await blocking.has_begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(WAIT_SECONDS):
            await blocking.ended.wait()
        assert await first.ask(1, [1]) == 1


async def test_address_belongs_to_one_process_and_is_free_after_its_end() -> None:
    secret = os.urandom(8).hex()
    async with _running(WorkerRpc(secret, 2, 0)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, pytest.raises(OSError, match="in use"):
            other.bind(f"\0ovmstrio-{secret}-0")
    async with _running(WorkerRpc(secret, 2, 0)):
        pass


# Orders


async def test_questions_of_an_order_are_answered_one_after_the_other() -> None:
    blocking = _Blocking()
    async with _several(_echo, blocking.answer) as (first, _), trio.open_nursery() as nursery:

        async def ask(number: int, size: int) -> None:
            assert await first.ask(1, [number, bytes(size)], ["m", 7]) == number

        for number, size in enumerate((400_000, 10, 300_000, 1)):
            nursery.start_soon(ask, number, size)
            await _settle()
        assert await first.ask(1, [9, b""], ["m", 8]) == 9
        blocking.gate.set()
    assert blocking.begun == [0, 9, 1, 2, 3]


async def test_cancelled_questions_of_an_order_do_not_change_the_order() -> None:
    blocking = _Blocking()
    async with _several(_echo, blocking.answer) as (first, _):
        scopes = [trio.CancelScope() for _ in range(5)]

        async def ask(number: int) -> None:
            with scopes[number]:
                assert await first.ask(1, [number], ["m", 7]) == number

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
                await _settle()
            for number in (1, 2):
                scopes[number].cancel()
                await _settle()
            # The last question of the order was cancelled. The next question waits for those before it.
            nursery.start_soon(ask, 3)
            await _settle()
            assert blocking.begun == [0]
            blocking.gate.set()
        assert blocking.begun == [0, 3]
        await ask(4)
    assert blocking.begun == [0, 3, 4]


@pytest.mark.parametrize("size", [0, 100_000])
async def test_questions_that_wait_for_a_starting_peer_are_sent_in_order(size: int) -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    received: list[Any] = []

    async def answer(value: Any) -> None:
        received.append([value[0], sum(map(len, value[1:]))])

    async with trio.open_nursery() as nursery, _running(first):
        scopes = [trio.CancelScope() for _ in range(10)]

        async def ask(number: int) -> None:
            with scopes[number]:
                await first.ask(1, PackedMessage([number], [bytes(size)]), ["m", 7])

        for number in range(8):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        scopes[0].cancel()
        scopes[4].cancel()
        await wait_all_tasks_blocked()
        async with _running(WorkerRpc(secret, 2, 1), answer):
            nursery.start_soon(ask, 8)
            await wait_all_tasks_blocked()
            first.announce()
            nursery.start_soon(ask, 9)
            await until_async(lambda: len(received) == 8)
    assert received == [[number, size] for number in (1, 2, 3, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("size", [0, 100_000])
async def test_questions_that_a_leaving_peer_has_not_begun_are_sent_to_its_successor(size: int) -> None:
    secret = os.urandom(8).hex()
    first, second, successor = (WorkerRpc(secret, 2, row) for row in (0, 1, 1))
    blocking, results, received = _Blocking(), list[Any](), list[Any]()

    async def answer(value: Any) -> Any:
        received.append([value[0], sum(map(len, value[1:]))])
        return "successor"

    async def ask(number: int, *order: Any) -> None:
        results.append(await first.ask(1, PackedMessage([number], [bytes(size)]), list(order)))

    async with trio.open_nursery() as nursery, _running(first):
        async with _running(second, blocking.answer):
            nursery.start_soon(ask, 0, "m", 8)
            await blocking.has_begun.wait()
            nursery.start_soon(second.leave, None)
            await _settle()
            for number in range(1, 7):
                nursery.start_soon(ask, number, "m", 7)
                await _settle()
            blocking.gate.set()
            await _settle()
        assert results == [0]
        async with _running(successor, answer):
            first.announce()
            await until_async(lambda: len(results) == 7)
    assert received == [[number, size] for number in range(1, 7)]
    assert results == [0, *["successor"] * 6]


async def test_peer_that_leaves_without_successor_tells_the_others() -> None:
    received: list[Any] = []

    async def answer(value: Any) -> None:
        received.append(value)

    async with _several(answer, _echo, _echo) as (_, replaced, last):
        with trio.fail_after(WAIT_SECONDS):
            await replaced.leave(None)
            await last.leave(set())
    assert received == [[FAREWELL, 2]]


async def test_end_of_an_asking_peer_does_not_end_the_answering_peer() -> None:
    first, second, third = _peers(3)
    blocking = _Blocking()

    async def ask() -> None:
        with pytest.raises(NotReady):
            await first.ask(1, [0], ["m", 7])

    async with _running(second, blocking.answer), _running(third):
        async with _running(first) as end, trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
            await blocking.has_begun.wait()
            await _settle()
            end()
        assert await third.ask(1, [1], ["m", 7]) == 1


async def test_answer_may_take_longer_than_the_start_of_a_peer(autojump_clock: MockClock) -> None:
    async def answer(value: Any) -> Any:
        await trio.sleep(1000)
        return value

    async with _several(_echo, answer) as (first, _):
        assert await first.ask(1, "slow", ["m", 7]) == "slow"


async def test_wait_for_a_peer_that_does_not_start_is_bounded(autojump_clock: MockClock) -> None:
    first, _ = _peers(2)
    async with _running(first):
        with pytest.raises(NotReady, match="send the request again"):
            await first.ask(1, "question", ["m", 7])


# Hostile processes


async def test_invalid_question_closes_its_connection_only() -> None:
    secret = os.urandom(8).hex()
    first, second = (WorkerRpc(secret, 2, row) for row in range(2))
    async with _running(first), _running(second):
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            await other.connect(f"\0ovmstrio-{secret}-1")
            await other.send(b"nonsense")
            with trio.fail_after(WAIT_SECONDS):
                assert await other.recv(10) == b""
        assert await first.ask(1, "question") == "question"


@asynccontextmanager
async def _listening_as_peer(secret: str, row: int) -> AsyncIterator[trio.socket.SocketType]:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        await other.bind(f"\0ovmstrio-{secret}-{row}")
        other.listen(1)
        with trio.fail_after(WAIT_SECONDS):
            yield other


async def test_invalid_answer_fails_its_question() -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    async with _listening_as_peer(secret, 1) as other, _running(first), trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(NotReady, match="exited before it answered"):
                await first.ask(1, "question")

        nursery.start_soon(ask)
        accepted, _ = await other.accept()
        with accepted:
            await accepted.recv(1000)
            await accepted.send(b"nonsense")
            assert await accepted.recv(10) == b""


async def test_address_of_another_user_is_not_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    async with _listening_as_peer(secret, 1) as other, _running(first):
        monkeypatch.setattr(os, "geteuid", lambda: -2)
        with pytest.raises(NotReady, match="is starting"):
            await first.ask(1, "question")
        accepted, _ = await other.accept()
        with accepted:
            assert await accepted.recv(10) == b""


# Steps of sequences


class _LoadingRegistry:
    """A registry whose names are unknown until it has loaded."""

    has_loaded = False

    def lease_now(self, name: str, version: str) -> None: ...

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


async def test_step_waits_until_the_worker_has_loaded() -> None:
    registry: Any = _LoadingRegistry()
    with pytest.raises(NotSupported, match="'m' is not a stateful model"):
        await run_plain_step(registry, ["m", "", 7, False, False, {}, math.inf])


@given(
    st.lists(
        st.sampled_from([np.float32, np.int8, np.uint64, np.bool_]).flatmap(
            lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4))
        ),
        max_size=4,
    )
)
def test_packed_arrays_survive_a_round_trip(arrays: list[Any]) -> None:
    packed = encode_arrays((str(number), "type", array) for number, array in enumerate(arrays))
    assert packed is not None
    heads, buffers = packed
    found = list(decode_arrays(heads, memoryview(b"".join(buffers))))
    assert [(name, kind) for name, kind, _ in found] == [(str(number), "type") for number in range(len(arrays))]
    for (_, _, array), sent in zip(found, arrays, strict=True):
        assert (array.dtype, array.shape, array.flags.writeable) == (sent.dtype, sent.shape, True)
        assert array.tobytes() == sent.tobytes()


def test_values_that_are_no_json_or_too_large_have_no_swift_packet() -> None:
    assert encode_packed([1, "a", None], [b"xyz"]) is not None
    assert encode_packed([2**64], ()) is None
    assert encode_packed([1], [bytes(70_000)]) is None
    assert encode_arrays([("texts", "", np.array([b"a"], object))]) is None


@asynccontextmanager
async def _owners(
    *answers: Answer,
) -> AsyncIterator[tuple[SharedState, list[WorkerRpc], SequenceForwarder, SharedSequenceDirectory]]:
    """Run the first of two workers, and the second if it has an answer; return the directory of the second."""
    secret = os.urandom(8).hex()
    board = SharedState.create(2)
    try:
        made = [WorkerRpc(secret, 2, row) for row in range(2)]
        async with trio.open_nursery() as nursery:
            for peers, answer in zip(made, answers, strict=False):
                await nursery.start(peers.run, answer)
            here, there = (SharedSequenceDirectory(board, row, secret) for row in range(2))
            yield board, made, SequenceForwarder(made[0], here), there
            nursery.cancel_scope.cancel()
    finally:
        board.close()


async def _nothing(_: Any) -> Any:
    return [[]]


def _step(*, start: bool = False) -> ForwardedStep:
    return ForwardedStep("m", "", 5, start, False, {}, math.inf)


@pytest.mark.parametrize(
    ("array", "is_swift"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3), True),
        (np.zeros((300, 300), np.float32), True),
        (np.array([[b"text"]], object), False),
    ],
    ids=["small", "large", "texts"],
)
@pytest.mark.parametrize("identity", [5, 2**64 - 1, "named"])
async def test_step_is_answered_by_the_owner_of_its_sequence(array: Any, is_swift: bool, identity: int | str) -> None:
    questions: list[Any] = []

    async def answer(question: Any) -> Any:
        questions.append(question)
        if question[0] == PACKED_STEP:
            heads, tail = question[-2:]
            packed = encode_arrays((name, "FP32", found + 1) for name, _, found in decode_arrays(heads, tail))
            assert packed is not None
            return PackedMessage([packed[0]], packed[1])
        return [["x", "BYTES", question[-2]["x"]]]

    step = ForwardedStep("acc", "3", identity, False, True, {"x": array}, math.inf if is_swift else 1e9)
    async with _owners(_nothing, answer) as (_, _, owners, _):
        with trio.fail_after(WAIT_SECONDS):
            (output,) = await owners.run_step(1, step)
    assert isinstance(output, Tensor)
    np.testing.assert_array_equal(output.array, array + 1 if is_swift else array)
    assert questions[0][1:6] == ["acc", "3", identity, False, True]
    assert (questions[0][0] == PACKED_STEP) is is_swift


async def test_step_waits_for_the_restart_of_the_owner_while_it_has_the_sequence(autojump_clock: MockClock) -> None:
    async with _owners(_nothing) as (board, made, owners, there):
        there.begin("m", 1, 5, 500)
        assert owners.owner("m", 5) == 1
        with pytest.raises(NotReady, match="is starting"):
            await owners.run_step(1, _step())
        has_owner: list[bool] = []

        async def run() -> None:
            with pytest.raises(SequenceMoved):
                await owners.run_step(1, _step())
            has_owner.append(owners.owner("m", 5) is not None)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(run)
            await wait_all_tasks_blocked()
            assert not has_owner
            board.clear(1)
            made[0].announce()
        assert not has_owner[-1]


async def test_steps_follow_those_under_way_though_their_sequence_has_ended() -> None:
    gate = trio.Event()

    async def answer(_: Any) -> Any:
        await gate.wait()
        return [[]]

    async with _owners(_nothing, answer) as (_, _, owners, there), trio.open_nursery() as nursery:
        there.begin("m", 1, 5, 500)
        nursery.start_soon(owners.run_step, 1, _step())
        await _settle()
        there.end("m", 1, 5)
        assert owners.owner("m", 5) == 1
        nursery.start_soon(owners.run_step, 1, _step(start=True))
        await _settle()
        gate.set()
        await until_async(lambda: owners.owner("m", 5) is None)
