"""Whether the nodes of a pipeline fit together, now that it is known what each takes and gives.

The checks are OVMS's, by the names of ``pipeline_problems``; all of them are made, and everything that is wrong is
told at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.config.findings import did_you_mean
from ovmstrio.core.datatypes import BYTES
from ovmstrio.runtimes.pipelines.node_signatures import common_shape, is_open, shown_dims
from ovmstrio.runtimes.pipelines.pipeline_problems import Code, problem_of
from ovmstrio.runtimes.pipelines.structure import DYNAMIC, ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ovmstrio.config.specs import PipelineNode
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.tensor import Dim, TensorSpec
    from ovmstrio.runtimes.pipelines.node_signatures import NodeSignature
    from ovmstrio.runtimes.pipelines.structure import Edge, Structure

__all__ = ["MIN_RANK_TO_SPLIT", "check_entry", "check_nodes"]

MIN_RANK_TO_SPLIT = 3
"""What is split needs a dimension to split, and must be a batch of something behind it."""


def check_nodes(structure: Structure, signatures: Mapping[str, NodeSignature]) -> list[Problem]:
    """Check every node with a signature, and every connection between two of them."""
    problems: list[Problem] = []
    for name, signature in signatures.items():
        node = structure.nodes[name]
        problems += _check_outputs(node, signature)
        problems += _check_inputs(node, signature, structure.into(name))
    for edge in structure.edges:
        if edge.source in signatures and edge.target in signatures:
            problems += _check_edge(structure, edge, signatures)
    return problems


def check_entry(structure: Structure, inputs: Iterable[TensorSpec]) -> list[Problem]:
    """Check whether the pipeline's inputs, as clients see them, can be split if they are to be."""
    entry = structure.nodes[ENTRY]
    if entry.demultiply_count is None:
        return []
    return [problem for spec in inputs if not is_open(spec) for problem in _check_split(entry, spec)]


def _check_outputs(node: PipelineNode, signature: NodeSignature) -> list[Problem]:
    problems = []
    for output in node.outputs:
        spec = signature.outputs.get(output.data_item)
        if spec is None:
            hint = _known(output.data_item, signature.outputs)
            message = f"it has no output {output.data_item!r}"
            problems.append(problem_of(node, Code.OUTPUT_MISSING, message, hint))
        elif node.demultiply_count is not None and not is_open(spec):
            problems += _check_split(node, spec)
    return problems


def _check_split(node: PipelineNode, spec: TensorSpec) -> list[Problem]:
    what = f"{'the input' if node.name == ENTRY else 'its output'} {spec.name!r}"
    if spec.datatype is BYTES:
        message = f"{what} is of strings, which are not split"
        return [problem_of(node, Code.STRINGS_SPLIT, message, "remove demultiply_count")]
    if len(spec.shape) < MIN_RANK_TO_SPLIT:
        message = f"{what} of shape {shown_dims(spec.shape)} has too few dimensions to be split"
        fix = f"give it at least {MIN_RANK_TO_SPLIT}: the one to split, a batch, and what that is of"
        return [problem_of(node, Code.TOO_FLAT, message, fix)]
    first, count = spec.shape[0], node.demultiply_count
    if count in (None, DYNAMIC) or not first.is_fixed:
        return []
    if first.low != count:
        message = f"its demultiply_count is {count}, and {what} is {shown_dims(spec.shape)}"
        return [problem_of(node, Code.COUNT, message, f"make both the same, or demultiply_count {DYNAMIC}")]
    return []


def _check_inputs(node: PipelineNode, signature: NodeSignature, into: list[Edge]) -> list[Problem]:
    problems = []
    connected = {given.name for given in node.inputs}
    for name in {edge.name: None for edge in into}:
        if name not in signature.inputs:
            message = f"it has no input {name!r}"
            problems.append(problem_of(node, Code.INPUT_MISSING, message, _known(name, signature.inputs)))
    problems += [
        problem_of(node, Code.NOT_CONNECTED, f"its input {name!r} is not connected", "add it to the node's inputs")
        for name in signature.inputs
        if name not in connected
    ]
    return problems


def _check_edge(structure: Structure, edge: Edge, signatures: Mapping[str, NodeSignature]) -> list[Problem]:
    given = signatures[edge.source].outputs.get(edge.item)
    wanted = signatures[edge.target].inputs.get(edge.name)
    if given is None or wanted is None or is_open(given) or is_open(wanted):
        return []
    node = structure.nodes[edge.target]
    where = f"input {edge.name!r} from {edge.item!r} of {edge.source!r}"
    problems = []
    if given.datatype is not wanted.datatype:
        message = f"{where}: expected {wanted.datatype.name}, got {given.datatype.name}"
        problems.append(problem_of(node, Code.PRECISION, message, "convert it with a custom node between the two"))
    elif given.datatype is BYTES:
        message = f"{where}: strings do not go from node to node"
        problems.append(problem_of(node, Code.NOT_IMPLEMENTED, message, "pass them as rows of UINT8"))
    sent = given.shape if structure.nodes[edge.source].demultiply_count is None else given.shape[1:]
    taken = wanted.shape[1:] if edge.gathers else wanted.shape
    # What has a shape in common may fit; if not every size does, a request may still fail.
    if common_shape(sent, taken) is None:
        message = f"{where}: expected {shown_dims(taken)}, got {shown_dims(sent)}{_why(edge, sent, given)}"
        problems.append(problem_of(node, Code.SHAPE, message, "reshape the model, or convert it between the two"))
    return problems


def _why(edge: Edge, sent: tuple[Dim, ...], given: TensorSpec) -> str:
    parts = []
    if sent != given.shape:
        parts.append(f"{edge.source!r} splits {shown_dims(given.shape)}")
    if edge.gathers:
        parts.append(f"{edge.target!r} gathers one dimension before it")
    return f" ({', '.join(parts)})" if parts else ""


def _known(found: str, known: Mapping[str, TensorSpec]) -> str:
    return did_you_mean(found, known, otherwise=f"known are {', '.join(known) or 'none'}")
