from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.observability.metrics import Metrics
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.runtimes.models.sequences import SequenceManagers
from tests.service.api.grpc.servers import Serving, serving_grpc
from tests.support import ir
from tests.support.grpc_clients import call
from tests.unit.api.grpc.tensorflow.calls import model_spec, predict_request

PREDICTION = "/tensorflow.serving.PredictionService"
MODEL = "/tensorflow.serving.ModelService"


class Server:
    """Models behind a gRPC front end, called through the API of TensorFlow Serving."""

    def __init__(self, serving: Serving, repository: Path) -> None:
        self.serving = serving
        self.repository = repository

    async def load(self, name: str, model: Any) -> None:
        """Serve one more model."""
        base = ir.save(model, self.repository, name)
        spec = ModelSpec(name=name, base_path=base, plugin_config={"INFERENCE_PRECISION_HINT": "f32"})
        self.serving.specs.append(spec)
        assert not (await self.serving.registry.apply(self.serving.specs)).failures

    async def predict(self, model: str, **inputs: Any) -> Any:
        """Call ``Predict`` of the default version."""
        return await self.call(predict_request(model, inputs))

    async def call(self, message: Any, service: str = PREDICTION, **options: Any) -> Any:
        """Call the method whose request a message is."""
        name = message.DESCRIPTOR.full_name.removesuffix("Request")
        path = f"{service}/{name.rpartition('.')[2]}"
        return await call(self.serving.address, path, message, f"{name}Response", **options)

    async def status(self, **spec: Any) -> Any:
        """Call ``GetModelStatus``."""
        message = message_class("tensorflow.serving.GetModelStatusRequest")(model_spec=model_spec(**spec))
        return await self.call(message, MODEL)

    async def metadata(self, fields: tuple[str, ...] = ("signature_def",), **spec: Any) -> Any:
        """Call ``GetModelMetadata``."""
        make = message_class("tensorflow.serving.GetModelMetadataRequest")
        return await self.call(make(model_spec=model_spec(**spec) if spec else None, metadata_field=fields))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Serve the models ``dummy`` and ``two`` and the stateful model ``sums``."""
    specs = [
        ModelSpec(name="dummy", base_path=ir.save(ir.dummy(), tmp_path, "dummy")),
        ModelSpec(name="two", base_path=ir.save(ir.sum_of_two(), tmp_path, "two")),
        ModelSpec(
            name="sums", base_path=ir.save(ir.accumulator(), tmp_path, "sums"), stateful=True, max_sequence_number=2
        ),
    ]
    load = partial(load_model, managers=SequenceManagers())
    async with serving_grpc(load, specs, metrics=Metrics()) as serving:
        yield Server(serving, tmp_path)
