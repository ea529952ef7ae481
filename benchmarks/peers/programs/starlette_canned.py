"""Baseline of the REST benchmark: a Starlette route on uvicorn that parses the JSON body and returns a canned answer.

It runs in an environment that has both packages, such as LitServe's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

_ANSWER = {
    "model_name": "trivial",
    "model_version": "1",
    "outputs": [{"name": "a", "shape": [1, 10], "datatype": "FP32", "data": [float(n) for n in range(1, 11)]}],
}


async def infer(request: Request) -> JSONResponse:
    """Answer."""
    await request.json()
    return JSONResponse(_ANSWER)


if __name__ == "__main__":
    app = Starlette(routes=[Route("/v2/models/{model}/infer", infer, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
