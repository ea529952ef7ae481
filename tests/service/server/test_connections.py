from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import pytest
import structlog
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.server.workers.board import Board
from ovmstrio.server.workers.connections import GivenConnection, GivenConnections
from ovmstrio.server.workers.journal import NO_SLOT, SLOTS, Journal, Standing, State
from ovmstrio.server.workers.kept_stream import KeptStream
from ovmstrio.server.workers.passing import ConnectionInbox
from ovmstrio.server.workers.recovery import go_on_with
from ovmstrio.server.workers.socket_counts import written_bytes
from ovmstrio.wire.direct_stream import DirectStream
from ovmstrio.wire.http.fast_lane import FastLane
from ovmstrio.wire.http.heads import Head
from ovmstrio.wire.http.router import Route, RoutedRequest, Router
from ovmstrio.work.messages.message_packets import Message
from ovmstrio.work.processes import WorkRequest, WorkRequests
from ovmstrio.work.processes.message_channel import MessageChannel
from ovmstrio.work.processes.packet_socket import packet_pair
from tests.support.waits import WAIT_SECONDS

SLOT = 3


class _Connection:
    """Both ends of a connection, whose server end has a slot of a journal."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname(), timeout=WAIT_SECONDS)
            self.accepted, _ = listener.accept()
        self.accepted.setblocking(False)
        self.journal = Journal(memoryview(bytearray(Journal.size())))
        self.closed: list[str] = []

    def stream(self) -> trio.SocketStream:
        return trio.SocketStream(trio.socket.from_stdlib_socket(self.accepted))

    def keep(self) -> KeptStream:
        return KeptStream(self.stream(), self.accepted, self.journal, SLOT, lambda: self.closed.append("stream"))

    def read(self) -> object:
        return self.journal.read(SLOT, self.accepted)

    def standing(self) -> Standing:
        with trio.socket.from_stdlib_socket(self.accepted.dup()) as same:
            return self.journal.standing(SLOT, same)

    def close(self) -> None:
        self.client.close()
        self.accepted.close()


@pytest.fixture
def connection() -> Iterator[_Connection]:
    made = _Connection()
    yield made
    made.close()


# Connections given to workers


class _Parent:
    """The channel to a worker, and the inbox of the worker."""

    def __init__(self) -> None:
        self.channel, self._end = (MessageChannel(end) for end in packet_pair())
        self.closed: list[str] = []
        self.inbox = ConnectionInbox(
            lambda: self.closed.append("connection"), Journal(memoryview(bytearray(Journal.size())))
        )

    async def give(self, connection: _Connection) -> None:
        await self.channel.send([0, ["REST", NO_SLOT]], connection.accepted.fileno())
        connection.accepted.close()

    async def run_worker(self) -> None:
        async with trio.open_nursery() as nursery:
            await WorkRequests(self._end, nursery).handle_all(self.inbox.put)

    def close(self) -> None:
        self.channel.close()
        self._end.close()


@pytest.fixture
async def parent() -> AsyncIterator[_Parent]:
    made = _Parent()
    yield made
    made.close()


async def test_given_connection_works_in_the_worker(parent: _Parent, connection: _Connection) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent.run_worker)
        await parent.give(connection)
        stream = await parent.inbox.accept()
        connection.client.sendall(b"ping")
        assert await stream.receive_some() == b"ping"
        await stream.send_all(b"pong")
        assert connection.client.recv(10) == b"pong"
        assert not parent.closed
        await stream.aclose()
        await stream.aclose()
        assert connection.client.recv(10) == b""
        parent.channel.finish()
    await parent.inbox.aclose()
    assert parent.closed == ["connection"]


async def test_connection_that_is_not_accepted_is_closed_with_the_inbox(
    parent: _Parent, connection: _Connection
) -> None:
    await parent.give(connection)
    parent.channel.close()
    with trio.fail_after(WAIT_SECONDS):
        await parent.run_worker()
    await parent.inbox.aclose()
    assert connection.client.recv(10) == b""


async def test_connections_without_descriptor_are_reported_as_closed(parent: _Parent) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await parent.inbox.put(WorkRequest(parent.channel, Message([0, ["REST", NO_SLOT]], None)))
    await parent.inbox.aclose()
    assert parent.closed == ["connection"] * 3
    assert [line["event"] for line in logs] == ["connections lost"]


async def test_connection_whose_bytes_are_not_kept_is_served_directly(parent: _Parent, connection: _Connection) -> None:
    closed: list[str] = []
    inbox = ConnectionInbox(lambda: closed.append("connection"), connection.journal, keeps=False)
    connection.journal.give(SLOT)
    descriptor = os.dup(connection.accepted.fileno())
    await inbox.put(WorkRequest(parent.channel, Message([0, ["gRPC", SLOT]], descriptor)))
    stream = await inbox.accept()
    assert isinstance(stream, DirectStream)
    assert connection.standing().state is State.GIVEN
    connection.client.sendall(b"ping")
    assert await stream.receive_some() == b"ping"
    assert connection.standing().state is State.UNKNOWN
    assert not closed
    # The parent process still has a descriptor of the connection.
    await stream.aclose()
    await stream.aclose()
    assert connection.client.recv(10) == b""
    await inbox.aclose()
    assert (closed, connection.journal.ended_since(0)) == (["connection"], [SLOT])


# Journal


def test_journal_knows_read_and_answered_bytes(connection: _Connection) -> None:
    journal = connection.journal
    journal.give(SLOT)
    assert connection.standing() == Standing(State.GIVEN, 0, b"", 0)
    journal.set_state(SLOT, State.WAITING)
    connection.client.sendall(b"one|two|thr")
    assert connection.read() == b"one|two|thr"
    journal.begin(SLOT, 4)
    assert connection.standing() == Standing(State.WAITING, 0, b"one|two|thr", 4)
    journal.finish(SLOT, 4)
    assert connection.standing() == Standing(State.WAITING, 4, b"two|thr", 0)
    connection.client.sendall(b"ee")
    assert connection.standing().kept == b"two|thr"
    journal.begin(SLOT, None)
    assert connection.standing().request is None
    assert connection.read() == b"ee"
    with pytest.raises(BlockingIOError):
        connection.read()


class _KilledSocket:
    """A socket whose process ends as soon as bytes have been read from it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def recv_into(self, buffer: memoryview) -> int:
        assert self._connection.recv_into(buffer) == 11
        raise KeyboardInterrupt


def test_bytes_whose_length_was_not_written_are_found_by_kernel_counts(connection: _Connection) -> None:
    connection.journal.give(SLOT, 0, b"")
    connection.client.sendall(b"answered|")
    connection.read()
    connection.journal.finish(SLOT, 9)
    connection.client.sendall(b"lost length")
    with pytest.raises(KeyboardInterrupt):
        connection.journal.read(SLOT, cast("socket.socket", _KilledSocket(connection.accepted)))
    assert connection.standing().kept == b"lost length"
    connection.client.shutdown(socket.SHUT_WR)
    assert connection.standing().kept == b"lost length"


def test_incomplete_slot_has_no_bytes(connection: _Connection) -> None:
    journal = connection.journal
    journal.give(SLOT)
    connection.client.sendall(b"x" * 70_000)
    while connection.read() is not None:
        pass
    assert connection.standing().kept is None
    with suppress(BlockingIOError):
        while True:
            connection.accepted.recv(100_000)
    journal.restart(SLOT, 70_000)
    assert connection.standing() == Standing(State.WAITING, 70_000, b"", 0)
    # The state after the end of a process that was changing the slot.
    journal._cells[journal._cell(SLOT, 5)] = 1  # noqa: SLF001 - see above
    assert connection.standing().kept is None
    journal.restart(SLOT, 69_990)
    assert connection.standing().kept is not None
    journal.restart(SLOT, 70_001)
    assert connection.standing().kept is None


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.integers(0, 60)), max_size=20))
def test_slot_has_the_bytes_that_were_read_and_not_answered(steps: list[tuple[bytes, int]]) -> None:
    connection = _Connection()
    journal = connection.journal
    journal.give(SLOT)
    unanswered, answered = b"", 0
    for number, (data, most) in enumerate(steps):
        connection.client.sendall(data)
        connection.read()
        unanswered += data
        size = min(most, len(unanswered))
        journal.begin(SLOT, size)
        journal.finish(SLOT, size)
        unanswered, answered = unanswered[size:], answered + size
        standing = connection.standing()
        assert (standing.kept, standing.answered) == (unanswered, answered)
        if number % 3 == 0:
            journal.give(SLOT, answered, unanswered)
            assert journal.kept(SLOT) == unanswered
    connection.close()


# Streams


async def test_stream_records_the_state_of_its_requests(connection: _Connection) -> None:
    connection.journal.give(SLOT, 0, b"first ")
    kept = connection.keep()
    assert connection.standing().state is State.GIVEN
    kept.begin_lane()
    assert await kept.receive_some() == b"first "
    connection.client.sendall(b"second ")
    assert await kept.receive_some() == b"second "
    assert connection.standing().state is State.WAITING
    notify_started = kept.begin(6)
    notify_started()
    assert connection.standing().state is State.BEGUN
    await kept.send_all(b"answer")
    notify_started()
    assert connection.standing().state is State.ANSWERING
    kept.finish()
    notify_started()
    assert connection.standing().state is State.WAITING
    assert connection.journal.kept(SLOT) == b"second "
    kept.begin(7)()
    assert connection.standing().state is State.BEGUN
    assert connection.closed == []
    with trio.socket.from_stdlib_socket(connection.accepted.dup()) as same:
        await kept.aclose()
        await kept.aclose()
        assert connection.journal.standing(SLOT, same).state is State.FREE
    assert [connection.client.recv(100) for _ in range(2)] == [b"answer", b""]
    assert (connection.closed, connection.journal.ended_since(0)) == (["stream"], [SLOT])
    with pytest.raises(trio.ClosedResourceError):
        await kept.receive_some()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", Standing(State.ANSWERING, 6, b"second third", 7)),
        (b"ans", Standing(State.ANSWERING, 6, b"second third", 7)),
        (b"answer", Standing(State.WAITING, 13, b"third", 0)),
    ],
)
async def test_complete_answer_is_recognized_by_kernel_counts(
    connection: _Connection, sent: bytes, expected: Standing
) -> None:
    connection.accepted.sendall(b"of another process")
    with trio.socket.from_stdlib_socket(connection.accepted.dup()) as same:
        connection.journal.give(SLOT, 0, b"", written_bytes(same))
    kept = connection.keep()
    kept.begin_lane()
    connection.client.sendall(b"first second third")
    assert await kept.receive_some() == b"first second third"
    kept.begin(6)()
    kept.end_after(10)
    await kept.send_all(b"answered")
    await kept.send_all(b"so")
    kept.finish()
    kept.begin(7)()
    kept.end_after(6)
    await kept.send_all(sent)
    assert connection.standing() == expected
    assert connection.client.recv(100).endswith(b"answeredso" + sent)
    assert connection.standing() == expected


async def test_journal_continues_after_a_request_larger_than_a_slot(connection: _Connection) -> None:
    connection.journal.give(SLOT)
    kept = connection.keep()
    kept.begin_lane()
    read = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, partial(connection.client.sendall, b"x" * 100_000))
        while read < 100_000:
            read += len(await kept.receive_some())
    kept.begin(100_000)()
    standing = connection.standing()
    assert (standing.state, standing.kept) == (State.BEGUN, None)
    kept.finish()
    connection.client.sendall(b"next")
    assert await kept.receive_some() == b"next"
    assert connection.standing() == Standing(State.WAITING, 100_000, b"next", 0)


async def test_stream_without_lane_is_unknown(connection: _Connection) -> None:
    connection.journal.give(SLOT)
    kept = connection.keep()
    connection.client.sendall(b"PRI")
    assert await kept.receive_some() == b"PRI"
    assert connection.standing().state is State.UNKNOWN


async def _echo(request: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, body=request.body)


async def _admit(*_: object) -> None:
    return None


class _LimitedRouter:
    """Refuses requests for ``/limited`` before their body is read."""

    def __init__(self) -> None:
        self.heads: dict[bytes, RoutedRequest] = {}

    def find(self, _method: str, path: str) -> Route:
        admit = _admit if path == "/limited" else None
        return Route(_echo, lambda _: HttpAnswer(500), path, is_hot=True, admit=admit)

    def routed(self, head: Head, query: str, route: Route, size: int) -> RoutedRequest:
        return RoutedRequest(head, query, route, size)

    def lets_in(self, route: Route) -> bool:
        return route.admit is not None

    def admit_now(self, _route: Route, _headers: object) -> bool:
        return False

    async def admit(self, _route: Route, _request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(429, body=b"not now")

    async def answer(self, route: Route, request: HttpRequest) -> HttpAnswer:
        return await route.view(request)


async def test_requests_refused_before_their_body_count_as_answered(connection: _Connection) -> None:
    connection.journal.give(SLOT)
    lane = FastLane(cast("Router", _LimitedRouter()), connection.keep(), 1000)
    sent = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        for path, body, status in (
            (b"/echo", b"a long body", b"200"),
            (b"/limited", b"x", b"429"),
            (b"/limited", b"a longer body", b"429"),
            (b"/echo", b"", b"200"),
        ):
            head = b"POST %b HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
            connection.client.sendall(head + body)
            sent += len(head + body)
            answer = await trio.to_thread.run_sync(connection.client.recv, 1000)
            await trio.testing.wait_all_tasks_blocked()
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert connection.standing() == Standing(State.WAITING, sent, b"", 0)
        nursery.cancel_scope.cancel()


# Recovery by the parent


@contextmanager
def _given(connection: _Connection, *, tries: int = 0) -> Iterator[GivenConnection]:
    given_connection = GivenConnection("REST", connection.stream(), tries=tries)
    yield given_connection
    given_connection.close()


@pytest.mark.parametrize(
    ("standing", "goes_on", "kept", "status"),
    [
        (Standing(State.GIVEN, 5, b"", 0), True, b"", None),
        (Standing(State.WAITING, 5, b"request", 3), True, b"request", None),
        (Standing(State.WAITING, 5, None, 3), False, b"", 503),
        (Standing(State.BEGUN, 5, b"request", 3), True, b"uest", 500),
        (Standing(State.BEGUN, 5, b"request", None), False, b"", 500),
        (Standing(State.BEGUN, 5, None, 3), False, b"", 500),
        (Standing(State.ANSWERING, 5, b"request", 3), False, b"", None),
        (Standing(State.UNKNOWN, 0, b"", 0), False, b"", None),
        (Standing(State.FREE, 0, b"", 0), False, b"", None),
    ],
)
async def test_connection_goes_on_or_ends_by_the_state_of_its_request(
    connection: _Connection, standing: Standing, *, goes_on: bool, kept: bytes, status: int | None
) -> None:
    connection.client.shutdown(socket.SHUT_WR)
    with _given(connection) as given_connection:
        assert await go_on_with(given_connection, standing, "SIGSEGV") is goes_on
    assert given_connection.kept == kept
    received = b"".join(iter(lambda: connection.client.recv(1000), b""))
    if status is None:
        assert received == b""
        return
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"connection: close" in head) is not goes_on
    assert "SIGSEGV" in json.loads(body)["error"]
    assert given_connection.answered == (8 if goes_on else 0)


@pytest.mark.parametrize(
    ("answered", "tries", "goes_on", "tries_afterwards"),
    [
        pytest.param(0, 0, True, 1, id="first try"),
        pytest.param(0, 1, True, 2, id="second try"),
        pytest.param(0, 2, False, 2, id="third try"),
        pytest.param(5, 2, True, 1, id="first try of the next request"),
    ],
)
async def test_request_is_tried_by_three_workers(
    connection: _Connection, answered: int, tries: int, *, goes_on: bool, tries_afterwards: int
) -> None:
    connection.client.shutdown(socket.SHUT_WR)
    with _given(connection, tries=tries) as given_connection:
        assert (
            await go_on_with(given_connection, Standing(State.WAITING, answered, b"request", 0), "SIGKILL") is goes_on
        )
    assert (given_connection.answered, given_connection.tries) == (answered, tries_afterwards)


async def test_connections_have_slots_until_they_end(connection: _Connection) -> None:
    board = Board.create(2)
    given_connections, journal = GivenConnections(board), board.journal(1)
    made = [
        GivenConnection("REST", trio.SocketStream(trio.socket.from_stdlib_socket(connection.accepted.dup())))
        for _ in range(4)
    ]
    slots = [given_connections.place(1, each) for each in made[:2]]
    assert len(set(slots)) == 2
    journal.end(slots[0])
    given_connections.take_back(1, slots[1])
    slots = [given_connections.place(1, made[1]), given_connections.place(1, made[2])]
    assert [each.stream.socket.fileno() < 0 for each in made] == [True, False, False, False]
    lost = given_connections.lose(1)
    assert [lost_connection for lost_connection, _ in lost] == made[1:3]
    assert all(each.is_lost for each in made[1:3])
    while given_connections.place(1, made[3]) != NO_SLOT:
        pass
    assert given_connections.place(0, made[3]) in range(SLOTS)
    given_connections.close()
    assert made[3].stream.socket.fileno() < 0
    for each in made:
        each.close()
    board.close()
