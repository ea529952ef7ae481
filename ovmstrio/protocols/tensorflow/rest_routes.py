"""HTTP routes of TensorFlow Serving: predict, status and metadata below ``/v1/models``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ovmstrio.core.callers import Need
from ovmstrio.core.errors import InvalidRequest, MethodNotAllowed, NotFound, ServerError
from ovmstrio.core.request import InferRequest
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES
from ovmstrio.protocols.kserve.rest_responses import check_version
from ovmstrio.protocols.tensorflow.rest_requests import read_large_predict_body, read_predict_body
from ovmstrio.protocols.tensorflow.rest_responses import render_predict_answer
from ovmstrio.protocols.tensorflow.types import BY_DATATYPE
from ovmstrio.serving.interfaces import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.serving.ovms_errors import INVALID_URL, UNSUPPORTED_METHOD, admits, body_of_call, status_document
from ovmstrio.transport.http.responses import json_answer
from ovmstrio.transport.http.router import rule
from ovmstrio.util.slices import run_in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane, ModelMetadata
    from ovmstrio.transport.http.router import Rule

__all__ = ["tensorflow_rules"]


async def _answer_predict(plane: DataPlane, model: str, version: str, body: bytes) -> HttpAnswer:
    """Infer and encode the response; looks up the servable before it parses the body, as OVMS does."""
    check_version(version)
    described = await plane.describe(model, version, TENSORFLOW_REST)
    if described.has_streams:
        # JSON has no datatypes, and graphs do not declare any.
        raise NotFound(MODEL_MISSING)
    try:
        if len(body) <= AT_ONCE_BYTES:
            read = read_predict_body(body, described.inputs)
        else:
            read = await run_in_slices(read_large_predict_body(body, described.inputs))
    except ServerError as error:
        plane.count_unparsed(model, version, error, TENSORFLOW_REST, len(body))
        raise

    def render(response: InferResponse) -> tuple[HttpAnswer, int]:
        answer = render_predict_answer(response, by_rows=read.by_rows)
        return answer, len(answer.content)

    request = InferRequest(model, version, inputs=read.inputs, received=len(body))
    return await plane.infer(request, TENSORFLOW_REST, render)


_Operation = Literal["predict", "status", "metadata"]

_NO_RESOURCE: Final = "Requested REST resource not found"

_SERVABLE: Final = r"(?P<model>[^/]+?)(?:/versions/(?P<version>[0-9]+)|/labels/[^/:]+)?"
_CALL: Final = re.compile(rf"{_SERVABLE}:(?P<verb>predict|classify|regress)")
_INFO: Final = re.compile(rf"{_SERVABLE}(?P<metadata>/metadata)?/?")


@dataclass(frozen=True, slots=True)
class _ModelTarget:
    """Operation and servable of a path; ``version`` is empty for the default version."""

    operation: _Operation
    model: str
    version: str


def _read_target(method: str, path: str) -> _ModelTarget:
    """Parse the path after ``/v1/models/``."""
    match, wanted = _CALL.fullmatch(path), "POST"
    if match is None:
        match, wanted = _INFO.fullmatch(path), "GET"
    if match is None:
        raise InvalidRequest(f"{INVALID_URL} - {method} /v1/models/{path}")
    if (method == "POST") != (wanted == "POST"):
        raise MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {method} /v1/models/{path}; use {wanted}")
    operation = _operation(match.groupdict())
    return _ModelTarget(operation, match["model"], check_version(match["version"] or ""))


def _operation(found: dict[str, str | None]) -> _Operation:
    verb = found.get("verb")
    if verb is None:
        return "metadata" if found["metadata"] else "status"
    if verb != "predict":
        raise NotFound(f"{_NO_RESOURCE} - {verb} is not supported; use predict")
    return "predict"


_TYPE: Final = "type.googleapis.com/tensorflow.serving.SignatureDefMap"


def _metadata_document(known: ModelMetadata, version: str) -> dict[str, Any]:
    """Return the document of one version; clients index every key, so defaults are included."""
    signature = {"inputs": _tensors(known.inputs), "outputs": _tensors(known.outputs), "methodName": "", "defaults": {}}
    definitions = {"@type": _TYPE, "signatureDef": {"serving_default": signature}}
    return {
        "modelSpec": {"name": known.name, "signatureName": "", "version": version},
        "metadata": {"signature_def": definitions},
    }


def _tensors(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {spec.name: _tensor(spec) for spec in specs}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in spec.reported_shape]
    row = BY_DATATYPE.get(spec.datatype.name)
    dtype = "DT_INVALID" if row is None else row.name
    return {"dtype": dtype, "tensorShape": {"dim": sizes, "unknownRank": False}, "name": spec.name}


def tensorflow_rules(
    plane: DataPlane, max_body_bytes: int, further: Callable[[str], Mapping[str, Any]] = lambda _: {}
) -> list[Rule]:
    """Return the routes; paths other than the common predict paths are parsed here.

    A colon separates the operation, and OVMS reports a wrong method even for unknown servables.  ``further`` returns
    additional status fields of a name, for another API that shares this path.
    """

    async def predict(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        body = await body_of_call(plane, request, model, version, limit=max_body_bytes, door=TENSORFLOW_REST)
        return await _answer_predict(plane, model, version, body)

    async def answer(request: HttpRequest, path: str) -> HttpAnswer:
        target = _read_target(request.method, path)
        if target.operation != "predict":
            return _describe(plane, target, further)
        return await predict(request, target.model, target.version)

    admit = admits(plane, TENSORFLOW_REST)
    return [
        rule("/v1/models/<model>:predict", "POST", predict, is_hot=True, admit=admit, need=Need.INFER),
        rule(
            "/v1/models/<model>/versions/<number:version>:predict",
            "POST",
            predict,
            is_hot=True,
            admit=admit,
            need=Need.INFER,
        ),
        rule("/v1/models/<path:path>", "GET", answer, is_hot=True, need=Need.ABOUT),
        rule("/v1/models/<path:path>", "POST", answer, need=Need.INFER),
    ]


def _describe(plane: DataPlane, target: _ModelTarget, further: Callable[[str], Mapping[str, Any]]) -> HttpAnswer:
    if target.operation == "status":
        status = status_document(plane.model_status(target.model, int(target.version or 0), TENSORFLOW_REST))
        return json_answer(status if target.version else {**status, **further(target.model)})
    known = plane.model_metadata(target.model, target.version, TENSORFLOW_REST)
    version = target.version.lstrip("0")
    return json_answer(_metadata_document(known, version or known.versions[-1]))
