"""HTTP servers in threads and a TCP relay, as substitutes for external servers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LOOK_SECONDS = 0.01


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def answering_http(handler: type[QuietHandler]) -> Iterator[str]:
    """Serve a handler; yield the address with its scheme."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(_LOOK_SECONDS,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class BreakingHandler(QuietHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "audio/wav" if self.path.endswith("speech") else "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"6\r\n: half\r\n")
        self.close_connection = True


@dataclass
class ChatServer:
    """Answers of a chat server, and received requests; a delta ``None`` waits for a disconnect, which sets ``left``."""

    url: str = ""
    deltas: list[dict[str, Any] | None] = field(default_factory=list)
    error: tuple[int, Any] | None = None
    late_error: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


class _Handler(QuietHandler):
    chat: ChatServer

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        chat = self.chat
        chat.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        chat.keys.append(self.headers.get("Authorization", ""))
        if chat.error is not None:
            self._answer(*chat.error)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(chat)
        except OSError:
            chat.left.set()

    def _stream(self, chat: ChatServer) -> None:
        for delta in chat.deltas:
            if delta is None:
                self.connection.settimeout(30)
                if not self.connection.recv(1):
                    chat.left.set()
                return
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})
        if chat.late_error:
            self._event({"error": {"message": chat.late_error, "type": "server_error"}})
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(chat.deltas)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(b"data: %b\n\n" % json.dumps(document).encode())
        self.wfile.flush()

    def _answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    chat = ChatServer()
    with answering_http(type("_ChatHandler", (_Handler,), {"chat": chat})) as address:
        chat.url = f"{address}/v3"
        yield chat


class Relay:
    """TCP relay between its own port and a server that tests hold or cut."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def hold(self) -> None:
        self._flowing.clear()

    def cut(self) -> None:
        # A thread that accepts is not woken by the close of its socket.
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._flowing.set()
        for thread in self._threads:
            thread.join()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._target)
                self._sockets += (near, far)
                self._start(self._pass, near, far)
                self._start(self._pass, far, near)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._flowing.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def relaying(target: str) -> Iterator[Relay]:
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.cut()
