"""Streams over REST: Triton's ``generate_stream`` with one request, answered by server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.client.streaming import StreamOutput, StreamReply, StreamRequest
from ovmstrio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["body_of", "only", "read_events"]

_KNOWN: Final = frozenset({"model_name", "model_version", "parameters", "id"})
_TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"


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
        InvalidRequest: an input is bytes that are no text, which JSON cannot carry.
    """
    inputs: dict[str, Any] = {}
    for name, value in request.inputs.items():
        if isinstance(value, np.ndarray):
            inputs[name] = value.tolist()
            continue
        try:
            inputs[name] = value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"input {name}: bytes that are no UTF-8 text cannot go over REST; use gRPC") from None
    parameters = dict(request.parameters)
    if request.timestamp is not None:
        parameters[_TIMESTAMP] = request.timestamp
    document = inputs | ({"parameters": parameters} if parameters else {})
    return orjson.dumps(document | ({"id": request.id} if request.id else {}))


def read_events(lines: Iterable[str]) -> Iterator[StreamReply]:
    """Read server-sent events line by line.

    Raises:
        ValueError: the data of an event is no JSON object.
    """
    kind = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield _reply(kind, orjson.loads(value))
        elif not line:
            kind = ""


def _reply(kind: str, document: dict[str, Any]) -> StreamReply:
    if kind == "error":
        return StreamReply(error=str(document.get("error", document)))
    outputs = tuple(StreamOutput(name, "JSON", (), value) for name, value in document.items() if name not in _KNOWN)
    return StreamReply(outputs, document.get("parameters", {}).get(_TIMESTAMP))
