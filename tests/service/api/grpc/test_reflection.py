from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ovmstrio.protocol.descriptors import message_class
from tests.support.grpc_clients import with_channel
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from tests.service.api.grpc.conftest import Serving

NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def ask(serving: Serving, version: str, **question: Any) -> Any:
    """Ask one question in one version of the protocol."""
    package = f"grpc.reflection.{version}"
    request = message_class(f"{package}.ServerReflectionRequest")(host="h", **question)

    def work(channel: Any) -> Any:
        method = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            response_deserializer=message_class(f"{package}.ServerReflectionResponse").FromString,
        )
        (answer,) = method(iter([request.SerializeToString()]), timeout=WAIT_SECONDS)
        assert answer.valid_host == "h"
        assert answer.original_request == request
        return answer

    return await with_channel(serving.address, work)


async def test_a_client_without_stubs_can_infer(serving: Serving) -> None:
    """What reflection gives is enough to list the services, build the messages and make a call."""

    def work(channel: Any) -> tuple[list[str], bytes]:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelInfer"]
        request: Any = GetMessageClass(method.input_type)(model_name="echo")
        request.inputs.add(name="x", datatype="FP32", shape=[2])
        request.raw_input_contents.append(np.array([1, 2], "f4").tobytes())
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return sorted(database.get_services()), infer(request, timeout=WAIT_SECONDS).raw_output_contents[0]

    services, raw = await with_channel(serving.address, work)

    assert services == [
        "grpc.health.v1.Health",
        "inference.GRPCInferenceService",
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
    ]
    assert raw == np.array([1, 2], "f4").tobytes()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize(
    "symbol",
    [
        *("inference.GRPCInferenceService", "inference.GRPCInferenceService.ModelInfer"),
        *("inference.ModelInferRequest.InferInputTensor", "inference.ModelInferRequest.id"),
    ],
)
async def test_a_symbol_comes_with_the_file_that_declares_it_and_its_imports(
    serving: Serving, version: str, symbol: str
) -> None:
    """Services, methods, messages and fields lead to their file, followed by what it imports."""
    answer = await ask(serving, version, file_containing_symbol=symbol)

    files = [_name(file) for file in answer.file_descriptor_response.file_descriptor_proto]
    assert files == ["inference/kserve.proto", "inference/model_config.proto"]


def _name(file: bytes) -> str:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    name: str = FileDescriptorProto.FromString(file).name
    return name


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_file_is_given_by_its_name(serving: Serving, version: str) -> None:
    """A file's own name leads to it."""
    answer = await ask(serving, version, file_by_filename="grpc/health/v1/health.proto")

    assert [_name(file) for file in answer.file_descriptor_response.file_descriptor_proto] == [
        "grpc/health/v1/health.proto"
    ]


async def test_messages_without_extensions_have_none(serving: Serving) -> None:
    """A known message has an empty list of extensions."""
    answer = await ask(serving, "v1", all_extension_numbers_of_type="inference.ModelInferRequest")

    extensions = answer.all_extension_numbers_response
    assert (extensions.base_type_name, list(extensions.extension_number)) == ("inference.ModelInferRequest", [])


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ({"file_by_filename": "/etc/passwd"}, NOT_FOUND),
        ({"file_containing_symbol": "inference.Nothing"}, NOT_FOUND),
        ({"file_containing_symbol": "inference.GRPCInferenceService.Nothing"}, NOT_FOUND),
        ({"file_containing_symbol": ""}, NOT_FOUND),
        ({"all_extension_numbers_of_type": "inference.Nothing"}, NOT_FOUND),
        ({"file_containing_extension": {"containing_type": "a.B", "extension_number": 1}}, NOT_FOUND),
        ({}, INVALID_ARGUMENT),
    ],
)
async def test_questions_without_an_answer_get_an_error_and_the_stream_goes_on(
    serving: Serving, question: dict[str, Any], code: int
) -> None:
    """What is not known is said in the answer, not by ending the stream."""
    answer = await ask(serving, "v1", **question)

    assert answer.error_response.error_code == code
    assert answer.error_response.error_message
