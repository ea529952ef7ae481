"""A Ray cluster with a trivial model, served by ``ovms deploy ray`` and by a hand-written deployment.

Arguments are a configuration of one group and one of two groups, the model's file, and the port for HTTP. It writes a
line when all answer, below ``/ours``, ``/groups`` and ``/hand``, and ends with its standard input.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

import numpy as np
import openvino
import orjson
import ray
from ray import serve
from starlette.responses import Response

from ovmstrio.cluster.ray.application import application

if TYPE_CHECKING:
    from starlette.requests import Request

_STORE_BYTES = 80_000_000


class ByHand:
    """Minimal deployment that answers a KServe request for this model."""

    def __init__(self, file: str) -> None:
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
        self._request = openvino.Core().compile_model(file, "CPU", options).create_infer_request()

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        given = orjson.loads(await request.body())["inputs"][0]
        found = self._request.infer([np.array(given["data"], np.float32).reshape(given["shape"])])[0]
        output = {"name": "a", "shape": found.shape, "datatype": "FP32", "data": found.ravel()}
        document = {"model_name": "m", "model_version": "1", "outputs": [output]}
        return Response(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def main(config: str, groups: str, file: str, port: str) -> None:
    """Serve until standard input ends."""
    # Ray prints the state of its processes to standard output.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=_STORE_BYTES, log_to_driver=False)
    quiet: dict[str, Any] = {"logging_config": {"enable_access_log": False}}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        serve.run(application({"config": config}), name="ours", route_prefix="/ours", **quiet)
        serve.run(application({"config": groups}), name="groups", route_prefix="/groups", **quiet)
        deployment = serve.deployment(name="hand", max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
        serve.run(deployment(ByHand).bind(file), name="hand", route_prefix="/hand", **quiet)
        print("ready", file=output, flush=True)
        sys.stdin.read()
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
