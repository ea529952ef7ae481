"""Health, metadata and inferences with tritonclient: raw, JSON, compressed, texts, classes and asyncio."""

from __future__ import annotations

import asyncio

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
from arguments import GRPC, REST

X = np.arange(10, dtype=np.float32).reshape(1, 10)
TEXTS = np.array([b"one", "größe".encode()], object)

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
        option = "compression_algorithm" if module is over_grpc else "request_compression_algorithm"
        for algorithm in ("gzip", "deflate"):
            assert (client.infer("dummy", [given], **{option: algorithm}).as_numpy("a") == X + 1).all()
        classes = module.InferRequestedOutput("a", class_count=2)
        found = client.infer("dummy", [given], outputs=[classes]).as_numpy("a")
        assert found.tolist() == [[b"10.000000:9", b"9.000000:8"]], found
        texts = module.InferInput("strings", [2], "BYTES")
        texts.set_data_from_numpy(TEXTS)
        assert client.infer("strings", [texts]).as_numpy("strings").tolist() == TEXTS.tolist()
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
