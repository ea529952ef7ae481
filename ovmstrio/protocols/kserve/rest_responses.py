"""An ``InferResponse`` as the answer of a REST inference: JSON, and behind it the tensors that go as bytes.

Keys stand in the order in which OVMS answers over the KServe REST API.  Floating-point numbers are printed as the
shortest text that reads back as the same number; NaN and infinities, which JSON has no numbers for, are the texts
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as protobuf's JSON has them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from ovmstrio.core.errors import InvalidRequest, NotFound, ServerError
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.encoding.json_output import JSON_NUMBERS, json_pieces, json_values
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES
from ovmstrio.encoding.raw_contents import join_buffers, raw_contents
from ovmstrio.protocols.kserve.rest_requests import read_infer_request, read_large_infer_request, split_body
from ovmstrio.serving.interfaces import KSERVE_REST, VERSION_MISSING
from ovmstrio.transport.http.responses import JSON_TYPE
from ovmstrio.util.buffers import PiecedMessage
from ovmstrio.util.slices import run_in_slices

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from ovmstrio.core.request import Buffer, InferRequest, InferResponse
    from ovmstrio.protocols.kserve.rest_requests import KnownDocuments
    from ovmstrio.serving.data_plane import DataPlane

__all__ = [
    "HEAD_LENGTH",
    "InferHead",
    "answer_infer",
    "check_version",
    "render_infer_answer",
]

_PRINTABLE: Final = frozenset(JSON_NUMBERS) - {"BF16"}
_PRINTED_AT_ONCE: Final = 64 * 1024
"""Bytes of outputs that are printed in about a millisecond."""
_JOINED: Final = 256 * 1024
"""Bytes of outputs up to which a copy costs less than a system call over several parts."""
_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


HEAD_LENGTH: Final = "inference-header-content-length"
_LONG_LENGTH: Final = 5
"""Digits of a length of JSON that may be too large to parse on the event loop."""


def render_infer_answer(request: InferRequest, response: InferResponse) -> HttpAnswer:
    """Render a response in the form that its request asked for.

    Raises:
        InvalidRequest: an output that goes as JSON has elements that JSON cannot carry.
    """
    return _render_sized(request, response)[0]


def _render_carefully(request: InferRequest, response: InferResponse) -> HttpAnswer:
    wants_binary = _binary_outputs(request)
    if response.nbytes > _PRINTED_AT_ONCE:
        return _render_in_pieces(wants_binary, response)
    buffers: list[Any] = []
    outputs = []
    for tensor in response.outputs:
        head = _head_of(tensor)
        if isinstance(tensor, RawTensor) and tensor.place is not None:
            head["parameters"] = tensor.place.parameters
        elif wants_binary is None or tensor.name in wants_binary:
            raw = raw_contents(tensor)
            buffers.append(raw)
            head["parameters"] = {"binary_data_size": len(raw)}
        else:
            head["data"] = json_values(tensor)
        outputs.append(head)
    body = orjson.dumps({**_facts_of(response), "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return _answer(body, buffers, response)


def _plain_body(request: InferRequest, response: InferResponse) -> bytes | None:
    """Print an answer whose outputs are all small, and numbers that JSON has; None for any other.

    Keys and values are those of the careful way, which it saves the look at each number.
    """
    for wanted in request.outputs:
        if wanted.parameters:
            return None
    outputs, size = [], 0
    for tensor in response.outputs:
        if type(tensor) is not Tensor or (datatype := tensor.datatype.name) not in _PRINTABLE:
            return None
        array = tensor.array
        size += array.nbytes
        if size > _PRINTED_AT_ONCE:
            return None
        outputs.append({"name": tensor.name, "shape": array.shape, "datatype": datatype, "data": array.ravel()})
    document: dict[str, Any] = {"model_name": response.model_name}
    if response.id:
        document["id"] = response.id
    document["model_version"] = response.model_version
    document["outputs"] = outputs
    body = orjson.dumps(document, option=_NUMPY)
    # So orjson prints numbers that are not finite; of a name with that word nothing is lost but time.
    return None if b"null" in body else body


def _head_of(tensor: Tensor | RawTensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype_name}


def _facts_of(response: InferResponse) -> dict[str, Any]:
    facts: dict[str, Any] = {"model_name": response.model_name}
    if response.id:
        facts["id"] = response.id
    facts["model_version"] = response.model_version
    if response.parameters:
        facts["parameters"] = response.parameters
    return facts


def _answer(body: bytes, buffers: list[Any], response: InferResponse) -> HttpAnswer:
    if not buffers:
        return HttpAnswer(200, JSON_TYPE, body)
    parts = [body, *buffers]
    whole = PiecedMessage(parts) if response.nbytes > _JOINED and response.lies_as_sent else join_buffers(parts)
    return HttpAnswer(200, (*JSON_TYPE, (HEAD_LENGTH, str(len(body)))), whole)


def _render_in_pieces(wants_binary: Collection[str] | None, response: InferResponse) -> HttpAnswer:
    """Render as always, without one call that takes long."""
    pieces = [orjson.dumps(_facts_of(response))[:-1], b',"outputs":[']
    buffers: list[Any] = []
    for number, tensor in enumerate(response.outputs):
        head = _head_of(tensor)
        pieces.append(b"," if number else b"")
        if isinstance(tensor, RawTensor) and tensor.place is not None:
            pieces.append(orjson.dumps(head | {"parameters": tensor.place.parameters}))
        elif wants_binary is None or tensor.name in wants_binary:
            raw = raw_contents(tensor)
            buffers.append(raw)
            pieces.append(orjson.dumps(head | {"parameters": {"binary_data_size": len(raw)}}))
        else:
            pieces += [orjson.dumps(head)[:-1], b',"data":', *json_pieces(tensor), b"}"]
    return _answer(b"".join([*pieces, b"]}"]), buffers, response)


_NOTHING: Final[frozenset[str]] = frozenset()


def _binary_outputs(request: InferRequest) -> frozenset[str] | set[str] | None:
    """Tell which outputs go as bytes, None for all.

    An output that is not listed is JSON even if the request asks for bytes (OVMS's rule), unless none is listed at all:
    then, as with Triton, the request speaks for every output.
    """
    everything = request.parameters.get("binary_data_output") is True if request.parameters else False
    if not request.outputs:
        return None if everything else _NOTHING
    chosen = set()
    for output in request.outputs:
        own = output.parameters.get("binary_data")
        if own is True or (everything and not isinstance(own, bool)):
            chosen.add(output.name)
    return chosen


_MAX_VERSION: Final = 2**63 - 1


def check_version(version: str) -> str:
    """Give a version of a path back if it may name one; an empty one is the default.

    Raises:
        InvalidRequest: it is not a whole number.
        NotFound: it is larger than any version can be.
    """
    if version and not (version.isascii() and version.isdigit()):
        raise InvalidRequest(f'Model version must be an integer, got "{version[:40]}"')
    if version and (len(version) > len(str(_MAX_VERSION)) or int(version) > _MAX_VERSION):
        raise NotFound(VERSION_MISSING)
    return version


class InferHead(NamedTuple):
    """What is said of an inference before its body: by its path, and in its headers of where the JSON ends."""

    model: str
    version: str
    json_length: str | None


def answer_infer(
    plane: DataPlane, known: KnownDocuments, head: InferHead, body: Buffer
) -> Coroutine[Any, Any, HttpAnswer]:
    """Read the body, at once if its JSON is small; what is given infers, and renders the answer.

    Raises:
        ServerError: the refusal.

    Ownership: ``body`` must stay unchanged until there is an answer.
    Cancellation: at any checkpoint of the servable, and while a large body is read.
    """
    model, version, json_length = head
    if len(body) > AT_ONCE_BYTES and (json_length is None or len(json_length) >= _LONG_LENGTH):
        return _answer_large(plane, head, memoryview(body))
    try:
        request = read_infer_request(model, version, body, json_length, known)
    except ServerError as error:
        plane.count_unparsed(model, version, error, KSERVE_REST, len(body))
        raise
    return _infer(plane, request, len(body))


async def _answer_large(plane: DataPlane, head: InferHead, body: memoryview) -> HttpAnswer:
    """Read a body in a worker thread, infer, and render the answer."""
    model, version, json_length = head
    try:
        request = await run_in_slices(read_large_infer_request(model, version, *split_body(body, json_length)))
    except ServerError as error:
        plane.count_unparsed(model, version, error, KSERVE_REST, len(body))
        raise
    return await _infer(plane, request, len(body))


def _infer(plane: DataPlane, request: InferRequest, size: int) -> Coroutine[Any, Any, HttpAnswer]:
    if request.model_version:
        check_version(request.model_version)
    request.received = size
    return plane.infer(request, KSERVE_REST, partial(_render_sized, request))


def _render_sized(request: InferRequest, response: InferResponse) -> tuple[HttpAnswer, int]:
    plain = None if request.parameters or response.parameters else _plain_body(request, response)
    if plain is not None:
        return HttpAnswer(200, JSON_TYPE, plain), len(plain)
    answer = _render_carefully(request, response)
    return answer, answer.size
