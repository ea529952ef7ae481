"""One version of one OpenVINO model, without state, as a servable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import UINT8
from ovmstrio.core.layer_times import LayerTimes
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.tensor import Array, RawTensor, Tensor
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.signature import ModelSignature
from ovmstrio.runtimes.models.reshaping import NetworkSource, relaxed
from ovmstrio.runtimes.models.strings import strings_of_rows
from ovmstrio.runtimes.models.validation import Validator

__all__ = ["PLATFORM", "ModelServable", "model_metadata", "named_outputs"]

PLATFORM = "OpenVINO"


class ModelServable:
    """Validates requests, runs them, and names the outputs.

    ``source`` gives networks of other shapes, for a model that follows its requests.
    """

    def __init__(self, spec: ModelSpec, version: int, network: Network, source: NetworkSource | None = None) -> None:
        self.name = spec.name
        self.version = str(version)
        self._network: Network | None = network
        self._source = source
        inputs = network.signature.inputs
        self._validate = Validator(inputs if source is None else relaxed(spec, inputs))
        self._metadata = model_metadata(spec.name, network.signature)

    @property
    def metadata(self) -> ServableMetadata:
        """Inputs and outputs; of a model that follows its requests, those of the moment."""
        if self._source is not None:
            return model_metadata(self.name, self._source.current.signature)
        return self._metadata

    @property
    def follows_requests(self) -> bool:
        """Whether the model is reshaped to whatever a request brings."""
        return self._source is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What it was compiled to, for those who look; nothing once it is closed."""
        return {} if self._network is None else self._network.facts

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call with all outputs of the model, in the order of their names.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs.
            FailedPrecondition: a model that follows its requests cannot take the shape.
            ModelFailure: OpenVINO failed on a valid request.

        Cancellation: see :meth:`Network.infer`; requests of the pool are given back.
        """
        arrays = self._validate(request)
        network = self._network
        if self._source is not None:
            network = await self._source.fitting(arrays)
        if network is None:
            raise trio.ClosedResourceError
        results = await network.infer(tuple(arrays.values()), event=request.event, most_bytes=request.most_bytes)
        outputs = named_outputs(network.signature, results, keeps_rows=request.keeps_rows)
        return InferResponse(self.name, self.version, outputs, request.id, is_private=True)

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Time the model's layers; see ``LayeredServable``."""
        if self._network is None:
            raise trio.ClosedResourceError
        return await self._network.layer_times(seconds)

    async def aclose(self) -> None:
        """Unload the model.  Called once, when no call is in flight.

        Cancellation: never; it does not wait.
        """
        self._network = self._source = None


def model_metadata(name: str, signature: ModelSignature) -> ServableMetadata:
    """Describe a model as its servables do."""
    extra = dict(signature.extra)
    return ServableMetadata(name, PLATFORM, signature.inputs, signature.outputs, extra, labels=signature.labels)


def named_outputs(
    signature: ModelSignature, arrays: Sequence[Array], *, keeps_rows: bool = False
) -> list[Tensor | RawTensor]:
    """Name the outputs of one inference, and give strings where the name asks for them, unless rows are to be kept."""
    outputs: list[Tensor | RawTensor] = []
    for spec, array in zip(signature.outputs, arrays, strict=True):
        tensor = Tensor(spec.name, spec.datatype, array)
        outputs.append(tensor if keeps_rows or spec.datatype is not UINT8 else strings_of_rows(tensor))
    return outputs
