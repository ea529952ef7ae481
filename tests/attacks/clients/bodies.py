"""Bodies that never come to their end, and bodies that are much more than they seem."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
import zlib
from typing import Final

from tests.attacks.served import INFER, SLEEPER, TRIVIAL, Ports
from tests.support.bare_http2 import BareConnection, ConnectionEnded, framed
from tests.support.hostile_bodies import HEADERS, ROUTES, SHAPES, bodies

PATH: Final = f"/v2/models/{TRIVIAL}/infer"
CONNECTIONS: Final = 50
HELD_SECONDS: Final = 8.0
BYTE_SECONDS: Final = 0.1
BOMB_BYTES: Final = 2**30
BOMBS: Final = 4


def _connect(ports: Ports) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ports.rest), timeout=30)


def _alive(held: socket.socket, data: bytes) -> bool:
    try:
        held.sendall(data)
        held.setblocking(False)
        held.recv(4096, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        held.settimeout(30)
    return False


def slow_bodies(ports: Ports) -> str:
    """Send bodies of a thousand bytes by ten a second, on fifty connections."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    by_application = head.replace("/infer", "/generate")
    ended, started = [], time.monotonic()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_connect(ports)) for _ in range(CONNECTIONS)]
        for number, each in enumerate(held):
            each.sendall((by_application if number % 2 else head).encode())
        while held and (due := time.monotonic() + BYTE_SECONDS) < started + HELD_SECONDS:
            living = [each for each in held if _alive(each, b" ")]
            ended += [time.monotonic() - started] * (len(held) - len(living))
            held = living
            time.sleep(max(0.0, due - time.monotonic()))
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
        said = [_status(post) for post in posts] + [_grpc_status(call, stream) for call in calls]
    return "answers " + ", ".join(said)


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
