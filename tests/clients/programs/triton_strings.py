"""Texts there and back, over gRPC and HTTP."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from arguments import GRPC, REST

TEXTS = np.array([b"one", "größe".encode()], object)

for module, address in ((over_grpc, GRPC), (over_http, REST)):
    with module.InferenceServerClient(address) as client:
        given = module.InferInput("strings", [2], "BYTES")
        given.set_data_from_numpy(TEXTS)
        assert client.infer("strings", [given]).as_numpy("strings").tolist() == TEXTS.tolist()
