"""KServe v2's paths: what each answers, and with which status it refuses."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio

from ovmstrio.api.kserve.rest.infer_answer import HEAD_LENGTH
from ovmstrio.config.specs import ModelSpec
from ovmstrio.observability.metrics import Metrics
from tests.support.pass_through import load_pass_through
from tests.unit.api.rest.servers import BODY, Serving, infer_post, serving_rest

DATA = [0.5, -1.0]
INFER = "/v2/models/echo/infer"
MODEL_MISSING = "Model with requested name is not found"
VERSION_MISSING = "Model with requested version is not found"


def _infer_document(version: str = "2") -> dict[str, Any]:
    output = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": DATA}
    return {"model_name": "echo", "model_version": version, "outputs": [output]}


async def test_the_server_tells_what_it_is(serving: Serving) -> None:
    """Clients of OVMS look at the name."""
    answer = await serving.get("/v2")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    known = answer.json()
    assert known["name"] == "OpenVINO Model Server"
    assert known["version"]
    assert known["extensions"] == [
        "binary_tensor_data",
        "classification",
        "generate",
        "logging",
        "model_configuration",
        "statistics",
    ]


@pytest.mark.parametrize("state", ["live", "ready"])
async def test_health_is_a_document_that_clients_read(serving: Serving, state: str) -> None:
    """KServe's SDK parses it; to ``HEAD`` there is none."""
    answer = await serving.get(f"/v2/health/{state}")
    assert (answer.status_code, answer.json()) == (200, {state: True})
    head = await serving.with_http(lambda client: client.head(f"/v2/health/{state}"))
    assert (head.status_code, head.content) == (200, b"")


async def test_a_server_that_drains_is_live_and_not_ready(serving: Serving) -> None:
    """The refusal says why."""
    serving.plane.begin_drain()
    assert (await serving.get("/v2/health/live")).status_code == 200
    answer = await serving.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (503, {"error": "Server is not ready - the server is shutting down"})


@pytest.mark.parametrize("path", ["/v2/models/echo", "/v2/models/echo/", "/v2/models/echo/versions/1"])
async def test_metadata_lists_all_versions_and_tensors(serving: Serving, path: str) -> None:
    """Whichever version is asked for, all that can be called are listed; sizes that are not fixed are -1."""
    answer = await serving.get(path)
    tensors = [
        {"name": "text", "datatype": "BYTES", "shape": [-1]},
        {"name": "x", "datatype": "FP32", "shape": [1, 10]},
    ]
    assert (answer.status_code, answer.json()) == (
        200,
        {"name": "echo", "versions": ["1", "2"], "platform": "OpenVINO", "inputs": tensors, "outputs": tensors},
    )
    assert list(answer.json()) == ["name", "versions", "platform", "inputs", "outputs"]


@pytest.mark.parametrize("path", ["/v2/models/echo/ready", "/v2/models/echo/versions/2/ready"])
async def test_a_model_that_can_be_called_is_ready(serving: Serving, path: str) -> None:
    """The answer has no body."""
    answer = await serving.get(path)
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_minimal_configuration_is_told(serving: Serving) -> None:
    """Triton's load generator asks for it."""
    answer = await serving.get("/v2/models/echo/config")
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "name": "echo",
            "platform": "OpenVINO",
            "backend": "openvino",
            "max_batch_size": 0,
            "input": [
                {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]},
                {"name": "x", "data_type": "TYPE_FP32", "dims": [1, 10]},
            ],
            "output": [
                {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]},
                {"name": "x", "data_type": "TYPE_FP32", "dims": [1, 10]},
            ],
        },
    )


async def test_every_version_is_listed(serving: Serving) -> None:
    """The repository index and its short form show name, version and state, and no empty reason."""
    entries = [{"name": "echo", "version": version, "state": "READY"} for version in ("1", "2")]
    assert (await serving.get("/v2/models")).json() == {"models": entries}
    for body in (b"", b"{}", b'{"ready": true}'):
        assert (await serving.post("/v2/repository/index", content=body)).json() == entries
    refused = await serving.post("/v2/repository/index", content=b"{")
    assert refused.status_code == 412
    assert refused.json()["error"].startswith("The file is not valid json")


async def test_only_ready_versions_are_listed_if_asked(tmp_path: Path) -> None:
    """A version that does not load is in the whole list with its reason."""

    async def load(spec: ModelSpec, version: int, directory: Path) -> Any:
        if version == 2:
            raise ValueError("cannot be read")
        return await load_pass_through(spec, version, directory)

    async with serving_rest(tmp_path, loader=load) as server:
        index = (await server.post("/v2/repository/index")).json()
        assert [(entry["version"], entry["state"] == "READY") for entry in index] == [("1", True), ("2", False)]
        assert "cannot be read" in index[1]["reason"]
        ready = (await server.post("/v2/repository/index", content=b'{"ready": true}')).json()
        assert [entry["version"] for entry in ready] == ["1"]
        not_loaded = await server.get("/v2/models/echo/versions/2/ready")
        assert not_loaded.status_code == 404
        assert not_loaded.json()["error"].startswith("Model with requested version is not loaded yet")


@pytest.mark.parametrize(
    ("suffix", "version"), [("", "2"), ("/versions/1", "1"), ("/versions/2", "2"), ("/versions/0", "2")]
)
@pytest.mark.parametrize("extra", [(), ("Origin: http://elsewhere",)], ids=["lane", "application"])
async def test_an_inference_is_answered_by_the_version(
    serving: Serving, suffix: str, version: str, extra: tuple[str, ...]
) -> None:
    """Both ways through the server give the same answer."""
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(BODY, *extra, suffix=suffix))
    assert (answer.status, answer.json) == (200, _infer_document(version))
    assert answer.headers["content-type"] == "application/json"


async def test_an_id_is_echoed(serving: Serving) -> None:
    """It stands behind the model's name."""
    answer = await serving.post(INFER, content=BODY[:-1] + b',"id":"seven"}')
    assert answer.json()["id"] == "seven"
    assert list(answer.json()) == ["model_name", "id", "model_version", "outputs"]


@pytest.mark.parametrize("extra", [(), ("Origin: http://elsewhere",)], ids=["lane", "application"])
async def test_binary_tensors_travel_both_ways(serving: Serving, extra: tuple[str, ...]) -> None:
    """The length of the JSON part is told in either direction."""
    raw = b"\0\0\0\x3f\0\0\x80\xbf"
    head = orjson.dumps(
        {
            "parameters": {"binary_data_output": True},
            "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
        }
    )
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(head + raw, f"{HEAD_LENGTH.upper()}: {len(head)}", *extra))
    assert answer.status == 200
    length = int(answer.headers[HEAD_LENGTH.lower()])
    assert answer.body[length:] == raw
    assert orjson.loads(answer.body[:length])["outputs"] == [
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    ]


@pytest.mark.parametrize(
    ("suffix", "body", "status", "text"),
    [
        ("", b"{", 412, "The file is not valid json"),
        ("", b"[]", 400, "Request body should be JSON object"),
        ("", b"{}", 400, "No inputs found"),
        ("/versions/99999999999999999999", BODY, 404, VERSION_MISSING),
        ("/versions/9999999999999999999", BODY, 404, VERSION_MISSING),
        ("/versions/7", BODY, 404, VERSION_MISSING),
        ("/versions/7", b"{}", 400, "No inputs found"),
        ("/versions/one", BODY, 400, "Model version must be an integer"),
        ("/versions/one", b"{", 412, "The file is not valid json"),
        ("/versions/-1", BODY, 400, "Model version must be an integer"),
        ("/versions/1.0", BODY, 400, "Model version must be an integer"),
        ("/versions/%D9%A1", BODY, 400, "Model version must be an integer"),
    ],
)
@pytest.mark.parametrize("extra", [(), ("Origin: http://elsewhere",)], ids=["lane", "application"])
async def test_a_refused_inference_says_why(
    serving: Serving, suffix: str, body: bytes, *, status: int, text: str, extra: tuple[str, ...]
) -> None:
    """Bodies are judged before versions, and errors have one form, whichever way the request came."""
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(body, *extra, suffix=suffix))
        assert (answer.status, list(answer.json)) == (status, ["error"])
        assert answer.json["error"].startswith(text)
        assert answer.headers["content-type"] == "application/json"
        assert (await peer.ask(infer_post())).status == 200


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/nobody", 404, MODEL_MISSING),
        ("/v2/models/nobody/ready", 404, MODEL_MISSING),
        ("/v2/models/nobody/config", 404, MODEL_MISSING),
        ("/v2/models/echo%20echo", 404, MODEL_MISSING),
        ("/v2/models/echo/versions/7", 404, VERSION_MISSING),
        ("/v2/models/echo/versions/7/ready", 404, VERSION_MISSING),
        ("/v2/models/echo/versions/0/ready", 404, VERSION_MISSING),
        ("/v2/models/echo/versions/99999999999999999999", 404, VERSION_MISSING),
        ("/v2/models/echo/versions/one", 400, "Model version must be an integer"),
        ("/v2/models/echo/versions/-1/ready", 400, "Model version must be an integer"),
        ("/v2/models/echo/labels/stable", 400, "Invalid request URL"),
    ],
)
async def test_what_does_not_exist_is_refused(serving: Serving, path: str, status: int, text: str) -> None:
    """Names and versions have OVMS's texts."""
    answer = await serving.get(path)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert answer.json()["error"].startswith(text)


async def test_a_name_is_percent_decoded(tmp_path: Path) -> None:
    """Blanks and other characters may be in names, on either way through the server."""
    name = "a model, pr\u00fcf"
    (tmp_path / "other" / "1").mkdir(parents=True)
    async with serving_rest(tmp_path, models=(ModelSpec(name=name, base_path=tmp_path / "other"),)) as server:
        path = "/v2/models/a%20model%2C%20pr%C3%BCf"
        assert (await server.get(path)).json()["name"] == name
        for headers in ({}, {"Origin": "http://elsewhere"}):
            answer = await server.post(f"{path}/infer", content=BODY, headers=headers)
            assert answer.json()["model_name"] == name


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
    ],
)
async def test_compressed_bodies_are_read(serving: Serving, encoding: str, encode: Any) -> None:
    """The encodings that clients of Triton use are undone."""
    answer = await serving.post(INFER, content=encode(BODY), headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()) == (200, _infer_document())


@pytest.mark.parametrize(
    ("encoding", "body", "status", "text"),
    [
        ("br", BODY, 400, "Content-Encoding 'br' is not supported; use gzip, deflate or none"),
        ("gzip, gzip", BODY, 400, "Content-Encoding 'gzip, gzip' is not supported"),
        ("gzip", BODY, 400, "the body is not gzip"),
        ("deflate", BODY, 400, "the body is not deflate"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400, "the body is not gzip: it ends too early"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400, "the body is not gzip: it goes on"),
        ("gzip", b"", 400, "the body is not gzip: it ends too early"),
        (
            "gzip",
            gzip.compress(b" " * 2_000_000, mtime=0),
            413,
            "the body has more than 1000000 bytes, the limit is 1000000",
        ),
    ],
)
async def test_bad_compression_is_the_callers_mistake(
    tmp_path: Path, encoding: str, body: bytes, status: int, text: str
) -> None:
    """A body that grows beyond the limit is refused before it has grown."""
    async with serving_rest(tmp_path, front_end={"max_body_bytes": 1_000_000}) as server:
        answer = await server.post(INFER, content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_refused_with_the_numbers(tmp_path: Path, chunked: bool) -> None:
    """The client reads the refusal, though it was still sending; the limit's option is named."""
    body = b" " * 8_000_000
    content: Any = iter([body]) if chunked else body
    async with serving_rest(tmp_path, front_end={"max_body_bytes": 1_000_000}) as server:
        answer = await server.post(INFER, content=content)
        assert answer.status_code == 413
        size = "more than 1000000" if chunked else "8000000"
        assert answer.json()["error"] == f"the body has {size} bytes, the limit is 1000000 (--max_message_size)"
        assert (await server.post(INFER, content=BODY)).status_code == 200


async def test_an_overloaded_servable_says_when_to_come_again(tmp_path: Path) -> None:
    """A full queue is 429 with ``Retry-After``, in whole seconds that are not too few."""
    from ovmstrio.core.errors import Overloaded

    async def load(spec: ModelSpec, version: int, directory: Path) -> Any:
        servable = await load_pass_through(spec, version, directory)

        async def infer(request: Any) -> Any:
            await trio.lowlevel.checkpoint()
            raise Overloaded("the queue is full", retry_after_seconds=2.4)

        servable.infer = infer  # type: ignore[method-assign]
        return servable

    async with serving_rest(tmp_path, loader=load) as server:
        answer = await server.post(INFER, content=BODY)
    assert (answer.status_code, answer.json()) == (429, {"error": "the queue is full"})
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("extra", [(), ("Origin: http://elsewhere",)], ids=["lane", "application"])
async def test_a_model_that_fails_is_the_servers_failure(serving: Serving, extra: tuple[str, ...]) -> None:
    """Its text reaches the client; the connection goes on."""
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(BODY[:-1] + b',"parameters":{"fail":"it broke"}}', *extra))
        assert (answer.status, answer.json) == (500, {"error": "it broke"})
        assert (await peer.ask(infer_post())).status == 200


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
async def test_a_body_that_cannot_be_read_counts_as_a_failed_inference(tmp_path: Path, headers: dict[str, str]) -> None:
    """If the model exists, its failures are counted; unknown names are not."""
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        for model in ("echo", "nobody"):
            assert (await server.post(f"/v2/models/{model}/infer", content=b"{", headers=headers)).status_code >= 400
        text = (await server.get("/metrics")).text
    failures = [line for line in text.splitlines() if line.startswith("ovms_requests_fail") and line.endswith(" 1.0")]
    assert len(failures) == 1
    assert 'name="echo"' in failures[0]
    assert 'method="ModelInfer"' in failures[0]
    assert "nobody" not in text
