"""The largest elements of an output, over gRPC and HTTP."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from arguments import GRPC, REST

for module, address in ((over_grpc, GRPC), (over_http, REST)):
    with module.InferenceServerClient(address) as client:
        given = module.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(np.arange(10, dtype=np.float32).reshape(1, 10))
        wanted = module.InferRequestedOutput("a", class_count=2)
        found = client.infer("dummy", [given], outputs=[wanted]).as_numpy("a")
        assert found.tolist() == [[b"10.000000:9", b"9.000000:8"]], found
