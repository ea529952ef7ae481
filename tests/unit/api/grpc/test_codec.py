from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ovmstrio.api.grpc_codec import Codec
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.generated import inference
from ovmstrio.protocol.generated.grpc.health.v1 import HealthCheckRequest
from ovmstrio.protocol.generated.grpc.reflection.v1 import ServerReflectionRequest
from tests.unit.api.grpc.wire_samples import mutations

REQUESTS: dict[Any, str] = {
    inference.ServerLiveRequest: "inference.ServerLiveRequest",
    inference.ModelReadyRequest: "inference.ModelReadyRequest",
    inference.ModelMetadataRequest: "inference.ModelMetadataRequest",
    inference.ModelConfigRequest: "inference.ModelConfigRequest",
    inference.RepositoryIndexRequest: "inference.RepositoryIndexRequest",
    HealthCheckRequest: "grpc.health.v1.HealthCheckRequest",
    ServerReflectionRequest: "grpc.reflection.v1.ServerReflectionRequest",
}

VALID = [
    inference.ModelReadyRequest("model", "3"),
    inference.RepositoryIndexRequest(ready=True),
    ServerReflectionRequest(host="h", file_containing_symbol="inference.ModelInferRequest"),
]


@settings(deadline=None)
@given(
    message_type=st.sampled_from(list(REQUESTS)),
    data=st.one_of(st.binary(max_size=60), mutations(st.sampled_from([bytes(message) for message in VALID]))),
)
@example(inference.ModelReadyRequest, b"\x0a\x01\xff")
@example(inference.ModelReadyRequest, b"\x0a\x05ab")
@example(inference.ModelReadyRequest, b"\x08\x01")
@example(ServerReflectionRequest, b"\x2a\x02\x10\x01\x1a\x01a\x22\x01b")
def test_any_bytes_are_a_message_or_an_invalid_argument(message_type: Any, data: bytes) -> None:
    """Requests other than inferences are read exactly as Google's parser reads them, or refused with their name."""
    strict = message_class(REQUESTS[message_type])
    try:
        oracle = strict.FromString(data)
    except DecodeError:
        with pytest.raises(GRPCError, match=f"malformed {REQUESTS[message_type]}") as caught:
            Codec().decode(data, message_type)
        assert caught.value.status is Status.INVALID_ARGUMENT
    else:
        oracle.DiscardUnknownFields()
        assert strict.FromString(bytes(Codec().decode(data, message_type))) == oracle


def test_messages_are_written_as_google_reads_them() -> None:
    """A nested message with a map and lists arrives with every value."""
    tensor = inference.ModelMetadataResponseTensorMetadata("x", "FP32", [1, -1])
    message = inference.ModelMetadataResponse("m", ["1", "2"], "OpenVINO", [tensor], [], {"layout": "NCHW"})

    written = Codec().encode(message, inference.ModelMetadataResponse)

    assert message_class("inference.ModelMetadataResponse").FromString(written) == message_class(
        "inference.ModelMetadataResponse"
    )(
        name="m",
        versions=["1", "2"],
        platform="OpenVINO",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, -1]}],
        properties={"layout": "NCHW"},
    )
