"""What can be wrong with a pipeline, by the names that OVMS gives to it."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ovmstrio.core.errors import Problem

if TYPE_CHECKING:
    from ovmstrio.config.specs import PipelineNode

__all__ = ["Code", "placed", "problem_of"]


class Code(StrEnum):
    """One kind of problem."""

    CYCLE = "PIPELINE_CYCLE_FOUND"
    UNCONNECTED = "PIPELINE_CONTAINS_UNCONNECTED_NODES"
    ENTRIES = "PIPELINE_MULTIPLE_ENTRY_NODES"
    EXITS = "PIPELINE_MULTIPLE_EXIT_NODES"
    NAME_TWICE = "PIPELINE_NODE_NAME_DUPLICATE"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    GATHER_MISSING = "PIPELINE_NODE_GATHER_FROM_NOT_EXISTING_NODE"
    GATHER_NO_DEMULTIPLEXER = "PIPELINE_NODE_GATHER_FROM_NOT_DEMULTIPLEXER"
    ORDER = "PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"
    NODE_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_NODE"
    EXIT_USED = "PIPELINE_EXIT_USED_AS_NODE_DEPENDENCY"
    SOURCE_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE"
    CONNECTED_TWICE = "PIPELINE_MODEL_INPUT_CONNECTED_TO_MULTIPLE_DATA_SOURCES"
    MODEL_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_MODEL"
    MODEL_CHANGES = "FORBIDDEN_MODEL_DYNAMIC_PARAMETER"
    MODEL_STATEFUL = "REQUESTED_STATEFUL_PARAMETERS_ON_SUBSCRIBED_MODEL"
    STRINGS_SPLIT = "PIPELINE_STRING_DEMUILTIPLICATION_UNSUPPORTED"
    TOO_FLAT = "PIPELINE_NOT_ENOUGH_SHAPE_DIMENSIONS_TO_DEMULTIPLY"
    COUNT = "PIPELINE_DEMULTIPLY_COUNT_DOES_NOT_MATCH_TENSOR_SHARD_COUNT"
    INPUT_MISSING = "PIPELINE_CONNECTION_TO_MISSING_MODEL_INPUT"
    OUTPUT_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_MODEL_OUTPUT"
    SHAPE = "INVALID_SHAPE"
    PRECISION = "INVALID_PRECISION"
    NOT_CONNECTED = "PIPELINE_NOT_ALL_INPUTS_CONNECTED"
    AMBIGUOUS = "PIPELINE_INPUTS_AMBIGUOUS_METADATA"
    SELF = "PIPELINE_CALLS_ITSELF"


def problem_of(node: PipelineNode, code: Code, message: str, fix: str, *, warning: bool = False) -> Problem:
    """Say what is wrong with a node, and where it is configured."""
    problem = Problem(
        f"{code}: node {node.name!r}: {message}",
        suggestion=fix,
        severity="warning" if warning else "error",
    )
    return placed(node, problem)


def placed(node: PipelineNode, problem: Problem) -> Problem:
    """Say where the node that a problem is of is configured."""
    file, _, line = node.origin.rpartition(":")
    if not file or not line.isdecimal():
        return replace(problem, file=node.origin)
    return replace(problem, file=file, line=int(line))
