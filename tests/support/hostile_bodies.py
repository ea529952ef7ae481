"""A table of hostile request bodies: JSON values of bad shapes, at each place of a valid body of each route."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

Shape = "Callable[[int], bytes]"
_JSON: Final = "application/json"
HEADERS: Final = {"Content-Type": _JSON, "x-ovms-console": "1"}
"""Headers of bodies of JSON for all routes."""


def _repeat(item: bytes, size: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening + b",".join([item] * max(1, size // (len(item) + 1))) + closing


def _numbered(text: bytes, size: int, opening: bytes, closing: bytes) -> bytes:
    count = max(1, size // (len(text) + 4))
    return opening + b",".join([text % number for number in range(count)]) + closing


def _nested(opening: bytes, inner: bytes, closing: bytes, levels: int) -> bytes:
    return opening * levels + inner + closing * levels


def _list_of(item: bytes) -> Callable[[int], bytes]:
    return lambda size: _repeat(item, size)


def _object_of(member: bytes) -> Callable[[int], bytes]:
    return lambda size: _numbered(member, size, b"{", b"}")


def _string_of(text: bytes) -> Callable[[int], bytes]:
    return lambda size: b'"' + text * (size // len(text)) + b'"'


SHAPES: Final[dict[str, Callable[[int], bytes]]] = {
    "empty lists": _list_of(b"[]"),
    "lists of a zero": _list_of(b"[0]"),
    "zeros": _list_of(b"0"),
    "doubles": _list_of(b"-1.2345678901234567e-300"),
    "texts": _list_of(b'"a"'),
    "empty texts": _list_of(b'""'),
    "booleans": _list_of(b"true"),
    "nulls": _list_of(b"null"),
    "empty objects": _list_of(b"{}"),
    "small objects": _list_of(b'{"a":0}'),
    "NaN": _list_of(b"NaN"),
    "zeros and texts": _list_of(b'0,""'),
    "zeros, then a text": lambda size: _repeat(b"0", size)[:-1] + b',"a"]',
    "zeros in lists of two lengths": lambda size: _repeat(b"[0,0]", size)[:-1] + b",[0]]",
    "members": _object_of(b'"k%d":0'),
    "members of lists": _object_of(b'"k%d":[]'),
    "members of objects": _object_of(b'"k%d":{"a":[0]}'),
    "one name": lambda size: _repeat(b'"k":0', size, b"{", b"}"),
    "named objects": lambda size: _numbered(b'{"name":"n%d"}', size, b"[", b"]"),
    "named tensors": lambda size: _numbered(
        b'{"name":"n%d","shape":[1],"datatype":"FP32","data":[0]}', size, b"[", b"]"
    ),
    "equal tensors": _list_of(b'{"name":"b","shape":[1,10],"datatype":"FP32","data":[0,0,0,0,0,0,0,0,0,0]}'),
    "rows": _list_of(b'{"b":[0,0,0,0,0,0,0,0,0,0]}'),
    "long rows": _list_of(b"[" + b",".join([b"0"] * 1000) + b"]"),
    "lists of texts": _list_of(b'["a","b","c","d","e","f"]'),
    "messages": _list_of(b'{"role":"user","content":"x"}'),
    "tools": lambda size: _numbered(b'{"type":"function","function":{"name":"f%d","parameters":{}}}', size, b"[", b"]"),
    "pipeline tensors": lambda size: _numbered(
        b'{"name":"n%d","elem_type":13,"shape":[1],"str_data":["a"]}', size, b"[", b"]"
    ),
    "pipeline numbers": lambda size: (
        b'[{"name":"x","elem_type":1,"shape":[1],"float_data":' + _repeat(b"0.5", size) + b"}]"
    ),
    "long name": lambda size: b'{"' + b"k" * size + b'":0}',
    "long names": lambda size: _numbered(b'"' + b"k" * 1000 + b'%d":0', size, b"{", b"}"),
    "99 levels": _list_of(_nested(b"[", b"0", b"]", 90)),
    "1000 levels": lambda size: b"[%b,%b]" % (_nested(b"[", b"0", b"]", 1000), _repeat(b"0", size)),
    "lists": lambda size: _nested(b"[", b"", b"]", size // 2),
    "objects": lambda size: _nested(b'{"a":', b"0", b"}", size // 6),
    "unclosed lists": lambda size: b"[" * size,
    "brackets in a text": _string_of(b"[{"),
    "characters": _string_of("一".encode()),
    "escaped characters": _string_of(b"\\u4e00"),
    "escapes": _string_of(b"\\n"),
    "backslashes": _string_of(b"\\\\"),
    "quotes": _string_of(b'\\"'),
    "surrogates": _string_of(b"\\ud83d"),
    "long text": _string_of(b"x"),
    "secrets": _string_of(b'password=\\"'),
    "digits": lambda size: b"1" * size,
    "fraction": lambda size: b"0." + b"0" * size + b"1",
    "long numbers": _list_of(b"1" * 4000),
    "large integers": _list_of(b"1" * 25),
    "blanks": lambda size: b" " * size + b"0",
    "lines": lambda size: b"[" + b"\r\n\t" * (size // 3) + b"]",
    "cut off": lambda size: _repeat(b"0", size)[:-1],
    "cut in a text": lambda size: b'"' + b"x" * size,
    "cut after members": lambda size: _object_of(b'"k%d":0')(size)[:-1],
    "no UTF-8": lambda size: b'"' + b"x" * size + b'\xff"',
    "control characters": _string_of(b"\0"),
    "no JSON": lambda size: b"\x08\x01\x12" * (size // 3),
    "UTF-16": lambda size: ("[" + "0," * (size // 4) + "0]").encode("utf-16"),
}
"""JSON values by kind; each is built with a size in bytes."""

_TENSOR: Final = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": list(range(10))}
_MESSAGES: Final = [{"role": "user", "content": "x"}]


@dataclass(frozen=True, slots=True)
class Route:
    """Route or routes with a common body parser.

    Attributes:
        patterns: paths of the route in which ``<model>`` stands for a name and so on; the first is called.
        base: a valid body.
        places: names of members of the body, with dots between levels, whose value is replaced or which are added; an
            empty name is the document. The value at a name with ``!`` at its end is JSON in a text.
        model: the name in the path.
        status: of the answer to the valid body, where no text model is served.
    """

    patterns: tuple[str, ...]
    base: Any = None
    places: tuple[str, ...] = ("",)
    model: str = "model"
    status: int = 200

    @property
    def paths(self) -> list[str]:
        names = {"<model>": self.model, "<version>": "1", "<label>": "stable", "<region>": "r", "<path>": "payload"}
        return [re.sub("<.+?>", lambda match: names[match[0]], pattern) for pattern in self.patterns]


def _openai(*paths: str) -> tuple[str, ...]:
    return tuple(prefix + path for path in paths for prefix in ("/v3", "/v1", "/v3/v1"))


def _text_route(paths: tuple[str, ...], base: dict[str, Any], places: tuple[str, ...], status: int = 404) -> Route:
    return Route(_openai(*paths), {"model": "text", **base}, places, status=status)


def _predict(verb: str) -> tuple[str, ...]:
    return tuple(f"/v1/models/<model>{servable}:{verb}" for servable in ("", "/versions/<version>", "/labels/<label>"))


ROUTES: Final[dict[str, Route]] = {
    "infer": Route(
        ("/v2/models/<model>/infer", "/v2/models/<model>/versions/<version>/infer"),
        {"inputs": [_TENSOR]},
        (
            *("", "inputs", "outputs", "parameters", "id", "x"),
            *("inputs.0.data", "inputs.0.shape", "inputs.0.name", "inputs.0.datatype", "inputs.0.parameters"),
            "inputs.0.parameters.shared_memory_region",
        ),
    ),
    "infer of a pipeline": Route(("/v2/models/<model>/infer",), {"inputs": [_TENSOR]}, ("inputs",), "dag"),
    "infer of a graph": Route(
        ("/v2/models/<model>/infer",), {"inputs": [_TENSOR | {"name": "in"}]}, ("inputs", "parameters"), "graph"
    ),
    "predict": Route(
        _predict("predict"),
        {"inputs": {"b": [list(range(10))]}},
        ("", "inputs", "inputs.b", "inputs.x", "signature_name"),
    ),
    "classify": Route((*_predict("classify"), *_predict("regress")), {}, ("x",), status=404),
    "predict rows": Route(("/v1/models/<model>:predict",), {"instances": [{"b": list(range(10))}]}, ("instances",)),
    "generate": Route(
        ("/v2/models/<model>/generate", "/v2/models/<model>/versions/<version>/generate"),
        {"in": "x"},
        ("", "in", "parameters", "x", "id"),
        "graph",
    ),
    "generate with a model": Route(("/v2/models/<model>/generate",), {"b": list(range(10))}, ("b",)),
    "generate_stream": Route(
        ("/v2/models/<model>/generate_stream", "/v2/models/<model>/versions/<version>/generate_stream"),
        {"in": "x"},
        ("in", "parameters"),
        "graph",
    ),
    "chat": _text_route(
        ("/chat/completions",),
        {"messages": _MESSAGES},
        ("", "messages", "messages.0.content", "tools", "x", "metadata", "response_format", "logit_bias", "stop"),
    ),
    "completions": _text_route(("/completions",), {"prompt": "x"}, ("prompt", "stop", "x")),
    "messages": _text_route(
        ("/messages", "/messages/count_tokens"),
        {"messages": _MESSAGES, "max_tokens": 1},
        (
            *("", "messages", "messages.0.content", "system", "system.0.text"),
            *("tools", "tools.0.input_schema", "tool_choice", "thinking", "metadata", "output_config.format", "x"),
        ),
    ),
    "message batches": Route(_openai("/messages/batches"), {}, ("x",), status=404),
    "chat of Ollama": Route(
        ("/api/chat",),
        {"model": "text", "messages": _MESSAGES},
        ("", "messages", "messages.0.images", "messages.0.tool_calls", "tools", "options", "options.stop", "format"),
        status=404,
    ),
    "texts of Ollama": Route(
        ("/api/generate",),
        {"model": "text", "prompt": "x"},
        ("prompt", "system", "images", "context", "options.x", "format", "think", "keep_alive", "x"),
        status=404,
    ),
    "embeddings of Ollama": Route(
        ("/api/embed", "/api/embeddings"), {"model": "text", "input": "x"}, ("input", "options", "x"), status=404
    ),
    "models of Ollama": Route(("/api/show",), {"model": "text"}, ("", "model", "verbose", "x"), status=404),
    "changes of Ollama": Route(
        ("/api/pull", "/api/push", "/api/create", "/api/copy"), {"model": "text"}, ("", "x"), status=400
    ),
    "responses": _text_route(
        ("/responses", "/responses/input_tokens"),
        {"input": "x"},
        ("input", "tools", "metadata", "previous_response_id", "store"),
    ),
    "cancelled response": _text_route(("/responses/<model>/cancel",), {}, ("x",)),
    "files": _text_route(("/files", "/batches"), {}, ("x",), 400),
    "embeddings": _text_route(("/embeddings",), {"input": "x"}, ("input", "x")),
    "rerank": Route(
        (*_openai("/rerank"), "/rerank", "/v2/rerank", "/v3/v2/rerank", "/v1/v2/rerank", "/v3/v1/v2/rerank"),
        {"model": "text", "query": "x", "documents": ["x"]},
        ("documents", "query"),
        status=404,
    ),
    "tokenize": Route((*_openai("/tokenize"), "/tokenize"), {"model": "text", "text": "x"}, ("text", "x"), status=404),
    "tokenize a chat": _text_route(("/tokenize",), {"messages": _MESSAGES}, ("messages", "tools", "prompt")),
    "detokenize": Route(
        (*_openai("/detokenize"), "/detokenize"), {"model": "text", "tokens": [1]}, ("tokens", "x"), status=404
    ),
    "score": Route(
        (*_openai("/score"), "/score"),
        {"model": "text", "text_1": "x", "text_2": ["x"]},
        ("text_1", "text_2", "x"),
        status=404,
    ),
    "pooling": Route((*_openai("/pooling"), "/pooling"), {"model": "text", "input": "x"}, ("input", "x"), status=404),
    "speech": _text_route(("/audio/speech",), {"input": "x", "voice": "x"}, ("input", "x")),
    "transcriptions": _text_route(("/audio/transcriptions", "/audio/translations"), {}, ("file",), 400),
    "images": _text_route(("/images/generations",), {"prompt": "x"}, ("prompt", "negative_prompt", "size", "x")),
    "image edits": _text_route(("/images/edits", "/images/variations"), {}, ("prompt",), 400),
    "payload": Route(("/v3/<path>",), {"x": 0}, ("", "x", "model")),
    "unknown path of a model": Route(("/v1/models/<path>",), {}, ("x",), status=406),
    "trace setting": Route(
        ("/v2/trace/setting", "/v2/models/<model>/trace/setting"),
        {"trace_level": ["OFF"]},
        ("", "trace_level", "trace_rate", "x"),
    ),
    "logging": Route(("/v2/logging",), {"log_info": True}, ("", "log_info", "x"), status=412),
    "index": Route(("/v2/repository/index",), {"ready": True}, ("", "ready", "x")),
    "load": Route(
        ("/v2/repository/models/<model>/load",),
        {"parameters": {}},
        ("", "parameters", "parameters.config", "parameters.config!", "parameters.file:1/x", "x"),
    ),
    "unload": Route(
        ("/v2/repository/models/<model>/unload",), {"parameters": {}}, ("", "parameters", "x"), "absent", status=404
    ),
    "register": Route(
        ("/v2/systemsharedmemory/region/<region>/register", "/v2/cudasharedmemory/region/<region>/register"),
        {"key": "/absent", "byte_size": 64},
        ("", "key", "offset", "byte_size"),
        status=404,
    ),
    "unregister": Route(
        (
            "/v2/systemsharedmemory/unregister",
            "/v2/systemsharedmemory/region/<region>/unregister",
            "/v2/cudasharedmemory/unregister",
            "/v2/cudasharedmemory/region/<region>/unregister",
        ),
        {},
        ("x",),
    ),
    "reload": Route(("/v1/config/reload", "/console/api/reload"), {}, ("x",)),
    "profile": Route(("/v2/profile",), {"seconds": 0.01}, ("", "seconds", "models", "x")),
    "console load": Route(("/console/api/services/<model>/load", "/console/api/services/<model>/unload"), {}, ("x",)),
    "console level": Route(("/console/api/log_level",), {"level": "INFO"}, ("", "level", "x"), status=412),
    "handler": Route(("/handler",), [1, 2], ("",)),
    "ops": Route(
        ("/ops/prediction",),
        {"key": ["x"], "value": ["y"]},
        ("", "key", "value", "tensors", "tensors.0.float_data", "tensors.0.x", "logid", "x"),
    ),
}
"""Routes that take a body, by their families."""


def bodies(route: Route, place: str, shape: str, size: int) -> bytes:
    hostile = SHAPES[shape](size)
    if not place:
        return hostile
    document = json.loads(json.dumps(route.base))
    holder: Any = document
    *outer, last = place.removesuffix("!").split(".")
    if place.endswith("!"):
        hostile = json.dumps(hostile.decode("latin-1"), ensure_ascii=False).encode()
    for name, after in pairwise((*outer, last)):
        missing: Any = [{}] if after.isdigit() else {}
        holder = holder[int(name)] if isinstance(holder, list) else holder.setdefault(name, missing)
    mark = "\N{SNOWMAN}"
    holder[last] = mark
    return json.dumps(document).encode().replace(json.dumps(mark).encode(), hostile)


def _part(name: bytes, content: bytes, more: bytes = b"") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="' + name + b'"' + more + b"\r\n\r\n" + content + b"\r\n"


def _parts(part: bytes) -> Callable[[int], bytes]:
    return lambda size: part * (size // len(part)) + b"--b--\r\n"


_FORM: Final = "application/x-www-form-urlencoded"
_MULTIPART: Final = "multipart/form-data; boundary=b"
FORMS: Final[dict[str, tuple[str, Callable[[int], bytes]]]] = {
    "fields": (_FORM, lambda size: b"&".join([b"a=1"] * (size // 4))),
    "escaped fields": (_FORM, lambda size: b"a=" + b"%41" * (size // 3)),
    "ampersands": (_FORM, lambda size: b"&" * size),
    "equals signs": (_FORM, lambda size: b"=" * size),
    "parts": (_MULTIPART, _parts(_part(b"a", b"1"))),
    "files": (_MULTIPART, _parts(_part(b"a", b"1", b'; filename="f"'))),
    "one part": (_MULTIPART, lambda size: _part(b"a", b"x" * size) + b"--b--\r\n"),
    "a part of lines": (_MULTIPART, lambda size: _part(b"a", b"\r\n" * (size // 2)) + b"--b--\r\n"),
    "a part of near boundaries": (_MULTIPART, lambda size: _part(b"a", b"\r\n--" * (size // 4)) + b"--b--\r\n"),
    "a part of boundaries without ends": (_MULTIPART, lambda size: b"--b" * (size // 3)),
    "headers without end": (_MULTIPART, lambda size: b"--b\r\n" + b"x: y\r\n" * (size // 6)),
    "no boundary": (_MULTIPART, lambda size: b"x" * size),
    "text": ("text/plain; charset=utf-8", lambda size: b"\xff" * size),
    "text of escapes": ("text/plain; charset=unicode_escape", lambda size: b"\\n" * (size // 2)),
    "text in UTF-7": ("text/plain; charset=utf-7", lambda size: b"+AGE-" * (size // 5)),
    "text in Punycode": ("text/plain; charset=punycode", lambda size: b"a" * size + b"-" + b"b" * 1000),
    "text in IDNA": ("text/plain; charset=idna", lambda size: b"a." * (size // 2)),
    "no JSON": (_JSON, lambda size: b"\0" * size),
}
"""Handler bodies by kind: content type and builder."""
