"""What becomes of connections whose process has died."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.server.workers.board import Board
from ovmstrio.server.workers.connections import GivenConnection, GivenConnections
from ovmstrio.server.workers.journal import NO_SLOT, SLOTS, Journal, Standing, State
from ovmstrio.server.workers.kept_stream import KeptStream
from ovmstrio.server.workers.recovery import go_on_with
from ovmstrio.server.workers.socket_counts import written_bytes
from ovmstrio.wire.http.fast_lane import FastLane
from ovmstrio.wire.http.heads import Head
from ovmstrio.wire.http.router import Route, RoutedRequest, Router


@pytest.fixture
def journal() -> Journal:
    """A journal in memory of its own."""
    return Journal(memoryview(bytearray(Journal.size())))


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    return client, accepted


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    made = _pair()
    yield made
    for each in made:
        each.close()


def _standing(journal: Journal, accepted: socket.socket, slot: int = 3) -> Standing:
    with trio.socket.from_stdlib_socket(accepted.dup()) as same:
        return journal.standing(slot, same)


def test_what_was_read_is_known(journal: Journal, pair: tuple[socket.socket, socket.socket]) -> None:
    """The bytes, how many are the request at hand, and how many had been answered."""
    client, accepted = pair
    journal.give(3)
    assert _standing(journal, accepted) == Standing(State.GIVEN, 0, b"", 0)
    journal.set_state(3, State.WAITING)
    client.sendall(b"one|two|thr")
    assert journal.read(3, accepted) == b"one|two|thr"
    journal.begin(3, 4)
    assert _standing(journal, accepted) == Standing(State.WAITING, 0, b"one|two|thr", 4)
    journal.finish(3, 4)
    assert _standing(journal, accepted) == Standing(State.WAITING, 4, b"two|thr", 0)
    client.sendall(b"ee")
    assert _standing(journal, accepted).kept == b"two|thr"
    journal.begin(3, None)
    assert _standing(journal, accepted).request is None
    assert journal.read(3, accepted) == b"ee"
    with pytest.raises(BlockingIOError):
        journal.read(3, accepted)


class _Dying:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def recv_into(self, buffer: memoryview) -> int:
        assert self._connection.recv_into(buffer) == 11
        raise KeyboardInterrupt


def test_what_was_read_last_is_found_though_its_length_was_not_written(
    journal: Journal, pair: tuple[socket.socket, socket.socket]
) -> None:
    """By the kernel's counts; also behind what had been answered, and of a client that has ended its side."""
    client, accepted = pair
    journal.give(3, 0, b"")
    client.sendall(b"answered|")
    journal.read(3, accepted)
    journal.finish(3, 9)
    client.sendall(b"lost length")
    with pytest.raises(KeyboardInterrupt):
        journal.read(3, cast("socket.socket", _Dying(accepted)))
    assert _standing(journal, accepted).kept == b"lost length"
    client.shutdown(socket.SHUT_WR)
    assert _standing(journal, accepted).kept == b"lost length"


def test_what_is_not_whole_is_not_taken_for_it(journal: Journal, pair: tuple[socket.socket, socket.socket]) -> None:
    """A slot that was full, one that was being written to, and bytes that were read elsewhere."""
    client, accepted = pair
    journal.give(3)
    client.sendall(b"x" * 70_000)
    while journal.read(3, accepted) is not None:
        pass
    assert _standing(journal, accepted).kept is None
    while True:
        try:
            accepted.recv(100_000)
        except BlockingIOError:
            break
    journal.restart(3, 70_000)
    assert _standing(journal, accepted) == Standing(State.WAITING, 70_000, b"", 0)
    # As after the end of a process in the midst of a change of the slot.
    journal._cells[journal._cell(3, 5)] = 1  # noqa: SLF001 - see above
    assert _standing(journal, accepted).kept is None
    journal.restart(3, 69_990)
    assert _standing(journal, accepted).kept is not None
    journal.restart(3, 70_001)
    assert _standing(journal, accepted).kept is None


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.integers(0, 60)), max_size=20))
def test_a_slot_has_what_was_read_and_not_answered(steps: list[tuple[bytes, int]]) -> None:
    """Whatever was read, answered, and passed on, in whatever pieces."""
    journal = Journal(memoryview(bytearray(Journal.size())))
    client, accepted = _pair()
    with client, accepted:
        journal.give(3)
        unanswered, answered = b"", 0
        for number, (data, most) in enumerate(steps):
            client.sendall(data)
            journal.read(3, accepted)
            unanswered += data
            size = min(most, len(unanswered))
            journal.begin(3, size)
            journal.finish(3, size)
            unanswered, answered = unanswered[size:], answered + size
            standing = _standing(journal, accepted)
            assert (standing.kept, standing.answered) == (unanswered, answered)
            if number % 3 == 0:
                journal.give(3, answered, unanswered)
                assert journal.kept(3) == unanswered


# The stream


async def test_a_stream_says_how_far_it_is(journal: Journal, pair: tuple[socket.socket, socket.socket]) -> None:
    """Until a lane begins nothing is known; then requests wait, begin, are answered and forgotten."""
    client, accepted = pair
    journal.give(3, 0, b"first ")
    ended: list[str] = []
    kept = KeptStream(
        trio.SocketStream(trio.socket.from_stdlib_socket(accepted)), accepted, journal, 3, lambda: ended.append("it")
    )

    def state() -> State:
        return _standing(journal, accepted).state

    assert state() is State.GIVEN
    kept.begin_lane()
    assert await kept.receive_some() == b"first "
    client.sendall(b"second ")
    assert await kept.receive_some() == b"second "
    assert state() is State.WAITING
    late = kept.begin(6)
    late()
    assert state() is State.BEGUN
    await kept.send_all(b"answer")
    late()
    assert state() is State.ANSWERING
    kept.finish()
    late()
    assert state() is State.WAITING
    assert journal.kept(3) == b"second "
    kept.begin(7)()
    assert state() is State.BEGUN
    assert ended == []
    with trio.socket.from_stdlib_socket(accepted.dup()) as same:
        await kept.aclose()
        await kept.aclose()
        assert journal.standing(3, same).state is State.FREE
    assert client.recv(100) == b"answer"
    assert client.recv(100) == b""
    assert (ended, journal.ended_since(0)) == (["it"], [3])
    with pytest.raises(trio.ClosedResourceError):
        await kept.receive_some()


@pytest.mark.parametrize(("sent", "is_whole"), [(b"", False), (b"ans", False), (b"answer", True)])
async def test_an_answer_that_was_sent_as_a_whole_is_known(
    journal: Journal, pair: tuple[socket.socket, socket.socket], sent: bytes, *, is_whole: bool
) -> None:
    """Though the process died before it could say so: by what the kernel has counted, before and behind the client."""
    client, accepted = pair
    accepted.sendall(b"of another process")
    with trio.socket.from_stdlib_socket(accepted.dup()) as same:
        journal.give(3, 0, b"", written_bytes(same))
    kept = KeptStream(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)), accepted, journal, 3, lambda: None)
    kept.begin_lane()
    client.sendall(b"first second third")
    assert await kept.receive_some() == b"first second third"
    kept.begin(6)()
    kept.end_after(10)
    await kept.send_all(b"answered")
    await kept.send_all(b"so")
    kept.finish()
    kept.begin(7)()
    kept.end_after(6)
    await kept.send_all(sent)
    standing = _standing(journal, accepted)
    expected = (
        Standing(State.WAITING, 13, b"third", 0) if is_whole else Standing(State.ANSWERING, 6, b"second third", 7)
    )
    assert standing == expected
    assert client.recv(100).endswith(b"answeredso" + sent)
    assert _standing(journal, accepted) == expected


async def test_a_request_that_does_not_fit_is_kept_from_the_next_one_on(
    journal: Journal, pair: tuple[socket.socket, socket.socket]
) -> None:
    """What follows is kept again once everything that was read has been answered."""
    client, accepted = pair
    journal.give(3)
    kept = KeptStream(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)), accepted, journal, 3, lambda: None)
    kept.begin_lane()
    read = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, partial(client.sendall, b"x" * 100_000)))
        while read < 100_000:
            read += len(await kept.receive_some())
    kept.begin(100_000)()
    standing = _standing(journal, accepted)
    assert (standing.state, standing.kept) == (State.BEGUN, None)
    kept.finish()
    client.sendall(b"next")
    assert await kept.receive_some() == b"next"
    assert _standing(journal, accepted) == Standing(State.WAITING, 100_000, b"next", 0)


async def test_a_stream_of_something_else_is_unknown(
    journal: Journal, pair: tuple[socket.socket, socket.socket]
) -> None:
    """As TLS, and HTTP/2: from its first byte on."""
    client, accepted = pair
    journal.give(3)
    kept = KeptStream(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)), accepted, journal, 3, lambda: None)
    client.sendall(b"PRI")
    assert await kept.receive_some() == b"PRI"
    assert _standing(journal, accepted).state is State.UNKNOWN


async def _echo(request: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, body=request.body)


async def _admit(*_: object) -> None:
    return None


class _LimitedRouter:
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


async def test_requests_that_were_refused_unread_are_answered(
    journal: Journal, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Another process would go on behind them, and behind no more."""
    client, accepted = pair
    client.settimeout(10)
    journal.give(3)
    kept = KeptStream(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)), accepted, journal, 3, lambda: None)
    lane = FastLane(cast("Router", _LimitedRouter()), kept, 1000)
    sent = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        for path, body in (
            ("/echo", b"a long body"),
            ("/limited", b"x"),
            ("/limited", b"a longer body"),
            ("/echo", b""),
        ):
            request = b"POST %b HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n%b" % (
                path.encode(),
                len(body),
                body,
            )
            client.sendall(request)
            sent += len(request)
            answer = await trio.to_thread.run_sync(client.recv, 1000)
            await trio.testing.wait_all_tasks_blocked()
            assert answer.startswith(b"HTTP/1.1 200" if path == "/echo" else b"HTTP/1.1 429")
            assert _standing(journal, accepted) == Standing(State.WAITING, sent, b"", 0)
        nursery.cancel_scope.cancel()


# The parent


async def _see_to(standing: Standing, tries: int = 0) -> tuple[bool, bytes, GivenConnection]:
    """Go on with a connection; gives what the client sees of that."""
    client, accepted = _pair()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
    connection = GivenConnection("REST", stream, tries=tries)
    with client:
        client.settimeout(5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, client.shutdown, socket.SHUT_WR)
            goes_on = await go_on_with(connection, standing, "SIGSEGV")
        await stream.aclose()
        seen = b""
        while data := client.recv(1000):
            seen += data
    return goes_on, seen, connection


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
async def test_a_connection_goes_on_or_ends(
    standing: Standing, *, goes_on: bool, kept: bytes, status: int | None
) -> None:
    """As far as its bytes are known and nothing of them has been answered; the client is told of what has failed."""
    went_on, seen, connection = await _see_to(standing)
    assert (went_on, connection.kept) == (goes_on, kept)
    if status is None:
        assert seen == b""
        return
    head, _, body = seen.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"connection: close" in head) is not goes_on
    assert "SIGSEGV" in json.loads(body)["error"]
    assert connection.answered == (8 if goes_on else 0)


async def test_a_request_is_not_passed_on_for_ever() -> None:
    """When processes keep ending that have read it, it may be the cause."""
    waiting = Standing(State.WAITING, 0, b"request", 0)
    assert [(await _see_to(waiting, tries))[0] for tries in range(3)] == [True, True, False]


async def test_requests_that_were_answered_do_not_count_for_the_next_one() -> None:
    """A connection may outlive any number of processes, as long as each has answered some of it."""
    waiting = Standing(State.WAITING, 5, b"request", 3)
    client, accepted = _pair()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
    connection = GivenConnection("REST", stream, answered=0, tries=2)
    assert await go_on_with(connection, waiting, "SIGKILL")
    assert (connection.answered, connection.tries) == (5, 1)
    client.close()
    await stream.aclose()


async def test_connections_have_places_until_they_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """More than there are slots have none; what a process has closed is closed by the parent, too."""
    board = Board.create(2)
    given, journal = GivenConnections(board), board.journal(1)
    _, accepted = pair
    made = [
        GivenConnection("REST", trio.SocketStream(trio.socket.from_stdlib_socket(accepted.dup()))) for _ in range(4)
    ]
    slots = [given.place(1, each) for each in made[:2]]
    assert len(set(slots)) == 2
    journal.end(slots[0])
    given.take_back(1, slots[1])
    slots = [given.place(1, made[1]), given.place(1, made[2])]
    assert [each.stream.socket.fileno() < 0 for each in made] == [True, False, False, False]
    lost = given.lose(1)
    assert [connection for connection, _ in lost] == made[1:3]
    assert all(connection.is_lost for connection in made[1:3])
    while given.place(1, made[3]) != NO_SLOT:
        pass
    assert given.place(0, made[3]) in range(SLOTS)
    given.close()
    assert made[3].stream.socket.fileno() < 0
    for each in made:
        each.close()
    board.close()
