"""Which part of a group has a sequence: the same by whatever door a step comes."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.grpc_paths import INFER
from ovmstrio.cluster.ray.shards import grpc_shard, http_shard
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.http import HttpRequest
from ovmstrio.core.peers import UNKNOWN_PEER
from ovmstrio.protocol.descriptors import message_class

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


def _posted(target: str, sequence: int | str | None = None, **parameters: object) -> HttpRequest:
    given = parameters if sequence is None else {"sequence_id": sequence, **parameters}
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    return HttpRequest(
        "POST", "", "", (), orjson.dumps({"inputs": [tensor], "parameters": given}), UNKNOWN_PEER, target
    )


def test_a_sequence_has_one_part_by_whatever_door_its_steps_come() -> None:
    """And all parts have some."""
    over_grpc = [grpc_shard(INFER, _message(sequence), "m", 3) for sequence in range(1, 100)]
    over_http = [http_shard(_posted("/v2/models/m/infer", sequence), "m", 3) for sequence in range(1, 100)]
    assert over_grpc == over_http
    assert set(over_grpc) == set(shard_names("m", 3))


def test_questions_are_answered_by_any_part_and_groups_of_one_need_no_look() -> None:
    """What all parts have in common is told by the first."""
    assert grpc_shard(METADATA, b"", "m", 3) == "m-0-of-3"
    assert http_shard(HttpRequest("GET", "", target="/v2/models/m"), "m", 3) == "m-0-of-3"
    assert http_shard(HttpRequest("OPTIONS", "", target="/v2/models/m/infer"), "m", 3) == "m-0-of-3"
    assert http_shard(HttpRequest("HEAD", "", target="/v2/models/m"), "m", 3) == "m-0-of-3"
    assert grpc_shard(INFER, b"no message", "m", 1) == "m"
    assert http_shard(_posted("/v1/models/m:predict"), "m", 1) == "m"


def test_a_sequence_that_is_begun_without_an_id_is_refused_with_the_way_out() -> None:
    """The part that began it would be the only one to know it."""
    with pytest.raises(InvalidRequest, match=r"clients choose them \(sequence_id\)"):
        grpc_shard(INFER, _message(0, 1), "m", 2)
    with pytest.raises(InvalidRequest, match=r"clients choose them \(sequence_id\)"):
        http_shard(_posted("/v2/models/m/infer", sequence_start=True), "m", 2)


def test_steps_by_other_ways_are_refused_with_the_way_out() -> None:
    """Nobody looks for their sequence."""
    with pytest.raises(NotSupported, match="by KServe's ModelInfer"):
        grpc_shard(PREDICT, b"", "m", 2)
    for request in (_posted("/v1/models/m:predict"), HttpRequest("GET", "", target="/v2/models/m/sequences")):
        with pytest.raises(NotSupported, match="by KServe's ModelInfer"):
            http_shard(request, "m", 2)
