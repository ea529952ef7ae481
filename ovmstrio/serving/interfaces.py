"""The ways in, each with its API's names of methods, and its words for what is not there.

OVMS's words differ by API and interface, because each looks for other kinds of services last.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from ovmstrio.core.errors import ServerError, ServiceMissing, VersionLoading, VersionMissing, VersionRetired
from ovmstrio.core.events import QUESTIONS, Door

__all__ = [
    "GRAPH_MISSING",
    "HANDLERS_GRPC",
    "HANDLERS_HTTP",
    "KSERVE_GRPC",
    "KSERVE_REST",
    "MODEL_MISSING",
    "NOT_LOADED",
    "OPENAI_REST",
    "PADDLE_GRPC",
    "PADDLE_HTTP",
    "TENSORFLOW_GRPC",
    "TENSORFLOW_REST",
    "VERSION_MISSING",
]

MODEL_MISSING: Final = "Model with requested name is not found"
GRAPH_MISSING: Final = "Mediapipe graph definition with requested name is not found"
"""What an inference of an unknown name is told: OVMS looks for graphs last, and the last miss speaks."""
PIPELINE_MISSING: Final = "Pipeline with requested name is not found"
NOT_LOADED: Final = "Model with requested version is not loaded yet"
VERSION_MISSING: Final = "Model with requested version is not found"

_RETIRED: Final = {
    "model": "Model with requested version is retired",
    "pipeline": "Pipeline is retired",
    "graph": "Mediapipe is retired",
}
_LOADING: Final = {
    "model": NOT_LOADED,
    "pipeline": "Pipeline is not loaded yet",
    "graph": "Mediapipe is not loaded yet",
}


def _ovms_words(missing: str, error: ServerError, method: str) -> ServerError:
    """Say of a look-up what OVMS says; kinds that it does not know have the server's own words."""
    text = _text(missing, error, method)
    if text is None:
        return error
    error.message = text
    error.args = (text,)
    return error


def _text(missing: str, error: ServerError, method: str) -> str | None:
    match error:
        case ServiceMissing():
            return MODEL_MISSING if method in QUESTIONS else missing
        case VersionMissing():
            why = f" - the last load of version {error.tried} failed: {error.why}" if error.why else ""
            return VERSION_MISSING + why
        case VersionRetired():
            return _RETIRED.get(error.kind)
        case VersionLoading() if error.kind in _LOADING:
            return _LOADING[error.kind] + _last_load(error)
    return None


def _last_load(error: VersionLoading) -> str:
    if not error.has_failed:
        return ""
    return f": its last load failed{f': {error.why}' if error.why else ''}"


_KSERVE: Final = {
    "api": "KServe",
    "infer": "ModelInfer",
    "stream": "ModelInferStream",
    "metadata": "ModelMetadata",
    "ready": "ModelReady",
    "status": "GetModelStatus",
}
_TENSORFLOW: Final = {
    "api": "TensorFlowServing",
    "infer": "Predict",
    "metadata": "GetModelMetadata",
    "status": "GetModelStatus",
}

KSERVE_GRPC: Final = Door(**_KSERVE, interface="gRPC", words=partial(_ovms_words, GRAPH_MISSING))
KSERVE_REST: Final = Door(**_KSERVE, interface="REST", words=partial(_ovms_words, GRAPH_MISSING))
TENSORFLOW_GRPC: Final = Door(**_TENSORFLOW, interface="gRPC", words=partial(_ovms_words, PIPELINE_MISSING))
TENSORFLOW_REST: Final = Door(**_TENSORFLOW, interface="REST", words=partial(_ovms_words, MODEL_MISSING))
HANDLERS_GRPC: Final = Door("Handlers", "gRPC")
HANDLERS_HTTP: Final = Door("Handlers", "REST")
OPENAI_REST: Final = Door("V3", "REST")
"""Metrics of OVMS call the API so, after its first path; methods are ``Unary`` and ``Stream``."""
PADDLE_GRPC: Final = Door("PaddleServing", "gRPC")
PADDLE_HTTP: Final = Door("PaddleServing", "REST")
