"""What a plain request costs the server's thread, in calls of Python functions."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.core.tensor import Tensor
from ovmstrio.dataplane.guarded_plane import CallerNames, GuardedPlane
from tests.service.api.rest.handlers.servers import serving_handler
from tests.support.callers import gate_of
from tests.support.pass_through import PassThrough
from tests.support.python_calls import calls_of_one
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import BODY, infer_post, serving_rest

HANDLER = "class Handler:\n    def handle_post(self, payload):\n        return payload\n"
MOST_OF_A_HANDLER = 336 * 1.1
MOST_OF_AN_INFERENCE = 194 * 1.1
MOST_OF_ONE_AT_ONCE = 83 * 1.1
MOST_WITH_BYTES = 97 * 1.1
MOST_OF_A_KEY = 20
"""With room for a busy machine, on which the event loop takes more turns for the same requests."""


def _drive(address: str, request: bytes, count: int) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as client:
        for _ in range(count):
            client.sendall(request)
            come = client.recv(65536)
            head, _, body = come.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += client.recv(65536)


async def test_a_post_to_a_handler(tmp_path: Path) -> None:
    """Its method runs in a thread, whose calls are not the server's."""
    body = b'{"a":1}'
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving_handler(tmp_path, HANDLER) as served:
        assert await calls_of_one(partial(_drive, served.address, head + body)) <= MOST_OF_A_HANDLER


async def test_a_key_that_was_shown_before_costs_few_calls(tmp_path: Path) -> None:
    """The gate neither waits for such a request nor makes anything for it but the note whose it is."""
    guarded: dict[str, Any] = {
        "plane_class": GuardedPlane,
        "observers": (CallerNames(),),
        "front_end": {"gate": gate_of({"shop": "infer:echo"})},
    }
    request = infer_post(BODY, "Authorization: Bearer shop")
    async with serving_rest(tmp_path / "open") as open_to_all, serving_rest(tmp_path / "keyed", **guarded) as keyed:
        free = await calls_of_one(partial(_drive, open_to_all.address, request))
        known = await calls_of_one(partial(_drive, keyed.address, request))
    assert known - free <= MOST_OF_A_KEY


class _AtOnce(PassThrough):
    async def infer(self, request: InferRequest) -> InferResponse:
        (given,) = request.inputs
        values = np.frombuffer(request.raw_inputs[0] or b"", np.float32) if request.raw_inputs else None
        if given.contents is not None:
            values = np.array(given.contents.values, np.float32)
        assert values is not None
        array = values.reshape(given.shape)
        output = Tensor(given.name, BY_NAME["FP32"], array)
        return InferResponse(request.model_name, "2", [output], is_private=True)


async def _load_at_once(spec: ModelSpec, version: int, _directory: Path) -> _AtOnce:
    return _AtOnce(spec, version)


async def test_an_inference_that_waits_for_nothing(tmp_path: Path) -> None:
    """It takes one turn of the loop, in which its answer is sent."""
    async with serving_rest(tmp_path, loader=_load_at_once) as serving:
        assert await calls_of_one(partial(_drive, serving.address, infer_post())) <= MOST_OF_ONE_AT_ONCE


async def test_an_inference(tmp_path: Path) -> None:
    """Of a servable that waits for its turn, and for nothing else."""
    async with serving_rest(tmp_path) as serving:
        assert await calls_of_one(partial(_drive, serving.address, infer_post())) <= MOST_OF_AN_INFERENCE


async def test_an_inference_with_bytes_behind_its_document(tmp_path: Path) -> None:
    """The document has come before, and the answer is one of JSON and bytes."""
    given = b'{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}'
    head = b'{"parameters":{"binary_data_output":true},"inputs":[%b]}' % given
    request = infer_post(head + bytes(8), f"Inference-Header-Content-Length: {len(head)}")
    async with serving_rest(tmp_path, loader=_load_at_once) as serving:
        assert await calls_of_one(partial(_drive, serving.address, request)) <= MOST_WITH_BYTES
