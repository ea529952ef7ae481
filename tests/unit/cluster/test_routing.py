"""The group and shard that a request goes to."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.grpc_paths import INFER
from ovmstrio.cluster.ray.shards import grpc_shard, http_shard
from ovmstrio.cluster.ray.targets import HttpTarget, http_target, plain_path
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.http import HttpRequest
from ovmstrio.core.peers import UNKNOWN_PEER
from ovmstrio.protocol.descriptors import message_class

NAMES = {"m", "text", "graph"}
JSON = (("content-type", "application/json"),)


def _post(target: str, document: object = None, headers: tuple[tuple[str, str], ...] = JSON) -> HttpRequest:
    return HttpRequest(
        "POST", "", "", headers, b"" if document is None else orjson.dumps(document), UNKNOWN_PEER, target
    )


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("/v2/models/m/infer", "m"),
        ("/v1/models/m:predict", "m"),
        ("/v1/models/m/versions/1:predict?x=1", "m"),
        ("/v2/models/%6D", "m"),
        ("/graph/some/path", "graph"),
        ("/nothing", ""),
        ("/v2/models/", ""),
        ("/v2", ""),
    ],
)
def test_paths_name_the_service(target: str, name: str) -> None:
    """Those of all protocols, and of services with paths of their own."""
    assert http_target(_post(target), NAMES).name == name


@pytest.mark.parametrize(
    "target", ["/v3/chat/completions", "/v1/completions", "/v2/rerank", "/v1/v2/rerank", "/v1/images/generations"]
)
def test_bodies_of_openai_requests_name_the_service(target: str) -> None:
    """Whichever group has them, and also where the path is not one of the usual three."""
    assert http_target(_post(target, {"model": "text"}), NAMES) == HttpTarget("text", may_stream=True)


def test_a_path_of_a_graph_names_the_graph() -> None:
    """Its body may be anything then."""
    assert http_target(_post("/v3/graph/x", headers=()), NAMES).name == "graph"


@pytest.mark.parametrize("document", [None, [], {}, {"model": 3}])
def test_a_body_without_a_model_has_no_target(document: object) -> None:
    """With the words and the status that a server alone has for it."""
    assert http_target(_post("/v3/chat/completions", document), NAMES).name == ""


@pytest.mark.parametrize(
    "request_", [HttpRequest("GET", "", target="/v1/models/"), _post("/v1/audio/transcriptions", headers=())]
)
def test_requests_about_all_groups_are_refused(request_: HttpRequest) -> None:
    with pytest.raises(NotSupported, match='place all models of text in the group "ingress"'):
        http_target(request_, NAMES)


def test_a_trailing_slash_is_ignored() -> None:
    assert plain_path(HttpRequest("GET", "", target="/v2/models/?x=/")) == "/v2/models"
    assert plain_path(HttpRequest("GET", "", target="/")) == "/"


# Shards of sequences


Request = message_class("inference.ModelInferRequest")
PREDICT = "/tensorflow.serving.PredictionService/Predict"
METADATA = "/inference.GRPCInferenceService/ModelMetadata"


def _message(sequence: int, control: int = 0) -> bytes:
    message = Request(model_name="m")
    for name, datatype, value in (
        ("sequence_id", "UINT64", np.uint64(sequence)),
        ("sequence_control_input", "UINT32", np.uint32(control)),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=[1])
        message.raw_input_contents.append(value.tobytes())
    data: bytes = message.SerializeToString()
    return data


def _infer_request(target: str, sequence: int | str | None = None, **parameters: object) -> HttpRequest:
    given = parameters if sequence is None else {"sequence_id": sequence, **parameters}
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    return HttpRequest(
        "POST", "", "", (), orjson.dumps({"inputs": [tensor], "parameters": given}), UNKNOWN_PEER, target
    )


def test_a_sequence_has_the_same_shard_over_grpc_and_http() -> None:
    over_grpc = [grpc_shard(INFER, _message(sequence), "m", 3) for sequence in range(1, 100)]
    over_http = [http_shard(_infer_request("/v2/models/m/infer", sequence), "m", 3) for sequence in range(1, 100)]
    assert over_grpc == over_http
    assert set(over_grpc) == set(shard_names("m", 3))


def test_requests_without_sequences_go_to_the_first_shard() -> None:
    assert grpc_shard(METADATA, b"", "m", 3) == "m-0-of-3"
    assert http_shard(HttpRequest("GET", "", target="/v2/models/m"), "m", 3) == "m-0-of-3"
    assert http_shard(HttpRequest("OPTIONS", "", target="/v2/models/m/infer"), "m", 3) == "m-0-of-3"
    assert http_shard(HttpRequest("HEAD", "", target="/v2/models/m"), "m", 3) == "m-0-of-3"
    assert grpc_shard(INFER, b"no message", "m", 1) == "m"
    assert http_shard(_infer_request("/v1/models/m:predict"), "m", 1) == "m"


def test_a_sequence_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"clients choose them \(sequence_id\)"):
        grpc_shard(INFER, _message(0, 1), "m", 2)
    with pytest.raises(InvalidRequest, match=r"clients choose them \(sequence_id\)"):
        http_shard(_infer_request("/v2/models/m/infer", sequence_start=True), "m", 2)


def test_other_interfaces_are_refused_for_sequences() -> None:
    with pytest.raises(NotSupported, match="by KServe's ModelInfer"):
        grpc_shard(PREDICT, b"", "m", 2)
    for request in (_infer_request("/v1/models/m:predict"), HttpRequest("GET", "", target="/v2/models/m/sequences")):
        with pytest.raises(NotSupported, match="by KServe's ModelInfer"):
            http_shard(request, "m", 2)
