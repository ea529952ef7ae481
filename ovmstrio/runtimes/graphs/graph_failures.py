"""What a client is told when a graph fails: OVMS's text, with the node and the cause."""

from __future__ import annotations

from typing import Final

from ovmstrio.core.errors import GraphFailure, ServerError
from ovmstrio.core.texts import text_of
from ovmstrio.runtimes.graphs.calculator import NodeFailure
from ovmstrio.runtimes.graphs.input_streams import TimestampMismatch

__all__ = ["DEADLOCK", "graph_failure", "node_failure"]

_EXECUTION: Final = "Mediapipe execution failed. MP status"
_RUN_FAILED: Final = "CalculatorGraph::Run() failed: \n"

DEADLOCK: Final = (
    "Detected a deadlock due to input throttling: every queue that would have to be emptied first is full; raise "
    "max_queue_size, or remove report_deadlock"
)


def graph_failure(detail: str, code: str = "INTERNAL") -> GraphFailure:
    """Make the failure of a run, ``code`` being the absl status that MediaPipe would give."""
    return GraphFailure(f"{_EXECUTION} - {code}: {_RUN_FAILED}{detail}")


def node_failure(node: str, phase: str, error: Exception) -> ServerError:
    """Make the failure of a run out of what a calculator raised in ``Open``, ``Process`` or ``Close``."""
    match error:
        case ServerError():
            return error
        case TimestampMismatch():
            return graph_failure(str(error), "INVALID_ARGUMENT")
        case NodeFailure():
            message, code = error.message, error.code
        case _:
            message, code = f"{type(error).__name__}: {text_of(error)}", "INTERNAL"
    return graph_failure(f'Calculator::{phase}() for node "{node}" failed: {message}', code)
