from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, cast

import numpy as np
import pytest
import trio
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.core.errors import FailedPrecondition, NotReady, NotSupported, SequenceMissing, WorkerRestarting
from ovmstrio.core.tensor import Tensor
from ovmstrio.core.worker_peers import ForwardedStep
from ovmstrio.isolation.messages import PackedMessage, encode_packed
from ovmstrio.models.sequences.requests import decode_arrays, encode_arrays
from ovmstrio.transport.grpc.headers import RetryableError
from ovmstrio.transport.http.responses import retry_after_headers
from ovmstrio.transport.statuses import error_status, to_grpc_error
from ovmstrio.workers.owners import OwnerTimeouts, WorkerEngines, WorkerSequences, answer_step
from ovmstrio.workers.rpc import WorkerRpc
from ovmstrio.workers.shared_state import SharedState
from ovmstrio.workers.worker_group import WorkerGroup
from tests.support.descriptors import without_free_descriptors
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
            found, added = await first.call(1, [number, np.zeros(200_000, np.float32)])
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
        assert await first.call_within({row: ["who", row] for row in (1, 2, 3, 4)}, 0.5) == {1: ["who", 1]}
        assert trio.current_time() - begin == 0.5


async def test_errors_of_answers_are_raised_to_the_asking_peer() -> None:
    async def answer(value: Any) -> Any:
        if value == "missing":
            raise SequenceMissing("there is none")
        return object() if value == "unsendable" else value

    async with _several(_echo, answer) as (first, _):
        with pytest.raises(SequenceMissing, match="there is none"):
            await first.call(1, "missing")
        with pytest.raises(TypeError, match="plain data"):
            await first.call(1, "unsendable")
        assert await first.call(1, "good") == "good"


async def test_ask_all_leaves_out_peers_that_have_not_started_or_end_meanwhile() -> None:
    first, ending, other, _ = _peers(4)
    has_begun, answers = trio.Event(), list[Any]()

    async def never(_: Any) -> Any:
        has_begun.set()
        await trio.sleep_forever()

    async def ask() -> None:
        answers.extend(await first.call_all("question", 1, 2))

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
            await first.call_all("question")
    assert caught.value.message == "worker 1: the file is odd"
    assert answered == [["question"]]


async def test_ask_all_names_peers_that_do_not_answer_in_time(autojump_clock: MockClock) -> None:
    async def answer(value: Any) -> Any:
        await trio.sleep(1000)
        return value

    async with _several(_echo, _echo, answer) as (first, *_):
        with pytest.raises(NotReady, match=r"workers 2 of 3 timed out after 60 s"):
            await first.call_all("question")
        assert await first.call_all("question", limit_seconds=math.inf) == [["question"]] * 2


async def test_question_fails_if_its_peer_ends_and_the_successor_answers() -> None:
    secret = os.urandom(8).hex()
    first, second, successor = (WorkerRpc(secret, 2, row) for row in (0, 1, 1))
    blocking = _Blocking()

    async def ask() -> None:
        with pytest.raises(NotReady, match="exited before it answered"):
            await first.call(1, [0])

    async with _running(first):
        async with _running(second, blocking.answer) as end, trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await blocking.has_begun.wait()
            end()
        with pytest.raises(NotReady, match="is starting"):
            await first.call(1, "question")
        async with _running(successor):
            assert await first.call(1, "question") == "question"


async def test_question_without_a_free_descriptor_is_refused_as_by_an_unreachable_peer() -> None:
    async with _several(_echo, _echo) as (first, _):
        with without_free_descriptors(), pytest.raises(NotReady, match="Too many open files"):
            await first.call(1, "now")
        assert await first.call(1, "later") == "later"


async def test_cancelled_question_cancels_its_answer_only() -> None:
    blocking = _Blocking()
    async with _several(_echo, blocking.answer) as (first, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.call, 1, [0])
            await blocking.has_begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(WAIT_SECONDS):
            await blocking.ended.wait()
        assert await first.call(1, [1]) == 1


async def test_address_belongs_to_one_process_and_is_free_after_its_end() -> None:
    secret = os.urandom(8).hex()
    async with _running(WorkerRpc(secret, 2, 0)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, pytest.raises(OSError, match="in use"):
            other.bind(f"\0ovmstrio-{secret}-rpc-0")
    async with _running(WorkerRpc(secret, 2, 0)):
        pass


# Order of calls, and restarts


@pytest.mark.parametrize("size", [0, 100_000])
async def test_calls_are_started_in_the_order_in_which_they_were_made(size: int) -> None:
    blocking = _Blocking()
    async with _several(_echo, blocking.answer) as (first, _), trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            assert await first.call(1, PackedMessage([number], [bytes(size * (number % 2))])) == number

        for number in range(6):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        await until_async(lambda: len(blocking.begun) == 6)
        blocking.gate.set()
    assert blocking.begun == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [0, 100_000])
async def test_calls_that_wait_for_a_starting_peer_are_sent_in_order(size: int) -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    received: list[Any] = []

    async def answer(value: Any) -> None:
        received.append([value[0], sum(map(len, value[1:]))])

    async with trio.open_nursery() as nursery, _running(first):
        scopes = [trio.CancelScope() for _ in range(10)]
        answered: list[int] = []

        async def ask(number: int) -> None:
            with scopes[number]:
                await first.call(1, PackedMessage([number], [bytes(size)]), wait_seconds=WAIT_SECONDS)
                answered.append(number)

        for number in range(8):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked(0.001)
        scopes[0].cancel()
        scopes[4].cancel()
        await wait_all_tasks_blocked(0.001)
        async with _running(WorkerRpc(secret, 2, 1), answer):
            for number in (8, 9):
                nursery.start_soon(ask, number)
                await wait_all_tasks_blocked(0.001)
            await until_async(lambda: len(answered) == 8)
    assert received == [[number, size] for number in (1, 2, 3, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("size", [0, 100_000])
async def test_leaving_peer_answers_what_it_received_and_its_successor_the_rest(size: int) -> None:
    secret = os.urandom(8).hex()
    first, second, successor = (WorkerRpc(secret, 2, row) for row in (0, 1, 1))
    blocking, results, received = _Blocking(), list[Any](), list[Any]()

    async def answer(value: Any) -> Any:
        received.append([value[0], sum(map(len, value[1:]))])
        return f"successor {value[0]}"

    async def ask(number: int) -> None:
        call = PackedMessage([number], [bytes(size)])
        results.append(await first.call(1, call, wait_seconds=WAIT_SECONDS))

    async with trio.open_nursery() as nursery, _running(first):
        async with _running(second, blocking.answer):
            nursery.start_soon(ask, 0)
            await blocking.has_begun.wait()
            nursery.start_soon(ask, 1)
            left = trio.Event()

            async def leave() -> None:
                await second.leave(WAIT_SECONDS)
                left.set()

            await until_async(lambda: results == [1])
            nursery.start_soon(leave)
            await _settle()
            for number in range(2, 7):
                nursery.start_soon(ask, number)
                # Shorter than the interval of connection attempts, in which tasks run.
                await wait_all_tasks_blocked(0.001)
            assert not left.is_set()
            blocking.gate.set()
            with trio.fail_after(WAIT_SECONDS):
                await left.wait()
            await until_async(lambda: results == [1, 0])
        async with _running(successor, answer):
            await until_async(lambda: len(results) == 7)
    assert blocking.begun == [0, 1]
    assert received == [[number, size] for number in range(2, 7)]
    # The tasks of callers whose results have arrived continue in any order.
    assert results[:2] == [1, 0]
    assert sorted(results[2:]) == [f"successor {number}" for number in range(2, 7)]


async def test_no_call_is_lost_while_peers_replace_each_other() -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    answered: list[int] = []
    over = trio.Event()

    async def ask() -> None:
        while not over.is_set():
            size = len(answered) % 2 * 70_000
            value = await first.call(1, PackedMessage([1], [bytes(size)]), wait_seconds=WAIT_SECONDS)
            answered.append(len(value))

    async with _running(first), trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask)
        for _ in range(5):
            goal = len(answered) + 40
            second = WorkerRpc(secret, 2, 1)
            async with _running(second):
                await until_async(lambda goal=goal: len(answered) > goal)  # type: ignore[misc]  # the loop's own
                with trio.fail_after(WAIT_SECONDS):
                    await second.leave(WAIT_SECONDS)
        async with _running(WorkerRpc(secret, 2, 1)):
            over.set()
            await until_async(lambda: not nursery.child_tasks)
    assert {*answered} == {2}


async def test_leaving_does_not_wait_for_a_dead_caller() -> None:
    first, second = _peers(2)
    blocking = _Blocking()
    async with _running(second, blocking.answer):
        with trio.fail_after(WAIT_SECONDS):
            async with _running(first) as end, trio.open_nursery() as nursery:
                nursery.start_soon(_expect_not_ready, first)
                await blocking.has_begun.wait()
                nursery.start_soon(second.leave, math.inf)
                await _settle()
                end()
            await blocking.ended.wait()


async def _expect_not_ready(peer: WorkerRpc) -> None:
    with pytest.raises(NotReady):
        await peer.call(1, [0])


async def test_workers_of_a_stopping_server_wait_for_each_other() -> None:
    state = SharedState.create(2)
    made = _peers(2)
    groups = [WorkerGroup(each, WorkerEngines(each, OwnerTimeouts(state, 5)), state.metrics) for each in made]
    departed: list[int] = []

    async def leave(row: int) -> None:
        await groups[row].wait_peers_drained({1 - row})
        departed.append(row)

    async with trio.open_nursery() as nursery:
        for group in groups:
            await nursery.start(group.run, None, _Reloading())
        nursery.start_soon(leave, 0)
        await _settle()
        assert departed == []
        with trio.fail_after(WAIT_SECONDS):
            await leave(1)
        await until_async(lambda: sorted(departed) == [0, 1])
        nursery.cancel_scope.cancel()
    state.close()


class _Reloading:
    reload_for_peer = rollback_here = staticmethod(_echo)


async def test_end_of_an_asking_peer_does_not_end_the_answering_peer() -> None:
    first, second, third = _peers(3)
    blocking = _Blocking()

    async with _running(second, blocking.answer), _running(third):
        async with _running(first) as end, trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(_expect_not_ready, first)
            await blocking.has_begun.wait()
            await _settle()
            end()
        assert await third.call(1, [1]) == 1


async def test_answer_may_take_longer_than_the_start_of_a_peer(autojump_clock: MockClock) -> None:
    async def answer(value: Any) -> Any:
        await trio.sleep(1000)
        return value

    async with _several(_echo, answer) as (first, _):
        assert await first.call(1, "slow", wait_seconds=5) == "slow"


async def test_wait_for_a_peer_that_does_not_start_is_bounded(autojump_clock: MockClock) -> None:
    first, _ = _peers(2)
    async with _running(first):
        for seconds in (5, 0.5):
            began = trio.current_time()
            with pytest.raises(WorkerRestarting, match=rf"send the request again .*within {seconds} s") as caught:
                await first.call(1, "question", wait_seconds=seconds)
            assert trio.current_time() - began == pytest.approx(seconds)
            error = to_grpc_error(caught.value)
            assert (error_status(caught.value).http, retry_after_headers(caught.value)) == (
                503,
                (("retry-after", "1"),),
            )
            assert isinstance(error, RetryableError)
            assert error.status is Status.UNAVAILABLE


# Hostile processes


async def test_invalid_question_closes_its_connection_only() -> None:
    secret = os.urandom(8).hex()
    first, second = (WorkerRpc(secret, 2, row) for row in range(2))
    async with _running(first), _running(second):
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            await other.connect(f"\0ovmstrio-{secret}-rpc-1")
            await other.send(b"nonsense")
            with trio.fail_after(WAIT_SECONDS):
                assert await other.recv(100) != b""
                assert await other.recv(100) == b""
        assert await first.call(1, "question") == "question"


@asynccontextmanager
async def _listening_as_peer(secret: str, row: int) -> AsyncIterator[trio.socket.SocketType]:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        await other.bind(f"\0ovmstrio-{secret}-rpc-{row}")
        other.listen(1)
        with trio.fail_after(WAIT_SECONDS):
            yield other


def _greeting() -> bytes:
    packet = encode_packed([0, 3, None], ())
    assert packet is not None
    return packet


@pytest.mark.parametrize(
    ("sends_greeting", "reason"),
    [(False, "is starting"), (True, "exited before it answered")],
    ids=["greeting", "answer"],
)
async def test_invalid_greeting_or_answer_fails_the_question(*, sends_greeting: bool, reason: str) -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    async with _listening_as_peer(secret, 1) as other, _running(first), trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(NotReady, match=reason):
                await first.call(1, "question")

        nursery.start_soon(ask)
        accepted, _ = await other.accept()
        with accepted:
            if sends_greeting:
                await accepted.send(_greeting())
                await accepted.recv(1000)
            await accepted.send(b"nonsense")
            assert await accepted.recv(10) == b""


async def test_address_of_another_user_is_not_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = os.urandom(8).hex()
    first = WorkerRpc(secret, 2, 0)
    async with _listening_as_peer(secret, 1) as other, _running(first):
        monkeypatch.setattr(os, "geteuid", lambda: -2)
        with pytest.raises(NotReady, match="is starting"):
            await first.call(1, "question")
        accepted, _ = await other.accept()
        with accepted:
            assert await accepted.recv(10) == b""


# Steps of sequences


class _Registry:
    """A registry with one model, which is not stateful."""

    def lease_now(self, name: str, version: str) -> Any:
        return self

    servable = object()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


async def test_step_of_a_model_without_sequences_is_refused() -> None:
    with pytest.raises(NotSupported, match="'m' is not a stateful model"):
        await answer_step(cast("Any", _Registry()), ["plain step", "m", "", 7, False, False, {}, math.inf])


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
async def _owners(*answers: Answer) -> AsyncIterator[tuple[SharedState, WorkerSequences]]:
    """Run the first of two workers, and the second if it has an answer; return the sequences of the first."""
    secret = os.urandom(8).hex()
    state = SharedState.create(2)
    try:
        made = [WorkerRpc(secret, 2, row) for row in range(2)]
        async with trio.open_nursery() as nursery:
            for peers, answer in zip(made, answers, strict=False):
                await nursery.start(peers.run, answer)
            yield state, WorkerSequences(made[0], state, OwnerTimeouts(state, 5))
            nursery.cancel_scope.cancel()
    finally:
        state.close()


async def _nothing(_: Any) -> Any:
    return [[]]


@pytest.mark.parametrize(
    ("array", "is_packed"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3), True),
        (np.zeros((300, 300), np.float32), True),
        (np.array([[b"text"]], object), False),
    ],
    ids=["small", "large", "texts"],
)
@pytest.mark.parametrize("identity", [5, 2**64 - 1, "named"])
async def test_step_is_answered_by_the_owner_of_its_sequence(array: Any, is_packed: bool, identity: int | str) -> None:
    calls: list[Any] = []

    async def answer(call: Any) -> Any:
        calls.append(call)
        if call[0] == "packed step":
            heads, tail = call[-2:]
            packed = encode_arrays((name, "FP32", found + 1) for name, _, found in decode_arrays(heads, tail))
            assert packed is not None
            return PackedMessage([7, packed[0]], packed[1])
        return [[["x", "BYTES", call[-2]["x"]]], 7]

    step = ForwardedStep("acc", "3", identity, False, True, {"x": array}, math.inf if is_packed else 1e9)
    async with _owners(_nothing, answer) as (_, sequences):
        with trio.fail_after(WAIT_SECONDS):
            (output,), restored_steps = await sequences.run_step(1, step)
    assert restored_steps == 7
    assert isinstance(output, Tensor)
    np.testing.assert_array_equal(output.array, array + 1 if is_packed else array)
    assert calls[0][1:6] == ["acc", "3", identity, False, True]
    assert (calls[0][0] == "packed step") is is_packed


async def test_step_waits_longer_for_an_owner_that_a_rolling_restart_replaces(autojump_clock: MockClock) -> None:
    async with _owners(_nothing) as (state, sequences):
        step = ForwardedStep("m", "", 5, False, False, {}, math.inf)
        for replaced, seconds in ((-1, 5), (0, 5), (1, 600)):
            state.replaced = replaced
            began = trio.current_time()
            with pytest.raises(WorkerRestarting):
                await sequences.run_step(1, step)
            assert trio.current_time() - began == pytest.approx(seconds)
