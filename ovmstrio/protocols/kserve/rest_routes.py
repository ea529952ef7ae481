"""HTTP routes of KServe v2, and the encoder of inference responses: JSON, followed by the outputs sent as bytes.

Keys are in the order of OVMS's KServe REST API.  Floats are printed as the shortest text that reads back as the same
number; NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as in protobuf's JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import InvalidRequest, NotFound, NotReady, ServerError, VersionLoading
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.encoding.json_output import JSON_NUMBERS, json_pieces, json_values
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES
from ovmstrio.encoding.raw_contents import join_buffers, raw_contents
from ovmstrio.protocols.kserve.extensions import config_document, server_extensions, server_version, statistics_document
from ovmstrio.protocols.kserve.request_templates import RestTemplates
from ovmstrio.protocols.kserve.rest_requests import read_infer_request, read_large_infer_request, split_body
from ovmstrio.serving.aggregate import aggregate_sequences, aggregate_statistics
from ovmstrio.serving.interfaces import KSERVE_REST, NOT_LOADED, VERSION_MISSING
from ovmstrio.serving.ovms_errors import decompressed_call_body, make_admission
from ovmstrio.transport.http.responses import JSON_TYPE, json_response
from ovmstrio.transport.http.router import rule
from ovmstrio.util.buffers import PiecedMessage
from ovmstrio.util.slices import run_in_slices
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Coroutine, Sequence

    from ovmstrio.core.http_messages import Headers, HttpRequest
    from ovmstrio.core.request import Buffer, InferRequest, InferResponse
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import BodyView, Rule

# ----------------------------------------------------------------------
# Inference responses
# ----------------------------------------------------------------------

_PRINTABLE: Final = frozenset(JSON_NUMBERS) - {"BF16"}
_MAX_ONE_CALL_BYTES: Final = 64 * 1024  # Output size that takes about a millisecond to print
_MAX_JOINED_BYTES: Final = 256 * 1024  # Output size up to which one copy is cheaper than a vectored write
_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


HEAD_LENGTH: Final = "inference-header-content-length"
_MIN_LONG_DIGITS: Final = 5  # Digits of a JSON length that may be too long to parse on the event loop


def encode_infer_response(request: InferRequest, response: InferResponse) -> HttpAnswer:
    """Encode a response in the form that the request selects; raise ``InvalidRequest`` if JSON cannot represent it."""
    return _render_sized(request, response)[0]


def _render_general(request: InferRequest, response: InferResponse) -> HttpAnswer:
    wants_binary = _binary_outputs(request)
    if response.nbytes > _MAX_ONE_CALL_BYTES:
        return _render_in_pieces(wants_binary, response)
    buffers: list[Any] = []
    outputs = []
    for tensor in response.outputs:
        head = _output_head(tensor)
        if isinstance(tensor, RawTensor) and tensor.place is not None:
            head["parameters"] = tensor.place.parameters
        elif wants_binary is None or tensor.name in wants_binary:
            raw = raw_contents(tensor)
            buffers.append(raw)
            head["parameters"] = {"binary_data_size": len(raw)}
        else:
            head["data"] = json_values(tensor)
        outputs.append(head)
    body = orjson.dumps({**_response_head(response), "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return _answer(body, buffers, response)


def _plain_body(request: InferRequest, response: InferResponse) -> bytes | None:
    """Encode small outputs of JSON-compatible numbers without checking each number; None for any other response."""
    for wanted in request.outputs:
        if wanted.parameters:
            return None
    outputs, size = [], 0
    for tensor in response.outputs:
        if type(tensor) is not Tensor or (datatype := tensor.datatype.name) not in _PRINTABLE:
            return None
        array = tensor.array
        size += array.nbytes
        if size > _MAX_ONE_CALL_BYTES:
            return None
        outputs.append({"name": tensor.name, "shape": array.shape, "datatype": datatype, "data": array.ravel()})
    document: dict[str, Any] = {"model_name": response.model_name}
    if response.id:
        document["id"] = response.id
    document["model_version"] = response.model_version
    document["outputs"] = outputs
    body = orjson.dumps(document, option=_NUMPY)
    # orjson prints non-finite numbers as null; a false positive from a name only costs time.
    return None if b"null" in body else body


def _output_head(tensor: Tensor | RawTensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype_name}


def _response_head(response: InferResponse) -> dict[str, Any]:
    facts: dict[str, Any] = {"model_name": response.model_name}
    if response.id:
        facts["id"] = response.id
    facts["model_version"] = response.model_version
    if response.parameters:
        facts["parameters"] = response.parameters
    return facts


def _answer(body: bytes, buffers: list[Any], response: InferResponse) -> HttpAnswer:
    headers = (*JSON_TYPE, *response.headers) if response.parameters else JSON_TYPE
    if not buffers:
        return HttpAnswer(200, headers, body)
    parts = [body, *buffers]
    content = (
        PiecedMessage(parts) if response.nbytes > _MAX_JOINED_BYTES and response.lies_as_sent else join_buffers(parts)
    )
    return HttpAnswer(200, (*headers, (HEAD_LENGTH, str(len(body)))), content)


def _render_in_pieces(wants_binary: Collection[str] | None, response: InferResponse) -> HttpAnswer:
    """Encode in several short calls."""
    pieces = [orjson.dumps(_response_head(response))[:-1], b',"outputs":[']
    buffers: list[Any] = []
    for number, tensor in enumerate(response.outputs):
        head = _output_head(tensor)
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


_NONE: Final[frozenset[str]] = frozenset()


def _binary_outputs(request: InferRequest) -> frozenset[str] | set[str] | None:
    """Return the outputs to send as bytes; None for all.

    If the request lists outputs, unlisted ones are JSON even with ``binary_data_output`` (OVMS's rule); without a list,
    ``binary_data_output`` applies to all outputs (Triton's rule).
    """
    is_binary_default = request.parameters.get("binary_data_output") is True if request.parameters else False
    if not request.outputs:
        return None if is_binary_default else _NONE
    chosen = set()
    for output in request.outputs:
        binary_data = output.parameters.get("binary_data")
        if binary_data is True or (is_binary_default and not isinstance(binary_data, bool)):
            chosen.add(output.name)
    return chosen


_MAX_VERSION: Final = 2**63 - 1


def check_version(version: str) -> str:
    """Return the version of a path (empty: default); raise ``InvalidRequest`` or ``NotFound`` for invalid ones."""
    if version and not (version.isascii() and version.isdigit()):
        raise InvalidRequest(f'Model version must be an integer, got "{cut(version, 40)}"')
    if version and (len(version) > len(str(_MAX_VERSION)) or int(version) > _MAX_VERSION):
        raise NotFound(VERSION_MISSING)
    return version


class InferTarget(NamedTuple):
    """Path parameters and JSON length header of an inference request."""

    model: str
    version: str
    json_length: str | None


def answer_infer(
    plane: DataPlane, cache: RestTemplates, head: InferTarget, body: Buffer
) -> Coroutine[Any, Any, HttpAnswer]:
    """Parse the body, immediately if its JSON is small; return a coroutine that infers and encodes the response.

    ``body`` must not change until the response is complete.
    """
    model, version, json_length = head
    if len(body) > AT_ONCE_BYTES and (json_length is None or len(json_length) >= _MIN_LONG_DIGITS):
        return _answer_large(plane, head, memoryview(body))
    try:
        request = read_infer_request(model, version, body, json_length, cache)
    except ServerError as error:
        plane.count_unreadable_call(model, version, error, KSERVE_REST, len(body))
        raise
    return _infer(plane, request, len(body))


async def _answer_large(plane: DataPlane, head: InferTarget, body: memoryview) -> HttpAnswer:
    model, version, json_length = head
    try:
        request = await run_in_slices(read_large_infer_request(model, version, *split_body(body, json_length)))
    except ServerError as error:
        plane.count_unreadable_call(model, version, error, KSERVE_REST, len(body))
        raise
    return await _infer(plane, request, len(body))


def _infer(plane: DataPlane, request: InferRequest, size: int) -> Coroutine[Any, Any, HttpAnswer]:
    if request.model_version:
        check_version(request.model_version)
    if request.parameters:
        request.read_scheduling()
    request.received = size
    return plane.infer(request, KSERVE_REST, partial(_render_sized, request))


def _render_sized(request: InferRequest, response: InferResponse) -> tuple[HttpAnswer, int]:
    plain = None if request.parameters or response.parameters else _plain_body(request, response)
    if plain is not None:
        return HttpAnswer(200, JSON_TYPE, plain), len(plain)
    answer = _render_general(request, response)
    return answer, answer.size


# ----------------------------------------------------------------------
# Routes: inference, health, metadata, configuration, statistics and sequences
# ----------------------------------------------------------------------


def kserve_rules(plane: DataPlane, max_body_bytes: int) -> list[Rule]:
    """Return the routes over one data plane."""
    known = RestTemplates.empty()

    def infer_bodies(headers: Headers, model: str, version: str = "") -> BodyView | None:
        is_encoded, head_length = _body_headers(headers)
        return None if is_encoded else partial(answer_infer, plane, known, InferTarget(model, version, head_length))

    def infer(request: HttpRequest, model: str, version: str = "") -> Awaitable[HttpAnswer]:
        is_encoded, head_length = _body_headers(request.headers)
        if is_encoded and request.view is None:
            return infer_encoded(request, model, version, head_length)
        body = request.body if request.view is None else request.view
        return answer_infer(plane, known, InferTarget(model, version, head_length), body)

    async def infer_encoded(request: HttpRequest, model: str, version: str, head_length: str | None) -> HttpAnswer:
        body = await decompressed_call_body(plane, request, model, version, limit=max_body_bytes)
        return await answer_infer(plane, known, InferTarget(model, version, head_length), body)

    admit = make_admission(plane, KSERVE_REST)
    options: dict[str, Any] = {"is_hot": True, "takes_views": True, "admit": admit, "need": Permission.INFER}
    options["body_view_factory"] = infer_bodies
    calls = [rule(path, "POST", infer, **options) for path in model_paths("/infer")]
    return [*calls, *_server_rules(plane), *_model_rules(plane)]


def _body_headers(headers: Headers) -> tuple[bool, str | None]:
    """Return whether the body is encoded, and its JSON length; differing lengths give an invalid text."""
    is_encoded, found = False, None
    for key, value in headers:
        if key == "content-encoding":
            is_encoded = True
        elif key == HEAD_LENGTH and value != found:
            found = value if found is None else f"{found}, {value}"
    return is_encoded, found


def model_paths(suffix: str) -> tuple[str, str]:
    """Return the paths of a model operation, without and with a version."""
    return f"/v2/models/<model>{suffix}", f"/v2/models/<model>/versions/<version>{suffix}"


_STATS: Final = "stats"


def _metadata(plane: DataPlane, model: str, version: str) -> HttpAnswer:
    known = plane.model_metadata(model, check_version(version), KSERVE_REST)
    document: dict[str, Any] = {"name": known.name, "versions": known.versions, "platform": known.platform}
    return json_response(
        document | {"inputs": _tensors(known.inputs), "outputs": _tensors(known.outputs), **known.extra}
    )


def _server_rules(plane: DataPlane) -> list[Rule]:
    async def metadata(_: HttpRequest) -> HttpAnswer:
        return json_response(
            {"name": plane.server_name, "version": server_version(), "extensions": server_extensions(plane)}
        )

    async def statistics(_: HttpRequest) -> HttpAnswer:
        if plane.registry.available_versions(_STATS):
            # The path is also that of the metadata of a service with this name.
            return _metadata(plane, _STATS, "")
        return await _statistics(plane, "", "")

    return [
        rule("/v2", "GET", metadata, is_hot=True, need=Permission.CALLER),
        *health_rules(plane),
        rule("/v2/models/stats", "GET", statistics, is_hot=True, need=Permission.READ),
    ]


def health_rules(plane: DataPlane) -> list[Rule]:
    """Return the liveness and readiness routes, which are all that a probe port serves."""

    async def live(request: HttpRequest) -> HttpAnswer:
        if not plane.is_live():
            raise NotReady("Server is not live")
        return _healthy(request, {"live": True})

    async def ready(request: HttpRequest) -> HttpAnswer:
        readiness = plane.readiness()
        if not readiness.ready:
            raise NotReady(f"Server is not ready - {readiness.reason}")
        return _healthy(request, {"ready": True})

    return [
        rule("/v2/health/live", "GET", live, is_hot=True, need=Permission.NOTHING),
        rule("/v2/health/ready", "GET", ready, is_hot=True, need=Permission.NOTHING),
    ]


def _model_rules(plane: DataPlane) -> list[Rule]:
    async def metadata(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        return _metadata(plane, model, version)

    async def model_ready(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        if not plane.model_ready(model, check_version(version), KSERVE_REST):
            raise VersionLoading(NOT_LOADED)
        return _healthy(request, {"name": model, "ready": True})

    async def config(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        known = plane.model_metadata(model, check_version(version), KSERVE_REST)
        return json_response(config_document(known))

    async def statistics(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        return await _statistics(plane, model, check_version(version))

    async def sequences(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        alive = await aggregate_sequences(plane, model, check_version(version), KSERVE_REST)
        return json_response({"sequences": [asdict(sequence) for sequence in alive]})

    views = (
        ("", metadata),
        ("/ready", model_ready),
        ("/config", config),
        ("/stats", statistics),
        ("/sequences", sequences),
    )
    return [
        rule(path, "GET", view, is_hot=True, need=Permission.ABOUT)
        for suffix, view in views
        for path in model_paths(suffix)
    ]


def _healthy(request: HttpRequest, document: dict[str, Any]) -> HttpAnswer:
    """Return the document that KServe clients expect; an empty body for ``HEAD``."""
    return HttpAnswer(200) if request.method == "HEAD" else json_response(document)


async def _statistics(plane: DataPlane, model: str, version: str) -> HttpAnswer:
    counted = await aggregate_statistics(plane, model, version, KSERVE_REST)
    return json_response({"model_stats": [statistics_document(*each) for each in counted]})


def _tensors(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": t.name, "datatype": t.datatype.name, "shape": t.reported_shape} for t in tensors]
