"""Requests that are compressed with gzip and deflate, over gRPC and HTTP."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from arguments import GRPC, REST

X = np.zeros((1, 10), np.float32)

for algorithm in ("gzip", "deflate"):
    with over_grpc.InferenceServerClient(GRPC) as client:
        given = over_grpc.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(X)
        assert (client.infer("dummy", [given], compression_algorithm=algorithm).as_numpy("a") == 1).all()
    with over_http.InferenceServerClient(REST) as client:
        given = over_http.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(X)
        assert (client.infer("dummy", [given], request_compression_algorithm=algorithm).as_numpy("a") == 1).all()
