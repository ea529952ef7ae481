"""Streams over REST: Triton's ``generate_stream`` with one request, answered by server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.client.streaming import TIMESTAMP, StreamOutput, StreamReply, StreamRequest, Value
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["body_of", "only", "read_events", "split_events"]

_KNOWN: Final = frozenset({"model_name", "model_version", "parameters", "id"})
_KEPT: Final = frozenset({"bool", "int64", "float64"})
"""Types of arrays that come out of JSON as they went in."""


def only(requests: Iterable[StreamRequest]) -> StreamRequest:
    """Give the one request that a stream over REST can have.

    Raises:
        InvalidRequest: there are more, or none.
    """
    found = list(requests)
    if len(found) != 1:
        raise InvalidRequest(f"a stream over REST has one request, got {len(found)}; use gRPC")
    return found[0]


def body_of(request: StreamRequest) -> bytes:
    """Write the body: inputs by name, beside the parameters.

    Raises:
        InvalidRequest: JSON cannot carry an input or a parameter as it is.
    """
    inputs = {name: _value(name, value) for name, value in request.inputs.items()}
    parameters = dict(request.parameters)
    if request.timestamp is not None:
        parameters[TIMESTAMP] = request.timestamp
    document = inputs | ({"parameters": parameters} if parameters else {})
    try:
        return orjson.dumps(document | ({"id": request.id} if request.id else {}))
    except TypeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def _value(name: str, value: Value) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"input {name}: bytes that are no UTF-8 text cannot go over REST; use gRPC") from None
    if value.dtype.name not in _KEPT:
        kept = ", ".join(sorted(_KEPT))
        raise InvalidRequest(
            f"input {name}: over REST, {value.dtype.name} would arrive as another type; use gRPC, or one of {kept}"
        )
    return value.tolist()


def read_events(chunks: Iterable[bytes]) -> Iterator[StreamReply]:
    """Read the events of a stream of replies.

    Raises:
        ValueError: the data of an event is no JSON.
        AttributeError: it is no JSON object.
    """
    for kind, data in split_events(chunks):
        yield _reply(kind, orjson.loads(data))


def split_events(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Give the name and the data of each server-sent event that has data."""
    kind, data = b"", list[bytes]()
    for line in _lines(chunks):
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"event":
                kind = value
            elif field == b"data":
                data.append(value)
            continue
        if data:
            yield kind, b"\n".join(data)
        kind, data = b"", []


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at line feeds alone: JSON may hold Unicode's other separators of lines as they are."""
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def _reply(kind: bytes, document: dict[str, Any]) -> StreamReply:
    if kind == b"error":
        return StreamReply(error=str(document.get("error", document)))
    outputs = tuple(
        StreamOutput(name, "JSON", (len(value),) if isinstance(value, list) else (), value)
        for name, value in document.items()
        if name not in _KNOWN
    )
    return StreamReply(outputs, document.get("parameters", {}).get(TIMESTAMP))
