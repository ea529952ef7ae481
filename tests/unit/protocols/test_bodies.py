from __future__ import annotations

import gzip
import json
import random
import threading
from typing import Any

import numpy as np
import orjson
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput
from ovmstrio.core.tensor import BY_NAME, BYTES, Tensor
from ovmstrio.encoding import json_output as json_arrays
from ovmstrio.encoding.inflate import Inflation
from ovmstrio.encoding.json_output import array_pieces
from ovmstrio.encoding.raw_contents import gather_buffers, join_buffers
from ovmstrio.protocols.kserve import rest_routes as infer_answer
from ovmstrio.protocols.kserve.rest_routes import encode_infer_response
from ovmstrio.protocols.tensorflow.rest_routes import encode_predict_response
from ovmstrio.serving import ovms_errors as refusals
from ovmstrio.serving.ovms_errors import decompressed_body
from tests.support.error_memory import bytes_referenced_by

NOISE = random.Random(1).randbytes(10_000)


def _request(body: bytes) -> HttpRequest:
    return HttpRequest("POST", "/", headers=(("content-encoding", "gzip"),), body=body)


async def test_only_large_bodies_are_inflated_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class RecordingInflation(Inflation):
        def finish(self) -> bytes:
            threads.append(threading.get_ident())
            return super().finish()

    monkeypatch.setattr(refusals, "Inflation", RecordingInflation)
    for body in (b"small", NOISE):
        assert await decompressed_body(_request(gzip.compress(body)), 2**20) == body
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_a_body_above_the_limit_is_refused() -> None:
    with pytest.raises(PayloadTooLarge, match="more than 9999 bytes"):
        await decompressed_body(_request(gzip.compress(NOISE)), 9_999)


async def test_one_body_is_inflated_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, running = threading.Event(), threading.Semaphore(0)

    class BlockingInflation(Inflation):
        def finish(self) -> bytes:
            running.release()
            gate.wait(20)
            return super().finish()

    monkeypatch.setattr(refusals, "Inflation", BlockingInflation)
    body = gzip.compress(NOISE)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(decompressed_body, _request(body), 2**20)
        assert await trio.to_thread.run_sync(running.acquire, True, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert not running.acquire(blocking=False)
        gate.set()


def test_a_refusal_does_not_keep_the_inflated_bytes() -> None:
    def refused() -> BaseException:
        with pytest.raises(PayloadTooLarge) as caught:
            trio.run(decompressed_body, _request(gzip.compress(bytes(5 * 2**20))), 4 * 2**20)
        return caught.value

    assert bytes_referenced_by(refused) < 2**19


Array = np.ndarray[Any, Any]
_arrays = arrays(np.int32, array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))


@given(_arrays, st.integers(1, 40))
def test_pieces_join_to_the_json_of_the_array(array: Array, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_arrays, "PIECE", piece)
        printed = list(array_pieces(array))
    assert b"".join(printed) == orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


@given(arrays(np.int32, array_shapes(min_dims=1, max_dims=4, max_side=6)))
def test_pieces_are_small(array: Array) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_arrays, "PIECE", 5)
        assert all(piece.count(b",") <= 5 for piece in array_pieces(array))


def _response() -> InferResponse:
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((40, 500)).astype(np.float32)
    numbers[3, 7], numbers[30, 1], numbers[30, 2] = np.nan, np.inf, -np.inf
    words = np.array([f"w{number}" * 10 for number in range(2000)], object)
    words[:] = [word.encode() for word in words]
    outputs = [
        Tensor("numbers", BY_NAME["FP32"], numbers),
        Tensor("halves", BY_NAME["BF16"], np.arange(20_000, dtype=np.uint16).reshape(40, 500)),
        Tensor("words", BYTES, words.reshape(40, 50)),
    ]
    return InferResponse("m", "1", [*outputs], "id-1", {"a": 1})


@pytest.mark.parametrize("binary", [(), ("halves",), ("numbers", "words")])
def test_kserve_answers_in_pieces_equal_answers_in_one_piece(
    binary: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [RequestedOutput(name, {"binary_data": name in binary}) for name in ("numbers", "halves", "words")]
    request = InferRequest("m", outputs=outputs)
    in_pieces = encode_infer_response(request, _response())
    monkeypatch.setattr(infer_answer, "_MAX_ONE_CALL_BYTES", 2**30)
    at_once = encode_infer_response(request, _response())
    assert (in_pieces.headers, in_pieces.content) == (at_once.headers, at_once.content)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("names", [("numbers",), ("words",), ("numbers", "halves", "words")])
def test_tensorflow_answers_in_pieces_equal_answers_in_one_piece(
    names: tuple[str, ...], by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = _response()
    response.outputs = [output for output in response.outputs if output.name in names]
    monkeypatch.setattr(json_arrays, "PIECE", 64)
    in_pieces = encode_predict_response(response, by_rows=by_rows).content
    monkeypatch.setattr(json_arrays, "PIECE", 2**30)
    assert in_pieces == encode_predict_response(response, by_rows=by_rows).content
    document = json.loads(in_pieces)
    value = document["predictions" if by_rows else "outputs"]
    if names == ("numbers",):
        assert value[30][2] == -np.inf
    elif names == ("words",):
        assert value[0][1] == "w1" * 10


@given(st.lists(st.sampled_from([0, 1, 50, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20]), max_size=4), st.booleans())
def test_joined_and_gathered_buffers_are_complete(sizes: list[int], is_view: bool) -> None:
    noise = random.Random(1).randbytes(3 * 2**20)
    parts: list[bytes | memoryview] = []
    for number, size in enumerate(sizes):
        parts.append(memoryview(noise)[:size] if is_view ^ (number % 2 == 0) else noise[:size])
    assert join_buffers(parts) == b"".join(parts)
    assert gather_buffers(parts) == b"".join(parts)
