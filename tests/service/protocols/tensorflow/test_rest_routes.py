from __future__ import annotations

import base64
import gzip
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from ovmstrio.config.specs import GraphSpec, ModelSpec, ServableSpec
from ovmstrio.core.service import Servable
from ovmstrio.models.loading import load_model
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.transport.http.router import Route
from tests.support import ir
from tests.support.servables import EXACT
from tests.support.stub_registry import GRAPH, load_pass_through, load_scripted
from tests.unit.protocols.servers import Serving, serving_rest

NAME_MISSING = "Model with requested name is not found"
VERSION_MISSING = "Model with requested version is not found"
OK_STATUS = {"error_code": "OK", "error_message": "OK"}


async def _load(spec: ModelSpec, version: int, directory: Path) -> Servable:
    load: Any = {"echo": load_pass_through, GRAPH: load_scripted}.get(spec.name, load_model)
    servable: Servable = await load(spec, version, directory)
    return servable


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    models = {
        "dummy": ir.dummy([-1, 3]),
        "scalar": ir.scalar(),
        "truth": ir.passthrough("BOOL", ()),
        "two": ir.sum_of_two((2, 2)),
        "int8": ir.dummy((2,), datatype="INT8"),
        "strings": ir.string_passthrough(),
        "image": ir.image_passthrough(),
        "broken": ir.matmul(),
    }
    specs: list[ServableSpec] = [
        ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT)
        for name, model in models.items()
    ]
    base = tmp_path / GRAPH
    (base / "1").mkdir(parents=True)
    specs.append(GraphSpec(name=GRAPH, base_path=base, graph_path=base / "graph.pbtxt"))
    async with serving_rest(tmp_path, models=tuple(specs), loader=_load, metrics=Metrics()) as server:
        yield server


async def _predict(served: Serving, model: str, document: Any) -> Any:
    answer = await served.post(f"/v1/models/{model}:predict", json=document)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


VALUES, SUMS = [[1, 2, 3], [4.5, 5, 6]], [[2, 3, 4], [5.5, 6, 7]]
TWO = [{"x": [1, 2], "y": [10, 20]}, {"x": [3, 4], "y": [30, 40]}]
DIFFERENCES, TOTALS = [[-9, -18], [-27, -36]], [[11, 22], [33, 44]]
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def _png() -> dict[str, str]:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}


PREDICTIONS: tuple[tuple[str, Any, Any], ...] = (
    *(
        (f"dummy{suffix}", {"inputs": {"b": VALUES}, "signature_name": "serving_default"}, {"outputs": SUMS})
        for suffix in ("", "/versions/1", "/versions/0", "/labels/any")
    ),
    ("d%75mmy", {"inputs": VALUES}, {"outputs": SUMS}),
    ("dummy", {"inputs": VALUES}, {"outputs": SUMS}),
    ("dummy", {"instances": VALUES}, {"predictions": SUMS}),
    ("dummy", {"instances": [{"b": row} for row in VALUES]}, {"predictions": SUMS}),
    (
        "two",
        {"inputs": {name: [row[name] for row in TWO] for name in "xy"}},
        {"outputs": {"difference": DIFFERENCES, "sum": TOTALS}},
    ),
    (
        "two",
        {"instances": TWO},
        {"predictions": [{"difference": a, "sum": b} for a, b in zip(DIFFERENCES, TOTALS, strict=True)]},
    ),
    ("scalar", {"inputs": 1.5}, {"outputs": 2.5}),
    ("scalar", {"inputs": {"b": 1.5}}, {"outputs": 2.5}),
    ("truth", {"inputs": True}, {"outputs": True}),
    ("strings", {"instances": ["a", "ü"]}, {"predictions": ["a", "ü"]}),
    ("strings", {"inputs": {"strings": [{"b64": "/w=="}, "a"]}}, {"outputs": [{"b64": "/w=="}, {"b64": "YQ=="}]}),
    ("image", {"inputs": [_png()]}, {"outputs": [PIXELS[..., ::-1].tolist()]}),
    ("image", {"instances": [{"image": _png()}]}, {"predictions": [PIXELS[..., ::-1].tolist()]}),
    ("int8", {"inputs": [1.9, -128]}, {"outputs": [2, -127]}),
)


async def test_predictions_have_the_form_of_the_request(served: Serving) -> None:
    for model, document, expected in PREDICTIONS:
        assert await _predict(served, model, document) == expected, (model, document)


async def test_bodies_may_be_compressed_and_have_any_content_type(served: Serving) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/x-www-form-urlencoded"}
    body = gzip.compress(b'{"inputs": [[1, 2, 3]]}')
    answer = await served.post("/v1/models/dummy:predict", content=body, headers=headers)
    assert answer.json() == {"outputs": [[2, 3, 4]]}


REFUSED_CALLS = (
    ("nothing", b"no json", 404, NAME_MISSING),
    (GRAPH, b'{"inputs": [1]}', 404, NAME_MISSING),
    ("dummy/versions/7", b"no json", 404, VERSION_MISSING),
    ("dummy/versions/99999999999999999999", b"{}", 404, VERSION_MISSING),
    ("dummy:predict", b"{}", 404, NAME_MISSING),
    ("%ff", b"{}", 404, NAME_MISSING),
    ("..", b"{}", 400, "Invalid request URL"),
    ("dummy", b"{", 412, "The file is not valid json"),
    ("dummy", b"{}", 400, "Invalid JSON structure. Could not detect row or column format"),
    ("dummy", b'{"inputs": {"c": [[1, 2, 3]]}}', 400, "Missing input with specific name - Required input: b"),
    ("dummy", b'{"inputs": {"b": [[1]], "c": 1}}', 400, "Invalid number of inputs - Expected: 1; Actual: 2"),
    ("dummy", b'{"inputs": [1, 2, 3]}', 400, "Invalid number of shape dimensions"),
    ("dummy", b'{"inputs": [[1, 2]]}', 400, "Invalid input shape"),
    ("dummy", b'{"inputs": {"sequence_id": [1], "b": [[1, 2, 3]]}}', 400, "Invalid number of inputs"),
    ("two", b'{"inputs": {"x": [[1, 2]], "y": [[1, 2], [3, 4]]}}', 400, "Invalid input batch size"),
    ("two", b'{"inputs": [[1, 2], [3, 4]]}', 400, "Inputs inside buffer do not match the expected format"),
    ("image", b'{"inputs": [{"b64": "AAAA"}]}', 400, ""),
    ("scalar", b'{"instances": [1.5]}', 400, "Invalid number of shape dimensions"),
    ("scalar", b'{"inputs": true}', 400, "Invalid JSON structure. One of inputs is not a JSON object"),
    ("int8", b'{"inputs": [1, 128]}', 400, "Invalid values in tensor proto container"),
    ("broken", b'{"inputs": {"x": [[1]], "y": [[1], [2]]}}', 500, ""),
)


async def test_a_refused_predict_call_has_status_and_text_of_ovms(served: Serving) -> None:
    for path, body, status, text in REFUSED_CALLS:
        answer = await served.post(f"/v1/models/{path}:predict", content=body)
        assert answer.status_code == status, (path, body, answer.text)
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"].startswith(text), (path, body, answer.text)


REFUSED_PATHS = (
    ("GET", "/v1/models/dummy:predict", 406, "Unsupported method - GET /v1/models/dummy:predict; use POST"),
    ("GET", "/v1/models/nothing:predict", 406, "Unsupported method"),
    ("POST", "/v1/models", 406, "Unsupported method"),
    ("GET", "/v1/models/a%2Fb", 404, NAME_MISSING),
    ("GET", "/v1/models/a/b", 400, "Invalid request URL"),
    ("GET", "/v1/models/nothing", 404, NAME_MISSING),
    ("GET", "/v1/models/dummy/versions/7", 404, VERSION_MISSING),
    ("GET", "/v1/models/nothing/metadata", 404, NAME_MISSING),
    ("GET", "/v1/models/dummy/versions/7/metadata", 404, VERSION_MISSING),
    ("GET", f"/v1/models/dummy/versions/{'9' * 5000}", 404, VERSION_MISSING),
    ("POST", "/v1/models/dummy/metadata", 406, "Unsupported method - POST /v1/models/dummy/metadata; use GET"),
    *(
        ("POST", f"/v1/models/{path}", 404, "Requested REST resource not found")
        for path in ("m:classify", "m/labels/x:regress")
    ),
    *(
        ("POST", f"/v1/models/m/versions/{each}:predict", 400, "Invalid request URL")
        for each in ("one", "", "-1", "%D9%A1")
    ),
    *(("GET", f"/v1/models/m/versions/1/{path}", 400, "Invalid request URL") for path in ("2", "labels/x")),
    ("POST", "/v1/models/m/infer", 400, "Invalid request URL"),
    ("POST", f"/v1/models/dummy/versions/{2**63}:predict", 404, VERSION_MISSING),
)


async def test_a_wrong_method_is_refused_before_names_are_checked(served: Serving) -> None:
    def work(client: httpx.Client) -> None:
        for method, path, status, text in REFUSED_PATHS:
            answer = client.request(method, path)
            assert answer.status_code == status, (method, path, answer.text)
            assert answer.json()["error"].startswith(text), (method, path, answer.text)

    await served.with_http(work)


@pytest.mark.parametrize(
    ("target", "places"),
    [
        ("/v1/models/a%20b:c/versions/7:predict", {"model": "a b:c", "version": "7"}),
        ("/v1/models/m/labels/a:predict", {"model": "m", "label": "a"}),
        ("/v1/models/org%2Fm:predict", {"model": "org/m"}),
        ("/v2/models/m:predict", None),
        ("/v4/models/m:predict", None),
        ("/v1/models/m/infer", None),
        ("/v1/models/m:classify", None),
        ("/v1/models/m:predict/", None),
        ("/v1/models/m/versions/x:predict", None),
    ],
)
async def test_only_predict_targets_are_for_the_fast_lane(
    serving: Serving, target: str, places: dict[str, str] | None
) -> None:
    route = make_rest_router(serving.plane).find("POST", target)
    assert (isinstance(route, Route) and route.is_hot) == (places is not None)
    assert places is None or route.places == places  # type: ignore[union-attr]


ONE, TWO_ = ({"version": number, "state": "AVAILABLE", "status": OK_STATUS} for number in "12")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("echo", [ONE, TWO_]),
        ("echo/versions/0", [ONE, TWO_]),
        ("echo/labels/stable", [ONE, TWO_]),
        ("echo/versions/1", [ONE]),
        ("echo/versions/002", [TWO_]),
    ],
)
async def test_status_lists_one_version_or_all(serving: Serving, path: str, expected: Any) -> None:
    answer = await serving.get(f"/v1/models/{path}")
    assert (answer.status_code, answer.json()) == (200, {"model_version_status": expected})


async def test_a_retired_version_is_listed_and_refused(served: Serving) -> None:
    served.specs[0] = ModelSpec.model_validate(
        served.specs[0].model_dump() | {"version_policy": {"kind": "specific", "versions": [2]}}
    )
    await served.registry.apply(served.specs)
    answer = await served.get("/v1/models/echo/versions/1")
    assert answer.json()["model_version_status"] == [{"version": "1", "state": "END", "status": OK_STATUS}]
    for refused in (
        await served.post("/v1/models/echo/versions/1:predict", content=b"{}"),
        await served.get("/v1/models/echo/versions/1/metadata"),
    ):
        assert (refused.status_code, refused.json()) == (404, {"error": "Model with requested version is retired"})


async def test_a_failed_version_is_listed_with_its_reason(served: Serving, tmp_path: Path) -> None:
    (tmp_path / "empty" / "1").mkdir(parents=True)
    await served.registry.apply([*served.specs, ModelSpec(name="empty", base_path=tmp_path / "empty")])
    (entry,) = (await served.get("/v1/models/empty")).json()["model_version_status"]
    assert (entry["version"], entry["state"]) == ("1", "LOADING")
    assert entry["status"]["error_code"] == entry["status"]["error_message"] == "UNKNOWN"
    assert entry["status"]["reason"]
    for path, text in (
        ("empty", VERSION_MISSING),
        ("empty/versions/1", "Model with requested version is not loaded yet"),
    ):
        refused = await served.post(f"/v1/models/{path}:predict", content=b"{}")
        assert refused.status_code == 404
        assert refused.json()["error"].startswith(text)


async def test_metadata_has_the_keys_of_protobuf_with_defaults(served: Serving) -> None:
    def tensor(name: str) -> dict[str, Any]:
        sizes = [{"size": "-1", "name": ""}, {"size": "3", "name": ""}]
        return {name: {"dtype": "DT_FLOAT", "tensorShape": {"dim": sizes, "unknownRank": False}, "name": name}}

    signature = {"inputs": tensor("b"), "outputs": tensor("a"), "methodName": "", "defaults": {}}
    definitions = {
        "@type": "type.googleapis.com/tensorflow.serving.SignatureDefMap",
        "signatureDef": {"serving_default": signature},
    }
    for path in ("dummy", "dummy/versions/1", "dummy/versions/0", "dummy/labels/any"):
        answer = await served.get(f"/v1/models/{path}/metadata")
        assert answer.status_code == 200
        assert answer.json() == {
            "modelSpec": {"name": "dummy", "signatureName": "", "version": "1"},
            "metadata": {"signature_def": definitions},
        }


async def test_metadata_has_datatypes_of_tensorflow(served: Serving) -> None:
    for model, name, dtype, rank in (
        ("scalar", "b", "DT_FLOAT", 0),
        ("int8", "b", "DT_INT8", 1),
        ("strings", "strings", "DT_STRING", 1),
    ):
        answer = (await served.get(f"/v1/models/{model}/metadata")).json()
        found = answer["metadata"]["signature_def"]["signatureDef"]["serving_default"]["inputs"][name]
        assert (found["dtype"], len(found["tensorShape"]["dim"])) == (dtype, rank)


async def test_graphs_have_a_status_and_metadata_only(served: Serving) -> None:
    only = {"version": "1", "state": "AVAILABLE", "status": OK_STATUS}
    assert (await served.get(f"/v1/models/{GRAPH}")).json() == {"model_version_status": [only]}
    assert (await served.get(f"/v1/models/{GRAPH}/metadata")).json()["modelSpec"]["name"] == GRAPH
    assert (await served.post(f"/v1/models/{GRAPH}:predict", content=b"{}")).json() == {"error": NAME_MISSING}


async def test_calls_are_counted_by_method_and_result(served: Serving) -> None:
    await _predict(served, "dummy", {"inputs": [[1, 2, 3]]})
    for body in (b"{", b'{"inputs": [[1]]}'):
        assert (await served.post("/v1/models/dummy:predict", content=body)).status_code >= 400
    headers = {"Content-Encoding": "nothing known"}
    assert (await served.post("/v1/models/dummy:predict", content=b"{}", headers=headers)).status_code == 400
    await served.get("/v1/models/dummy")
    await served.get("/v1/models/dummy/metadata")
    text = (await served.get("/metrics")).text
    for method, version, family, count in (
        ("Predict", "1", "success", 1),
        ("Predict", "1", "fail", 3),
        ("GetModelStatus", "", "success", 1),
        ("GetModelMetadata", "1", "success", 1),
    ):
        labels = f'api="TensorFlowServing",interface="REST",method="{method}",name="dummy",version="{version}"'
        assert f"ovms_requests_{family}{{{labels}}} {count}.0\n" in text, (method, family)
    assert (
        'ovms_requests_success{api="KServe",interface="REST",method="ModelInfer",name="dummy",version="1"} 0.0' in text
    )
