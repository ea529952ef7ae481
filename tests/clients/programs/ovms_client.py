"""State, metadata and predictions of TensorFlow Serving's API, over gRPC and HTTP."""

from __future__ import annotations

import numpy as np
from arguments import GRPC, REST
from ovmsclient import make_grpc_client, make_http_client

X = np.arange(10, dtype=np.float32).reshape(1, 10)

for client in (make_grpc_client(GRPC), make_http_client(REST)):
    assert client.get_model_status("dummy")[1]["state"] == "AVAILABLE"
    assert client.get_model_metadata("dummy")["inputs"]["b"]["shape"] == [-1, 10]
    found = client.predict({"b": X}, "dummy")
    assert (np.asarray(found) == X + 1).all()
