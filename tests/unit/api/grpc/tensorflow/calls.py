"""Messages and calls of the TensorFlow Serving API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.grpc_clients import call

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.registry import Registry

__all__ = ["Server", "array_of", "content", "predict_request", "refusal", "tensor"]

PREDICTION = "/tensorflow.serving.PredictionService"
MODEL = "/tensorflow.serving.ModelService"


@dataclass
class Server:
    """A front end that serves, with what lies behind it."""

    address: str
    plane: DataPlane
    registry: Registry
    repository: Path
    specs: list[ModelSpec]

    async def load(self, name: str, model: Any) -> None:
        """Serve one more model."""
        base = ir.save(model, self.repository, name)
        self.specs.append(ModelSpec(name=name, base_path=base, plugin_config={"INFERENCE_PRECISION_HINT": "f32"}))
        assert not (await self.registry.apply(self.specs)).failures

    async def predict(self, model: str, **inputs: Any) -> Any:
        """Call ``Predict`` for the default version."""
        return await self.call(predict_request(model, inputs))

    async def call(self, message: Any, service: str = PREDICTION, **options: Any) -> Any:
        """Make the call that a message is the request of."""
        name = message.DESCRIPTOR.full_name.removesuffix("Request")
        path = f"{service}/{name.rpartition('.')[2]}"
        return await call(self.address, path, message, f"{name}Response", **options)

    async def status(self, **spec: Any) -> Any:
        """Call ``GetModelStatus``."""
        message = message_class("tensorflow.serving.GetModelStatusRequest")(model_spec=model_spec(**spec))
        return await self.call(message, MODEL)

    async def metadata(self, fields: tuple[str, ...] = ("signature_def",), **spec: Any) -> Any:
        """Call ``GetModelMetadata``."""
        make = message_class("tensorflow.serving.GetModelMetadataRequest")
        return await self.call(make(model_spec=model_spec(**spec) if spec else None, metadata_field=fields))

    def metric(self, line: str) -> float:
        """Read one sample of the metrics, named as it is printed; 0 for one that is not there yet."""
        text = (self.plane.render_metrics() or b"").decode()
        found = [each for each in text.splitlines() if line + " " in each]
        assert len(found) < 2
        return float(found[0].rpartition(" ")[2]) if found else 0.0


def model_spec(name: str = "", version: int = 0, **others: Any) -> dict[str, Any]:
    """Make the fields of a ``ModelSpec``."""
    return {"name": name, **({"version": {"value": version}} if version else {}), **others}


def predict_request(model: str, inputs: dict[str, Any], version: int = 0, **others: Any) -> Any:
    """Make a ``PredictRequest``."""
    make = message_class("tensorflow.serving.PredictRequest")
    message = make(model_spec=model_spec(model, version), **others)
    for name, value in inputs.items():
        message.inputs[name].CopyFrom(value)
    return message


def tensor(dtype: str, shape: tuple[int, ...], **values: Any) -> Any:
    """Make a ``TensorProto`` out of its fields."""
    dims = {"dim": [{"size": size} for size in shape]}
    return message_class("tensorflow.TensorProto")(dtype=dtype, tensor_shape=dims, **values)


def content(dtype: str, array: Any) -> Any:
    """Make a ``TensorProto`` with the packed elements of an array."""
    return tensor(dtype, array.shape, tensor_content=array.tobytes())


def array_of(message: Any, dtype: str) -> Any:
    """Read the packed elements of a ``TensorProto``."""
    shape = [dim.size for dim in message.tensor_shape.dim]
    return np.frombuffer(message.tensor_content, dtype).reshape(shape)


async def refusal(answer: Any) -> tuple[str, str]:
    """Await a call that is to fail; gives its status and text."""
    with pytest.raises(grpc.RpcError) as caught:
        await answer
    error: Any = caught.value
    return error.code().name, error.details()
