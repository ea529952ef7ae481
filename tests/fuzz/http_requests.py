"""Requests of every path of the server, invalid HTTP/1.1, and the connections that send them."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any, Final, NamedTuple

from tests.fuzz.messages import Message, Outcome, Transport
from tests.fuzz.mutations import NUMBERS, TEXTS, changed_bytes, changed_json, text

_JSON: Final = ("content-type", "application/json")
_BINARY_LENGTH: Final = "inference-header-content-length"


class _Endpoint(NamedTuple):
    name: str
    weight: int
    paths: tuple[str, ...]
    documents: tuple[Any, ...] = ()


def _tensor(name: str, shape: list[int], datatype: str, data: list[Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data, **more}


_NUMBERS: Final = _tensor("b", [1, 10], "FP32", [0.5] * 10)
_KSERVE: Final = (
    {"inputs": [_NUMBERS]},
    {"id": "7", "inputs": [_NUMBERS], "outputs": [{"name": "a", "parameters": {"binary_data": True}}]},
    {"inputs": [_tensor("b", [1, 10], "FP32", [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])], "parameters": {"sequence_id": 3}},
    {"inputs": [_tensor("in", [1], "BYTES", ["abc"])]},
    {"inputs": [_tensor("strings", [2], "BYTES", ["abc", "é"])]},
    {"inputs": [_tensor("x", [1, 2], "FP32", [1.0, 2.0])], "parameters": {"sequence_id": 3, "sequence_start": True}},
)
_INFERS: Final = tuple(
    f"POST /v2/models/{name}/infer" for name in ("model", "dag", "dynamic", "graph", "strings", "stateful", "ops")
)
_TALK: Final = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]
_TOOLS: Final = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
_CHAT: Final = {"model": "chat", "messages": _TALK, "max_tokens": 3}
_CHATS: Final = (
    _CHAT,
    {**_CHAT, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.9, "seed": 1},
    {**_CHAT, "tools": _TOOLS, "tool_choice": "auto", "logprobs": True, "stop": ["a", "b"], "n": 2},
    {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}},
    {**_CHAT, "messages": [{"role": "tool", "tool_call_id": "1", "content": "2"}], "presence_penalty": 0.1},
)
_ENDPOINTS: Final = (
    _Endpoint("openai chat", 8, tuple(f"POST {prefix}/chat/completions" for prefix in ("/v1", "/v3")), _CHATS),
    _Endpoint(
        "openai completions", 4, ("POST /v1/completions",),
        ({"model": "chat", "prompt": "Hi", "max_tokens": 3, "echo": True, "logprobs": 1},
         {"model": "chat", "prompt": [[4, 5], [6]], "max_tokens": 2, "stream": True}),
    ),
    _Endpoint(
        "openai responses", 4, ("POST /v1/responses",),
        ({"model": "chat", "input": "Hi", "max_output_tokens": 3},
         {"model": "chat", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
          "max_output_tokens": 3, "stream": True, "tools": [{"type": "function", "name": "add", "parameters": {}}]}),
    ),
    _Endpoint(
        "anthropic", 6, ("POST /v1/messages", "POST /v1/messages/count_tokens"),
        ({"model": "chat", "max_tokens": 3, "system": [{"type": "text", "text": "Be brief."}], "messages": _TALK[1:]},
         {"model": "chat", "max_tokens": 3, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024},
          "tools": [{"name": "add", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
          "messages": [{"role": "user", "content": "Hi"},
                       {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
                       {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]}]}),
    ),
    _Endpoint(
        "ollama", 6, ("POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/show", "GET /api/tags"),
        ({"model": "chat", "messages": _TALK[:1], "tools": _TOOLS, "options": {"num_predict": 3, "stop": ["a"]}},
         {"model": "chat", "prompt": "Hi", "think": False, "format": "json", "options": {"num_predict": 3}},
         {"model": "chat", "input": ["a"], "truncate": True}),
    ),
    _Endpoint(
        "openai others", 4,
        ("POST /v3/tokenize", "POST /v3/embeddings", "POST /v3/rerank", "GET /v3/models", "GET /v1/models/chat",
         "POST /v3/audio/speech", "POST /v3/graph"),
        ({"model": "chat", "text": ["a", "b"], "add_special_tokens": False}, {"model": "chat", "input": "a"},
         {"model": "chat", "query": "a", "documents": ["b"]}),
    ),
    _Endpoint("rest kserve", 30, (*_INFERS, "POST /v2/models/model/versions/1/infer"), _KSERVE),
    _Endpoint(
        "rest generate", 6, ("POST /v2/models/graph/generate", "POST /v2/models/model/generate"),
        ({"in": "abc"},),
    ),
    _Endpoint("rest generate_stream", 3, ("POST /v2/models/graph/generate_stream",), ({"in": "abc"},)),
    _Endpoint(
        "rest tensorflow", 16,
        ("POST /v1/models/model:predict", "POST /v1/models/dynamic/versions/1:predict",
         "POST /v1/models/strings:predict"),
        ({"instances": [[0.5] * 10]}, {"inputs": {"b": [[1] * 10]}, "signature_name": "serving_default"},
         {"instances": [{"strings": "a"}, {"strings": {"b64": "YWJj"}}]}),
    ),
    _Endpoint(
        "rest questions", 8,
        ("GET /v2", "GET /v2/models", "GET /v2/models/model", "GET /v2/models/graph/ready", "GET /v2/health/ready",
         "POST /v2/repository/index", "GET /v1/models/model", "GET /v1/models/model/metadata", "GET /v1/models"),
        ({"ready": True},),
    ),
    _Endpoint("rest admin", 1, ("GET /v1/config", "GET /metrics"), ({},)),
    _Endpoint("handlers", 14,
          ("POST /handler", "GET /handler?a=1&b=2", "PUT /handler", "DELETE /handler", "GET /handler/info"),
          ([1, 2, 3], {"a": {"b": [None, 1.5, "x"]}})),
    _Endpoint("rest paddle", 12, ("POST /ops/prediction", "GET /ops/health", "GET /ops/trace", "GET /ops/metrics"),
          ({"key": ["x"], "value": ["abc"], "logid": 3}, {"key": ["x", "y"], "value": ["[1, 2]", "1"]})),
)  # fmt: skip
_HEADERS: Final = (
    ("content-type", ("application/octet-stream", "multipart/form-data; boundary=x", "multipart/form-data", "image/png",
                      "text/plain", "application/json; charset=utf-16", "application/x-www-form-urlencoded", "")),
    ("accept", ("*/*", "text/event-stream", "application/octet-stream", "x")),
    ("accept-encoding", ("gzip", "br;q=2", "identity;q=0")),
    ("connection", ("close", "keep-alive", "te, close")),
    ("x-request-id", ("1", "é", "a" * 3000)),
    ("authorization", ("Bearer x", "Basic !!!")),
    ("origin", ("http://a", "null")),
    ("cookie", ("a=b; c", "=;=")),
    ("range", ("bytes=0-1", "x")),
    ("if-none-match", ("*",)),
    ("x-forwarded-for", ("1.2.3.4", ",")),
)  # fmt: skip
_TROUBLES: Final = (
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: x", "Content-Length: 3",
    "Content-Length: -1", "Content-Length: +5", "Content-Length: 99999999999999999999", "Content-Length: 1, 1",
    "Expect: 100-continue", "Expect: x", "Upgrade: h2c", "Upgrade: websocket", "Connection: Upgrade", "Host:",
    "Host: a b", "Trailer: x", " folded: x", "no colon", ": empty", "A\0: b", "A: b\rC: d", "X-Long: " + "z" * 20_000,
)  # fmt: skip


def http_message(random: Random, number: int) -> Message:
    (endpoint,) = random.choices(_ENDPOINTS, [each.weight for each in _ENDPOINTS])
    verb, _, path = random.choice(endpoint.paths).partition(" ")
    if random.random() < 0.08:
        path = _changed_path(random, path)
    if random.random() < 0.03:
        verb = random.choice(("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW"))
    body, headers = b"", [_JSON]
    if verb in {"POST", "PUT", "PATCH"} and endpoint.documents:
        body, headers = _body(random, random.choice(endpoint.documents), binary=endpoint.name == "rest kserve")
    if random.random() < 0.1:
        name, values = random.choice(_HEADERS)
        headers = [each for each in headers if each[0] != name] + [(name, random.choice(values))]
    return Message(number, endpoint.name, Transport.HTTP, body, f"{verb} {path}", tuple(headers))


def _changed_path(random: Random, path: str) -> str:
    segments = path.split("/")
    match random.randrange(4):
        case 0:
            segments[random.randrange(len(segments))] = text(random)
        case 1:
            segments.insert(
                random.randrange(len(segments) + 1), random.choice((*TEXTS, "versions", str(random.choice(NUMBERS))))
            )
        case 2:
            segments[-1] += random.choice(("?", "?a=%ff", "?a=1&a=2", "%", "%zz", ";a", "?" + "b" * 3000))
        case _:
            segments = changed_bytes(random, path.encode()).decode("latin-1").split("/")
    changed = "/" + "/".join(segments).lstrip("/")
    return "".join(each if "!" <= each <= "~" and each != "#" else f"%{ord(each) & 0xFF:02x}" for each in changed)


def _body(random: Random, document: Any, *, binary: bool) -> tuple[bytes, list[tuple[str, str]]]:
    if binary and random.random() < 0.3:
        return _binary_body(random, document)
    body = changed_json(random, document)
    match random.randrange(40):
        case 0:
            return gzip.compress(body, mtime=0), [_JSON, ("content-encoding", "gzip")]
        case 1:
            return body, [_JSON, ("content-encoding", random.choice(("gzip", "deflate", "br", "x")))]
        case 2:
            return zlib.compress(body), [_JSON, ("content-encoding", "deflate")]
        case 3:
            return changed_bytes(random, gzip.compress(body, mtime=0)), [_JSON, ("content-encoding", "gzip")]
    return body, [_JSON]


def _binary_body(random: Random, document: Any) -> tuple[bytes, list[tuple[str, str]]]:
    tensor = dict(document["inputs"][0])
    tensor.pop("data")
    size = random.choice((40, 40, 40, 4, 0, 39, 400, 2**31))
    tensor["parameters"] = {"binary_data_size": size}
    changed = {**document, "inputs": [tensor]}
    head = changed_json(random, changed) if random.random() < 0.5 else json.dumps(changed).encode()
    length = str(random.choice((len(head), len(head), len(head), len(head) - 1, 0, -1, 10**9, "x")))
    return head + random.randbytes(min(size, 400)), [_JSON, (_BINARY_LENGTH, length)]


def http_bytes(message: Message) -> bytes:
    verb, _, path = message.path.partition(" ")
    lines = [f"{verb} {path} HTTP/1.1", "host: 127.0.0.1", *(f"{name}: {value}" for name, value in message.headers)]
    if message.body or verb in {"POST", "PUT", "PATCH"}:
        lines.append(f"content-length: {len(message.body)}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8") + message.body


def raw_http_message(random: Random, number: int) -> Message:
    requests = [http_bytes(http_message(random, number)) for _ in range(random.choice((1, 1, 1, 2, 3)))]
    if random.random() < 0.5:
        at = random.randrange(len(requests))
        head, _, body = requests[at].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        lines.insert(random.randint(1, len(lines)), random.choice(_TROUBLES).encode("latin-1"))
        requests[at] = b"\r\n".join(lines) + b"\r\n\r\n" + body
    data = b"".join(requests)
    if random.random() < 0.1:
        data = data.replace(b"\r\n", b"\n")
    if random.random() < 0.6:
        data = changed_bytes(random, data)
    return Message(number, "raw http", Transport.RAW_HTTP, data)


SECONDS: Final = 20.0
_BODILESS: Final = {204, 304}
_HEAD_END: Final = b"\r\n\r\n"


class _Answer(NamedTuple):
    status: int
    body: bytes
    is_last: bool


class HttpReader:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    def read(self, verb: str = "GET") -> _Answer:
        while (answer := self._read_one(verb)).status < 200:
            pass
        return answer

    def _read_one(self, verb: str) -> _Answer:
        first, *lines = self._until(_HEAD_END).decode("latin-1").split("\r\n")
        version, status = first.split(" ")[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        is_last = "close" in fields.get("connection", "").lower()
        code = int(status)
        if verb == "HEAD" or code in _BODILESS or code < 200:
            return _Answer(code, b"", is_last)
        if "chunked" in fields.get("transfer-encoding", ""):
            return _Answer(code, self._chunks(), is_last)
        return _Answer(code, self._exactly(int(fields["content-length"])), is_last)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self._until(b"\r\n"), 16):
            parts.append(self._exactly(size + 2)[:-2])
        self._until(b"\r\n")
        return b"".join(parts)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._unread:
            self._more()
        found, _, self._unread = self._unread.partition(mark)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._more()
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def _more(self) -> None:
        try:
            data = self._connection.recv(65536)
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._unread += data


class HttpLane:
    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def begin(self, messages: Sequence[Message]) -> None:
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", self._port), timeout=SECONDS)
            self._reader = HttpReader(self._connection)
        last = next((at for at, message in enumerate(messages) if ("connection", "close") in message.headers), None)
        sent = messages if last is None else messages[: last + 1]
        with contextlib.suppress(OSError):
            self._connection.sendall(b"".join(map(http_bytes, sent)))

    def end(self, messages: Sequence[Message]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        tried = 0
        while len(outcomes) < len(messages):
            message = messages[len(outcomes)]
            try:
                answer = self._reader.read(message.path.partition(" ")[0])
            except (EOFError, ValueError, OSError) as error:
                self.close()
                tried += 1
                if tried == 1:
                    # Alone, for what follows an answer on a connection that the server closes may cost that answer.
                    self.begin([message])
                    continue
                outcomes.append(Outcome())
                outcomes[-1].add_silence(f"no answer over HTTP: {error!r}")
            else:
                outcomes.append(Outcome())
                outcomes[-1].add_http(answer.status, answer.body)
                if answer.is_last:
                    self.close()
            if tried or self._connection is None:
                tried = 0
                self.begin(messages[len(outcomes) :])
        return outcomes


def exchange_raw_http(port: int, data: bytes) -> Outcome:
    outcome = Outcome()
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        reader = HttpReader(connection)
        try:
            while True:
                answer = reader.read()
                outcome.add_http(answer.status, answer.body)
        except TimeoutError:
            outcome.add_silence("a connection stays open over HTTP")
        except (EOFError, ValueError, KeyError, OSError):
            outcome.kinds.append("closed")
    return outcome
