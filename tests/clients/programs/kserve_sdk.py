"""Health and inferences of KServe's SDK, over REST and gRPC."""

from __future__ import annotations

import asyncio

import numpy as np
from arguments import GRPC, REST
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

X = np.arange(10, dtype=np.float32).reshape(1, 10)


def request(*, binary: bool) -> InferRequest:
    given = InferInput("b", [1, 10], "FP32")
    given.set_data_from_numpy(X, binary_data=binary)
    return InferRequest("dummy", [given])


async def ask() -> None:
    url = f"http://{REST}"
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=1))
    assert await rest.is_server_live(url)
    assert await rest.is_server_ready(url)
    assert await rest.is_model_ready(url, "dummy")
    for binary in (False, True):
        answer = await rest.infer(url, request(binary=binary), model_name="dummy")
        assert (np.ravel(answer.outputs[0].as_numpy()) == np.ravel(X + 1)).all()
    async with InferenceGRPCClient(GRPC) as client:
        assert await client.is_server_ready()
        assert await client.is_model_ready("dummy")
        answer = await client.infer(request(binary=True))
        assert (np.ravel(answer.outputs[0].as_numpy()) == np.ravel(X + 1)).all()


asyncio.run(ask())
