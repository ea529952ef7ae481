from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from ovmstrio.cluster.layout import ClusterLayout, drain_seconds, make_layout, shard_names
from ovmstrio.cluster.ray.controller import DESIRED_REPLICAS, desired_replicas
from ovmstrio.cluster.ray.group_server import QUEUE_METRICS, sum_samples
from ovmstrio.cluster.ray.grpc_services import INFER
from ovmstrio.cluster.ray.routing import HttpTarget, grpc_shard, http_shard, http_target, plain_path
from ovmstrio.config.config_file import parse_config
from ovmstrio.core.connection import UNKNOWN_PEER
from ovmstrio.core.errors import ConfigError, InvalidRequest, NotSupported
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.encoding.messages import message_class
from ovmstrio.server.kinds import KINDS
from ovmstrio.telemetry.metrics import Metrics
from tests.support.pipelines import dag_entry

UNSET = object()


def _model(name: str, placement: Any = UNSET, **settings: Any) -> dict[str, Any]:
    placed = {} if placement is UNSET else {"placement": placement}
    return {"config": {"name": name, "base_path": f"/models/{name}", **placed, **settings}}


def _pipeline(name: str, model: str, placement: str | None = None) -> dict[str, Any]:
    return dag_entry(name, model, ("x", "x"), ("y", "y")) | ({"placement": placement} if placement else {})


def _layout(*models: dict[str, Any], pipelines: Any = ()) -> ClusterLayout:
    document = {"model_config_list": list(models), "pipeline_config_list": list(pipelines)}
    return make_layout(parse_config(KINDS.values(), json.dumps(document).encode(), Path("/c/config.json")), KINDS)


def _members(layout: ClusterLayout) -> dict[str, list[str]]:
    return {group.name: [service.name for service in group.services] for group in layout.groups}


def _refusals(*models: dict[str, Any], pipelines: Any = ()) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        _layout(*models, pipelines=pipelines)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("models", "members", "ingress"),
    [
        pytest.param([_model("a"), _model("b")], {"a": ["a"], "b": ["b"], "ingress": []}, "ingress", id="own groups"),
        pytest.param([_model("a", "g"), _model("b", "g")], {"g": ["a", "b"]}, "g", id="a single group"),
        pytest.param([_model("a"), _model("b", "ingress")], {"a": ["a"], "ingress": ["b"]}, "ingress", id="in ingress"),
    ],
)
def test_services_are_grouped_by_placement(models: Any, members: dict[str, list[str]], ingress: str) -> None:
    layout = _layout(*models)
    assert (_members(layout), layout.ingress.name) == (members, ingress)
    assert layout.owners == {name: group for group, names in members.items() for name in names}


def test_groups_are_ordered_by_calls_and_know_the_called_groups() -> None:
    pipelines = [_pipeline("p", "a", "p"), _pipeline("q", "b", "p")]
    layout = _layout(_model("a", "far"), _model("b", "p"), pipelines=pipelines)
    assert list(_members(layout)) == ["far", "p", "ingress"]
    (group,) = (group for group in layout.groups if group.name == "p")
    assert group.called == {"a": "far"}


def test_placements_of_a_group_are_merged() -> None:
    layout = _layout(
        _model("a", {"group": "g", "replicas": 3}), _model("b", {"group": "g", "num_cpus": 0.5}), _model("c", "g")
    )
    (group,) = layout.groups
    assert (group.placement.replicas, group.placement.num_cpus, group.placement.resources) == (3, 0.5, None)


def test_contradicting_placements_are_refused_with_their_line() -> None:
    (refusal,) = _refusals(_model("a", {"group": "g", "replicas": 3}), _model("b", {"group": "g", "replicas": 2}))
    assert 'conflicting replicas in group "g"' in refusal
    assert "model_config_list[1].config.placement.replicas" in refusal


def test_circular_calls_between_groups_are_refused() -> None:
    pipelines = [_pipeline("p", "a", "one"), _pipeline("q", "b", "two")]
    (refusal,) = _refusals(_model("a", "two"), _model("b", "one"), pipelines=pipelines)
    assert "cyclic calls between groups: one, two; place them in one group" in refusal


def test_services_in_the_ingress_cannot_be_called_by_other_groups() -> None:
    refusals = _refusals(_model("a", "ingress"), pipelines=[_pipeline("p", "a")])
    assert any('"p" calls "a", which is in the ingress group' in refusal for refusal in refusals)


@pytest.mark.parametrize("many", [{"replicas": 2}, {"autoscaling": {"max_replicas": 2}}])
def test_a_limit_of_one_process_excludes_several_replicas(many: Any) -> None:
    (refusal,) = _refusals(_model("a", many, max_concurrency=2))
    assert '"a" has max_concurrency, which is not supported with several replicas' in refusal
    assert _members(_layout(_model("a", {"replicas": 1}, max_concurrency=2))) == {"a": ["a"]}


def test_only_stateless_local_models_are_repeatable() -> None:
    remote = {"config": {"name": "r", "remote": "grpc://127.0.0.1:1", "placement": "elsewhere"}}
    layout = _layout(
        _model("a"), _model("b", stateful=True), remote, _model("c", "both"), pipelines=[_pipeline("p", "a")]
    )
    assert {group.name: group.is_repeatable(KINDS) for group in layout.groups if group.services} == {
        "a": True,
        "b": False,
        "elsewhere": False,
        "both": True,
        "p": False,
    }


def test_sequences_are_sharded_over_replicas() -> None:
    layout = _layout(_model("a", {"replicas": 3}, stateful=True))
    assert _members(layout) == {"a": ["a"], "ingress": []}
    assert [group.shards for group in layout.groups] == [3, 1]
    assert shard_names("a", 3) == ["a-0-of-3", "a-1-of-3", "a-2-of-3"]
    assert _layout(_model("a", {"replicas": 3})).groups[0].shards == 1


@pytest.mark.parametrize(
    "models",
    [
        [_model("a", {"autoscaling": {"max_replicas": 2}}, stateful=True)],
        [_model("a", {"group": "g", "replicas": 2}, stateful=True), _model("b", "g")],
        [_model("a", {"group": "ingress", "replicas": 2}, stateful=True), _model("b")],
    ],
)
def test_sequences_need_a_fixed_number_of_replicas(models: Any) -> None:
    (refusal,) = _refusals(*models)
    assert '"a" has sequences, which require a fixed number of replicas' in refusal


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ({"groups": "g"}, "placement.groups: unknown key 'groups'; did you mean 'group'?"),
        ({"replicas": 0}, "placement.replicas: the value cannot be used (expected an integer of 1 to 100000, found 0)"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas <= max_replicas"),
        ({"replicas": 1, "autoscaling": {"max_replicas": 2}}, "either replicas or autoscaling"),
        ("a group", "placement: the value cannot be used"),
    ],
)
def test_invalid_placements_are_refused_with_their_line(placement: Any, text: str) -> None:
    (refusal,) = _refusals(_model("a", placement))
    assert text in refusal
    assert "/c/config.json:1" in refusal


def test_a_changed_placement_reloads_nothing() -> None:
    specs = [_layout(_model("a", placement)).groups[0].services[0] for placement in ("g", {"replicas": 7})]
    assert not specs[0].needs_reload(specs[1])


# Autoscaling


@pytest.mark.parametrize(
    ("ongoing", "metrics", "replicas"),
    [
        (32.0, {DESIRED_REPLICAS: {"a": 0.5, "b": 0.25}}, 4.0),
        (8.0, {DESIRED_REPLICAS: {"a": 2.5, "b": 0.5}}, 3.0),
        (16.0, {}, 2.0),
        (16.0, None, 2.0),
    ],
)
def test_the_larger_of_ongoing_and_waiting_requests_counts(ongoing: float, metrics: Any, replicas: float) -> None:
    config = SimpleNamespace(target_ongoing_requests=8.0)
    context: Any = SimpleNamespace(total_num_requests=ongoing, config=config, aggregated_metrics=metrics)
    assert desired_replicas(context) == (replicas, {})


def test_waiting_requests_are_summed_over_services() -> None:
    metrics = Metrics()
    metrics.add_limited_service("a", lambda: 2)
    metrics.add_limited_service("b", lambda: 3)
    metrics.register_gauge("ovmstrio_batch_queued_requests", lambda: {("a",): 4})
    metrics.register_gauge("ovmstrio_worker_threads", lambda: {("a",): 7})
    assert sum_samples(metrics.render(QUEUE_METRICS)) == 9


# Draining


def test_callers_drain_longer_than_the_groups_that_they_call() -> None:
    model = drain_seconds([])
    caller = drain_seconds([model])
    ingress = drain_seconds([model, caller])
    assert model == 30
    assert caller >= model + 60
    assert ingress >= caller + 60


# Routing of requests


NAMES = {"m", "text", "graph", "org/m", "org/m/large", "a:b"}
NO_MODELS: list[Any] = [None, [], {}, {"model": 3}]
JSON = (("content-type", "application/json"),)


def _openai_request(target: str, document: object = None, headers: tuple[tuple[str, str], ...] = JSON) -> HttpRequest:
    body = b"" if document is None else orjson.dumps(document)
    return HttpRequest("POST", "", "", headers, body, UNKNOWN_PEER, target)


@pytest.mark.parametrize(
    ("target", "document", "name"),
    [
        ("/v2/models/m/infer", None, "m"),
        ("/v1/models/m:predict", None, "m"),
        ("/v1/models/m/versions/1:predict?x=1", None, "m"),
        ("/v2/models/%6D", None, "m"),
        ("/v2/models/org%2Fm/infer", None, "org/m"),
        ("/v2/models/org/m/infer", None, "org/m"),
        ("/v2/models/org/m/large/infer", None, "org/m/large"),
        ("/v1/models/org%2fm:predict", None, "org/m"),
        ("/v1/models/org/m:predict", None, "org/m"),
        ("/v1/models/a:b:predict", None, "a:b"),
        ("//v2//models/m/infer", None, "m"),
        ("/v2%2Fmodels/m", None, "m"),
        ("/graph/some/path", None, "graph"),
        ("/v3/graph/x", None, "graph"),
        ("/nothing", None, ""),
        ("/v2/models/", None, ""),
        ("/v2", None, ""),
        *(("/v3/chat/completions", document, "") for document in NO_MODELS),
    ],
)
def test_paths_name_the_service(target: str, document: object, name: str) -> None:
    assert http_target(_openai_request(target, document), NAMES).name == name


@pytest.mark.parametrize(
    "target",
    [
        *("/v3/chat/completions", "/v1/completions", "/v2/rerank", "/v1/v2/rerank", "/v1/images/generations"),
        *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    ],
)
@pytest.mark.parametrize("model", ["text", "text:latest"])
def test_bodies_of_openai_requests_name_the_service(target: str, model: str) -> None:
    assert http_target(_openai_request(target, {"model": model}), NAMES) == HttpTarget("text", may_stream=True)


@pytest.mark.parametrize(
    "request_", [HttpRequest("GET", "", target="/v1/models/"), _openai_request("/v1/audio/transcriptions", headers=())]
)
def test_requests_about_all_groups_are_refused(request_: HttpRequest) -> None:
    with pytest.raises(NotSupported, match='place all text models in the group "ingress"'):
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
    body = orjson.dumps({"inputs": [tensor], "parameters": given})
    return HttpRequest("POST", "", "", (), body, UNKNOWN_PEER, target)


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


def test_sequences_without_an_id_or_over_other_interfaces_are_refused() -> None:
    started = _infer_request("/v2/models/m/infer", sequence_start=True)
    sequences = HttpRequest("GET", "", target="/v2/models/m/sequences")
    with pytest.raises(InvalidRequest, match="missing sequence_id: the model is sharded by sequence id"):
        grpc_shard(INFER, _message(0, 1), "m", 2)
    with pytest.raises(InvalidRequest, match="missing sequence_id: the model is sharded by sequence id"):
        http_shard(started, "m", 2)
    with pytest.raises(NotSupported, match="require KServe's ModelInfer"):
        grpc_shard(PREDICT, b"", "m", 2)
    for request in (_infer_request("/v1/models/m:predict"), sequences):
        with pytest.raises(NotSupported, match="require KServe's ModelInfer"):
            http_shard(request, "m", 2)
