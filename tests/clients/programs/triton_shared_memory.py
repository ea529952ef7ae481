"""Inputs and outputs in system shared memory, over gRPC and HTTP; CUDA's is refused."""

from __future__ import annotations

import os

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
import tritonclient.utils.shared_memory as shm
from arguments import GRPC, REST
from tritonclient.utils import InferenceServerException

X = np.arange(10, dtype=np.float32).reshape(1, 10)
SIZE = X.nbytes

for module, address in ((over_grpc, GRPC), (over_http, REST)):
    keys = [f"/ovmstrio-client-{os.getpid()}-{module.__name__}-{which}" for which in ("in", "out")]
    ins, outs = (shm.create_shared_memory_region(key, key, SIZE) for key in keys)
    try:
        shm.set_shared_memory_region(ins, [X])
        with module.InferenceServerClient(address) as client:
            client.unregister_system_shared_memory()
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("ins", keys[0], SIZE)
            client.register_system_shared_memory("outs", keys[1], SIZE)
            given = module.InferInput("b", [1, 10], "FP32")
            given.set_shared_memory("ins", SIZE)
            wanted = module.InferRequestedOutput("a")
            wanted.set_shared_memory("outs", SIZE)
            client.infer("dummy", [given], outputs=[wanted])
            assert (shm.get_contents_as_numpy(outs, np.float32, [1, 10]) == X + 1).all()
            client.unregister_system_shared_memory()
            try:
                client.register_cuda_shared_memory("gpu", b"aGFuZGxl", 0, SIZE)
            except InferenceServerException as error:
                message = str(error)
            else:
                message = "it was registered"
            assert "CUDA" in message, message
    finally:
        for handle in (ins, outs):
            shm.destroy_shared_memory_region(handle)
