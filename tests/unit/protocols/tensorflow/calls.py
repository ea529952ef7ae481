"""Messages of the TensorFlow Serving API."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from ovmstrio.encoding.messages import message_class

__all__ = ["array_of", "content", "model_spec", "predict_request", "refusal", "tensor"]


def model_spec(name: str = "", version: int = 0, **others: Any) -> dict[str, Any]:
    return {"name": name, **({"version": {"value": version}} if version else {}), **others}


def predict_request(model: str, inputs: dict[str, Any], version: int = 0, **others: Any) -> Any:
    make = message_class("tensorflow.serving.PredictRequest")
    message = make(model_spec=model_spec(model, version), **others)
    for name, value in inputs.items():
        message.inputs[name].CopyFrom(value)
    return message


def tensor(dtype: str, shape: tuple[int, ...], **values: Any) -> Any:
    dims = {"dim": [{"size": size} for size in shape]}
    return message_class("tensorflow.TensorProto")(dtype=dtype, tensor_shape=dims, **values)


def content(dtype: str, array: Any) -> Any:
    return tensor(dtype, array.shape, tensor_content=array.tobytes())


def array_of(message: Any, dtype: str) -> Any:
    shape = [dim.size for dim in message.tensor_shape.dim]
    return np.frombuffer(message.tensor_content, dtype).reshape(shape)


async def refusal(answer: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await answer
    error: Any = caught.value
    return error.code().name, error.details()
