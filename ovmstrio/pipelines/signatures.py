"""Signatures of pipeline nodes, their compatibility, and the resulting signature of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.tensor import ANY_SIZE, BYTES, INVALID, Dim, TensorSpec
from ovmstrio.pipelines.structure import DYNAMIC, ENTRY, EXIT, PipelineErrorCode, node_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ovmstrio.config.specs import PipelineNode
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.pipelines.custom_node import CustomNode, ItemInfo
    from ovmstrio.pipelines.structure import Edge, Structure


@dataclass(frozen=True, slots=True)
class NodeSignature:
    """Inputs and outputs of one node, by name."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


def is_open(spec: TensorSpec) -> bool:
    """Return whether datatype and shape are unknown before a request, as for graphs."""
    return spec.datatype is INVALID


def signature_of_servable(metadata: ServableMetadata) -> NodeSignature:
    """Return the signature of a node that calls a servable."""
    return NodeSignature(
        {spec.name: spec for spec in metadata.inputs},
        {spec.name: spec for spec in metadata.outputs},
    )


def signature_of_custom_node(node: CustomNode) -> NodeSignature:
    """Return the signature of a custom node; items without a known datatype are open."""
    return NodeSignature(
        {name: _spec_of(info) for name, info in node.inputs.items()},
        {name: _spec_of(info) for name, info in node.outputs.items()},
    )


def _spec_of(info: ItemInfo) -> TensorSpec:
    dims = tuple(ANY_SIZE if size < 0 else Dim.fixed(size) for size in info.shape)
    return TensorSpec(info.name, info.datatype or INVALID, dims, batch_axis=None)


def _common_dim(one: Dim, other: Dim) -> Dim | None:
    highs = [dim.high for dim in (one, other) if dim.high != -1]
    common = Dim(max(one.low, other.low), min(highs, default=-1))
    return common if common.high == -1 or common.low <= common.high else None


def _common_shape(one: Sequence[Dim], other: Sequence[Dim]) -> tuple[Dim, ...] | None:
    if len(one) != len(other):
        return None
    dims = [_common_dim(a, b) for a, b in zip(one, other, strict=True)]
    found = tuple(dim for dim in dims if dim is not None)
    return found if len(found) == len(dims) else None


def _format_dims(dims: Sequence[Dim]) -> str:
    return f"[{','.join(map(str, dims))}]"


# Checks of nodes and connections

MIN_RANK_TO_SPLIT = 3
"""A split tensor needs the split dimension, a batch dimension, and at least one more."""


def check_nodes(structure: Structure, signatures: Mapping[str, NodeSignature]) -> list[Problem]:
    """Return the problems of all nodes with a signature, and of the connections between them."""
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
    """Return the problems of splitting the pipeline's inputs."""
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
            problems.append(node_problem(node, PipelineErrorCode.OUTPUT_MISSING, message, hint))
        elif node.demultiply_count is not None and not is_open(spec):
            problems += _check_split(node, spec)
    return problems


def _check_split(node: PipelineNode, spec: TensorSpec) -> list[Problem]:
    what = f"{'the input' if node.name == ENTRY else 'its output'} {spec.name!r}"
    if spec.datatype is BYTES:
        message = f"{what} has strings, which cannot be split"
        return [node_problem(node, PipelineErrorCode.STRING_DEMULTIPLICATION, message, "remove demultiply_count")]
    if len(spec.shape) < MIN_RANK_TO_SPLIT:
        message = f"{what} of shape {_format_dims(spec.shape)} has too few dimensions to be split"
        fix = f"use at least {MIN_RANK_TO_SPLIT} dimensions: the one to split, a batch, and its elements"
        return [node_problem(node, PipelineErrorCode.TOO_FEW_DIMENSIONS, message, fix)]
    first, count = spec.shape[0], node.demultiply_count
    if count in (None, DYNAMIC) or not first.is_fixed:
        return []
    if first.low != count:
        message = f"its demultiply_count is {count}, but {what} is {_format_dims(spec.shape)}"
        return [
            node_problem(
                node, PipelineErrorCode.COUNT, message, f"make both equal, or set demultiply_count to {DYNAMIC}"
            )
        ]
    return []


def _check_inputs(node: PipelineNode, signature: NodeSignature, into: list[Edge]) -> list[Problem]:
    problems = []
    connected = {given.name for given in node.inputs}
    for name in {edge.name: None for edge in into}:
        if name not in signature.inputs:
            message = f"it has no input {name!r}"
            problems.append(
                node_problem(node, PipelineErrorCode.INPUT_MISSING, message, _known(name, signature.inputs))
            )
    problems += [
        node_problem(
            node, PipelineErrorCode.NOT_CONNECTED, f"its input {name!r} is not connected", "add it to the node's inputs"
        )
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
        problems.append(node_problem(node, PipelineErrorCode.PRECISION, message, "add a custom node that converts it"))
    elif given.datatype is BYTES:
        message = f"{where}: strings between nodes are not supported"
        problems.append(node_problem(node, PipelineErrorCode.NOT_IMPLEMENTED, message, "pass them as rows of UINT8"))
    sent = given.shape if structure.nodes[edge.source].demultiply_count is None else given.shape[1:]
    taken = wanted.shape[1:] if edge.gathers else wanted.shape
    # Overlapping shapes may fit; requests with other sizes fail at run time.
    if _common_shape(sent, taken) is None:
        message = (
            f"{where}: expected {_format_dims(taken)}, got {_format_dims(sent)}{_shape_details(edge, sent, given)}"
        )
        problems.append(
            node_problem(node, PipelineErrorCode.SHAPE, message, "reshape the model, or add a node that converts it")
        )
    return problems


def _shape_details(edge: Edge, sent: tuple[Dim, ...], given: TensorSpec) -> str:
    parts = []
    if sent != given.shape:
        parts.append(f"{edge.source!r} splits {_format_dims(given.shape)}")
    if edge.gathers:
        parts.append(f"{edge.target!r} gathers one dimension before it")
    return f" ({', '.join(parts)})" if parts else ""


def _known(found: str, known: Mapping[str, TensorSpec]) -> str:
    return did_you_mean(found, known, otherwise=f"known: {', '.join(known) or 'none'}")


# Inputs and outputs of the pipeline


def describe_inputs(
    structure: Structure, signatures: Mapping[str, NodeSignature]
) -> tuple[tuple[TensorSpec, ...], list[Problem]]:
    """Return the pipeline's inputs in name order, and problems of inputs whose consumers disagree."""
    entry = structure.nodes[ENTRY]
    inputs: list[TensorSpec] = []
    problems: list[Problem] = []
    for output in entry.outputs:
        found: TensorSpec | None = None
        for edge in structure.edges_from(ENTRY):
            wanted = signatures[edge.target].inputs.get(edge.name) if edge.target in signatures else None
            if edge.item != output.data_item or wanted is None:
                continue
            spec = replace(wanted, name=output.data_item)
            if entry.demultiply_count is not None and not edge.gathers and not is_open(spec):
                spec = _split_spec(spec, entry.demultiply_count)
            merged = spec if found is None else _common(found, spec)
            if merged is None:
                problems.append(_ambiguous(entry, found, spec))
            found = merged or found
        inputs.append(found or TensorSpec(output.data_item, INVALID, (), batch_axis=None))
    return tuple(sorted(inputs, key=lambda spec: spec.name)), problems


def describe_outputs(
    structure: Structure, signatures: Mapping[str, NodeSignature], inputs: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Return the pipeline's outputs in name order."""
    given = {spec.name: spec for spec in inputs}
    outputs = []
    for edge in structure.into(EXIT):
        found = given.get(edge.item) if edge.source == ENTRY else signatures[edge.source].outputs.get(edge.item)
        spec = found or TensorSpec(edge.name, INVALID, ())
        if edge.source != ENTRY and not is_open(spec):
            levels = structure.levels[edge.source]
            counts = tuple(_count_of(structure, signatures, demultiplexer) for demultiplexer in levels)
            spec = replace(spec, shape=(*counts, *spec.shape), layout=_nested_layout(spec.layout, len(counts)))
        outputs.append(replace(spec, name=edge.name))
    return tuple(sorted(outputs, key=lambda spec: spec.name))


def _split_spec(spec: TensorSpec, count: int) -> TensorSpec:
    first = ANY_SIZE if count == DYNAMIC else Dim.fixed(count)
    return replace(spec, shape=(first, *spec.shape), batch_axis=0, layout=_nested_layout(spec.layout, 1))


def _nested_layout(layout: str, levels: int) -> str:
    """Prepend demultiplexer dimensions to a layout; the outermost is its batch."""
    return "N" + "?" * (levels - 1) + layout.replace("N", "?") if layout and levels else layout


def _common(one: TensorSpec, other: TensorSpec) -> TensorSpec | None:
    if is_open(one):
        return other
    if is_open(other):
        return one
    shape = _common_shape(one.shape, other.shape)
    if shape is None or one.datatype is not other.datatype or (one.layout and other.layout not in ("", one.layout)):
        return None
    return replace(one, shape=shape, layout=one.layout or other.layout)


def _ambiguous(entry: PipelineNode, one: TensorSpec | None, other: TensorSpec) -> Problem:
    first = "" if one is None else _shown(one)
    message = f"the input {other.name!r} goes to nodes with different inputs: {first} and {_shown(other)}"
    return node_problem(entry, PipelineErrorCode.AMBIGUOUS, message, "add a separate input for each")


def _shown(spec: TensorSpec) -> str:
    return f"{spec.datatype.name} {_format_dims(spec.shape)}{f' {spec.layout}' if spec.layout else ''}"


def _count_of(structure: Structure, signatures: Mapping[str, NodeSignature], demultiplexer: str) -> Dim:
    count = structure.nodes[demultiplexer].demultiply_count
    if count is not None and count != DYNAMIC:
        return Dim.fixed(count)
    outputs = signatures[demultiplexer].outputs if demultiplexer in signatures else {}
    for output in structure.nodes[demultiplexer].outputs:
        spec = outputs.get(output.data_item)
        if spec is not None and spec.shape:
            return spec.shape[0]
    return ANY_SIZE
