"""gRPC calls of a cluster, and the position of the service name in their messages; proxies import nothing else."""

from __future__ import annotations

from typing import Final

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
