"""The index, loads with settings, and unloads, over gRPC and HTTP."""

from __future__ import annotations

import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from arguments import GRPC, REST
from tritonclient.utils import InferenceServerException

for module, address in ((over_grpc, GRPC), (over_http, REST)):
    with module.InferenceServerClient(address) as client:
        client.get_model_repository_index()
        client.load_model("spare")
        assert client.is_model_ready("spare")
        client.load_model("spare", config='{"max_batch_size":"16"}')
        config = client.get_model_config("spare")
        assert (config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size) == 16
        client.unload_model("spare")
        assert not client.is_model_ready("spare")
        try:
            client.load_model("wrong_model_name")
        except InferenceServerException as error:
            message = error.message()
        else:
            message = "it was loaded"
        assert "failed to load" in message, message
