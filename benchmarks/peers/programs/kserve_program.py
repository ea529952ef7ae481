"""KServe's Python server: a model class, run in its process, over the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from shared_models import SETUP, Models

_MODELS = Models()


class ServedModel(Model):  # type: ignore[misc] # it has no types
    """One of the models."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        """Infer on the event loop, because KServe documents no other way for custom models."""
        result = _MODELS.infer(self.name, payload.inputs[0].as_numpy())
        output = InferOutput(name="output", shape=list(result.shape), datatype="FP32")
        wanted = payload.request_outputs or []
        is_binary = payload.from_grpc or any(each.parameters.get("binary_data") for each in wanted if each.parameters)
        output.set_data_from_numpy(result, binary_data=bool(is_binary))
        return InferResponse(response_id=payload.id or "", model_name=self.name, infer_outputs=[output])


if __name__ == "__main__":
    server = ModelServer(http_port=SETUP["rest"], grpc_port=SETUP["grpc"], workers=1, access_log_format=None)
    server.start([ServedModel(name) for name in SETUP["models"]])
