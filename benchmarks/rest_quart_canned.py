"""Baseline of the REST benchmark: a bare quart-trio route on hypercorn with a canned answer."""

from __future__ import annotations

import sys

import orjson
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart import Response, request
from quart_trio import QuartTrio

_ANSWER = {
    "model_name": "trivial",
    "model_version": "1",
    "outputs": [{"name": "a", "shape": [1, 10], "datatype": "FP32", "data": [float(n) for n in range(1, 11)]}],
}

app = QuartTrio(__name__)


@app.post("/v2/models/<model>/infer")
async def infer(model: str) -> Response:
    del model
    orjson.loads(await request.get_data())
    return Response(orjson.dumps(_ANSWER), content_type="application/json")


def main(port: int) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    config.keep_alive_max_requests = sys.maxsize
    trio.run(serve, app, config)


if __name__ == "__main__":
    main(int(sys.argv[1]))
