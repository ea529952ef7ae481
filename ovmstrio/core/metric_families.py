"""Metric families with type, labels, help text and default.

Names, labels and buckets of ``ovms_*`` are OVMS's.  ``ovmstrio_*`` and ``process_*`` (Prometheus conventions) are on
unless ``--metrics-families`` selects others.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

from ovmstrio.util.deprecation import OLD_METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_REQUEST = ("name", "version", "api", "method", "interface")
_GRAPH = ("name", "api", "method", "interface")
_VERSION = ("name", "version")

BUCKETS_SIZE: Final = tuple(float(2**power) for power in range(11))
"""Bounds of batch sizes."""

BUCKETS_SECONDS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds of event-loop iterations."""

BUCKETS_US: Final = tuple(float(int(10 * 1.8**step)) for step in range(33))
"""Bounds of OVMS's histograms."""

BUCKETS_TIME_SECONDS: Final = tuple(bound / 1e6 for bound in BUCKETS_US)
"""The same bounds in seconds."""

BUCKETS_COARSE_SECONDS: Final = BUCKETS_TIME_SECONDS[1::2]
"""Coarser bounds, for histograms with many label values."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family: Prometheus type, labels, help text, and whether it is enabled by default."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    default: bool = True
    buckets: tuple[float, ...] = BUCKETS_US


def _table(*rows: Family) -> dict[str, Family]:
    return {row.name: row for row in rows}


FAMILIES: Final[Mapping[str, Family]] = _table(
    Family("ovms_requests_success", "counter", _REQUEST, "Successful requests."),
    Family("ovms_requests_fail", "counter", _REQUEST, "Failed or rejected requests."),
    Family("ovms_request_time_us", "histogram", ("name", "version", "interface"), "Request latency in microseconds."),
    Family("ovms_current_requests", "gauge", _VERSION, "Running inference requests."),
    Family("ovms_streams", "gauge", _VERSION, "OpenVINO execution streams."),
    Family("ovms_inference_time_us", "histogram", _VERSION, "Inference time in microseconds."),
    Family(
        "ovms_wait_for_infer_req_time_us",
        "histogram",
        _VERSION,
        "Time in microseconds that a request waited for an infer request.",
    ),
    Family("ovms_infer_req_queue_size", "gauge", _VERSION, "Infer requests of the pool.", default=False),
    Family("ovms_infer_req_active", "gauge", _VERSION, "Infer requests in use.", default=False),
    Family("ovms_current_graphs", "gauge", ("name",), "Running graphs."),
    Family("ovms_requests_accepted", "counter", _GRAPH, "Packets accepted by a graph."),
    Family("ovms_requests_rejected", "counter", _GRAPH, "Packets rejected by a graph."),
    Family("ovms_responses", "counter", _GRAPH, "Responses of a graph."),
    Family("ovms_graph_error", "counter", _GRAPH, "Failed graphs."),
    Family("ovms_graph_processing_time_us", "histogram", ("name", "method"), "Graph run time in microseconds."),
)
"""Families that ``metrics_list`` may name."""

OWN_FAMILIES: Final[Mapping[str, Family]] = _table(
    Family("ovmstrio_requests", "counter", (*_REQUEST, "code"), "Requests by gRPC status."),
    Family(
        "ovmstrio_request_time_seconds",
        "histogram",
        ("kind", "interface"),
        "Request latency in seconds by service kind.",
        buckets=BUCKETS_COARSE_SECONDS,
    ),
    Family(
        "ovmstrio_node_time_seconds",
        "histogram",
        ("name", "node"),
        "Run time in seconds of a graph or pipeline node, or of an Op batch.",
        buckets=BUCKETS_COARSE_SECONDS,
    ),
    Family("ovmstrio_node_failures", "counter", ("name", "node"), "Failed runs of a node or Op batch."),
    Family(
        "ovmstrio_event_loop_delay_seconds",
        "histogram",
        (),
        "Duration of event-loop iterations in seconds (upper bound of scheduling delay).",
        buckets=BUCKETS_SECONDS,
    ),
    Family("ovmstrio_worker_threads", "gauge", ("name",), "Threads for blocking user code."),
    Family("ovmstrio_stuck_threads", "gauge", ("name",), "Abandoned threads that have not returned."),
    Family("ovmstrio_thread_queue_length", "gauge", ("name",), "User-code calls queued for a thread."),
    Family("ovmstrio_worker_processes", "gauge", ("name",), "Running worker processes of a service."),
    Family("ovmstrio_worker_restarts", "counter", ("name",), "Unexpected exits of worker processes."),
    Family(
        "ovmstrio_worker_memory_bytes", "gauge", ("name",), "Resident memory in bytes of a service's worker processes."
    ),
    Family("ovmstrio_auth_failures", "counter", ("reason",), "Requests rejected by authentication or authorisation."),
    Family("ovmstrio_model_load_seconds", "gauge", _VERSION, "Duration in seconds of a version's last load."),
    Family(
        "ovmstrio_memory_bytes", "gauge", (*_VERSION, "part"), "Memory in bytes allocated by a version's last load."
    ),
    Family("ovmstrio_inference_on_loop", "gauge", _VERSION, "1 if the last inference ran on the event loop."),
    Family("ovmstrio_execution_switches", "counter", _VERSION, "Moves of inference to or from the event loop."),
    Family("ovmstrio_cpu_pinned", "gauge", _VERSION, "1 if the model's threads are pinned to cores."),
    Family(
        "ovmstrio_cpu_pinning_changes",
        "counter",
        _VERSION,
        "CPU pinning changes after models were loaded or unloaded.",
    ),
    Family("ovmstrio_batch_size", "histogram", _VERSION, "Rows per batch of joined requests.", buckets=BUCKETS_SIZE),
    Family(
        "ovmstrio_batch_wait_time_seconds",
        "histogram",
        _VERSION,
        "Time in seconds that a request waited for its batch.",
        buckets=BUCKETS_TIME_SECONDS,
    ),
    Family("ovmstrio_batch_queued_requests", "gauge", ("name",), "Requests queued for a batch."),
    Family("ovmstrio_bucketed_inferences", "counter", (*_VERSION, "fit"), "Inferences of models with shape_buckets."),
    Family(
        "ovmstrio_padded_elements",
        "counter",
        (*_VERSION, "part"),
        "Input and padding elements of bucketed inferences.",
    ),
    Family("ovmstrio_queued_requests", "gauge", ("name",), "Requests queued by max_concurrency."),
    Family(
        "ovmstrio_rejected_requests",
        "counter",
        ("name", "reason"),
        "Requests rejected before they reached a service; no name for unknown services and callers.",
    ),
    Family("ovmstrio_remote_unreachable_calls", "counter", ("name",), "Calls to a remote model without a response."),
    Family("ovmstrio_config_reloads", "counter", ("result",), "Loads of the configuration file, the first included."),
    Family(
        "ovmstrio_config_last_reload_success_timestamp_seconds",
        "gauge",
        (),
        "Time of the last successful load of the configuration file.",
    ),
    Family("ovmstrio_service_state", "gauge", (*_VERSION, "state"), "1 for the current state of each version."),
    Family("ovmstrio_worker_deaths", "counter", (), "Unexpected exits of the server's worker processes (--workers)."),
    Family("ovmstrio_build_info", "gauge", ("version", "openvino", "python"), "1, with the versions as labels."),
    Family(
        "ovmstrio_certificate_expiry_timestamp_seconds",
        "gauge",
        ("option",),
        "Time at which the certificate of an option expires.",
    ),
    Family("ovmstrio_dropped_log_lines", "counter", (), "Log lines dropped because the log buffer was full."),
    Family("ovmstrio_sequences", "gauge", _VERSION, "Live sequences of a stateful model."),
    Family("ovmstrio_connections", "gauge", ("interface",), "Open connections."),
    Family(
        "process_resident_memory_bytes",
        "gauge",
        (),
        "Resident memory in bytes of the server process (without worker processes).",
    ),
    Family(
        "process_cpu_seconds", "counter", (), "CPU time in seconds of the server process (without worker processes)."
    ),
    Family("process_start_time_seconds", "gauge", (), "Start time of the server process, since the epoch."),
    Family("process_open_fds", "gauge", (), "Open file descriptors of the server process."),
    Family("process_max_fds", "gauge", (), "Maximum number of open file descriptors."),
    Family("ovmstrio_ready", "gauge", (), "1 if the server is ready."),
)

LOOP_DELAY: Final = "ovmstrio_event_loop_delay_seconds"

SCRAPED_FAMILIES: Final = frozenset(
    {
        LOOP_DELAY,
        "ovmstrio_batch_queued_requests",
        "ovmstrio_build_info",
        "ovmstrio_certificate_expiry_timestamp_seconds",
        "ovmstrio_config_last_reload_success_timestamp_seconds",
        "ovmstrio_config_reloads",
        "ovmstrio_sequences",
        "ovmstrio_service_state",
        "ovmstrio_stuck_threads",
        "ovmstrio_thread_queue_length",
        "ovmstrio_worker_deaths",
        "ovmstrio_worker_memory_bytes",
        "ovmstrio_worker_processes",
        "ovmstrio_worker_restarts",
        "ovmstrio_worker_threads",
        "process_cpu_seconds",
        "process_max_fds",
        "process_open_fds",
        "process_start_time_seconds",
        "process_resident_memory_bytes",
    }
)
"""Families whose values are read at scrape time."""


_SUFFIXES: Final = ("", "_total", "_bucket", "_sum", "_count")
"""Suffixes of sample names."""


def selected_families(names: Iterable[str]) -> frozenset[str]:
    """Return the possible names of the families that names of families or samples select."""
    return frozenset(each.removesuffix(suffix) for each in names for suffix in _SUFFIXES)


def matching_families(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of all families whose name, or earlier name, matches a glob pattern."""
    patterns = tuple(patterns)
    old = {name: (each.name,) for name, each in OLD_METRICS.items()}
    return tuple(
        name
        for name in (*FAMILIES, *OWN_FAMILIES)
        if any(fnmatchcase(known, each) for known in (name, *old.get(name, ())) for each in patterns)
    )
