"""KServe v2 documents shared by REST and gRPC: model configuration, statistics, extensions, repository index.

The configuration follows Triton's ``ModelConfig``, the statistics Triton's ``ModelStatistics``, which load generators
and SDKs read.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.encoding.generated import inference as pb
from ovmstrio.serving.records import VersionState
from ovmstrio.telemetry.call_statistics import CallTotal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane, ModelMetadata
    from ovmstrio.telemetry.call_statistics import VersionStatistics

# Model configuration

_BACKEND: Final = "openvino"
_UNBOUNDED_BATCH_SIZE: Final = 65_536  # Reported ``max_batch_size`` of an unbounded batch: clients expect a number


def config_document(known: ModelMetadata) -> dict[str, Any]:
    """Return the REST document; a dynamic batch dimension of all tensors is ``max_batch_size`` and not in ``dims``."""
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
    """Return the gRPC message."""
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
    if not known.inputs or not all(
        each.batch_axis == 0 and each.shape and not each.shape[0].is_fixed for each in tensors
    ):
        return 0
    if known.joined_rows:
        return known.joined_rows
    bounds = [each.shape[0].high for each in known.inputs if each.shape[0].high > 0]
    return min([*bounds, _UNBOUNDED_BATCH_SIZE])


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


# Statistics

_NANOSECONDS: Final = 1e9
_MILLISECONDS: Final = 1e3


def statistics_document(name: str, version: str, counted: VersionStatistics) -> dict[str, Any]:
    """Return the REST document of one version."""
    calls = {
        "success": counted.success,
        "fail": counted.fail,
        "queue": counted.queue,
        "compute_input": CallTotal(counted.success.count),
        "compute_infer": counted.compute,
        "compute_output": counted.rest,
    }
    return {
        "name": name,
        "version": version,
        "last_inference": int(counted.last_call * _MILLISECONDS),
        "inference_count": counted.success.count,
        "execution_count": counted.success.count,
        "inference_stats": {
            key: {"count": total.count, "ns": int(total.seconds * _NANOSECONDS)} for key, total in calls.items()
        },
    }


def statistics_message(name: str, version: str, counted: VersionStatistics) -> pb.ModelStatistics:
    """Return the gRPC message of one version."""
    document = statistics_document(name, version, counted)
    calls = {key: pb.StatisticDuration(**total) for key, total in document.pop("inference_stats").items()}
    return pb.ModelStatistics(**document, inference_stats=pb.InferStatistics(**calls))


# Extensions and repository index

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "generate",
    "logging",
    "model_configuration",
    "statistics",
)


def server_extensions(plane: DataPlane) -> list[str]:
    """Return the KServe v2 extensions that this server was started with."""
    allowed = {
        "model_repository": plane.control is not None,
        "model_repository(unload_dependents)": plane.control is not None,
        "system_shared_memory": plane.regions.is_allowed,
    }
    return sorted([*_EXTENSIONS, *(name for name, is_allowed in allowed.items() if is_allowed)])


def server_version() -> str:
    """Return the server version."""
    return version("ovmstrio")


_STATES: Final = {
    VersionState.START: "LOADING",
    VersionState.LOADING: "LOADING",
    VersionState.AVAILABLE: "READY",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.END: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Version of a servable; ``state`` is READY, LOADING, UNLOADING or UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str


def repository_index(plane: DataPlane, *, only_ready: bool = False) -> list[IndexEntry]:
    """List all versions, or the ready ones, by name and number; loadable names never loaded have no version."""
    statuses = plane.statuses()
    names = [] if only_ready or plane.control is None else plane.control.names
    unloaded = [name for name in names if name not in statuses]
    entries = [
        IndexEntry(name, str(status.version), _STATES[status.state], status.reason)
        for name, versions in sorted(statuses.items())
        for status in sorted(versions, key=lambda status: status.version)
        if status.state is VersionState.AVAILABLE or not only_ready
    ]
    return sorted(
        [*entries, *(IndexEntry(name, "", "UNAVAILABLE", "") for name in unloaded)], key=lambda each: each.name
    )
