"""Baseline of the handler benchmark: a bare quart-trio route on hypercorn that returns its JSON input."""

from __future__ import annotations

import json
import sys

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart import Response, request
from quart_trio import QuartTrio

app = QuartTrio(__name__)


@app.post("/")
async def echo() -> Response:
    body = await request.get_data()
    return Response(json.dumps(json.loads(body)), content_type="application/json")


def main(port: int) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    config.keep_alive_max_requests = sys.maxsize
    trio.run(serve, app, config)


if __name__ == "__main__":
    main(int(sys.argv[1]))
