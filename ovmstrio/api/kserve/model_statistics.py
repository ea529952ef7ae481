"""What was counted of calls, in the words of Triton's ``ModelStatistics``: a document for REST, a message for gRPC.

Times of Triton are nanoseconds in all; the time between reading a request and its inference, and that from there to the
answer, are not told apart here and stand in ``compute_output``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.observability.call_statistics import Total
from ovmstrio.encoding.generated import inference as pb

if TYPE_CHECKING:
    from ovmstrio.observability.call_statistics import VersionStatistics

__all__ = ["statistics_document", "statistics_message"]

_NANOSECONDS: Final = 1e9
_MILLISECONDS: Final = 1e3


def statistics_document(name: str, version: str, counted: VersionStatistics) -> dict[str, Any]:
    """Make the document of one version."""
    calls = {
        "success": counted.success,
        "fail": counted.fail,
        "queue": counted.queue,
        "compute_input": Total(counted.success.count),
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
    """Make the message of one version."""
    document = statistics_document(name, version, counted)
    calls = {key: pb.StatisticDuration(**total) for key, total in document.pop("inference_stats").items()}
    return pb.ModelStatistics(**document, inference_stats=pb.InferStatistics(**calls))
