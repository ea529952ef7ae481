"""Attacks by name: each function is one attack by hostile clients, and returns a summary of the server's answers.

``python -m tests.attacks.attacks NAME GRPC_PORT REST_PORT`` runs one.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks.requests import framed_bytes_request, framed_infer_request
from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import MAX_WINDOW, FrameType, Setting
from tests.attacks.attacked_server import BIG, INFER, ROW, SLEEPER, TRIVIAL, Ports
from tests.support.bare_http2 import BareConnection, ConnectionEnded, frame, framed
from tests.support.hostile_bodies import HEADERS, ROUTES, SHAPES, bodies

PATH: Final = f"/v2/models/{TRIVIAL}/infer"
CONNECTIONS: Final = 50
HELD_SECONDS: Final = 8.0
STEP_SECONDS: Final = 0.1
BOMB_BYTES: Final = 2**30
BOMBS: Final = 4


def _connect(ports: Ports) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ports.rest), timeout=30)


def _received(connection: socket.socket, size: int) -> bytes | None:
    """Return bytes that have arrived, none if the connection has ended, or None if it is open and silent."""
    connection.setblocking(False)
    try:
        return connection.recv(size)
    except BlockingIOError:
        return None
    except OSError:
        return b""
    finally:
        connection.settimeout(30)


def _hold(held: Sequence[socket.socket], keeps: Callable[[socket.socket], bool]) -> list[float]:
    """Use each connection ten times a second, and return the seconds until each of those that the server ended."""
    ended, started = list[float](), time.monotonic()
    while held and (due := time.monotonic() + STEP_SECONDS) < started + HELD_SECONDS:
        kept = [each for each in held if keeps(each)]
        ended += [time.monotonic() - started] * (len(held) - len(kept))
        held = kept
        time.sleep(max(0.0, due - time.monotonic()))
    return ended


def _send_byte(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        connection.sendall(b" ")
        return _received(connection, 4096) is None
    return False


def slow_bodies(ports: Ports) -> str:
    """Send bodies of a thousand bytes by ten a second, on fifty connections."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    by_application = head.replace("/infer", "/generate")
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_connect(ports)) for _ in range(CONNECTIONS)]
        for number, each in enumerate(held):
            each.sendall((by_application if number % 2 else head).encode())
        ended = _hold(held, _send_byte)
    last = f", the last after {ended[-1]:.1f} s" if ended else ""
    return f"{len(ended)} of {CONNECTIONS} were ended within {HELD_SECONDS:.0f} s{last}"


def hostile_bodies(ports: Ports) -> str:
    """Send bodies of a megabyte with hostile values to an inference, a prediction and a handler."""
    paths = {"infer": PATH, "predict": f"/v1/models/{TRIVIAL}:predict", "handler": f"/{SLEEPER}"}
    statuses: dict[int, int] = {}
    for name, path in paths.items():
        for number, shape in enumerate(SHAPES):
            place = ROUTES[name].places[number % len(ROUTES[name].places)]
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", ports.rest, timeout=60)) as connection:
                connection.request("POST", path, bodies(ROUTES[name], place, shape, 2**20), HEADERS)
                status = connection.getresponse().status
            statuses[status] = statuses.get(status, 0) + 1
    return f"statuses {statuses}"


def _bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    part = b" " * 2**20
    return b"".join([packer.compress(part) for _ in range(BOMB_BYTES // len(part))]) + packer.flush()


def gzip_bombs(ports: Ports) -> str:
    """Send a gibibyte that was compressed to a megabyte over both protocols, on four connections each."""
    bomb = _bomb()
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(BareConnection(ports.grpc)) for _ in range(BOMBS)]
        posts = [stack.enter_context(_connect(ports)) for _ in range(BOMBS)]
        for call in calls:
            stream, data = call.begin(INFER, framed(bomb, compressed=True), [("grpc-encoding", "gzip")])
            call.send(data)
        post_head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
        for post in posts:
            with contextlib.suppress(OSError):
                post.sendall(f"{post_head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb)
        output = [_status(post) for post in posts] + [_grpc_status(call, stream) for call in calls]
    return "answers " + ", ".join(output)


def _status(post: socket.socket) -> str:
    try:
        return post.recv(4096).split(b" ", 2)[1].decode()
    except (OSError, IndexError):
        return "none"


def _grpc_status(call: BareConnection, stream: int) -> str:
    try:
        return f"gRPC {call.wait(stream).status}"
    except ConnectionEnded:
        return "none"


CLIENTS: Final = 40
CALLS: Final = 50
PAUSE_SECONDS: Final = 0.05


def _call_often(ports: Ports) -> Counter[str]:
    outcomes = Counter[str]()
    connection = http.client.HTTPConnection("127.0.0.1", ports.rest, timeout=30)
    for _ in range(CALLS):
        connection.request("POST", f"/{SLEEPER}", "[1]")
        answer = connection.getresponse()
        answer.read()
        outcomes[str(answer.status)] += 1
        time.sleep(PAUSE_SECONDS)
    return outcomes


def overload(ports: Ports) -> str:
    """Call a service that takes eight calls at once with forty clients, which soon come again."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = sum(pool.map(_call_often, [ports] * CLIENTS), Counter[str]())
    return "answers " + ", ".join(f"{count} of {status}" for status, count in sorted(counts.items()))


def _ask(ports: Ports, graph: str, times: int, text: bytes = b"x", headers: Sequence[tuple[str, str]] = ()) -> str:
    answers = []
    for _ in range(times):
        with BareConnection(ports.grpc, timeout=120) as connection:
            try:
                answer = connection.ask(INFER, framed_bytes_request(graph, "in", text)[5:], headers)
                answers.append(f"{answer.status} in {len(answer.headers.get('grpc-message', ''))} characters")
            except ConnectionEnded:
                answers.append("no answer")
    return "status " + ", ".join(answers)


def long_searches(ports: Ports) -> str:
    """Make a node search with an expression that takes exponential time, twice, with deadlines of two seconds."""
    return _ask(ports, "long_search", 2, b"(a+)+$", [("grpc-timeout", "2S")])


def long_texts(ports: Ports) -> str:
    """Raise an exception of 20 MB, five times."""
    return _ask(ports, "long_text", 5)


def long_chains(ports: Ports) -> str:
    """Raise an exception with a thousand causes, five times."""
    return _ask(ports, "long_chain", 5)


def long_outputs(ports: Ports) -> str:
    """Answer with 400 MB, which is more than an answer may have, three times."""
    return _ask(ports, "long_output", 3)


STREAMS: Final = 2_000
SETTINGS_FRAMES: Final = 20
ENTRIES: Final = 2_730
WINDOW_UPDATE_BYTES: Final = 500_000


def _open_calls(ports: Ports) -> BareConnection:
    connection = BareConnection(ports.grpc, settings={Setting.INITIAL_WINDOW_SIZE: 0}, window=0)
    body = framed_infer_request(TRIVIAL, "b", ROW)
    for number in range(STREAMS):
        _, data = connection.begin(INFER, body if number % 2 else None)
        connection.send(data)
    return connection


def _until_answered(connection: BareConnection) -> str:
    mark = b"attacked"
    try:
        connection.send(frame(FrameType.PING, 0, 0, mark))
        while (got := connection.read()).kind != FrameType.PING or got.payload != mark:
            connection.take(got)
    except ConnectionEnded:
        code = connection.goaway and int.from_bytes(connection.goaway.payload[4:8], "big")
        return f"the connection was ended with code {code}"
    return "everything was taken"


def settings_flood(ports: Ports) -> str:
    """Change the window of every stream 54,600 times in 330 kB."""
    with _open_calls(ports) as connection:
        entries = (struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, number % 7) for number in range(ENTRIES))
        flood = frame(FrameType.SETTINGS, 0, 0, b"".join(entries))
        with contextlib.suppress(ConnectionEnded):
            for _ in range(SETTINGS_FRAMES):
                connection.send(flood)
        return _until_answered(connection)


def window_update_flood(ports: Ports) -> str:
    """Open the connection's window by a byte, 38,000 times."""
    with _open_calls(ports) as connection:
        update = frames.window_update(0, 1)
        with contextlib.suppress(ConnectionEnded):
            connection.send(update * (WINDOW_UPDATE_BYTES // len(update)))
        return _until_answered(connection)


UNREAD_CALLS: Final = 300
CALLS_OF_READER: Final = 10
SIP_BYTES: Final = 1_000


def _begin_all(connection: BareConnection, calls: int) -> None:
    body = framed_infer_request(BIG, "x", np.ones(1, np.float32))
    connection.send(b"".join(connection.begin(INFER, body)[1] for _ in range(calls)))


def unread_answers(ports: Ports) -> str:
    """Ask for 16 MB three hundred times, and let the server send none of it."""
    with BareConnection(ports.grpc, settings={Setting.INITIAL_WINDOW_SIZE: 0}, timeout=HELD_SECONDS) as connection:
        ends = time.monotonic() + HELD_SECONDS
        try:
            _begin_all(connection, UNREAD_CALLS)
            while (left := ends - time.monotonic()) > 0:
                connection.socket.settimeout(left)
                connection.take(connection.read())
        except ConnectionEnded:
            return f"the connection was ended after {HELD_SECONDS - ends + time.monotonic():.1f} s"
        except TimeoutError:
            pass
    return f"{UNREAD_CALLS} calls were held for {HELD_SECONDS:.0f} s"


def slow_readers(ports: Ports) -> str:
    """Ask for 160 MB on each of fifty connections, and read 10 kB/s of it."""
    settings = {Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(BareConnection(ports.grpc, settings=settings, receive_buffer=4096))
            for _ in range(CONNECTIONS)
        ]
        for connection in held:
            _begin_all(connection, CALLS_OF_READER)
        ended = _hold([each.socket for each in held], lambda each: _received(each, SIP_BYTES) != b"")
    return f"{len(ended)} of {CONNECTIONS} were ended within {HELD_SECONDS:.0f} s"


@dataclass(frozen=True, slots=True)
class Attack:
    run: Callable[[Ports], str]
    options: tuple[str, ...] = ()
    graph_keys: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def what(self) -> str:
        return (self.run.__doc__ or "").strip().rstrip(".")


ATTACKS: Final[dict[str, Attack]] = {
    "settings": Attack(settings_flood),
    "window_updates": Attack(window_update_flood),
    "long_texts": Attack(long_texts),
    "long_chains": Attack(long_chains),
    "long_outputs": Attack(long_outputs),
    "unread_answers": Attack(unread_answers, ("--client_stall_timeout", "3")),
    "slow_readers": Attack(slow_readers, ("--client_stall_timeout", "3")),
    "slow_bodies": Attack(slow_bodies, ("--request_read_timeout", "3")),
    "gzip_bombs": Attack(gzip_bombs),
    "hostile_bodies": Attack(hostile_bodies),
    "overload": Attack(overload),
    "long_searches": Attack(long_searches, graph_keys={"long_search": {"python_isolation": "process"}}),
}

if __name__ == "__main__":
    print(ATTACKS[sys.argv[1]].run(Ports(*map(int, sys.argv[2:]))))  # noqa: T201 - the parent process reads the output
