"""The metric families, their labels and which of them are on without being asked for.

Names, labels and buckets are those of OVMS; ``ovmstrio_*`` families are this
server's own, ``process_*`` Prometheus's, and both are on unless other ones are asked for by ``--metrics_families``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "BUCKETS_COARSE_US",
    "BUCKETS_SECONDS",
    "BUCKETS_SIZE",
    "BUCKETS_US",
    "FAMILIES",
    "LOOP_DELAY",
    "OWN_FAMILIES",
    "READ_FAMILIES",
    "Family",
    "families_like",
]

_REQUEST = ("name", "version", "api", "method", "interface")
_GRAPH = ("name", "api", "method", "interface")
_VERSION = ("name", "version")

BUCKETS_SIZE: Final = tuple(float(2**power) for power in range(11))
"""Upper bounds of the histogram of batch sizes."""

BUCKETS_SECONDS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of turns of the event loop."""

BUCKETS_US: Final = tuple(float(int(10 * 1.8**step)) for step in range(33))
"""Upper bounds of OVMS's histograms, in microseconds."""

BUCKETS_COARSE_US: Final = BUCKETS_US[1::2]
"""Every other one, for histograms of which there are many."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family: its Prometheus type, labels, help text, and whether it is on by default."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    default: bool = True
    buckets: tuple[float, ...] = BUCKETS_US


def _table(*rows: Family) -> dict[str, Family]:
    return {row.name: row for row in rows}


FAMILIES: Final[Mapping[str, Family]] = _table(
    Family("ovms_requests_success", "counter", _REQUEST, "Requests to a servable that were answered."),
    Family("ovms_requests_fail", "counter", _REQUEST, "Requests to a servable that were refused or failed."),
    Family("ovms_request_time_us", "histogram", ("name", "version", "interface"), "Time to answer a request."),
    Family("ovms_current_requests", "gauge", _VERSION, "Inference requests in process."),
    Family("ovms_streams", "gauge", _VERSION, "Execution streams of OpenVINO."),
    Family("ovms_inference_time_us", "histogram", _VERSION, "Time that the runtime took for an inference."),
    Family("ovms_wait_for_infer_req_time_us", "histogram", _VERSION, "Time that a request waited for the pool."),
    Family("ovms_infer_req_queue_size", "gauge", _VERSION, "Infer requests in the pool.", default=False),
    Family("ovms_infer_req_active", "gauge", _VERSION, "Infer requests at work.", default=False),
    Family("ovms_current_graphs", "gauge", ("name",), "Graphs in process."),
    Family("ovms_requests_accepted", "counter", _GRAPH, "Packets that a graph took in."),
    Family("ovms_requests_rejected", "counter", _GRAPH, "Packets that a graph refused."),
    Family("ovms_responses", "counter", _GRAPH, "Answers that a graph gave."),
    Family("ovms_graph_error", "counter", _GRAPH, "Graphs that ended in an error."),
    Family("ovms_graph_processing_time_us", "histogram", ("name", "method"), "Time that a graph ran."),
)
"""Every family that ``metrics_list`` may name."""

OWN_FAMILIES: Final[Mapping[str, Family]] = _table(
    Family("ovmstrio_requests", "counter", (*_REQUEST, "code"), "Requests by outcome, as the gRPC status is called."),
    Family(
        "ovmstrio_request_time_us",
        "histogram",
        ("kind", "interface"),
        "Time to answer a request, by kind of service.",
        buckets=BUCKETS_COARSE_US,
    ),
    Family(
        "ovmstrio_node_time_us",
        "histogram",
        ("name", "node"),
        "Time that one run of a node of a graph or pipeline, or a batch of an Op, took.",
        buckets=BUCKETS_COARSE_US,
    ),
    Family("ovmstrio_node_failures", "counter", ("name", "node"), "Runs of a node, or batches of an Op, that failed."),
    Family(
        "ovmstrio_event_loop_delay_seconds",
        "histogram",
        (),
        "Length of turns of the event loop: for so long at most whatever was ready had to wait.",
        buckets=BUCKETS_SECONDS,
    ),
    Family("ovmstrio_worker_threads", "gauge", ("name",), "Threads for code of users that may block."),
    Family("ovmstrio_stuck_threads", "gauge", ("name",), "Threads that were given up, as they do not come back."),
    Family("ovmstrio_waiting_calls", "gauge", ("name",), "Calls of code of users that wait for a thread."),
    Family("ovmstrio_worker_processes", "gauge", ("name",), "Worker processes of a service that live."),
    Family("ovmstrio_worker_restarts", "counter", ("name",), "Worker processes that ended by themselves."),
    Family("ovmstrio_worker_memory_bytes", "gauge", ("name",), "Resident memory of a service's worker processes."),
    Family("ovmstrio_refused_callers", "counter", ("reason",), "Requests refused because of who makes them."),
    Family("ovmstrio_model_load_seconds", "gauge", _VERSION, "Time that the last load of a version took."),
    Family("ovmstrio_memory_bytes", "gauge", (*_VERSION, "part"), "Memory that the last load of a version took."),
    Family("ovmstrio_inline", "gauge", _VERSION, "1 while inferences such as the last run on the event loop."),
    Family("ovmstrio_placement_moves", "counter", _VERSION, "How often inferences came to the event loop or left it."),
    Family("ovmstrio_bound_to_cores", "gauge", _VERSION, "1 while threads of a model are bound to cores."),
    Family(
        "ovmstrio_core_choices", "counter", _VERSION, "How often that was chosen anew, as other models came or went."
    ),
    Family("ovmstrio_batch_size", "histogram", _VERSION, "Rows of a batch of joined requests.", buckets=BUCKETS_SIZE),
    Family("ovmstrio_batch_wait_time_us", "histogram", _VERSION, "Time that a request waited for its batch."),
    Family("ovmstrio_batch_queued_requests", "gauge", ("name",), "Requests that wait for their batch."),
    Family("ovmstrio_bucketed_inferences", "counter", (*_VERSION, "fit"), "Inferences of models with shape_buckets."),
    Family("ovmstrio_bucketed_elements", "counter", (*_VERSION, "part"), "Elements of their inputs, and of padding."),
    Family("ovmstrio_queued_requests", "gauge", ("name",), "Requests that wait for a place (max_concurrency)."),
    Family("ovmstrio_refused_requests", "counter", ("name",), "Requests refused because as many waited as may."),
    Family("ovmstrio_dropped_log_lines", "counter", (), "Lines of the log for which there was no room."),
    Family("ovmstrio_sequences", "gauge", _VERSION, "Live sequences of a stateful model."),
    Family("ovmstrio_connections", "gauge", ("interface",), "Connections that are open."),
    Family("process_resident_memory_bytes", "gauge", (), "Memory of the server's process, without others of its."),
    Family("process_cpu_seconds", "counter", (), "Processor time of the server's process, without others of its."),
    Family("ovmstrio_ready", "gauge", (), "1 while the server calls itself ready."),
)

LOOP_DELAY: Final = "ovmstrio_event_loop_delay_seconds"

READ_FAMILIES: Final = frozenset(
    {
        LOOP_DELAY,
        "ovmstrio_batch_queued_requests",
        "ovmstrio_sequences",
        "ovmstrio_stuck_threads",
        "ovmstrio_waiting_calls",
        "ovmstrio_worker_memory_bytes",
        "ovmstrio_worker_processes",
        "ovmstrio_worker_restarts",
        "ovmstrio_worker_threads",
        "process_cpu_seconds",
        "process_resident_memory_bytes",
    }
)
"""Those whose figures somebody else keeps, and that are read whenever somebody scrapes."""


def families_like(patterns: Iterable[str]) -> tuple[str, ...]:
    """Give the names of all families that one of the patterns fits, in which ``*`` stands for anything."""
    patterns = tuple(patterns)
    return tuple(name for name in (*FAMILIES, *OWN_FAMILIES) if any(fnmatchcase(name, each) for each in patterns))
