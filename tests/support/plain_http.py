"""A plain HTTP server in a thread, for tests and benchmarks in which others than this server answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_LOOK_SECONDS = 0.01


class QuietHandler(BaseHTTPRequestHandler):
    """Answers one connection, and prints nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def answering_http(handler: type[QuietHandler]) -> Iterator[str]:
    """Have requests answered by a handler; gives the address, with its scheme."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(_LOOK_SECONDS,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
