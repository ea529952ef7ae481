"""A servable's configuration in the words of Triton's ``ModelConfig``, which load generators and SDKs read.

The document is the one of REST; gRPC's message is made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.encoding.generated import inference as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.dataplane.plane import ModelMetadata

__all__ = ["config_document", "config_message"]

_BACKEND: Final = "openvino"
_ROWS_OF_AN_OPEN_BATCH: Final = 65_536
"""What is told of a batch that the model does not bound: clients want a number."""


def config_document(known: ModelMetadata) -> dict[str, Any]:
    """Make the document.

    ``max_batch_size`` is above 0 where all tensors begin with a batch of open size, which is no part of ``dims`` then.
    """
    rows = _batch_rows(known)
    document: dict[str, Any] = {
        "name": known.name,
        "platform": known.platform,
        "backend": _BACKEND,
        "max_batch_size": rows,
        "input": _tensors(known.inputs, skipped=bool(rows)),
        "output": _tensors(known.outputs, skipped=bool(rows)),
    }
    if known.has_sequences:
        document["sequence_batching"] = {"max_sequence_idle_microseconds": 0}
    elif known.joined_rows:
        document["dynamic_batching"] = {"preferred_batch_size": [known.joined_rows]}
    if known.has_streams:
        document["model_transaction_policy"] = {"decoupled": True}
    return document


def config_message(known: ModelMetadata) -> pb.ModelConfig:
    """Make the message."""
    document = config_document(known)
    policy, sequences = document.get("model_transaction_policy"), document.get("sequence_batching")
    batching = document.get("dynamic_batching")
    return pb.ModelConfig(
        name=document["name"],
        platform=document["platform"],
        max_batch_size=document["max_batch_size"],
        input=[pb.ModelInput(each["name"], _type(each), each["dims"]) for each in document["input"]],
        output=[pb.ModelOutput(each["name"], _type(each), each["dims"]) for each in document["output"]],
        dynamic_batching=batching and pb.ModelDynamicBatching(**batching),
        sequence_batching=sequences and pb.ModelSequenceBatching(**sequences),
        backend=document["backend"],
        model_transaction_policy=policy and pb.ModelTransactionPolicy(**policy),
    )


def _batch_rows(known: ModelMetadata) -> int:
    tensors = (*known.inputs, *known.outputs)
    if not known.inputs or not all(_begins_with_open_batch(each) for each in tensors):
        return 0
    if known.joined_rows:
        return known.joined_rows
    bounds = [each.shape[0].high for each in known.inputs if each.shape[0].high > 0]
    return min([*bounds, _ROWS_OF_AN_OPEN_BATCH])


def _begins_with_open_batch(tensor: TensorSpec) -> bool:
    return tensor.batch_axis == 0 and bool(tensor.shape) and not tensor.shape[0].is_fixed


def _tensors(tensors: Sequence[TensorSpec], *, skipped: bool) -> list[dict[str, Any]]:
    kinds = {"BYTES": "STRING"}
    return [
        {
            "name": each.name,
            "data_type": f"TYPE_{kinds.get(each.datatype.name, each.datatype.name)}",
            "dims": each.reported_shape[skipped:],
        }
        for each in tensors
    ]


def _type(tensor: dict[str, Any]) -> pb.DataType:
    return pb.DataType[tensor["data_type"]]
