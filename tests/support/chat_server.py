"""A server that speaks OpenAI's chat API in a thread, for clients: scripted answers and recorded requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.plain_http import QuietHandler, answering_http


@dataclass
class ChatServer:
    """What it says and has heard.

    Attributes:
        url: where it is, with the path of the API.
        deltas: of each answer; ``None`` waits until the client is gone.
        error: what is answered in place of a stream: a status and a document.
        late_error: the text of an error that ends a stream.
        asked: the documents of the requests.
        keys: what came as ``Authorization``.
        left: is set when a client has gone in the middle of an answer.
    """

    url: str = ""
    deltas: list[dict[str, Any] | None] = field(default_factory=list)
    error: tuple[int, Any] | None = None
    late_error: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


class _Handler(QuietHandler):
    chat: ChatServer

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self._answer(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:  # noqa: N802 - the library's name
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
    """Run a chat server until the block ends."""
    chat = ChatServer()
    with answering_http(type("_ChatHandler", (_Handler,), {"chat": chat})) as address:
        chat.url = f"{address}/v3"
        yield chat
