"""MLServer: with a custom runtime, run in the server's process (``parallel_workers`` 0), over its protocol V2."""

from __future__ import annotations

from collections.abc import AsyncIterator

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from shared_models import Models

_MODELS: list[Models] = []


class ServedModel(MLModel):  # type: ignore[misc] # it has no types
    """One of the models."""

    async def load(self) -> bool:
        """Compile all models, once."""
        if not _MODELS:
            _MODELS.append(Models())
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Infer on the event loop."""
        result = _MODELS[0].infer(self.name, NumpyCodec.decode_input(payload.inputs[0]))
        output = NumpyCodec.encode_output("output", result)
        return InferenceResponse(model_name=self.name, outputs=[output])

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        """Yield as many outputs as the first number of each input says, each from one inference."""
        async for payload in payloads:
            array = NumpyCodec.decode_input(payload.inputs[0])
            for _ in range(int(array.flat[0])):
                yield await self.predict(payload)
