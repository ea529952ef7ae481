"""API interfaces: KServe, TensorFlow Serving, OpenAI ... with their metric labels and OVMS's look-up errors.

OVMS's error texts differ by interface, because each looks for another kind of service last.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Final

from ovmstrio.core.errors import ServerError, ServiceMissing, VersionLoading, VersionMissing, VersionRetired
from ovmstrio.core.events import QUERY_METHODS, ApiInterface

MODEL_MISSING: Final = "Model with requested name is not found"
GRAPH_MISSING: Final = "Mediapipe graph definition with requested name is not found"
"""OVMS's inference error for an unknown name: graphs are looked up last."""
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


def _with_ovms_text(missing: str, error: ServerError, method: str) -> ServerError:
    """Return a look-up error with OVMS's text, if the kind exists in OVMS; the raised error may be raised again."""
    text = _ovms_text(missing, error, method)
    if text is None:
        return error
    translated = copy(error)
    translated.message = text
    translated.args = (text,)
    return translated


def _ovms_text(missing: str, error: ServerError, method: str) -> str | None:
    match error:
        case ServiceMissing():
            return MODEL_MISSING if method in QUERY_METHODS else missing
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

KSERVE_GRPC: Final = ApiInterface(**_KSERVE, interface="gRPC", words=partial(_with_ovms_text, GRAPH_MISSING))
KSERVE_REST: Final = ApiInterface(**_KSERVE, interface="REST", words=partial(_with_ovms_text, GRAPH_MISSING))
TENSORFLOW_GRPC: Final = ApiInterface(**_TENSORFLOW, interface="gRPC", words=partial(_with_ovms_text, PIPELINE_MISSING))
TENSORFLOW_REST: Final = ApiInterface(**_TENSORFLOW, interface="REST", words=partial(_with_ovms_text, MODEL_MISSING))
HANDLERS_GRPC: Final = ApiInterface("Handlers", "gRPC")
HANDLERS_HTTP: Final = ApiInterface("Handlers", "REST")
OPENAI_REST: Final = ApiInterface("V3", "REST")
"""OVMS's metric label of the API, from its first path ``/v3``; methods are ``Unary`` and ``Stream``."""
ANTHROPIC_REST: Final = ApiInterface("Anthropic", "REST")
OLLAMA_REST: Final = ApiInterface("Ollama", "REST")
PADDLE_GRPC: Final = ApiInterface("PaddleServing", "gRPC")
PADDLE_HTTP: Final = ApiInterface("PaddleServing", "REST")
