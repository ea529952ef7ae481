from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovmstrio.encoding.messages import FILES, POOL, message_class

PROJECT = Path(__file__).parents[3]


@pytest.mark.parametrize("file", ["inference/kserve.proto", "inference/model_config.proto"])
def test_fields_are_those_of_triton_clients(file: str) -> None:
    from tritonclient.grpc import service_pb2

    pool = service_pb2.DESCRIPTOR.pool
    beyond_triton = {"inference.ModelMetadataResponse.properties", "inference.ModelMetadataResponse.PropertiesEntry"}
    for message in POOL.FindFileByName(file).message_types_by_name.values():
        _assert_same_wire(message, pool.FindMessageTypeByName(message.full_name), beyond_triton)


def _assert_same_wire(ours: Any, theirs: Any, beyond: set[str]) -> None:
    for field in ours.fields:
        if field.full_name not in beyond:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
    for nested in ours.nested_types:
        if nested.full_name not in beyond:
            _assert_same_wire(nested, theirs.nested_types_by_name[nested.name], beyond)


SIGNATURE_DEFAULTS = {"tensorflow.SignatureDef.defaults", "tensorflow.SignatureDef.DefaultsEntry"}
TENSORFLOW = sorted(file for file in FILES if file.startswith(("tensorflow/", "tensorflow_serving/")))


@pytest.mark.parametrize("file", TENSORFLOW)
def test_fields_are_those_of_tensorflow_clients(file: str) -> None:
    path = {"tensorflow_serving/apis/status.proto": "tensorflow_serving/util/status.proto"}.get(file, file)
    module = path.removesuffix(".proto").replace("/", ".")
    theirs = pytest.importorskip(f"ovmsclient.tfs_compat.protos.{module}_pb2").DESCRIPTOR
    ours = POOL.FindFileByName(file)
    for name, message in ours.message_types_by_name.items():
        # Newer than the client: TensorFlow's own package has it.
        _assert_same_wire(message, theirs.message_types_by_name[name], SIGNATURE_DEFAULTS)
    for name, enum in ours.enum_types_by_name.items():
        numbers = theirs.enum_types_by_name[name].values_by_name
        assert {each.name: each.number for each in enum.values} == {
            each.name: numbers[each.name].number for each in enum.values
        }
    for name, service in ours.services_by_name.items():
        methods = theirs.services_by_name[name].methods_by_name
        for method in service.methods:
            other = methods[method.name]
            assert (method.input_type.name, method.output_type.name) == (other.input_type.name, other.output_type.name)


@pytest.mark.parametrize(
    ("module", "full_name"),
    [
        ("grpc_health.v1.health_pb2", "grpc.health.v1.HealthCheckResponse"),
        ("grpc_reflection.v1alpha.reflection_pb2", "grpc.reflection.v1alpha.ServerReflectionRequest"),
        ("grpc_reflection.v1alpha.reflection_pb2", "grpc.reflection.v1alpha.ServerReflectionResponse"),
    ],
)
def test_fields_are_those_of_grpc_services(module: str, full_name: str) -> None:
    theirs = getattr(pytest.importorskip(module), full_name.rpartition(".")[2]).DESCRIPTOR
    _assert_same_wire(message_class(full_name).DESCRIPTOR, theirs, set())


def test_a_message_that_does_not_exist_has_no_class() -> None:
    with pytest.raises(KeyError):
        message_class("inference.Nothing")


def test_every_source_file_is_described() -> None:
    sources = PROJECT / "protos"
    googles = {f"google/protobuf/{name}.proto" for name in ("any", "struct", "wrappers")}
    assert set(FILES) == {str(path.relative_to(sources)) for path in sources.rglob("*.proto")} | googles
