"""What a servable takes and gives, in the form of a protobuf ``GetModelMetadataResponse`` printed as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.dataplane.plane import ModelMetadata

__all__ = ["metadata_document"]

_TYPE: Final = "type.googleapis.com/tensorflow.serving.SignatureDefMap"


def metadata_document(known: ModelMetadata, version: str) -> dict[str, Any]:
    """Describe one version; clients index into every key, so those of default values are there too."""
    signature = {
        "inputs": _tensors(known.inputs),
        "outputs": _tensors(known.outputs),
        "methodName": "",
        "defaults": {},
    }
    definitions = {"@type": _TYPE, "signatureDef": {"serving_default": signature}}
    return {
        "modelSpec": {"name": known.name, "signatureName": "", "version": version},
        "metadata": {"signature_def": definitions},
    }


def _tensors(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {spec.name: _tensor(spec) for spec in specs}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in spec.reported_shape]
    row = BY_DATATYPE.get(spec.datatype.name)
    dtype = "DT_INVALID" if row is None else row.name
    return {"dtype": dtype, "tensorShape": {"dim": sizes, "unknownRank": False}, "name": spec.name}
