"""TensorFlow Serving's paths over models that OpenVINO runs: answers, statuses and what is counted."""

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

from ovmstrio.config.specs import GraphSpec, ModelSpec, ServableSpec
from ovmstrio.core.servable import Servable
from ovmstrio.observability.metrics import Metrics
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.pass_through import load_pass_through
from tests.support.servables import EXACT
from tests.support.streaming_servables import GRAPH, load_scripted
from tests.unit.api.rest.servers import Serving, serving_rest

NAME_MISSING = "Model with requested name is not found"
VERSION_MISSING = "Model with requested version is not found"
OK_STATUS = {"error_code": "OK", "error_message": "OK"}


async def _load(spec: ModelSpec, version: int, directory: Path) -> Servable:
    load: Any = {"echo": load_pass_through, GRAPH: load_scripted}.get(spec.name, load_model)
    servable: Servable = await load(spec, version, directory)
    return servable


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve small models, two versions of ``echo``, and ``graph``, which has streams."""
    models = {
        "dummy": ir.dummy([-1, 3]),
        "scalar": ir.scalar(),
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


# Predict


async def test_rows_and_columns_of_one_input(served: Serving) -> None:
    """With and without names, at every spelling of the version; the answer goes the way of the request."""
    values, sums = [[1, 2, 3], [4.5, 5, 6]], [[2, 3, 4], [5.5, 6, 7]]
    for given, expected in (
        ({"inputs": values}, {"outputs": sums}),
        ({"inputs": {"b": values}, "signature_name": "serving_default"}, {"outputs": sums}),
        ({"instances": values}, {"predictions": sums}),
        ({"instances": [{"b": row} for row in values]}, {"predictions": sums}),
    ):
        for path in ("dummy", "dummy/versions/1", "dummy/versions/0", "dummy/labels/any"):
            assert await _predict(served, path, given) == expected


async def test_several_inputs_and_outputs_have_names(served: Serving) -> None:
    """By rows each is an object of its own."""
    x, y = [[1, 2], [3, 4]], [[10, 20], [30, 40]]
    assert await _predict(served, "two", {"inputs": {"x": x, "y": y}}) == {
        "outputs": {"difference": [[-9, -18], [-27, -36]], "sum": [[11, 22], [33, 44]]}
    }
    rows = [{"x": one, "y": other} for one, other in zip(x, y, strict=True)]
    assert await _predict(served, "two", {"instances": rows}) == {
        "predictions": [{"difference": [-9, -18], "sum": [11, 22]}, {"difference": [-27, -36], "sum": [33, 44]}]
    }


async def test_a_model_without_dimensions(served: Serving) -> None:
    """It takes and gives a number by columns, and has no rows."""
    assert await _predict(served, "scalar", {"inputs": 1.5}) == {"outputs": 2.5}
    assert await _predict(served, "scalar", {"inputs": {"b": 1.5}}) == {"outputs": 2.5}
    answer = await served.post("/v1/models/scalar:predict", json={"instances": [1.5]})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Invalid number of shape dimensions")


async def test_texts_come_back(served: Serving) -> None:
    """As texts, or encoded where they are none."""
    assert await _predict(served, "strings", {"instances": ["a", "ü"]}) == {"predictions": ["a", "ü"]}
    assert await _predict(served, "strings", {"inputs": {"strings": [{"b64": "/w=="}, "a"]}}) == {
        "outputs": [{"b64": "/w=="}, {"b64": "YQ=="}]
    }


async def test_encoded_images_are_decoded(served: Serving) -> None:
    """By rows and by columns, each to a tensor of the model's shape."""
    from PIL import Image

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    sent = {"b64": base64.b64encode(file.getvalue()).decode()}
    expected = [pixels[..., ::-1].tolist()]
    assert await _predict(served, "image", {"inputs": [sent]}) == {"outputs": expected}
    assert await _predict(served, "image", {"instances": [{"image": sent}]}) == {"predictions": expected}


async def test_numbers_take_the_datatype_of_the_input(served: Serving) -> None:
    """A fraction loses what stands behind the point, and what is out of range is refused."""
    assert await _predict(served, "int8", {"inputs": [1.9, -128]}) == {"outputs": [2, -127]}
    answer = await served.post("/v1/models/int8:predict", json={"inputs": [1, 128]})
    assert answer.status_code == 400
    assert "out of range of INT8" in answer.json()["error"]


async def test_words_go_in_and_out(served: Serving) -> None:
    """NaN and infinities are spelled as Python spells them."""
    body = b'{"instances": [[NaN, Infinity, -Infinity], [1, 2, 3]]}'
    answer = await served.post("/v1/models/dummy:predict", content=body)
    assert answer.text == '{"predictions":[[NaN,Infinity,-Infinity],[2.0,3.0,4.0]]}'


async def test_bodies_may_be_compressed_and_of_any_type(served: Serving) -> None:
    """Clients send JSON without saying that it is."""
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/x-www-form-urlencoded"}
    body = gzip.compress(b'{"inputs": [[1, 2, 3]]}')
    answer = await served.post("/v1/models/dummy:predict", content=body, headers=headers)
    assert answer.json() == {"outputs": [[2, 3, 4]]}


REFUSED_CALLS = (
    ("nobody", b"no json", 404, NAME_MISSING),
    (GRAPH, b'{"inputs": [1]}', 404, NAME_MISSING),
    ("dummy/versions/7", b"no json", 404, VERSION_MISSING),
    ("dummy/versions/99999999999999999999", b"{}", 404, VERSION_MISSING),
    ("dummy/versions/x", b"{}", 400, "Invalid request URL"),
    ("dummy", b"", 412, "The file is not valid json"),
    ("dummy", b"{", 412, "The file is not valid json"),
    ("dummy", b"[]", 400, "Request body should be JSON object"),
    ("dummy", b"{}", 400, "Invalid JSON structure. Could not detect row or column format"),
    ("dummy", b'{"inputs": {"c": [[1, 2, 3]]}}', 400, "Missing input with specific name - Required input: b"),
    ("dummy", b'{"inputs": {"b": [[1]], "c": 1}}', 400, "Invalid number of inputs - Expected: 1; Actual: 2"),
    ("dummy", b'{"inputs": [1, 2, 3]}', 400, "Invalid number of shape dimensions"),
    ("dummy", b'{"inputs": [[1, 2]]}', 400, "Invalid input shape"),
    ("dummy", b'{"inputs": {"sequence_id": [1], "b": [[1, 2, 3]]}}', 400, "Invalid number of inputs"),
    ("two", b'{"inputs": {"x": [[1, 2]], "y": [[1, 2], [3, 4]]}}', 400, "Invalid input batch size"),
    ("two", b'{"inputs": [[1, 2], [3, 4]]}', 400, "Inputs inside buffer do not match the expected format"),
    ("image", b'{"inputs": [{"b64": "AAAA"}]}', 400, ""),
    ("broken", b'{"inputs": {"x": [[1]], "y": [[1], [2]]}}', 500, ""),
)


async def test_refusals_have_status_and_text(served: Serving) -> None:
    """The servable is looked for before its body is looked at."""
    for path, body, status, text in REFUSED_CALLS:
        answer = await served.post(f"/v1/models/{path}:predict", content=body)
        assert answer.status_code == status, (path, body, answer.text)
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"].startswith(text), (path, body, answer.text)


REFUSED_PATHS = (
    ("GET", "/v1/models/dummy:predict", 406, "Unsupported method"),
    ("PUT", "/v1/models/dummy:predict", 406, "Unsupported method"),
    ("GET", "/v1/models/nobody:predict", 406, "Unsupported method"),
    ("POST", "/v1/models/dummy", 406, "Unsupported method"),
    ("DELETE", "/v1/models/dummy", 406, "Unsupported method"),
    ("POST", "/v1/models/dummy/metadata", 406, "Unsupported method"),
    ("POST", "/v1/models", 406, "Unsupported method"),
    ("POST", "/v1/models/dummy:classify", 404, "Requested REST resource not found"),
    ("POST", "/v1/models/dummy/versions/1:regress", 404, "Requested REST resource not found"),
    ("POST", "/v1/models/dummy/infer", 400, "Invalid request URL"),
    ("GET", "/v1/models/dummy/versions/x", 400, "Invalid request URL"),
    ("GET", "/v1/models/a%2Fb", 400, "Invalid request URL"),
    ("GET", "/v1/models/nobody", 404, NAME_MISSING),
    ("GET", "/v1/models/dummy/versions/7", 404, VERSION_MISSING),
    ("GET", "/v1/models/nobody/metadata", 404, NAME_MISSING),
    ("GET", "/v1/models/dummy/versions/7/metadata", 404, VERSION_MISSING),
    ("GET", f"/v1/models/dummy/versions/{2**63}", 404, VERSION_MISSING),
)


async def test_other_paths_and_methods_are_refused(served: Serving) -> None:
    """A wrong method is told before anything is looked for."""

    def work(client: httpx.Client) -> None:
        for method, path, status, text in REFUSED_PATHS:
            answer = client.request(method, path)
            assert answer.status_code == status, (method, path, answer.text)
            assert answer.json()["error"].startswith(text), (method, path, answer.text)

    await served.with_http(work)


async def test_bodies_above_the_limit_are_refused(tmp_path: Path) -> None:
    """As on every other path."""
    async with serving_rest(tmp_path, front_end={"max_body_bytes": 100}) as server:
        answer = await server.post("/v1/models/echo:predict", content=b" " * 101)
    assert answer.status_code == 413


# Status and metadata


async def test_status_lists_every_version_or_one(served: Serving) -> None:
    """Version 0 and labels stand for all."""
    one, two = ({"version": number, "state": "AVAILABLE", "status": OK_STATUS} for number in ("1", "2"))
    for path, expected in (
        ("echo", [one, two]),
        ("echo/versions/0", [one, two]),
        ("echo/labels/stable", [one, two]),
        ("echo/versions/1", [one]),
        ("echo/versions/002", [two]),
    ):
        answer = await served.get(f"/v1/models/{path}")
        assert (answer.status_code, answer.json()) == (200, {"model_version_status": expected})


async def test_a_version_that_was_retired_stays_listed(served: Serving) -> None:
    """Calls of it are refused."""
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


async def test_a_version_that_failed_says_why(served: Serving, tmp_path: Path) -> None:
    """The reason is beside what OVMS tells."""
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


async def test_metadata_has_every_key_that_clients_index(served: Serving) -> None:
    """The form is protobuf's, with default values printed."""

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


async def test_metadata_names_the_version_that_is_meant(served: Serving) -> None:
    """Without one it is the default version."""
    for path, version in (("echo/metadata", "2"), ("echo/versions/01/metadata", "1")):
        assert (await served.get(f"/v1/models/{path}")).json()["modelSpec"]["version"] == version


async def test_metadata_names_datatypes(served: Serving) -> None:
    """As TensorFlow does; a tensor without dimensions has an empty list of them."""
    for model, name, dtype, rank in (
        ("scalar", "b", "DT_FLOAT", 0),
        ("int8", "b", "DT_INT8", 1),
        ("strings", "strings", "DT_STRING", 1),
    ):
        answer = (await served.get(f"/v1/models/{model}/metadata")).json()
        found = answer["metadata"]["signature_def"]["signatureDef"]["serving_default"]["inputs"][name]
        assert (found["dtype"], len(found["tensorShape"]["dim"])) == (dtype, rank)


async def test_graphs_have_a_status_and_metadata_only(served: Serving) -> None:
    """What they take is unknown, so JSON cannot be read for them."""
    only = {"version": "1", "state": "AVAILABLE", "status": OK_STATUS}
    assert (await served.get(f"/v1/models/{GRAPH}")).json() == {"model_version_status": [only]}
    assert (await served.get(f"/v1/models/{GRAPH}/metadata")).json()["modelSpec"]["name"] == GRAPH
    assert (await served.post(f"/v1/models/{GRAPH}:predict", content=b"{}")).json() == {"error": NAME_MISSING}


# What is counted


async def test_calls_are_counted_as_this_apis(served: Serving) -> None:
    """Successes, refusals of the model, and bodies that could not be read."""
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
