"""Health, metadata and inferences in every way that tritonclient has: raw and JSON, synchronous and not."""

from __future__ import annotations

import asyncio

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
from arguments import GRPC, REST

X = np.arange(10, dtype=np.float32).reshape(1, 10)

for module, address in ((over_grpc, GRPC), (over_http, REST)):
    with module.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("dummy")
        client.get_server_metadata()
        client.get_model_metadata("dummy")
        client.get_model_config("dummy")
        client.get_inference_statistics("dummy")
        given = module.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(X)
        result = client.infer("dummy", [given], outputs=[module.InferRequestedOutput("a")], request_id="1")
        assert (result.as_numpy("a") == X + 1).all()
        if module is over_http:
            given.set_data_from_numpy(X, binary_data=False)
            wanted = [module.InferRequestedOutput("a", binary_data=False)]
            assert (client.infer("dummy", [given], outputs=wanted).as_numpy("a") == X + 1).all()
            assert (client.async_infer("dummy", [given]).get_result().as_numpy("a") == X + 1).all()


async def ask() -> None:
    async with over_grpc_aio.InferenceServerClient(GRPC) as client:
        given = over_grpc_aio.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(X)
        assert ((await client.infer("dummy", [given])).as_numpy("a") == X + 1).all()


asyncio.run(ask())
