"""Clients that ask for much and read little or nothing."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import numpy as np

from benchmarks.requests import framed_infer_request
from ovmstrio.wire.grpc.frames import MAX_WINDOW, Setting
from tests.attacks.served import BIG, INFER, Ports
from tests.support.bare_http2 import BareConnection, ConnectionEnded

CALLS: Final = 300
READERS: Final = 50
CALLS_OF_READER: Final = 10
HELD_SECONDS: Final = 8.0
SIP_BYTES: Final = 1_000
SIP_SECONDS: Final = 0.1


def _begin_all(connection: BareConnection, calls: int) -> None:
    body = framed_infer_request(BIG, "x", np.ones(1, np.float32))
    connection.send(b"".join(connection.begin(INFER, body)[1] for _ in range(calls)))


def unread_answers(ports: Ports) -> str:
    """Ask for 16 MB three hundred times, and let the server send none of it."""
    with BareConnection(ports.grpc, settings={Setting.INITIAL_WINDOW_SIZE: 0}, timeout=HELD_SECONDS) as connection:
        ends = time.monotonic() + HELD_SECONDS
        try:
            _begin_all(connection, CALLS)
            while (left := ends - time.monotonic()) > 0:
                connection.socket.settimeout(left)
                connection.take(connection.read())
        except ConnectionEnded:
            return f"the connection was ended after {HELD_SECONDS - ends + time.monotonic():.1f} s"
        except TimeoutError:
            pass
    return f"{CALLS} calls were held for {HELD_SECONDS:.0f} s"


def slow_readers(ports: Ports) -> str:
    """Ask for 160 MB on each of fifty connections, and read 10 kB/s of it."""
    cut = 0
    with contextlib.ExitStack() as stack:
        settings = {Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}
        held = [
            stack.enter_context(BareConnection(ports.grpc, settings=settings, receive_buffer=4096))
            for _ in range(READERS)
        ]
        for connection in held:
            _begin_all(connection, CALLS_OF_READER)
        ends = time.monotonic() + HELD_SECONDS
        while held and (due := time.monotonic() + SIP_SECONDS) < ends:
            reading = [connection for connection in held if _sips(connection)]
            cut += len(held) - len(reading)
            held = reading
            time.sleep(max(0.0, due - time.monotonic()))
    return f"{cut} of {READERS} were cut off within {HELD_SECONDS:.0f} s"


def _sips(connection: BareConnection) -> bool:
    connection.socket.setblocking(False)
    try:
        return bool(connection.socket.recv(SIP_BYTES))
    except BlockingIOError:
        return True
    except OSError:
        return False
