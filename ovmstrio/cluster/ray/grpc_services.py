"""gRPC calls of a cluster, and their servicers for Ray's proxies, which import nothing else and forward bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

# ----------------------------------------------------------------------
# Calls, and the position of the service name in their messages
# ----------------------------------------------------------------------

NAME, MODEL_SPEC, NOWHERE = "name", "model spec", ""
"""The first field is the service name, or a ``ModelSpec``, or neither."""

_KSERVE: Final = "/inference.GRPCInferenceService"
_TENSORFLOW: Final = "/tensorflow.serving"
INFER: Final = f"{_KSERVE}/ModelInfer"
READY: Final = f"{_KSERVE}/ServerReady"
INDEX: Final = f"{_KSERVE}/RepositoryIndex"
STREAM: Final = f"{_KSERVE}/ModelStreamInfer"

CALLS: Final = {
    INFER: NAME,
    f"{_KSERVE}/ModelReady": NAME,
    f"{_KSERVE}/ModelMetadata": NAME,
    f"{_KSERVE}/ModelConfig": NAME,
    f"{_TENSORFLOW}.PredictionService/Predict": MODEL_SPEC,
    f"{_TENSORFLOW}.PredictionService/GetModelMetadata": MODEL_SPEC,
    f"{_TENSORFLOW}.ModelService/GetModelStatus": MODEL_SPEC,
    f"{_KSERVE}/ServerLive": NOWHERE,
    READY: NOWHERE,
    f"{_KSERVE}/ServerMetadata": NOWHERE,
    INDEX: NOWHERE,
}
"""Unary calls, without admin calls and process-local statistics."""


def add_services(servicer: Any, server: Any) -> None:
    """Add the calls to a server of Ray, which replaces the handlers by its own."""
    services: dict[str, dict[str, Any]] = {}
    for path in (*CALLS, STREAM):
        _, service, method = path.split("/")
        make: Callable[..., Any] = (
            grpc.stream_stream_rpc_method_handler if path == STREAM else grpc.unary_unary_rpc_method_handler
        )
        services.setdefault(service, {})[method] = make(getattr(servicer, method))
    for service, methods in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
