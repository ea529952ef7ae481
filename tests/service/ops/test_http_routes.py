from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio

from ovmstrio.ops.messages import PipelineResponse, PipelineTensor
from tests.support.fetched_samples import unpack_original
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedPlan
from tests.support.waits import WAIT_SECONDS, until_async

EMPTY = b'{"err_no":0,"err_msg":"","key":[],"value":[],"tensors":[]}'
NO_SERVICE = b'{"err_no":3002,"err_msg":"Failed to inference: Service name error.","key":[],"value":[],"tensors":[]}'
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
ECHOED = b'{"err_no":0,"err_msg":"","key":["%b"],"value":["%b"],"tensors":[]}'
ANSWERED: list[tuple[str, bytes, bytes]] = [
    (
        "/uci/prediction",
        b'{"key":["x"],"value":["<1&\\u0008\\u000c\\u2028\\u007f\\u0001\xc3\xa9>"]}',
        ECHOED % (b"x", b"\\u003c1\\u0026\\u0008\\u000c\\u2028\x7f\\u0001\xc3\xa9\\u003e"),
    ),
    ("/nope/prediction", b"{}", NO_SERVICE),
    *(("/uci/prediction", body, EMPTY) for body in (b"", b"null")),
    ("/uci/whatever", b'{"key":null,"nope":{"a":[1]}}', EMPTY),
    *((path, b"{}", EMPTY) for path in ("/uci/", "/uci/x%20y")),
    ("/uci/x", b'{"name":"other","method":"other"}', EMPTY),
    ("/uci/x", b'{"key":["a"],"key":["b"],"value":["2"],"logid":"78"}', ECHOED % (b"b", b"2")),
    ("/uci/x", b'{"tensors":[{"name":"s","elemType":12,"strData":["a","b"]}]}', ECHOED % (b"s", b"ab")),
    (
        "/uci/x",
        b'{"tensors":[{"name":"i","elem_type":0,"int64_data":["1",2],"shape":["2"]}]}',
        ECHOED % (b"i", b"array([1, 2])"),
    ),
]
GATEWAY: list[tuple[str, str, bytes, int, str, bytes]] = [
    *(("POST", path, body, 200, JSON, expected) for path, body, expected in ANSWERED),
    *((verb, "/uci/prediction", b"", 405, TEXT, b"Method Not Allowed\n") for verb in ("GET", "PUT", "DELETE")),
    *(("POST", path, b"{}", 404, TEXT, b"Not Found\n") for path in ("/", "/uci", "/a/b/c")),
]


@asynccontextmanager
async def _client(
    executor: EchoExecutor, *, headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving_pipeline(executor, **options) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", timeout=WAIT_SECONDS, headers=headers) as client,
    ):
        yield client


@pytest.mark.parametrize(("method", "path", "body", "status", "content_type", "expected"), GATEWAY)
async def test_answers_are_those_of_the_original_gateway(
    method: str, path: str, body: bytes, status: int, content_type: str, expected: bytes
) -> None:
    async with _client(EchoExecutor()) as client:
        answer = await client.request(method, path, content=body)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (status, content_type, expected)


@asynccontextmanager
async def _original_gateway(running: ServedPlan, home: Path) -> AsyncIterator[httpx.AsyncClient]:
    library = home / "paddle_serving_server" / "pipeline" / "gateway" / "libproxy_server.so"
    (port,) = free_ports(1)
    rpc = running.grpc[0].rpartition(":")[2]
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).run_proxy_server({rpc}, {port})"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.run_process, [sys.executable, "-c", code])
        transport = httpx.AsyncHTTPTransport(retries=6)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECONDS, transport=transport
        ) as client:
            yield client
        nursery.cancel_scope.cancel()


async def test_the_original_gateway_gives_the_same_answers(tmp_path: Path) -> None:
    home = unpack_original(tmp_path)
    async with serving_pipeline(EchoExecutor()) as running, _original_gateway(running, home) as client:
        for method, path, body, status, content_type, expected in GATEWAY:
            answer = await client.request(method, path, content=body)
            got = (answer.status_code, answer.headers["content-type"], answer.content)
            assert got == (status, content_type, expected), (method, path, body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{nope", "the body is not valid JSON"),
        (b"[1]", "the body: expected a JSON object, got a list"),
        (b'{"key":1}', "key: expected a list, got a number 1"),
        (b'{"key":[1]}', "key: expected a string, got a number 1"),
        (b'{"value":"a"}', "value: expected a list, got a string 'a'"),
        (b'{"logid":"abc"}', "logid: expected a 64-bit integer"),
        (b'{"logid":true}', "logid: expected a 64-bit integer or its text, got a boolean"),
        (b'{"logid":9223372036854775808}', "logid: expected a 64-bit integer"),
        (b'{"logid":"%b"}' % (b"9" * 5000), "logid: expected a 64-bit integer"),
        (b'{"value":[%b]}' % (b"[" * 300 + b"]" * 300), "value: lists and objects are nested too deeply"),
        (b'{"tensors":[1]}', "tensors[0]: expected an object, got a number 1"),
        (
            b'{"key":[1],"tensors":[1,2]}',
            (
                "key: expected a string, got a number 1. Also: tensors[0]: expected an object, got a number 1. "
                "Also: tensors[1]: expected an object, got a number 2"
            ),
        ),
        (b'{"tensors":[{},{"shape":"x"}]}', "tensors[1]: "),
        (b'{"tensors":[{"byte_data":"a"}]}', "tensors[0]: "),
    ],
)
async def test_malformed_bodies_are_refused_in_the_form_of_the_gateway(body: bytes, text: str) -> None:
    async with _client(EchoExecutor()) as client:
        answer = await client.post("/uci/prediction", content=body)
    document = answer.json()
    assert answer.status_code == 400
    assert list(document) == ["error", "code", "message", "details"]
    assert (document["code"], document["details"]) == (3, [])
    assert document["error"] == document["message"]
    assert document["error"].startswith(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([[[1, 2]]], "[[1,2]]"),
        ([{"a": "<"}], '{"a":"<"}'),
        ([1.5], "1.5"),
        ([True], "true"),
        ({"a": 1}, '{"a":1}'),
    ],
)
async def test_values_of_other_types_become_json_texts(value: Any, text: str) -> None:
    executor = EchoExecutor()
    async with _client(executor) as client:
        await client.post("/uci/prediction", json={"key": ["x"], "value": value})
    assert executor.requests[0].values == [text]


async def test_name_method_body_and_address_reach_the_pipeline() -> None:
    executor = EchoExecutor()
    body = {"key": ["a"], "value": ["1"], "logid": 78, "name": "other", "method": "other"}
    async with _client(executor) as client:
        await client.post("/uci/predict", json=body, headers={"content-type": "application/x-www-form-urlencoded"})
        await client.post("/uci/predict", json={**body, "clientip": "10.1.2.3"})
    first, second = executor.requests
    assert (first.name, first.method, first.logid, first.clientip) == ("uci", "predict", 78, "127.0.0.1")
    assert second.clientip == "10.1.2.3"


async def test_bytes_are_base64_and_large_integers_texts() -> None:
    executor = EchoExecutor()
    executor.answer = PipelineResponse(
        0, "", ["k"], ["v"], [PipelineTensor("t", 0, [2], [0, 2], [1, 2**60], [0.5, float("nan")], byte_data=b"abc")]
    )
    async with _client(executor) as client:
        sent = {"tensors": [{"name": "b", "elem_type": 13, "byte_data": base64.b64encode(b"xyz").decode()}]}
        answer = await client.post("/uci/prediction", json=sent)
    assert executor.requests[0].tensors[0].byte_data == b"xyz"
    assert answer.content == (
        b'{"err_no":0,"err_msg":"","key":["k"],"value":["v"],"tensors":[{"int64_data":["1","1152921504606846976"],'
        b'"float_data":[0.5,"NaN"],"int_data":[],"float64_data":[],"uint32_data":[],"bool_data":[],"complex64_data":[],'
        b'"complex128_data":[],"str_data":[],"byte_data":"YWJj","elem_type":0,"shape":[2],"lod":[0,2],"name":"t"}]}'
    )


STATUSES = ((0, 200), (3001, 503), (3002, 404), (5000, 400), (6000, 504), (8000, 400), (10000, 500), (51, 422))


@pytest.mark.parametrize(
    ("code", "is_overload", "http_status", "status"),
    [
        *((code, False, True, status) for code, status in STATUSES),
        *((code, False, False, 200) for code, _ in STATUSES),
        (3000, True, False, 429),
    ],
)
async def test_errors_have_a_status_on_request_and_overloads_always(
    code: int, is_overload: bool, http_status: bool, status: int
) -> None:
    executor = EchoExecutor()
    executor.answer = PipelineResponse(code, "text", is_overload=is_overload)
    async with _client(executor, http_status=http_status) as client:
        answer = await client.post("/uci/prediction", json={})
    assert (answer.status_code, answer.json()["err_no"]) == (status, code)


async def test_20_mb_are_received_and_sent() -> None:
    text = "x" * 20_000_000
    async with _client(EchoExecutor()) as client:
        answer = await client.post("/uci/prediction", content=json.dumps({"key": ["x"], "value": [text]}))
    assert answer.json()["value"] == [text]


async def test_a_client_that_disconnects_cancels_its_request() -> None:
    executor = EchoExecutor()
    executor.gate = trio.Event()
    async with _client(executor) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.post, "/uci/prediction")
            await executor.arrived.wait()
            nursery.cancel_scope.cancel()
        assert await until_async(lambda: executor.cancelled) == executor.requests


async def test_health_reports_the_problem_of_the_pipeline() -> None:
    executor = EchoExecutor()
    async with _client(executor) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        executor.problem = "worker 1 of Op det has died"
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["reason"]) == (503, "worker 1 of Op det has died")
        assert (await client.get("/v2/health/ready")).status_code == 503


async def test_metrics_and_figures_are_served_if_there_are_any() -> None:
    async with _client(EchoExecutor(), render_metrics=lambda: b"up 1\n", snapshot=lambda: {"running": 2}) as client:
        assert (await client.get("/metrics")).content == b"up 1\n"
        assert (await client.get("/trace")).json() == {"running": 2}
    async with _client(EchoExecutor()) as client:
        assert [(await client.get(path)).status_code for path in ("/metrics", "/trace")] == [404, 404]


async def test_kserve_inputs_are_keys_or_tensors() -> None:
    executor = EchoExecutor(as_tensors=True)
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]},
        {"name": "n", "datatype": "UINT8", "shape": [2], "data": [1, 2]},
    ]
    async with _client(executor) as client:
        numbers = (await client.post("/v2/models/uci/infer", json={"inputs": inputs})).json()
        text = {"name": "k", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
        texts = (await client.post("/v2/models/uci/infer", json={"inputs": [text]})).json()
    assert numbers["outputs"][0] == {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}
    assert numbers["outputs"][1] == {"name": "n", "datatype": "UINT8", "shape": [2], "data": [1, 2]}
    assert texts["outputs"] == [{"name": "k", "datatype": "BYTES", "shape": [1], "data": ["abc"]}]
    assert (executor.requests[1].keys, executor.requests[1].values) == (["k"], ["abc"])


async def test_pickled_arrays_are_refused() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], object), allow_pickle=True)
    sent = {"tensors": [{"name": "b", "elem_type": 13, "byte_data": base64.b64encode(buffer.getvalue()).decode()}]}
    async with _client(EchoExecutor()) as client:
        answer = (await client.post("/uci/prediction", json=sent)).json()
    assert answer["err_no"] == 8000
    assert "pickle" in answer["err_msg"]


@pytest.mark.parametrize("headers", [{}, {"TE": "trailers"}], ids=["fast", "application"])
async def test_methods_and_health_are_served_below_the_name_of_the_pipeline(headers: dict[str, str]) -> None:
    executor, body = EchoExecutor(), {"key": ["x"], "value": ["1"]}
    async with _client(executor, headers=headers, snapshot=lambda: {"running": 2}) as client:
        for path in ("/uci/go", "/uci/uci/go", "/uci/uci/go/"):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["value"]) == (200, ["1"])
        assert [(each.method, each.clientip) for each in executor.requests] == [("go", "127.0.0.1")] * 3
        answer = await client.post("/uci/go", content=b"{")
        assert (answer.status_code, answer.json()["code"]) == (400, 3)
        assert (await client.get("/uci/health")).json() == {"status": "ok"}
        assert (await client.get("/uci/trace")).json() == {"running": 2}
        assert (await client.get("/v1/config")).json()["uci"]
