"""KServe v2 extensions, for REST and gRPC: model configuration, statistics, repository, trace and log settings.

The configuration follows Triton's ``ModelConfig``, the statistics Triton's ``ModelStatistics``, which load generators
and SDKs read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import orjson
import structlog

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest, NotSupported
from ovmstrio.encoding.base64_text import decode_base64
from ovmstrio.encoding.generated import inference as pb
from ovmstrio.serving.records import VersionState
from ovmstrio.telemetry.call_statistics import CallTotal
from ovmstrio.telemetry.log_levels import LOG_LEVEL, format_log_levels, parse_log_levels
from ovmstrio.util.truncation import cut, shown

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
    "schedule_policy",
    "statistics",
)


NO_CUDA: Final = (
    "CUDA shared memory is not supported: models run on OpenVINO's devices; "
    "register system shared memory, or send tensors in requests"
)


def server_extensions(plane: DataPlane) -> list[str]:
    """Return the KServe v2 extensions that this server was started with, and the ports of its protocols."""
    allowed = {
        "model_repository": plane.control is not None,
        "model_repository(unload_dependents)": plane.control is not None,
        "system_shared_memory": plane.regions.is_allowed,
    }
    ports = ",".join(f"{protocol}={port}" for protocol, port in sorted(plane.ports.items()))
    named = [f"ports({ports})"] if ports else []
    return sorted([*_EXTENSIONS, *named, *(name for name, is_allowed in allowed.items() if is_allowed)])


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
    """List all versions, or the ready ones, by name and number.

    Names that were never loaded and names whose versions cannot be listed have no version.
    """
    statuses = plane.statuses()
    names = [] if only_ready or plane.control is None else plane.control.names
    unloaded = {name: "" for name in names if name not in statuses}
    if not only_ready:
        versionless = (
            name for name, versions in statuses.items() if not versions and plane.registry.is_configured(name)
        )
        unloaded |= {name: plane.registry.why_not(name) for name in versionless}
    entries = [
        IndexEntry(
            name,
            str(status.version),
            "UNAVAILABLE" if status.has_failed else _STATES[status.state],
            status.reason,
        )
        for name, versions in sorted(statuses.items())
        for status in sorted(versions, key=lambda status: status.version)
        if status.state is VersionState.AVAILABLE or not only_ready
    ]
    return sorted(
        [*entries, *(IndexEntry(name, "", "UNAVAILABLE", reason) for name, reason in unloaded.items())],
        key=lambda each: each.name,
    )


# ----------------------------------------------------------------------
# Load and unload requests
# ----------------------------------------------------------------------

_CONFIG: Final = "config"
_FILE: Final = "file:"
_DEPENDENTS: Final = "unload_dependents"
_MAX_CONFIG_CHARACTERS: Final = 64 * 1024


def load_parameters(given: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Return the model configuration (JSON or None) and the files by parameter name; REST sends files as base64."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in given.items():
        if name == _CONFIG:
            config = _config_json(value)
        elif name.startswith(_FILE):
            files[name] = _file_content(name, value)
        else:
            raise _unknown(name, f"{_CONFIG} and {_FILE}<version>/<name>")
    return config, files


def unload_parameters(given: Mapping[str, Any]) -> bool:
    """Return whether to unload the dependents too."""
    for name, value in given.items():
        if name != _DEPENDENTS:
            raise _unknown(name, _DEPENDENTS)
        if not isinstance(value, bool):
            raise InvalidRequest(f"the parameter {_DEPENDENTS} must be true or false, got {shown(value, 40)}")
    return bool(given.get(_DEPENDENTS, False))


def _config_json(value: object) -> str:
    text = orjson.dumps(value).decode() if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequest(f"the parameter {_CONFIG} must be JSON text, got {type(value).__name__}")
    if len(text) > _MAX_CONFIG_CHARACTERS:
        # The configuration parser tracks the line of each value, which costs microseconds per value.
        raise InvalidRequest(
            f"the parameter {_CONFIG}: expected at most {_MAX_CONFIG_CHARACTERS} characters, got {len(text)}"
        )
    return text


def _file_content(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return decode_base64(value)
    except ValueError:
        pass
    raise InvalidRequest(f"the parameter {cut(name, 80)!r} must be the content of a file (over REST as base64)")


def _unknown(name: str, known: str) -> InvalidRequest:
    return InvalidRequest(f"the parameter {cut(name, 80)!r} is not known, expected {known}")


# ----------------------------------------------------------------------
# Triton's trace and log settings
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

TRACE_SETTINGS: Final = {"trace_level": ["OFF"], "trace_rate": ["0"], "trace_count": ["0"], "log_frequency": ["0"]}
"""Triton's traces are not written."""

_VERBOSE: Final = "log_verbose_level"
_LEVELS: Final = {
    _VERBOSE: logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
"""Triton's settings and the log levels that they enable, lowest first."""
_LOGGER_LEVELS: Final = "log_levels"  # Additional setting: levels of individual loggers
_OFF: Final = logging.CRITICAL
_ABOVE: Final = dict(zip(_LEVELS, [*list(_LEVELS.values())[1:], _OFF], strict=True))
_FIXED: Final = {"log_file": "--log-path", "log_format": "--log-format"}
_MAX_SHOWN_CHARACTERS: Final = 80
_MAX_SHOWN_NAMES: Final = 8


def check_trace_settings(names: list[str], levels: list[str]) -> None:
    """Raise ``NotSupported`` unless the settings turn traces off."""
    if names != ["trace_level"] or levels not in (["OFF"], []):
        raise NotSupported(
            "Triton traces are not supported, only trace_level OFF; for request times see /v2/models/stats, /metrics, "
            f"or the request log ({_VERBOSE} 1 or --log-level DEBUG)"
        )


def log_settings() -> dict[str, bool | int | str]:
    """Return the current log settings in Triton's form."""
    least = LOG_LEVEL.value
    on = {name: least <= level for name, level in _LEVELS.items()}
    return {
        "log_file": LOG_LEVEL.path,
        "log_info": on["log_info"],
        "log_warning": on["log_warning"],
        "log_error": on["log_error"],
        _VERBOSE: int(on[_VERBOSE]),
        "log_format": "ISO8601",
        _LOGGER_LEVELS: format_log_levels(LOG_LEVEL.parts),
    }


def change_log_settings(changes: Mapping[str, Any]) -> None:
    """Change the log level: enabling a level enables all higher ones, disabling it disables all lower ones.

    Raises ``FailedPrecondition`` if an embedding program owns the log, ``NotSupported`` for settings fixed at start.
    """
    if not changes:
        return
    _check_own_log()
    current = log_settings()
    unknown = [cut(name, _MAX_SHOWN_CHARACTERS) for name in changes if name not in current][:_MAX_SHOWN_NAMES]
    if unknown:
        raise InvalidRequest(f"log settings: {', '.join(unknown)} not known, expected some of {', '.join(current)}")
    for name, option in _FIXED.items():
        if changes.get(name, current[name]) != current[name]:
            raise NotSupported(
                f"{name}: expected {current[name]!r}, got {shown(changes[name], _MAX_SHOWN_CHARACTERS)}; "
                f"fixed at start by {option}"
            )
    if _LOGGER_LEVELS in changes:
        _set_logger_levels(changes[_LOGGER_LEVELS])
    on = [name for name in _LEVELS if name in changes and _is_on(name, changes[name])]
    off = [name for name in _LEVELS if name in changes and name not in on]
    _apply(on, off)


def _set_logger_levels(text: object) -> None:
    try:
        parts = parse_log_levels(text if isinstance(text, str) else shown(text, _MAX_SHOWN_CHARACTERS))
    except ValueError as error:
        raise InvalidRequest(f"{_LOGGER_LEVELS}: {error}") from None
    if parts != LOG_LEVEL.parts:
        LOG_LEVEL.set_logger_levels(parts)
        log.info("logger levels changed", levels=format_log_levels(parts))


def set_log_level(level: int) -> None:
    """Set the lowest logged level (``logging`` number), unless an embedding program owns the log."""
    _check_own_log()
    if level != LOG_LEVEL.value:
        LOG_LEVEL.set(level)
        log.info("log level changed", from_level=logging.getLevelName(level))


def _check_own_log() -> None:
    if not LOG_LEVEL.is_begun:
        raise FailedPrecondition("log settings belong to the embedding program")


def _is_on(name: str, value: object) -> bool:
    if name == _VERBOSE and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value > 0
    if name != _VERBOSE and isinstance(value, bool):
        return value
    expected = "an integer, 0 for none" if name == _VERBOSE else "true or false"
    raise InvalidRequest(f"{name}: expected {expected}, got {shown(value, _MAX_SHOWN_CHARACTERS)}")


def _apply(on: list[str], off: list[str]) -> None:
    least = LOG_LEVEL.value
    if on:
        least = min(least, _LEVELS[on[0]])
    if off:
        if on and _LEVELS[off[-1]] > _LEVELS[on[0]]:
            raise InvalidRequest(
                f"{off[-1]} cannot be off while {on[0]} is on: everything from a level up is logged, in the order "
                f"{', '.join(_LEVELS)}"
            )
        least = max(least, _ABOVE[off[-1]])
    set_log_level(least)
